"""What T5X's weight metrics cost: seconds of a train step of T5 1.1 small without and with them.

    python scripts/bench/weight_metrics.py [--rows 8] [--steps 6] [--every 1 10]

Steps of the kinds alternate, so that other work on the machine slows all alike; medians are given.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

import jax
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from t0repro.config.run_config import AdafactorConfig, DTypePolicy, ModelConfig
from t0repro.model.t5 import T5
from t0repro.training.models import T5Model
from t0repro.training.optimizers import make_optimizer
from t0repro.training.train_state import TrainState
from t0repro.training.trainer import Trainer, WeightMetricsComputer

SMALL = ModelConfig(
    num_encoder_layers=8, num_decoder_layers=8, d_model=512, d_ff=1024, num_heads=6, d_kv=64,
    vocab_size=32128, activations=("gelu", "linear"), logits_from_embedding=False,
    relative_attention_num_buckets=32, dropout_rate=0.1, label_smoothing=0.0, z_loss=1e-4,
    loss_denominator=None,
)  # fmt: skip
ADAFACTOR = AdafactorConfig(
    multiply_by_parameter_scale=True, decay_exponent=0.8, decay_offset=0.0, beta1=0.0,
    clipping_threshold=1.0, factored=True, epsilon1=1e-30, epsilon2=1e-3,
    min_dim_size_to_factor=128,
)  # fmt: skip


def trainer_of(every: int) -> Trainer:
    """A trainer that measures every so many steps; 0 for never."""
    model = T5Model(
        T5(SMALL, DTypePolicy("float32", "float32", "float32")), make_optimizer(ADAFACTOR)
    )
    state = TrainState.create(
        model.optimizer_def, model.get_initial_variables(jax.random.key(0), {})
    )
    computer = WeightMetricsComputer(every) if every else None
    key = jax.random.key(1)
    return Trainer(model, state, None, [], None, None, key, lambda step: 0.001, None, computer)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--every", type=int, nargs="*", default=[1, 10])
    options = parser.parse_args()
    generator = np.random.default_rng(0)
    batch = {
        name: generator.integers(2, 32000, (options.rows, length)).astype(np.int32)
        for name, length in (("inputs", 512), ("targets", 114))
    }
    trainers = {every: trainer_of(every) for every in (0, *options.every)}
    seconds = {every: [] for every in trainers}
    for every, trainer in trainers.items():
        trainer.compile_train(batch)
        trainer.train(iter([batch]), 1).result()
        print(f"compiled: every {every}", flush=True)
    # A whole period of every kind, so that the mean has its share of measured steps.
    rounds = options.steps * max(options.every, default=1)
    for _ in range(rounds):
        for every, trainer in trainers.items():
            started = time.perf_counter()
            trainer.train(iter([batch]), 1).result()
            seconds[every].append(time.perf_counter() - started)
    plain = statistics.median(seconds[0])
    print(f"{options.rows} x (512 + 114) tokens: {plain:.3f} s a step without weight metrics")
    for every in options.every:
        per_step = statistics.median(
            [statistics.mean(seconds[every][n : n + every]) for n in range(0, rounds, every)]
        )
        print(f"every {every}: {per_step:.3f} s, {100 * (per_step / plain - 1):+.1f}%")


if __name__ == "__main__":
    main()
