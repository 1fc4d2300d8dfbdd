"""`t0repro parity`: runs one job on both stacks and compares them."""

from __future__ import annotations

import dataclasses
import itertools
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from t0repro.config.mtf.parser import MeshInputs
from t0repro.config.run_config import EvalDataConfig, RunConfig
from t0repro.data.batches import eval_tasks
from t0repro.data.train_data import TrainBatches
from t0repro.errors import UserError
from t0repro.evaluation.task_output import Judge, judge_of
from t0repro.files import output_path
from t0repro.parity.findings import Finding, compare_results, metrics_finding
from t0repro.parity.jax_run import (
    Error,
    StackResult,
    as_stack_result,
    injected,
    run_jax,
    with_error,
    without_exchange,
)
from t0repro.parity.mesh_jobs import MeshJob, run_mesh, save_batches

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

    config: RunConfig
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
    from t0repro.config.mtf.dialect import load
    from t0repro.config.mtf.parser import refuse_on_mesh_tensorflow

    out = output_path(out)
    float32 = dtype == "float32"
    # Use float32 masters whatever gin binds: bfloat16 masters would round away the differences.
    kinds = {"master": "float32", "slice": "float32", "activation": dtype}
    settings = [f"utils.get_variable_dtype.{kind}_dtype = '{x}'" for kind, x in kinds.items()]
    inputs = dataclasses.replace(inputs, gin_params=[*inputs.gin_params, *settings])
    config = load(inputs, float32_activations=float32).run
    refuse_on_mesh_tensorflow()
    if config.model.dropout_rate:
        raise UserError(
            f"The dropout rate is {config.model.dropout_rate}; the stacks draw different noise.",
            where=config.provenance.get("model.dropout_rate"),
            fix='Add --gin_param "dropout_rate = 0.0".',
        )
    # Remove an earlier comparison's results, or their checkpoints would be found too.
    shutil.rmtree(out / MESH_FOLDER, ignore_errors=True)
    source = TrainBatches(config).open(0, None)
    batches = list(itertools.islice(source, steps))
    task = None if eval_task is None else _task(eval_task, config)
    return Job(config, inputs, out, batches, task, float32, _mesh_checkpoint(start, out))


def _task(name: str, config: RunConfig) -> ScoredTask:
    """The task with its first PAIRS validation examples or fewer, in whole groups of choices."""
    data = config.eval_data or EvalDataConfig(name, "validation", False, False, 0, False, None)
    data = dataclasses.replace(
        data, mixture_or_task_name=name, split="validation", num_eval_examples=None, pack=False
    )
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
    return ScoredTask(judge_of(task), examples[:count])


def _input_of(example: Mapping[str, Any]) -> int:
    """The number of a ranked example's input; a unique one for any other example."""
    return int(example["idx"][0]) if "idx" in example else id(example)


def _mesh_checkpoint(start: str | None, out: Path) -> str | None:
    """The prefix of a start as a float32 Mesh TensorFlow checkpoint, converted if need be."""
    from t0repro.converters import sources
    from t0repro.converters.convert import convert
    from t0repro.parameters import naming

    if start is None:
        return None
    found = sources.find_checkpoint(start)
    # Check dtypes before converting: a float32 start is used as it is.
    reader = sources.open_checkpoint(found)
    types = {x.dtype for key, x in reader.tensors.items() if key.startswith(naming.PARAMETERS)}
    if found.format == "mtf" and types == {np.dtype(np.float32)}:
        return found.path
    folder = out / MESH_FOLDER / "start"
    convert(found.path, folder, "mtf", dtype="float32")
    return sources.find_checkpoint(folder).path


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
        from t0repro.converters.sources import load_any

        found = dataclasses.replace(found, trees={0: load_any(job.start), **found.trees})
    return found, result.start_step


def _rows(task: ScoredTask, config: RunConfig) -> list[dict[str, np.ndarray]]:
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
        trees = {done: without_exchange(tree) for done, tree in ours.trees.items()}
        ours = dataclasses.replace(ours, trees=trees)
    tokens = np.array([np.count_nonzero(np.asarray(ex["targets"]) > 0) for ex in examples])
    findings = compare_results(reference, ours, float32=job.float32, tokens=tokens)
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
    return metrics_finding(task.judge.task, *by_stack, float32=float32)


def to_json(parity: Parity, facts: dict[str, Any]) -> str:
    """The comparison as indented JSON; `facts` are added as they are."""
    first = parity.departures[0] if parity.departures else None
    value = {
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
    return json.dumps(value, indent=1) + "\n"
