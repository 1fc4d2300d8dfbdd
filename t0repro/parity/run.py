"""`t0repro parity`: runs one job on both stacks and compares them."""

from __future__ import annotations

import dataclasses
import itertools
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from t0repro.config.data import EvalDataConfig
from t0repro.config.mtf.dialect import load
from t0repro.config.mtf.parser import MeshInputs
from t0repro.config.run import TrainRun
from t0repro.converters import finding, sources
from t0repro.converters.convert import convert
from t0repro.converters.sources import load_any
from t0repro.converters.tensors import FlatTree
from t0repro.data.batches import eval_tasks
from t0repro.data.checks import check_readable
from t0repro.data.train_data import TrainBatches
from t0repro.errors import UserError
from t0repro.evaluation.judge import Judge, make_judge
from t0repro.parameters import naming
from t0repro.parity.jax_run import (
    Error,
    StackResult,
    as_stack_result,
    exchange_square_slots,
    injected,
    run_jax,
    with_error,
)
from t0repro.parity.mesh_jobs import MeshJob, run_mesh, save_batches
from t0repro.storage import output_path

PAIRS = 128  # maximum number of (input, choice) pairs to score from an evaluation task
ROWS = 16  # rows in a batch of pairs
MESH_FOLDER = "mesh_tensorflow"


@dataclasses.dataclass(frozen=True)
class ScoredTask:
    """A task from which both stacks score examples, and its metrics."""

    judge: Judge
    examples: Sequence[Mapping[str, Any]]


@dataclasses.dataclass(frozen=True)
class Job:
    """The inputs of both stacks.

    Attributes:
      config: configuration of the JAX stack.
      inputs: gin files and overrides, for Mesh TensorFlow.
      out: the folder for all results.
      batches: training batches, one per step.
      task: task whose examples are scored, if any.
      float32: whether the tolerances apply.
      start: the Mesh TensorFlow checkpoint that both start from; None lets Mesh TensorFlow
        initialize parameters.
    """

    config: TrainRun
    inputs: MeshInputs
    out: Path
    batches: Sequence[dict[str, np.ndarray]]
    task: ScoredTask | None
    float32: bool
    start: str | None

    @property
    def snapshots(self) -> list[int]:
        """Numbers of steps after which states are compared."""
        return sorted({1, len(self.batches)})


@dataclasses.dataclass(frozen=True)
class Parity:
    """The outcome of a comparison.

    Attributes:
      findings: findings in the order of the computation.
      mesh_losses: Mesh TensorFlow's training losses, [steps].
      jax_losses: the JAX stack's training losses, [steps].
      start_step: the global step at the start.
      start: describes where the parameters came from.
      float32: whether the tolerances apply.
      injected: the error that was injected into the JAX side, if any.
    """

    findings: Sequence[Finding]
    mesh_losses: np.ndarray
    jax_losses: np.ndarray
    start_step: int
    start: str
    float32: bool
    injected: str | None

    @property
    def departures(self) -> list[Finding]:
        """The findings beyond their tolerance."""
        return [finding for finding in self.findings if not finding.passes]

    @property
    def passed(self) -> bool:
        """Whether every judged quantity is within its tolerance."""
        return not self.departures


def make_job(
    inputs: MeshInputs,
    out: str | Path,
    *,
    steps: int,
    start: str | None = None,
    dtype: Literal["float32", "bfloat16"] = "float32",
    eval_task: str | None = None,
) -> Job:
    """Reads the configuration and the data, and converts the start to Mesh TensorFlow's format.

    Args:
      inputs: gin files and overrides of a training run.
      out: the folder for all results; those of an earlier comparison are replaced.
      steps: number of training steps.
      start: a checkpoint in any format; None lets Mesh TensorFlow initialize parameters.
      dtype: activation dtype.
      eval_task: a task or mixture with inputs and targets whose validation examples are scored.

    Raises:
      UserError: if the configuration has dropout, is invalid or is for the JAX stack alone.
    """
    out = output_path(out)
    float32 = dtype == "float32"
    # Use float32 masters whatever gin binds: bfloat16 masters would round away the differences.
    kinds = {"master": "float32", "slice": "float32", "activation": dtype}
    settings = [f"utils.get_variable_dtype.{kind}_dtype = '{x}'" for kind, x in kinds.items()]
    inputs = dataclasses.replace(inputs, gin_params=[*inputs.gin_params, *settings])
    configuration = load(inputs, float32_activations=float32, with_packages=True)
    config = configuration.run
    if configuration.only_on_jax:
        raise configuration.only_on_jax
    if config.model.dropout_rate:
        raise UserError(
            f"The dropout rate is {config.model.dropout_rate}, and the two stacks draw different"
            " random numbers.",
            where=config.provenance.get("model.dropout_rate"),
            fix='Add --gin_param "dropout_rate = 0.0".',
        )
    _check_cached(config)
    # Remove an earlier comparison's results, or their checkpoints would be found too.
    shutil.rmtree(out / MESH_FOLDER, ignore_errors=True)
    source = TrainBatches(config).open(0, None)
    batches = list(itertools.islice(source, steps))
    task = None if eval_task is None else _task(eval_task, config)
    return Job(config, inputs, out, batches, task, float32, _mesh_checkpoint(start, out))


def _check_cached(config: TrainRun) -> None:
    data = config.plan.train_data
    if data is None or not data.use_cached:
        return
    try:
        check_readable(data.mixture_or_task_name, data.split, use_cached=True)
    except UserError as error:
        fix = 'Read the rows: --gin_param "mesh_train_dataset_fn.use_cached = False".'
        raise UserError(error.what, where=error.where, fix=fix) from error


def _task(name: str, config: TrainRun) -> ScoredTask:
    """The task with its first PAIRS validation examples or fewer, in whole groups of choices."""
    trained_on = config.plan.train_data
    cached = trained_on is not None and trained_on.use_cached
    data = EvalDataConfig(name, "validation", cached, False, -1, False, None)
    task = next(iter(eval_tasks(data, config.sequence_length)), None)
    if task is None:
        raise UserError(
            f"{name} has no metrics or no validation split.",
            where="--eval_task",
            fix="Name a task that rank classification evaluates, e.g. one in ..._score_eval.",
        )
    # One more than are scored, which shows whether the last input has all of its choices.
    examples = list(itertools.islice(task.examples, PAIRS + 1))
    count = min(PAIRS, len(examples))
    if count < len(examples):
        # Do not separate the choices of one input.
        while count > 1 and _input_of(examples[count]) == _input_of(examples[count - 1]):
            count -= 1
    return ScoredTask(make_judge(task), examples[:count])


def _input_of(example: Mapping[str, Any]) -> int:
    """The number of a ranked example's input; a unique one for any other example."""
    return int(example["idx"][0]) if "idx" in example else id(example)


def _mesh_checkpoint(start: str | None, out: Path) -> str | None:
    """The prefix of a start as a float32 Mesh TensorFlow checkpoint, converted if need be."""
    if start is None:
        return None
    found = finding.find_checkpoint(start)
    # Check dtypes before converting: a float32 start is used as it is.
    reader = sources.open_checkpoint(found)
    types = {x.dtype for key, x in reader.tensors.items() if key.startswith(naming.PARAMETERS)}
    if found.format == "mtf" and types == {np.dtype(np.float32)}:
        return found.path
    folder = out / MESH_FOLDER / "start"
    convert(found.path, folder, "mtf", dtype="float32")
    return finding.find_checkpoint(folder).path


def run_mesh_side(job: Job) -> tuple[StackResult, int]:
    """Runs Mesh TensorFlow; returns its results and the global step at the start."""
    folder = job.out / MESH_FOLDER
    scored = None
    if job.task is not None:
        scored = save_batches(folder / "scored.npz", _rows(job.task, job.config))
    inputs = dataclasses.replace(job.inputs, model_dir=str(folder))
    result = run_mesh(
        [
            MeshJob(
                out=str(folder),
                inputs=inputs,
                batches=save_batches(folder / "batches.npz", job.batches),
                start=job.start,
                snapshots=job.snapshots,
                tensors=True,
                scored=scored,
                float32=job.float32,
            )
        ]
    )[0]
    # Include 0 only if Mesh TensorFlow initialized and saved the start.
    snapshots = job.snapshots if job.start else [0, *job.snapshots]
    found = as_stack_result(result, snapshots)
    if job.task is not None and found.scores is not None:
        # Drop the empty rows that padded the last batch.
        found = dataclasses.replace(found, scores=found.scores[: len(job.task.examples)])
    if job.start:
        found = dataclasses.replace(found, trees={0: load_any(job.start), **found.trees})
    return found, result.start_step


def _rows(task: ScoredTask, config: TrainRun) -> list[dict[str, np.ndarray]]:
    """The task's examples in batches of ROWS, padded to the run's lengths and with empty rows."""
    assert config.sequence_length is not None
    # Rounded up to full batches: a graph has one shape.
    count = -(-len(task.examples) // ROWS) * ROWS
    arrays = {}
    for name in ("inputs", "targets"):
        length = config.sequence_length[name]
        array = np.zeros((count, length), np.int32)
        for row, example in enumerate(task.examples):
            tokens = np.asarray(example[name])[:length]
            array[row, : len(tokens)] = tokens
        arrays[name] = array
    return [{name: x[at : at + ROWS] for name, x in arrays.items()} for at in range(0, count, ROWS)]


def compare_sides(
    job: Job, reference: StackResult, start_step: int, error: Error | None = None
) -> Parity:
    """Runs the JAX stack, with an error injected if one is named, and compares.

    Args:
      job: the job that Mesh TensorFlow ran.
      reference: Mesh TensorFlow's results.
      start_step: the global step at the start.
      error: the error to inject, see `t0repro.parity.jax_run`.

    Raises:
      UserError: if the error would change nothing.
    """
    examples = job.task.examples if job.task else ()
    config, start = with_error(error, job.config, job.batches, reference.trees[0])
    with injected(error):
        ours = run_jax(
            config,
            job.batches,
            start,
            snapshots=job.snapshots,
            tensors=True,
            gradients=True,
            scored=examples,
        )
    # The error leaves slots unexchanged between the stacks, so on the way back too.
    if error == "slot-swap":
        trees = {done: exchange_square_slots(tree) for done, tree in ours.trees.items()}
        ours = dataclasses.replace(ours, trees=trees)
    tokens = np.array([np.count_nonzero(np.asarray(ex["targets"]) > 0) for ex in examples])
    findings = _compare_results(reference, ours, float32=job.float32, tokens=tokens)
    if job.task is not None:
        findings.append(_metrics(job.task, reference, ours, job.float32))
    return Parity(
        findings=findings,
        mesh_losses=reference.losses,
        jax_losses=ours.losses,
        start_step=start_step,
        start=job.start or f"parameters that Mesh TensorFlow drew (in {MESH_FOLDER}/)",
        float32=job.float32,
        injected=error,
    )


def _metrics(task: ScoredTask, reference: StackResult, ours: StackResult, float32: bool) -> Finding:
    assert reference.scores is not None and ours.scores is not None
    by_stack = [
        task.judge.metrics_of(task.examples, scores) for scores in (reference.scores, ours.scores)
    ]
    return _metrics_finding(task.judge.task, *by_stack, float32=float32)


def to_json(parity: Parity, facts: dict[str, Any]) -> dict[str, Any]:
    """The comparison as JSON's types; `facts` are added as they are."""
    first = parity.departures[0] if parity.departures else None
    return {
        "passed": parity.passed,
        "judged": parity.float32,
        "injected": parity.injected,
        "first_departure": None if first is None else {"kind": first.kind, "name": first.name},
        "start": parity.start,
        "start_step": parity.start_step,
        "losses": {
            "mesh_tensorflow": [float(x) for x in parity.mesh_losses],
            "jax": [float(x) for x in parity.jax_losses],
        },
        **facts,
        "findings": [dataclasses.asdict(finding) for finding in parity.findings],
    }


# The stacks agree, in float32 without dropout, if: the loss differs by a relative error of at most
# 1e-5 at the first step and 1e-4 over twenty; after one step, every entry of every parameter and
# slot is within 1e-5 of its tensor's RMS or of itself, whichever is larger; log-likelihoods are
# within 1e-4 per target token; and metrics are equal. Activations and gradients, for which nothing
# is promised, depart if the RMS of the difference exceeds 1e-5 of their RMS. In bfloat16,
# differences are reported but not judged.

_FIRST_LOSS, _LOSSES, _TENSOR, _PER_TOKEN = 1e-5, 1e-4, 1e-5, 1e-4
_STEPS_JUDGED = 20  # losses of later steps are only reported
_QUANTILES = (0.5, 0.9, 0.99, 1.0)


@dataclasses.dataclass(frozen=True)
class Finding:
    """The difference of one quantity between the JAX stack and Mesh TensorFlow.

    Attributes:
      kind: activation, loss, gradient, first step, last step, log-likelihood or metric.
      name: name of the tensor, steps or task.
      size: number of values compared.
      reference_rms: root mean square of Mesh TensorFlow's values.
      difference_rms: root mean square of the differences.
      quantiles: the entries' absolute differences, relative to `measure`, at 0.5, 0.9, 0.99, 1.
      measure: the reference of the relative differences.
      error: the number to judge.
      tolerance: the largest error allowed; None if it is only reported.
    """

    kind: str
    name: str
    size: int
    reference_rms: float
    difference_rms: float
    quantiles: tuple[float, ...]
    measure: str
    error: float
    tolerance: float | None

    @property
    def passes(self) -> bool:
        """Whether it is within its tolerance, if it has one. A NaN never is."""
        # `<=` is false for NaN.
        return self.tolerance is None or self.error <= self.tolerance


def _compare_results(
    reference: StackResult, ours: StackResult, *, float32: bool, tokens: np.ndarray | None = None
) -> list[Finding]:
    """Compares everything that both results contain, in the order of computation.

    Args:
      reference: Mesh TensorFlow's results.
      ours: the JAX stack's results.
      float32: whether the tolerances apply.
      tokens: number of target tokens in each scored row.

    Raises:
      ValueError: if the results have different tensors, or tensors of different shapes.
    """
    found = list(_findings(reference, ours, tokens))
    if float32:
        return found
    return [dataclasses.replace(finding, tolerance=None) for finding in found]


def _findings(
    reference: StackResult, ours: StackResult, tokens: np.ndarray | None
) -> Iterator[Finding]:
    yield from _tensors("activation", reference.activations, ours.activations)
    if reference.token_losses is not None and ours.token_losses is not None:
        yield _absolute("log-likelihood", "targets of the first batch", reference.token_losses,
                        ours.token_losses, np.ones_like(reference.token_losses))  # fmt: skip
    yield relative("loss", "step 1", reference.losses[:1], ours.losses[:1], _FIRST_LOSS)
    yield from _tensors("gradient", reference.gradients, ours.gradients)
    # Step 0 is the start, equal by construction.
    first, *later = sorted(reference.trees.keys() & ours.trees.keys() - {0})
    yield from _trees("first step", reference.trees[first], ours.trees[first], _TENSOR)
    # Later steps accumulate the differences of all before them; the tolerance is defined for 20.
    judged = slice(0, _STEPS_JUDGED)
    last = min(_STEPS_JUDGED, len(reference.losses))
    if last > 1:
        name = f"steps 1 to {last}"
        yield relative("loss", name, reference.losses[judged], ours.losses[judged], _LOSSES)
    if len(reference.losses) > _STEPS_JUDGED:
        name = f"all {len(reference.losses)} steps"
        yield relative("loss", name, reference.losses, ours.losses, None)
    for step in later:
        yield from _trees("last step", reference.trees[step], ours.trees[step], None)
    if reference.scores is not None and ours.scores is not None and tokens is not None:
        name = "evaluation, for each target token"
        yield _absolute("log-likelihood", name, reference.scores, ours.scores, tokens)


def _tensors(
    kind: str, reference: Mapping[str, np.ndarray], ours: Mapping[str, np.ndarray]
) -> Iterator[Finding]:
    """Findings judged by the RMS of the difference over the RMS."""
    for name, expected, value in _pairs(kind, reference, ours):
        scale = _rms(expected)
        difference = _difference(expected, value)
        # Show entries relative to the RMS; judge the tensor by its own.
        errors, error = np.abs(difference) / max(scale, _TINY), _ratio(_rms(difference), scale)
        measure = "the tensor's RMS"
        yield _make_finding(kind, name, expected, difference, errors, measure, error, _TENSOR)


def _trees(
    kind: str, reference: FlatTree, ours: FlatTree, tolerance: float | None
) -> Iterator[Finding]:
    """Findings judged by their worst entry, relative to the tensor's RMS or the entry if larger."""
    for name, expected, value in _pairs(kind, _drop_unused(reference), _drop_unused(ours)):
        difference = _difference(expected, value)
        # The scale is zero only if the whole tensor is; any difference is then infinite.
        scale = np.maximum(_rms(expected), np.abs(expected.astype(np.float64)))
        errors = np.divide(
            np.abs(difference), scale, out=np.where(difference == 0, 0.0, np.inf), where=scale > 0
        )
        measure = "the tensor's RMS or the entry"
        error = float(np.max(errors)) if errors.size else 0.0
        yield _make_finding(kind, name, expected, difference, errors, measure, error, tolerance)


def _drop_unused(tree: FlatTree) -> dict[str, np.ndarray]:
    """A tree without the zeros of shape (1,) that represent unused slots."""
    return {name: x for name, x in tree.items() if x.shape != (1,) or x[0] != 0}


def relative(
    kind: str, name: str, expected: np.ndarray, value: np.ndarray, tolerance: float | None
) -> Finding:
    """A finding judged by the largest difference of an entry relative to that entry."""
    expected, value = np.asarray(expected), np.asarray(value)
    difference = _difference(expected, value)
    errors = np.abs(difference) / np.maximum(np.abs(expected.astype(np.float64)), _TINY)
    return _make_finding(kind, name, expected, difference, errors, "the value itself",
                         float(np.max(errors)), tolerance)  # fmt: skip


def _absolute(
    kind: str, name: str, expected: np.ndarray, value: np.ndarray, tokens: np.ndarray
) -> Finding:
    """A finding judged by the largest absolute difference per target token."""
    difference = _difference(expected, value)
    errors = np.abs(difference) / np.maximum(tokens, 1)
    return _make_finding(kind, name, expected, difference, errors, "one target token",
                         float(np.max(errors)), _PER_TOKEN)  # fmt: skip


def _metrics_finding(
    task: str, reference: Mapping[str, float], ours: Mapping[str, float], *, float32: bool
) -> Finding:
    """A finding for a task's metrics, which must be equal."""
    names = sorted(reference)
    expected = np.array([reference[name] for name in names])
    value = np.array([ours[name] for name in names])
    # A metric that is undefined on both stacks counts as equal.
    both_undefined = np.isnan(expected) & np.isnan(value)
    difference = np.where(both_undefined, 0.0, value - expected)
    error = float(np.max(np.abs(difference)))
    return _make_finding("metric", f"{task}: {', '.join(names)}", np.nan_to_num(expected),
                         difference, np.abs(difference), "one percentage point", error,
                         0.0 if float32 else None)  # fmt: skip


# Keeps a division by zero finite, and is smaller than any compared number.
_TINY = 1e-38


def _pairs(
    kind: str, reference: Mapping[str, np.ndarray], ours: Mapping[str, np.ndarray]
) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    if reference.keys() != ours.keys():
        odd = sorted(reference.keys() ^ ours.keys())
        raise ValueError(f"Only one stack has the {kind} {', '.join(odd[:5])}.")
    for name, expected in reference.items():
        if expected.shape != ours[name].shape:
            shapes = f"{expected.shape} and {ours[name].shape}"
            raise ValueError(f"The {kind} {name} has the shapes {shapes}.")
        yield name, expected, ours[name]


def _difference(expected: np.ndarray, value: np.ndarray) -> np.ndarray:
    # Use float64, so that the difference itself is not rounded.
    return value.astype(np.float64) - expected.astype(np.float64)


def _rms(x: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(x, dtype=np.float64)))) if x.size else 0.0


def _ratio(difference: float, scale: float) -> float:
    if scale > 0 or np.isnan(scale):
        return difference / scale
    return 0.0 if difference == 0 else float("inf")


def _make_finding(
    kind: str,
    name: str,
    expected: np.ndarray,
    difference: np.ndarray,
    errors: np.ndarray,
    measure: str,
    error: float,
    tolerance: float | None,
) -> Finding:
    spread = np.quantile(errors, _QUANTILES) if errors.size else np.zeros(len(_QUANTILES))
    return Finding(
        kind=kind,
        name=name,
        size=int(expected.size),
        reference_rms=_rms(expected),
        difference_rms=_rms(difference),
        quantiles=tuple(float(x) for x in spread),
        measure=measure,
        error=error,
        tolerance=tolerance,
    )
