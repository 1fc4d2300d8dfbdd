"""What changes the bits of a pair's score: its place and company in a program, or the shape.

    JAX_PLATFORMS=cpu python scripts/bench/row_bits.py

Scores random inputs, one with one choice in each row, in a random model of T5 1.1 small's width,
and counts the rows whose log-likelihoods have other bits once one thing is changed.
"""

from __future__ import annotations

import functools

import jax
import numpy as np
from rank_eval import SIZES

from t0repro.config.model import DTypePolicy
from t0repro.config.recipe import t5_1_1
from t0repro.model.t5 import T5, initial_parameters
from t0repro.training.token_losses import cross_entropy

SHAPES = ((32, 32, 4), (16, 128, 4), (8, 128, 8), (7, 96, 4), (2, 512, 8))
"""Rows, input tokens and target tokens."""
ROUNDS = 3
Pair = tuple[np.ndarray, np.ndarray]
EMPTY: Pair = (np.zeros(0, np.int32), np.zeros(0, np.int32))


def main() -> None:
    """Prints one line of counts for each dtype and shape."""
    for dtype in ("float32", "bfloat16"):
        widths = {name: value for name, value in SIZES["small"].items() if name != "layers"}
        model = T5(
            t5_1_1(num_layers=2, vocab_size=2048, **widths),
            DTypePolicy("float32", "float32", dtype),
        )
        params = initial_parameters(model, jax.random.key(0))
        params = jax.tree.map(lambda x, dtype=dtype: x.astype(dtype), params)
        for shape in SHAPES:
            counts = count_changes(model, params, *shape)
            print(dtype, shape, {name: f"{n} of {all_}" for name, (n, all_) in counts.items()})


def count_changes(
    model: T5, params: dict, size: int, inputs: int, targets: int
) -> dict[str, tuple[int, int]]:
    """For each change, the rows with other bits, and the rows compared."""
    random = np.random.default_rng(0)

    def draw() -> list[Pair]:
        lengths = zip(
            random.integers(inputs * 3 // 4, inputs + 1, size),
            random.integers(2, 5, size),
            strict=True,
        )
        return [(ids(random, n), ids(random, m)) for n, m in lengths]

    def scores(
        pairs: list[Pair],
        length: int = inputs,
        choice: int = targets,
        at: int = 0,
        choice_at: int = 0,
    ) -> list[bytes]:
        tokens, segments = np.zeros((2, len(pairs), length), np.int32)
        choices, parts = np.zeros((2, len(pairs), choice), np.int32)
        for row, (source, target) in enumerate(pairs):
            tokens[row, at : at + len(source)], segments[row, at : at + len(source)] = source, 1
            here = slice(choice_at, choice_at + len(target))
            choices[row, here], parts[row, here] = target, 1
        batch = {
            "inputs": tokens,
            "inputs_segmentation": segments,
            "targets": choices,
            "targets_segmentation": parts,
        }
        values = np.asarray(log_probabilities(model, params, batch))
        return [
            row[choice_at : choice_at + len(target)].tobytes()
            for row, (_, target) in zip(values, pairs, strict=True)
        ]

    pairs = draw()
    expected = scores(pairs)
    counts: dict[str, tuple[int, int]] = {}

    def compare(name: str, found: list[bytes], wanted: list[bytes], kept: list[int]) -> None:
        changed, total = counts.get(name, (0, 0))
        changed += sum(found[row] != wanted[row] for row in kept)
        counts[name] = changed, total + len(kept)

    every = list(range(size))
    for _ in range(ROUNDS):
        order = random.permutation(size)
        compare(
            "place", scores([pairs[row] for row in order]), [expected[row] for row in order], every
        )
        kept = random.permutation(size)[: size // 2 + 1].tolist()
        for name, others in (("company", draw()), ("empty rows", [EMPTY] * size)):
            mixed = [pairs[row] if row in kept else others[row] for row in every]
            compare(name, scores(mixed), expected, kept)
    half = max(1, size // 2)
    compare("half the rows", scores(pairs[:half]), expected, every[:half])
    longer, twice = inputs * 3 // 2, 2 * targets
    wide = scores(pairs, length=longer)
    compare("longer rows", wide, expected, every)
    compare("place of the input", scores(pairs, length=longer, at=5), wide, every)
    later = scores(pairs, choice=twice, choice_at=targets)
    compare("place of the choice", later, scores(pairs, choice=twice), every)
    return counts


@functools.partial(jax.jit, static_argnums=0)
def log_probabilities(model: T5, params: dict, batch: dict[str, jax.Array]) -> jax.Array:
    """Of each target, given its input and the targets before it."""
    return -cross_entropy(model.apply({"params": params}, batch), batch["targets"])


def ids(random: np.random.Generator, length: int) -> np.ndarray:
    """Random token ids."""
    return random.integers(2, 2000, length).astype(np.int32)


if __name__ == "__main__":
    main()
