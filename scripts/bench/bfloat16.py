"""bfloat16 on a CPU: scoring and a training step by t0repro.model.matmuls and by jnp.einsum.

    JAX_PLATFORMS=cpu python scripts/bench/bfloat16.py

Random weights and tokens in a model of T5 1.1 small's width. The two ways and float32 take turns,
so that any other load on the machine affects all three. Prints the least seconds of each, the
bytes of a step's temporaries, and how far the log-likelihoods are from float32's.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rank_eval import SIZES, VOCABULARY

from t0repro.config.model import DTypePolicy, ModelConfig
from t0repro.config.recipe import t5_1_1
from t0repro.evaluation.engine import decode, encode, make_room
from t0repro.evaluation.grouping import memory_class
from t0repro.model import full_attention, layers, matmuls
from t0repro.model.t5 import T5, initial_parameters
from t0repro.training.train_step import loss_and_gradients

ROWS, INPUTS, TARGETS = 16, 128, 16


def main() -> None:
    """Compiles the three, lets them take turns, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--layers", type=int, default=4, help="of each stack; T5 1.1 small has 8")
    parser.add_argument("--vocab_size", type=int, default=VOCABULARY)
    parser.add_argument("--rounds", type=int, default=8)
    options = parser.parse_args()
    widths = {name: value for name, value in SIZES["small"].items() if name != "layers"}
    config = t5_1_1(num_layers=options.layers, vocab_size=options.vocab_size, **widths)
    params = initial_parameters(T5(config, dtypes("float32")), jax.random.key(0))
    halved = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    ways = {
        "bfloat16, matmuls": compile_with(matmuls.einsum, config, "bfloat16", params, halved),
        "bfloat16, jnp.einsum": compile_with(plain, config, "bfloat16", params, halved),
        "float32": compile_with(plain, config, "float32", params, params),
    }
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for _ in range(options.rounds):
        for name, (score, step, _) in ways.items():
            seconds[name].append((time_of(score), time_of(step)))
    exact = np.asarray(ways["float32"][0]())
    for name, (score, _, temporaries) in ways.items():
        scoring, training = np.min(seconds[name], axis=0)
        difference = np.abs(np.asarray(score()) - exact)
        print(
            f"{name:22}scoring {scoring:.3f} s,"
            f" step {training:.3f} s and {temporaries / 1e6:,.0f} MB;"
            f" log-likelihoods differ by {difference.mean():.3f}, at most {difference.max():.3f},"
            f" of {np.abs(exact).mean():.0f}"
        )


def plain(equation: str, x: Any, y: Any, dtype: Any = None) -> jax.Array:
    """`matmuls.einsum` without what it does on a CPU."""
    return jnp.einsum(equation, x, y, preferred_element_type=dtype)


def dtypes(activation: str) -> DTypePolicy:
    """Float32 parameters and slots, and activations of this dtype."""
    return DTypePolicy("float32", "float32", activation)


def compile_with(
    einsum: Callable[..., jax.Array], config: ModelConfig, dtype: str, params: Any, stored: Any
) -> tuple[Callable[[], jax.Array], Callable[[], Any], int]:
    """Compiled scoring and training step by this einsum, and the step's temporaries in bytes.

    Args:
      einsum: computes the matmuls of layers and attention.
      config: the model.
      dtype: of activations.
      params: float32, for training.
      stored: of the activations' dtype, for scoring.
    """
    for module in (layers, full_attention):
        module.einsum = einsum
    model = T5(config, dtypes(dtype))
    random = np.random.default_rng(0)
    inputs = random.integers(2, config.vocab_size, (ROWS, INPUTS)).astype(np.int32)
    targets = random.integers(2, config.vocab_size, (ROWS, TARGETS)).astype(np.int32)
    batch = {"inputs": inputs, "targets": np.repeat(targets, 4, axis=1)}
    memory, lengths = memory_class(INPUTS), np.full((1, ROWS), INPUTS, np.int32)
    starts = INPUTS * np.arange(ROWS, dtype=np.int32)[None]
    jax.clear_caches()

    @jax.jit
    def score(params: Any) -> jax.Array:
        kept = make_room(model, 1, ROWS * INPUTS + memory)
        kept = encode(model, params, kept, inputs[None], lengths, np.int32(0))
        read = make_room(model, ROWS, memory)
        values, _ = decode(model, params, read, kept, starts, lengths, targets[None])
        return values["log_p"][0].sum(axis=1)

    @jax.jit
    def step(params: Any) -> Any:
        key = jax.random.key(0)
        return loss_and_gradients(model, params, batch, num_microbatches=1, dropout_key=key)

    scoring, training = score.lower(stored).compile(), step.lower(params).compile()
    used = training.memory_analysis()
    assert used is not None
    jax.block_until_ready((scoring(stored), training(params)))
    return (
        lambda: scoring(stored),
        lambda: training(params),
        used.temp_size_in_bytes,
    )


def time_of(function: Callable[[], Any]) -> float:
    """Seconds of one call."""
    started = time.perf_counter()
    jax.block_until_ready(function())
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
