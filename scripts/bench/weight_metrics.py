"""Times a train step of T5 1.1 small without and with T5X's weight metrics.

    python scripts/bench/weight_metrics.py [--rows 8] [--periods 6] [--every 1 10]
    python scripts/bench/weight_metrics.py --periods 1 --every    # a plain step and one measurement

Steps of the kinds alternate, so that other load slows all of them equally. Prints medians over
periods of wall-clock time and of total processor time; the latter is more reliable on a shared
machine. A measurement alone is timed first.
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

from t0repro.config.model import DTypePolicy
from t0repro.config.optimizer import AdafactorConfig
from t0repro.config.recipe import t5_1_1
from t0repro.model.t5 import T5, initial_parameters
from t0repro.training.optimizers import make_optimizer
from t0repro.training.t5_model import T5Model
from t0repro.training.train_state import TrainState
from t0repro.training.trainer import Trainer
from t0repro.training.weight_metrics import WeightMetricsComputer

SMALL = t5_1_1(num_layers=8, d_model=512, d_ff=1024, num_heads=6, dropout_rate=0.1)
FLOAT32 = DTypePolicy("float32", "float32", "float32")


def trainer_of(every: int) -> Trainer:
    """A trainer that measures every so many steps; 0 for never."""
    model = T5Model(T5(SMALL, FLOAT32), make_optimizer(AdafactorConfig()))
    state = TrainState.create(
        model.optimizer_def, model.get_initial_variables(jax.random.key(0), {})
    )
    computer = WeightMetricsComputer(every) if every else None
    key = jax.random.key(1)
    return Trainer(
        model=model,
        train_state=state,
        partitioner=None,
        eval_names=[],
        summary_dir=None,
        train_state_axes=None,
        rng=key,
        learning_rate_fn=lambda step: 0.001,
        num_microbatches=None,
        weight_metrics_computer=computer,
    )


def measurement_alone() -> float:
    """Processors' seconds of measuring all parameters, gradients and updates once; a median."""
    params = initial_parameters(T5(SMALL, FLOAT32), jax.random.key(0))
    others = [jax.tree.map(lambda x, by=by: x * by, params) for by in (1.5, 1.01)]
    measure, times = jax.jit(WeightMetricsComputer()._measure), []
    for _ in range(8):
        started = time.process_time()
        jax.block_until_ready(measure(*others, params))
        times.append(time.process_time() - started)
    return statistics.median(times[1:])  # the first has the compilation


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--periods", type=int, default=6)
    parser.add_argument("--every", type=int, nargs="*", default=[1, 10])
    options = parser.parse_args()
    generator = np.random.default_rng(0)
    batch = {
        name: generator.integers(2, 32000, (options.rows, length)).astype(np.int32)
        for name, length in (("inputs", 512), ("targets", 114))
    }
    print(f"one measurement: {measurement_alone():.3f} s of processors", flush=True)
    trainers = {every: trainer_of(every) for every in (0, *options.every)}
    times = {every: [] for every in trainers}
    for every, trainer in trainers.items():
        trainer.compile_train(batch)
        trainer.train(iter([batch]), 1).result()
        print(f"compiled: every {every}", flush=True)
    # Full periods, so that each contains its share of measured steps, and equally long ones for all
    # kinds, so that other load affects their means alike.
    period = max(options.every, default=1)
    for _ in range(options.periods * period):
        for every, trainer in trainers.items():
            wall, processors = time.perf_counter(), time.process_time()
            trainer.train(iter([batch]), 1).result()
            spent = (time.perf_counter() - wall, time.process_time() - processors)
            times[every].append(spent)
    print(f"{options.rows} x (512 + 114) tokens; seconds a step:")
    plain = _medians(times[0], period)
    for every, found in times.items():
        here = _medians(found, period)
        shown = ", ".join(
            f"{name} {seconds:.3f} ({100 * (seconds / before - 1):+.1f}%)"
            for name, seconds, before in zip(("wall", "processors"), here, plain, strict=True)
        )
        print(f"{f'every {every}' if every else 'without'}: {shown}")


def _medians(times: list[tuple[float, float]], period: int) -> list[float]:
    """Medians of the periods' means: of wall seconds, and of processors' seconds."""
    return [
        statistics.median(
            statistics.mean(column[n : n + period]) for n in range(0, len(column), period)
        )
        for column in zip(*times, strict=True)
    ]


if __name__ == "__main__":
    main()
