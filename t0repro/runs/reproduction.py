"""What `t0repro reproduce` will take, before it starts: rows, bytes, memory and hours.

The hours come from a minute of scoring on this machine, with a model as wide as the real one but of
two layers, and random tokens as long as the prompts' are. So neither weights nor rows need be here.
"""

from __future__ import annotations

import csv
import dataclasses
import functools
import importlib.resources
import itertools
import resource
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np

from t0repro.config.model import DType, DTypePolicy
from t0repro.converters.hf_config import Computation
from t0repro.evaluation.engine import Engine
from t0repro.evaluation.grouping import choice_class, input_class
from t0repro.evaluation.opened import make_scoring_config
from t0repro.evaluation.pairs import Pairs, collect_pairs
from t0repro.model.t5 import T5, evaluation_shapes, parameter_shapes
from t0repro.parameters.shape import ModelShape
from t0repro.runs.rank_eval import PAIRS_IN_MEMORY
from t0repro.tasks.catalog import catalog, label
from t0repro.tasks.hub_rows import bytes_to_fetch
from t0repro.tasks.readers import local_reader
from t0repro.tasks.registry import find_tasks, task_descriptions
from t0repro.tasks.rows import dataset_folder
from t0repro.tasks.story_cloze import how_to_ask

MIXTURE, SPLIT = "t0_eval_score_eval", "validation"
_LAYERS = 2  # of the model that is timed
_INPUTS = 64  # of a prompt: as many give about the batches that all give
_SECONDS = 60.0
_BYTES_PER_PAIR = 2500  # of a read buffer (PAIRS_IN_MEMORY)
ASSUMED_UTILIZATION = 0.4
"""Share of the published FLOP/s that scoring is assumed to reach on other machines' devices."""


@dataclasses.dataclass(frozen=True)
class RowsOfSplit:
    """A split of a held-out dataset.

    Attributes:
      dataset: Its label, such as super_glue/rte.
      prompts: Number of T0's prompts over it.
      inputs: Number of rows: counted if they are on this machine's disk, else as in T0's time.
      to_fetch: Bytes to download; 0 if the rows are here; None if only their authors provide them.
      how: The file, the repository, or how to get the rows.
    """

    dataset: str
    split: str
    prompts: int
    inputs: int
    to_fetch: int | None
    how: str


def find_rows(root: Path) -> tuple[RowsOfSplit, ...]:
    """Where the rows of T0's held-out tasks are, and how many bytes have to be downloaded.

    Args:
      root: The folder of datasets that messages name.

    Raises:
      UserError: If rows are missing and the hub cannot be reached.
    """
    prompts = Counter(_splits_of_tasks().values())
    return tuple(_find_split(*key, count, root) for key, count in sorted(prompts.items()))


def _splits_of_tasks() -> dict[str, tuple[str, str]]:
    """Each held-out task's dataset, as its label, and the name of its split's file."""
    rows = {task.name: task_descriptions()[task.name].rows for task in find_tasks(MIXTURE)}
    return {
        name: (label(each.dataset, each.subset), each.files_of_splits[SPLIT].file)
        for name, each in rows.items()
    }


def _find_split(name: str, split: str, prompts: int, root: Path) -> RowsOfSplit:
    entry = next(entry for entry in catalog().values() if entry.label == name)
    dataset, subset = entry.dataset, entry.subset
    local = local_reader(None, dataset, subset, split)
    if local is not None:
        return RowsOfSplit(name, split, prompts, local.count(), 0, str(local.path))
    inputs = entry.splits[split]
    if entry.hub is None:
        how = how_to_ask(dataset, subset, split, dataset_folder(root, dataset, subset))
        return RowsOfSplit(name, split, prompts, inputs, None, how)
    size = bytes_to_fetch(entry, split)
    return RowsOfSplit(name, split, prompts, inputs, size, entry.hub.repository)


@dataclasses.dataclass(frozen=True)
class Tokens:
    """The size of a scoring run: tokens of the encoder's and the decoder's arrays, and pairs."""

    inputs: float
    targets: float
    pairs: float

    def flops(self, shape: ModelShape) -> float:
        """FLOPs of the matmuls with parameters; attention's own are a few percent."""
        attention = 4 * shape.d_model * shape.num_heads * shape.d_kv
        feed_forward = (len(shape.wi_kernels) + 1) * shape.d_model * shape.d_ff
        layer, cross = attention + feed_forward, attention // 2  # keys and values of the inputs
        encoder = shape.num_encoder_layers * layer + shape.num_decoder_layers * cross
        decoder = shape.num_decoder_layers * (layer + cross) + shape.d_model * shape.vocab_size
        return 2 * (self.inputs * encoder + self.targets * decoder)


@dataclasses.dataclass(frozen=True)
class Speed:
    """What was measured on this machine.

    Attributes:
      flops: Per second of scoring, padding included.
      compilation: Seconds to compile one program.
      programs: Programs that the prompts take.
      overhead: Bytes of memory besides parameters.
      on_host: Whether this memory is the host's, not an accelerator's.
    """

    flops: float
    compilation: float
    programs: int
    overhead: int
    on_host: bool


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a reproduction takes.

    Attributes:
      rows: The held-out datasets.
      weights: Bytes of the checkpoint to download.
      tokens: Of all prompts whose rows are here or on the hub.
      speed: What was measured.
      memory: Bytes that the evaluation needs, on the host or on an accelerator.
      seconds: Of scoring, compilation included.
    """

    rows: tuple[RowsOfSplit, ...]
    weights: int
    tokens: Tokens
    speed: Speed
    memory: int
    seconds: float


def make_plan(
    shape: ModelShape,
    rows: Sequence[RowsOfSplit],
    weights: int,
    limit: int | None,
    activation: DType,
    seconds: float = _SECONDS,
) -> Plan:
    """Measures for a minute and scales the result to all prompts and to the model's depth.

    Args:
      shape: The model's.
      rows: From `find_rows`.
      weights: Bytes of the checkpoint that have to be downloaded.
      limit: See EvaluationSettings.
      activation: See EvaluationSettings.
      seconds: How long to measure; a batch that has begun is finished.
    """
    generator = np.random.default_rng(0)
    splits = {(each.dataset, each.split): each for each in rows}
    timed, total = [], Tokens(0, 0, 0)
    for task, key in _splits_of_tasks().items():
        if splits[key].to_fetch is None:
            continue
        inputs = min(limit or splits[key].inputs, splits[key].inputs)
        sample = min(inputs, _INPUTS)
        pairs = _random_pairs(_lengths()[task], sample, generator)
        # Of all inputs, hardly a batch has empty rows.
        padded_inputs = sum(input_class(len(tokens)) for tokens in pairs.inputs)
        padded_targets = sum(choice_class(len(tokens)) for tokens in pairs.targets)
        total = Tokens(
            total.inputs + inputs / sample * padded_inputs,
            total.targets + inputs / sample * padded_targets,
            total.pairs + inputs / sample * len(pairs),
        )
        timed.append(pairs)
    # A minute may not be enough for all prompts: time some of each dataset.
    generator.shuffle(timed)
    speed = _measure(shape, timed, activation, seconds)
    parameters = shape.parameter_count() * np.dtype(np.float32).itemsize
    memory = parameters // (1 if activation == "float32" else 2) + speed.overhead
    if speed.on_host:
        memory += int(_BYTES_PER_PAIR * min(total.pairs, PAIRS_IN_MEMORY))
    duration = total.flops(shape) / speed.flops + speed.compilation * speed.programs
    return Plan(tuple(rows), weights, total, speed, memory, duration)


@dataclasses.dataclass(frozen=True)
class _Lengths:
    """A prompt's number of choices, and quantiles of the tokens of its inputs and choices."""

    choices: int
    inputs: np.ndarray
    targets: np.ndarray


@functools.cache
def _lengths() -> dict[str, _Lengths]:
    """Task -> how long it is in T5's tokens; from scripts/bench/held_out_tokens.py."""
    text = importlib.resources.files("t0repro.runs").joinpath("held_out_tokens.csv").read_text()
    return {
        row["task"]: _Lengths(
            int(row["choices"]),
            np.array(row["input_tokens"].split(), float),
            np.array(row["target_tokens"].split(), float),
        )
        for row in csv.DictReader(text.splitlines())
    }


def _random_pairs(lengths: _Lengths, inputs: int, generator: np.random.Generator) -> Pairs:
    """Inputs and choices of a prompt's lengths, drawn at random from their quantiles."""

    def draw(quantiles: np.ndarray, number: int) -> np.ndarray:
        at = generator.random(number)
        return np.interp(at, np.linspace(0, 1, len(quantiles)), quantiles).round().astype(int)

    targets = iter(draw(lengths.targets, inputs * lengths.choices))
    examples = []
    for length in draw(lengths.inputs, inputs):
        source = generator.integers(3, 100, max(1, length))
        for choice in range(lengths.choices):
            # The first token keeps the choices apart.
            target = [3 + choice, *generator.integers(3, 100, max(1, next(targets)) - 1)]
            examples.append({"inputs": source, "targets": np.array(target)})
    return collect_pairs(examples)


def _measure(shape: ModelShape, timed: Sequence[Pairs], activation: DType, seconds: float) -> Speed:
    """Scores the pairs of one dataset after the other until the time is over."""
    shallow = dataclasses.replace(
        shape,
        num_encoder_layers=min(_LAYERS, shape.num_encoder_layers),
        num_decoder_layers=min(_LAYERS, shape.num_decoder_layers),
    )
    # Which activation it has does not change its speed.
    computed = Computation(("gelu", "linear") if shape.gated else ("relu",))
    config = make_scoring_config(shallow, computed, "")
    model = T5(config, DTypePolicy("float32", "float32", activation))
    leaves = evaluation_shapes(model, parameter_shapes(model))
    # Speed does not depend on the values, so none are drawn.
    params = jax.tree.map(lambda leaf: jax.numpy.full(leaf.shape, 0.01, leaf.dtype), leaves)
    engine = Engine(params, model)
    flops = spent = compiling = 0.0
    plans = [engine.plan(pairs) for pairs in timed]
    programs = frozenset[tuple[int, ...]]().union(*(plan.programs for plan in plans))
    compiled: set[tuple[int, ...]] = set()
    peaks: list[tuple[int, int]] = []  # number of compiled programs, bytes
    started = time.monotonic()
    for pairs, plan in itertools.cycle(zip(timed, plans, strict=True)):
        if not plan.programs <= compiled:
            before = time.monotonic()
            list(engine.run(pairs, plan))
            compiling += time.monotonic() - before
        before = time.monotonic()
        list(engine.run(pairs, plan))
        took = time.monotonic() - before
        if not plan.programs <= compiled:
            compiling -= took
            compiled |= plan.programs
            peaks.append((len(compiled), peak_memory()))
        spent += took
        tokens = Tokens(plan.padded_inputs, plan.padded_targets, len(pairs))
        flops += tokens.flops(shallow)
        if time.monotonic() - started > seconds:
            break
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    # Else the programs would stay in memory while the evaluation compiles its own.
    jax.clear_caches()
    on_host = jax.default_backend() == "cpu"
    overhead = peak_memory() - held
    if on_host and peaks[-1][0] > peaks[0][0]:
        # A host keeps every program: count those that the time was too short for.
        per_program = (peaks[-1][1] - peaks[0][1]) / (peaks[-1][0] - peaks[0][0])
        overhead += int(per_program * (len(programs) - len(compiled)))
    compilation = max(compiling, 0.0) / len(compiled)
    return Speed(flops / spent, compilation, len(programs), overhead, on_host)


def peak_memory() -> int:
    """The most bytes that this process has held so far: on its accelerator, or on the host."""
    statistics = jax.local_devices()[0].memory_stats() or {}
    status = Path("/proc/self/status")
    if "peak_bytes_in_use" in statistics:
        return int(statistics["peak_bytes_in_use"])
    if status.is_file():
        # Not ru_maxrss, which begins with what the process had that started this one.
        return int(status.read_text().partition("VmHWM:")[2].split()[0]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes, except on Linux
