"""Modes eval, score_eval and perplexity_eval, and T5X's eval: checkpoints by their tasks' metrics.

eval generates texts; score_eval computes the targets' log-likelihoods. The output files are in Mesh
TensorFlow's format (see task_output). Next to them are the facts that a report needs about the
evaluation: a record of each task, and provenance.json.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from t0repro.config.configuration import Configuration
from t0repro.config.inference_plan import EvalPlan
from t0repro.config.run_config import RunConfig
from t0repro.converters.model_files import check_configured
from t0repro.converters.tensors import CheckpointRef
from t0repro.data.batches import eval_tasks, perplexity_batches
from t0repro.data.checks import check_own_tokenizer
from t0repro.data.eval_examples import described_tasks
from t0repro.errors import UserError
from t0repro.evaluation.energy import Cost
from t0repro.evaluation.evaluation_facts import jax_device, print_results, write_facts
from t0repro.evaluation.evaluation_folder import EvaluationFolder, EvaluationSettings
from t0repro.evaluation.evaluator import FOLDER, open_evaluator
from t0repro.evaluation.opened import Checkpoint
from t0repro.evaluation.outputs import read_with_checksum, write_with_checksum
from t0repro.evaluation.rank_run import RankRun, ScoredPart
from t0repro.evaluation.reading import Part, windows
from t0repro.evaluation.task_output import (
    Judge,
    TaskOutput,
    TaskResult,
    TruncationCounter,
    explaining_incomplete_inputs,
    judge_of,
    judge_of_registered,
)
from t0repro.event_files import event_writer
from t0repro.files import output_path
from t0repro.model.t5 import T5
from t0repro.partitioning.devices import across_devices_of, data_parts, padded_rows
from t0repro.partitioning.processes import is_first, output_folder
from t0repro.progress import count_progress, say
from t0repro.runs.checkpoint_choice import (
    chosen,
    chosen_checkpoints,
    coming,
    generated_texts,
    generating_model,
    identity,
    loaded,
    opened,
    own_path,
)
from t0repro.runs.preflight import check_inference
from t0repro.runs.text_scores import ScoreFiles
from t0repro.tasks.task import find_task, is_described
from t0repro.training.losses import evaluation_metrics, evaluation_sums, loss_denominator
from t0repro.training.metrics import MetricLog

# As in rank_eval: memory for texts and tokens stops growing beyond this window.
EXAMPLES_IN_MEMORY = 131_072


def evaluate(configuration: Configuration) -> None:
    """Evaluates all tasks at each chosen checkpoint; writes results, event files and metrics.jsonl.

    Raises:
      UserError: If no evaluation dataset is bound.
    """
    checkpoints = chosen_checkpoints(configuration.run)
    configuration = _with_own_output(configuration)
    config = configuration.run
    windows = _windows(config)
    for checkpoint in loaded(configuration, checkpoints):
        evaluated = _evaluate(configuration, checkpoint, windows)
        if config.output_eval_examples:
            write_facts(evaluation_folder(config), checkpoint, [*evaluated], jax_device())
        print_results(evaluated, checkpoint.step, evaluation_folder(config))


def _with_own_output(configuration: Configuration) -> Configuration:
    """With several processes, keeps only the first one's results."""
    if is_first():
        return configuration
    run, folder = configuration.run, str(output_folder(configuration.run.model_dir))
    scores = None if run.scores_filename is None else f"{folder}/scores"
    # No eval_summary_dir, so that event files go below the other model_dir as well.
    run = dataclasses.replace(run, model_dir=folder, eval_summary_dir=None, scores_filename=scores)
    inputs = dataclasses.replace(configuration.inputs, model_dir=folder)
    return dataclasses.replace(configuration, run_or_refusal=run, inputs=inputs)


def _windows(config: RunConfig) -> TaskWindows:
    if config.eval_data is None:
        raise UserError(
            f"Mode {config.mode!r} needs run.eval_dataset_fn.",
            where=config.provenance.get("mode"),
            fix=f"Add --gin_file={config.mode}.gin.",
        )
    return TaskWindows(config)


def _evaluate(
    configuration: Configuration, checkpoint: Checkpoint, windows: TaskWindows
) -> dict[str, Mapping[str, float]]:
    """Evaluates all tasks at one checkpoint; returns the metrics of each."""
    config = configuration.run
    assert config.eval_data is not None
    output_of = _scores if config.mode == "score_eval" else _texts
    saves_scores = config.mode == "score_eval" and config.scores_filename is not None
    evaluated: dict[str, Mapping[str, float]] = {}
    writer = event_writer(evaluation_folder(config))
    # No start_step: it would drop the training run's lines in the same file.
    metrics = MetricLog(output_path(config.model_dir), writers=[writer])
    lengths = windows.lengths
    with (
        TaskWriter(config, checkpoint, windows.judges) as tasks,
        ScoreFiles(configuration) if saves_scores else contextlib.nullcontext() as files,
    ):
        for parts in windows:
            outputs = output_of(configuration, checkpoint, parts, lengths)
            for result in tasks.add(parts, outputs):
                split = config.eval_data.split
                metrics.write(split, result.step, result.metrics, task=result.task)
                evaluated[result.task] = result.metrics
            if files is not None:
                for part, output in zip(parts, outputs, strict=True):
                    files.add(output.values, (example["targets"] for example in part.examples))
            del parts, outputs  # free this window's memory before the next one is read
        if files is not None:
            files.commit()
    metrics.close()
    return evaluated


def _scores(
    configuration: Configuration,
    checkpoint: Checkpoint,
    parts: Sequence[Part],
    lengths: Mapping[str, int],
) -> list[Outputs]:
    # The engine's limit is in tokens, a run's in sequences: convert by a batch of full rows.
    tokens = configuration.run.batch_size * max(lengths.values())
    return scored(checkpoint, parts, lengths, tokens)


def _texts(
    configuration: Configuration,
    checkpoint: Checkpoint,
    parts: Sequence[Part],
    lengths: Mapping[str, int],
) -> list[Outputs]:
    inputs = [example["inputs"] for part in parts for example in part.examples]
    started = time.monotonic()
    texts = generated_texts(configuration, checkpoint, inputs, lengths["inputs"])
    return generated(parts, texts, time.monotonic() - started)


# ---- Windows of examples, and the files of each task ---------------------------------------------


class TaskWindows:
    """A run's tasks, a window of examples at a time; a large task is split across windows.

    Iterating again, for another checkpoint, rereads the tasks unless all fit in one window.

    Args:
      config: the run's configuration, with evaluation data.

    Attributes:
      judges: the judge of each task read so far, by name.
    """

    def __init__(self, config: RunConfig):
        self._config = config
        self.judges: dict[str, Judge] = {}
        self._kept: list[Part] | None = None
        self._all_read = False

    def __iter__(self) -> Iterator[list[Part]]:
        if self._kept is not None:
            yield self._kept
            return
        first, self._all_read = True, False
        for window in windows(self._tasks(), EXAMPLES_IN_MEMORY):
            # Everything fits in one window, so keep it for the next checkpoint.
            if first and self._all_read:
                self._kept = window
            first = False
            yield window
            del window  # free its memory before the next one is read

    def _tasks(self) -> Iterator[tuple[str, Iterable[dict[str, Any]]]]:
        data, lengths = self._config.eval_data, self._config.sequence_length
        assert data is not None
        if is_described(data.mixture_or_task_name):
            for task, examples in described_tasks(data, lengths):
                self.judges[task.name] = judge_of_registered(task)
                yield task.name, examples
            self._all_read = True
            return
        for task in eval_tasks(data, lengths):
            self.judges[task.name] = judge_of(task)
            yield task.name, task.examples
        self._all_read = True

    @functools.cached_property
    def lengths(self) -> Mapping[str, int]:
        """Maximum tokens per feature; without run.sequence_length, the longest over all tasks."""
        if self._config.sequence_length is not None:
            return self._config.sequence_length
        longest = {"inputs": 1, "targets": 1}
        for parts in self:
            for example in (example for part in parts for example in part.examples):
                longest = {name: max(size, len(example[name])) for name, size in longest.items()}
            del parts
        return longest


@dataclasses.dataclass(frozen=True)
class Outputs:
    """A model's outputs for a part's examples.

    Attributes:
      values: a score or a decoded text for each example.
      cost: time and energy that they took.
    """

    values: Sequence[Any] | np.ndarray
    cost: Cost


def scored(
    checkpoint: Checkpoint,
    parts: Sequence[Part],
    lengths: Mapping[str, int],
    tokens_per_batch: int,
) -> list[Outputs]:
    """Scores the targets of a window; pairs that its parts share are scored once.

    Args:
      checkpoint: the checkpoint to score with.
      parts: the window.
      lengths: maximum tokens per feature.
      tokens_per_batch: see grouping.make_batching.

    Raises:
      UserError: if a score is NaN or Inf, naming task, example and step.
    """
    found: dict[int, ScoredPart] = {}
    run = RankRun(checkpoint, parts, lengths, tokens_per_batch=tokens_per_batch)
    # Key by identity: equal parts of two tasks are still two parts.
    run.score(lambda part: found.update({id(part.part): part}))
    return [Outputs(each.scores, each.cost) for each in (found[id(part)] for part in parts)]


def generated(parts: Sequence[Part], texts: Sequence[str], seconds: float) -> list[Outputs]:
    """Splits decoded texts by part.

    Args:
      parts: in the order of the texts.
      texts: one text per example.
      seconds: total decoding time, split among parts by their number of examples.
    """
    found, start = [], 0
    for part in parts:
        end = start + len(part.examples)
        share = seconds * len(part.examples) / max(len(texts), 1)
        found.append(Outputs(texts[start:end], Cost(share)))
        start = end
    return found


class TaskWriter:
    """Writes each task's files and record, and computes its metrics, once it has all its parts.

    Args:
      config: the run's configuration.
      checkpoint: the checkpoint being evaluated.
      judges: the judge of each task, by name.
    """

    def __init__(self, config: RunConfig, checkpoint: Checkpoint, judges: Mapping[str, Judge]):
        self._config, self._checkpoint, self._judges = config, checkpoint, judges
        self._path, self._settings = evaluation_folder(config), _settings(config)
        self._open: dict[str, tuple[TaskOutput, Cost]] = {}

    def __enter__(self) -> TaskWriter:
        return self

    def __exit__(self, *error: object) -> None:
        # Only tasks that lack parts are still open here, because a failure ended the evaluation.
        for output, _ in self._open.values():
            output.discard()

    def add(self, parts: Sequence[Part], outputs: Sequence[Outputs]) -> list[TaskResult]:
        """Adds a window's outputs; returns the results of the tasks that this completes.

        Raises:
          UserError: if a task has no examples, or `num_eval_examples` ends between the choices of
            an input.
        """
        results = []
        for part, found in zip(parts, outputs, strict=True):
            output, cost = self._open.get(part.task) or (self._output(part.task), Cost(0.0, 0.0))
            self._open[part.task] = output, cost + found.cost
            output.add(part.examples, found.values)
            if part.last:
                results.append(self._finish(part.task))
        return results

    def _output(self, name: str) -> TaskOutput:
        truncation = TruncationCounter(_features(name), self._config.sequence_length)
        folder = self._path if self._config.output_eval_examples else None
        return TaskOutput(self._judges[name], self._checkpoint.step, folder, truncation)

    def _finish(self, name: str) -> TaskResult:
        output, cost = self._open[name]
        if not output.examples:
            raise UserError(
                f"The split {self._settings.split!r} of {name} has no examples.",
                fix="Check whether the data is there, and whether the templates drop every row.",
            )
        with explaining_incomplete_inputs(self._settings.limit):
            result = output.finish()
        del self._open[name]
        if self._config.output_eval_examples:
            self._record(result, output.examples, cost)
        return result

    def _record(self, result: TaskResult, examples: int, cost: Cost) -> None:
        ranks, mode = self._config.mode == "score_eval", self._config.mode
        generated_tasks = () if ranks else (result.task,)
        # The mode identifies the command, since commands choose examples differently.
        folder = EvaluationFolder(
            self._path, self._checkpoint, self._settings, generated_tasks, mode
        )
        # The size of the split is known only without a limit.
        available = result.statistics["inputs"] if self._settings.limit is None else None
        counts = {"pairs" if ranks else "examples": examples, "available": available}
        folder.record(result, {**counts, **cost.as_record()})


def _settings(config: RunConfig) -> EvaluationSettings:
    data = config.eval_data
    assert data is not None
    wanted = data.num_eval_examples
    return EvaluationSettings(
        split=data.split,
        # Mesh TensorFlow counts (input, choice) pairs and takes the first ones.
        limit=None if wanted is None or wanted < 0 else wanted,
        lengths=config.sequence_length or {},
        activation=config.dtypes.activation,
        use_cached=data.use_cached,
    )


def _features(name: str) -> Mapping[str, Any]:
    return find_task(name).output_features


def evaluation_folder(config: RunConfig) -> Path:
    """The folder of the evaluation's files, with Mesh TensorFlow's default and suffix."""
    split = config.eval_data.split if config.eval_data else "validation"
    folder = config.eval_summary_dir or f"{config.model_dir}/{split}_eval"
    suffix = config.eval_dir_suffix
    return output_path(folder if suffix is None else f"{folder}_{suffix}")


# ---- Mode perplexity_eval ------------------------------------------------------------------------


def evaluate_perplexity(configuration: Configuration) -> None:
    """Writes each task's metrics at each chosen checkpoint, and prints them.

    They go to metrics.jsonl and event files.
    """
    config = configuration.run
    steps = config.perplexity_eval_steps
    data = config.eval_data or config.plan.train_data
    split = data.split if data else "eval"
    datasets = perplexity_batches(config)
    for checkpoint in loaded(configuration, chosen_checkpoints(config)):
        params, model, step = checkpoint.params, checkpoint.model, checkpoint.step
        evaluated = {}
        for task, batches in datasets:
            evaluated[task] = values = perplexity_metrics(params, model, batches, steps)
            # Mesh TensorFlow's folder name, which contains the requested number of examples.
            name = f"{task}_{split}_{config.batch_size * steps}"
            name += f"_{config.eval_dir_suffix}" if config.eval_dir_suffix is not None else ""
            events = event_writer(output_path(config.model_dir) / f"eval_{name}")
            metrics = MetricLog(output_path(config.model_dir))
            metrics.write(split, step, values, task=task)
            metrics.close()
            events.write_scalars(step, values)
            events.close()
        print_results(evaluated, step, config.model_dir)


def perplexity_metrics(
    params: dict, model: T5, batches: Sequence[Mapping[str, np.ndarray]], steps: int
) -> dict[str, float]:
    """Teacher-forced metrics of a task over batches, under Mesh TensorFlow's names:

        neg_log_perplexity   mean log-probability of a target token, natural log
        token_accuracy       fraction of target tokens that are the most likely token
        sequence_accuracy    fraction of rows whose target tokens are all the most likely ones
        mean_label           mean id of the target tokens: a checksum of the data
        num_eval_tokens      number of target tokens
        max_targets_length   number of target tokens of the longest row
        loss                 the training loss without z_loss, mean over batches

    Args:
      params: the model's parameters.
      model: the model.
      batches: int32 arrays [batch, length] by feature, all of one shape.
      steps: number of batches that Mesh TensorFlow averages the loss over; those beyond `batches`
        are empty and add nothing to it.

    Source: mesh_tensorflow.transformer.utils.tpu_estimator_model_fn, simple_metrics.
    """
    totals: dict[str, float] = {}
    longest = 0
    with count_progress(len(batches), "evaluating", "batch", "evaluated", "batches") as advance:
        for batch in batches:
            rows = data_parts(params)
            parts = {name: padded_rows(x, rows) for name, x in batch.items()}
            denominator = loss_denominator(model.config, batch)
            with across_devices_of(params):
                sums = jax.device_get(_sums(model, params, parts, denominator))
            for name, value in sums.items():
                # In float64: a float32 sum stops counting tokens one by one at 2**24.
                totals[name] = totals.get(name, 0.0) + float(value)
            longest = max(longest, int((batch["targets"] > 0).sum(axis=-1).max(initial=0)))
            advance(1)
    zeros = dict.fromkeys(
        ("loss", "cross_entropy", "correct_tokens", "correct_rows", "tokens", "rows", "labels"), 0.0
    )
    totals = {**zeros, **totals, "batches": float(steps)}
    return {
        **evaluation_metrics(totals),
        "mean_label": totals["labels"] / max(totals["tokens"], 1.0),
        "max_targets_length": float(longest),
    }


@functools.partial(jax.jit, static_argnums=(0, 3))
def _sums(
    model: T5, params: dict, batch: dict[str, jax.Array], denominator: float
) -> dict[str, jax.Array]:
    return evaluation_sums(model, params, batch, denominator=denominator)


# ---- T5X's run mode eval -------------------------------------------------------------------------

RECORD = "evaluated.json"

Metrics = dict[str, dict[str, float]]


def evaluate_checkpoints(
    plan: EvalPlan,
    *,
    watch: bool = False,
    until: int | None = None,
    seconds: float | None = None,
    describe: Callable[[], None] = lambda: None,
) -> dict[int, Metrics]:
    """Evaluates each chosen checkpoint that this folder's record lacks.

    Args:
      plan: The evaluation.
      watch: Whether to keep evaluating as new checkpoints appear.
      until: Watching ends after a checkpoint of this step or a later one; None never ends.
      seconds: Between polls for new checkpoints; None takes the default.
      describe: Writes config.gin and model-info.txt, once data and checkpoints are found.

    Returns:
      Step -> task -> metrics, of the checkpoints evaluated by this call.

    Raises:
      UserError: If there is no checkpoint, one does not fit the model, the task's vocabulary is
        not the model's, or nothing has a metric.
    """
    check_inference(plan, starts=True)
    folder, record = Path(plan.output_dir), EvaluatedCheckpoints(plan)
    evaluator, results = None, {}
    refs = _checkpoints(plan, watch, until, seconds)
    describe()
    for ref in refs:
        # Taken first: a checkpoint that is replaced while being read is evaluated again next time.
        its_identity = identity(ref)
        if record.has(ref, its_identity):
            say(f"{ref.path}: evaluated before; remove {record.path} to evaluate it again")
            continue
        if evaluator is None:  # reads all examples, which a finished evaluation need not do
            evaluator = open_evaluator(plan.data, plan.evaluator, folder, plan.decoding)
        checkpoint = opened(plan, ref)
        model = generating_model(plan, checkpoint.model)
        metrics = evaluator.evaluate(model, checkpoint.params, checkpoint.step)
        # Recorded last: an evaluation interrupted before its results are written is repeated.
        record.add(ref, its_identity)
        results[checkpoint.step] = metrics
        print_results(metrics, checkpoint.step, folder)
        if any(logger.name != "py" for logger in plan.evaluator.loggers):
            say(f"wrote {folder / FOLDER}")
    return results


def _checkpoints(
    plan: EvalPlan, watch: bool, until: int | None, seconds: float | None
) -> Iterator[CheckpointRef]:
    if not watch:
        refs = chosen(plan.restore)
        for ref in refs:  # before the run writes a config.gin, which may replace their own
            check_configured(ref, plan.model)
            check_own_tokenizer(ref, plan.input_vocabulary, plan.output_vocabulary)
        return iter(refs)
    options: dict[str, Any] = {} if seconds is None else {"seconds": seconds}
    return coming(plan.restore, until, **options)


class EvaluatedCheckpoints:
    """The evaluations done into a folder, kept in its evaluated.json.

    A checkpoint counts as evaluated only with the same model, examples and decoding.
    """

    def __init__(self, plan: EvalPlan):
        self.path = Path(plan.output_dir) / RECORD
        settings = {**plan.decisive(), "evaluator": dataclasses.asdict(plan.evaluator)}
        # Sort keys, so that equal settings give equal texts.
        self._settings = json.dumps(settings, sort_keys=True)

    def has(self, ref: CheckpointRef, its_identity: str | None) -> bool:
        """Whether a checkpoint has been evaluated with these settings; reports a replaced one.

        A checkpoint that is gone, or that has no identity in the record, is matched by its path.
        """
        done, path = self._read().get(self._settings, {}), own_path(ref)
        if path not in done:
            return False
        if its_identity is None or done[path] in (its_identity, None):
            return True
        say(f"note: {ref.path} has changed since it was evaluated; evaluated again")
        return False

    def add(self, ref: CheckpointRef, its_identity: str | None) -> None:
        """Records a checkpoint as evaluated."""
        done = self._read()
        done.setdefault(self._settings, {})[own_path(ref)] = its_identity
        rows = [
            {"settings": json.loads(key), "checkpoints": [*known], "identities": known}
            for key, known in done.items()
        ]
        write_with_checksum(self.path, {"evaluated": rows})

    def _read(self) -> dict[str, dict[str, str | None]]:
        """Settings -> path -> identity, None in a record of a version that knew paths alone."""
        # Treat a damaged record as missing: its checkpoints are evaluated again.
        rows = (read_with_checksum(self.path) or {"evaluated": []})["evaluated"]
        return {
            json.dumps(row["settings"], sort_keys=True): {
                path: row.get("identities", {}).get(path) for path in row["checkpoints"]
            }
            for row in rows
        }
