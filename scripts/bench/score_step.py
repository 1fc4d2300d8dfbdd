"""Times the scoring of T0's held-out suite on this machine's devices, with random parameters.

    python scripts/bench/score_step.py RUN.json SUITE.npz --seconds 300

Needs jax, flax, optax and orbax alone, like train_step.py, and writes no file. RUN.json is
a TrainRun, of which model, dtypes and layout are used (train.py --prepare --size xl writes
T0-3B's). SUITE.npz has the number of tokens of every distinct input and choice; which tokens they
are does not affect the time. A machine with the data and all of t0repro writes it with

    T0REPRO_DATA_DIR=DIR T0REPRO_VOCAB=FILE python scripts/bench/score_step.py --prepare SUITE.npz

Batches are the evaluation's own, in blocks in random order until the time is up. Prints one line of
JSON:

    programs       programs that were compiled
    compiling      seconds that it took
    compiled_later programs that were compiled while pairs were scored: 0, or the figures are wrong
    pairs          distinct pairs that were scored; `of` is the number of all
    seconds        time for scoring them
    host           seconds that the host takes to build arrays, mostly while the device computes
    rate           pairs per second
    suite          seconds for all pairs: measured, or extrapolated by padded tokens
    memory         most bytes in use, on a device or, on CPU, of the process
    sha256         of all scores, one hash whatever --tokens_per_batch; null if time was up
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from t0repro.config.model import Layout
from t0repro.evaluation.engine import Engine, decode, encode
from t0repro.evaluation.grouping import DecoderBatch, Microbatch, Plan
from t0repro.evaluation.pairs import Pairs
from t0repro.model.t5 import evaluation_shapes, initial_parameters
from t0repro.partitioning.devices import choose

_BLOCK = 32  # batches
sys.path.append(str(Path(__file__).parent))  # python -P leaves it out


def main() -> None:
    """Scores pairs for a given time and prints the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("run", type=Path, nargs="?")
    parser.add_argument("suite", type=Path, nargs="?")
    parser.add_argument("--seconds", type=float, default=300, help="start no batch after these")
    parser.add_argument("--tokens_per_batch", type=int, help="as t0repro rank-eval takes it")
    parser.add_argument("--prepare", type=Path, metavar="SUITE.npz", help="write this file alone")
    options = parser.parse_args()
    if options.prepare:
        np.savez_compressed(options.prepare, **lengths_of_suite())
    elif options.suite is None:
        parser.error("RUN.json and SUITE.npz are missing")
    else:
        values = json.loads(options.run.read_text())
        lengths = dict(np.load(options.suite))
        found = measured(values, lengths, options.seconds, options.tokens_per_batch)
        print(json.dumps(found), flush=True)


def measured(
    values: dict[str, Any],
    lengths: dict[str, np.ndarray],
    limit: float,
    tokens_per_batch: int | None = None,
) -> dict[str, Any]:
    """The figures that the module's docstring lists.

    Args:
      values: a run's JSON.
      lengths: `inputs` and `targets`, their numbers of tokens, and `input_of`, each pair's input.
      limit: seconds of scoring.
      tokens_per_batch: see engine.Engine.
    """
    from train_step import memory, model_of

    model = model_of(values)
    model = model.clone(config=dataclasses.replace(model.config, dropout_rate=0.0))
    partitioning = choose(Layout(**values["layout"]), model.config)
    params = random_parameters(model, partitioning)
    pairs = random_pairs(lengths, model.config.vocab_size)
    engine = Engine(params, model, tokens_per_batch=tokens_per_batch)
    plan = engine.plan(pairs)
    before = time.perf_counter()
    one_of_each = {
        shape: batch
        for batch in plan.batches
        for shape in (batch.shape, *(each.shape for each in batch.microbatches))
    }
    scored(engine, pairs, plan, list(dict.fromkeys(one_of_each.values())))
    compiling, programs = time.perf_counter() - before, compiled()
    scores, done, seconds = scored(engine, pairs, plan, shuffle_blocks(plan.batches), limit)
    count = int(np.isfinite(scores).sum())
    every = plan.padded_inputs + plan.padded_targets
    return {
        "device": f"{partitioning}, jax {jax.__version__}",
        "programs": len(plan.programs),
        "compiling": compiling,
        "compiled_later": compiled() - programs,
        "pairs": count,
        "of": len(pairs),
        "seconds": seconds,
        "host": host_seconds(done, pairs),
        "rate": count / seconds,
        "suite": seconds * every / padded_tokens(done),
        "memory": memory(),
        "sha256": hashlib.sha256(scores).hexdigest() if count == len(pairs) else None,
    }


def random_parameters(model: Any, partitioning: Any) -> Any:
    """Parameters initialized on the devices, in the dtypes of an evaluation."""

    def drawn() -> Any:
        params = initial_parameters(model, jax.random.key(0))
        held = evaluation_shapes(model, params)
        return jax.tree.map(lambda x, like: x.astype(like.dtype), params, held)

    if partitioning.mesh.size == 1:
        return jax.jit(drawn)()
    return jax.jit(drawn, out_shardings=partitioning.shardings(jax.eval_shape(drawn)))()


def random_pairs(lengths: dict[str, np.ndarray], vocabulary: int) -> Pairs:
    """Pairs of random tokens with the suite's lengths."""
    generator = np.random.default_rng(0)

    def texts(sizes: np.ndarray) -> tuple[np.ndarray, ...]:
        ids = generator.integers(2, vocabulary, sizes.sum(), dtype=np.int32)
        return tuple(np.split(ids, np.cumsum(sizes.astype(np.int64))[:-1]))

    number = np.arange(len(lengths["targets"]))
    input_of = lengths["input_of"].astype(np.int64)
    return Pairs(texts(lengths["inputs"]), texts(lengths["targets"]), input_of, number)


def shuffle_blocks(batches: Sequence[DecoderBatch]) -> list[DecoderBatch]:
    """Batches whose neighbors, which share microbatches, mostly stay together."""
    starts = np.random.default_rng(0).permutation(np.arange(0, len(batches), _BLOCK))
    return [batch for start in starts for batch in batches[start : start + _BLOCK]]


def scored(
    engine: Engine, pairs: Pairs, plan: Plan, batches: list[DecoderBatch], limit: float = np.inf
) -> tuple[np.ndarray, list[DecoderBatch], float]:
    """Scores batches until the time is up: each pair's score or NaN, batches done, and seconds."""
    started, done, scores = time.perf_counter(), [], np.full(len(pairs), np.nan)
    some = dataclasses.replace(plan, batches=tuple(batches))
    for batch, found in zip(batches, engine.run(pairs, some), strict=True):
        assert np.isfinite(found.scores).all()
        done.append(batch)
        scores[found.pairs] = found.scores
        if time.perf_counter() - started > limit:
            break
    return scores, done, time.perf_counter() - started


def host_seconds(batches: list[DecoderBatch], pairs: Pairs) -> float:
    """Seconds that the host takes for the arrays of batches."""
    started = time.perf_counter()
    for batch in batches:
        batch.arrays(pairs)
    for microbatch in microbatches_of(batches):
        microbatch.arrays(pairs)
    return time.perf_counter() - started


def microbatches_of(batches: list[DecoderBatch]) -> set[Microbatch]:
    """The distinct microbatches that batches read."""
    return {each for batch in batches for each in batch.microbatches}


def padded_tokens(batches: list[DecoderBatch]) -> int:
    """Entries of the batches' arrays."""
    inputs = sum(each.inputs.size * each.length for each in microbatches_of(batches))
    return inputs + sum(batch.pairs.size * batch.length for batch in batches)


def compiled() -> int:
    """Programs that scoring has compiled so far."""
    return encode._cache_size() + decode._cache_size()


def lengths_of_suite() -> dict[str, np.ndarray]:
    """The lengths of all available rows of T0's held-out sets; needs all of t0repro."""
    from rank_eval import LENGTHS, register_tasks

    from t0repro.evaluation.pairs import collect_pairs
    from t0repro.evaluation.reading import TaskReader

    examples = (
        {name: example[name] for name in LENGTHS}
        for task in register_tasks()
        for example in TaskReader(task, "validation", LENGTHS).examples()
    )
    pairs = collect_pairs(examples, LENGTHS)
    return {
        "inputs": np.array([len(text) for text in pairs.inputs], np.uint16),
        "targets": np.array([len(text) for text in pairs.targets], np.uint16),
        "input_of": pairs.input_of.astype(np.uint32),
    }


if __name__ == "__main__":
    main()
