"""Evaluations on Mesh TensorFlow that write metrics.jsonl and a record per task and checkpoint.

The record of a scored task and provenance.json have the facts that Mesh TensorFlow's own files do
not give the report: how many inputs and targets were truncated, the digest of the checkpoint, and
the device.
"""

from __future__ import annotations

import functools
import inspect
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tensorflow

import gin
from t0repro.converters import finding, sources
from t0repro.converters.witnesses import parameters_digest
from t0repro.errors import UserError
from t0repro.evaluation import records
from t0repro.evaluation.evaluation_facts import write_facts
from t0repro.evaluation.evaluation_folder import EvaluationFolder, EvaluationSettings
from t0repro.evaluation.judge import check_choices_have_tokens, ranks_choices, strip_padding
from t0repro.evaluation.opened import Checkpoint
from t0repro.evaluation.result_lines import print_results
from t0repro.evaluation.task_output import (
    Statistics,
    TaskResult,
    TruncationCounter,
    explain_incomplete_inputs,
    numbers,
)
from t0repro.mtf.metrics_file import MetricsFile, is_on_this_disk


def record_perplexity(estimator_class: Any, metrics: MetricsFile) -> None:
    """Makes `perplexity_eval` write a metrics line per task and checkpoint, and print it."""
    original = estimator_class.evaluate

    @functools.wraps(original)
    def evaluate(self: Any, input_fn: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, input_fn, *args, **kwargs)
        # `run` passes partial(_input_fn, eval_dataset=...) and the name <task>_<split>_<examples>.
        dataset = getattr(input_fn, "keywords", {}).get("eval_dataset")
        name = kwargs.get("name") or ""
        task = dataset.name if dataset is not None else name
        # <task>_<split>_<examples>: the split is between the task's name and the next underscore.
        split = name.removeprefix(f"{task}_").split("_")[0] or "eval"
        values = dict(numbers(result.items()))
        # The Estimator adds the step to the metrics that it returns.
        step = int(values.pop("global_step"))
        metrics.append({"split": split, "step": step, "task": task, **values})
        print_results({task: values}, step, self.model_dir)
        return result

    estimator_class.evaluate = evaluate


def record_evaluation(utils: Any, metrics: MetricsFile) -> None:
    """Makes `eval` and `score_eval` write a metrics line and a record per task and checkpoint.

    `eval_model` computes a checkpoint's metrics while it iterates over the checkpoints. So the step
    comes from that iterator, and each dataset's functions are wrapped to record their data.
    """
    original_iterator, original_eval = utils.get_checkpoint_iterator, utils.eval_model
    signature = inspect.signature(original_eval)
    current: list[_Evaluation] = []

    @functools.wraps(original_iterator)
    def get_checkpoint_iterator(*args: Any, **kwargs: Any) -> Iterator[str]:
        for path in original_iterator(*args, **kwargs):
            for evaluation in current:
                evaluation.begin(path, int(utils.get_step_from_checkpoint_path(path)))
            yield path
            for evaluation in current:
                evaluation.end()

    @functools.wraps(original_eval)
    def eval_model(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs)
        call.apply_defaults()
        if not is_on_this_disk(call.arguments["eval_summary_dir"] or ""):
            return original_eval(*args, **kwargs)
        datasets_fn = call.arguments["eval_dataset_fn"]
        evaluation = _Evaluation(call.arguments, metrics)

        @functools.wraps(datasets_fn)
        def make_recorded_datasets(*args: Any, **kwargs: Any) -> list[Any]:
            return [evaluation.record_dataset(dataset) for dataset in datasets_fn(*args, **kwargs)]

        if datasets_fn is not None:
            call.arguments["eval_dataset_fn"] = make_recorded_datasets
        current[:] = [evaluation]
        try:
            return original_eval(*call.args, **call.kwargs)
        finally:
            current.clear()

    utils.get_checkpoint_iterator = get_checkpoint_iterator
    utils.eval_model = eval_model


class _Evaluation:
    """One call of eval_model.

    Args:
      arguments: Arguments of the call, by name.
      metrics: Where the metrics lines go.
    """

    def __init__(self, arguments: Mapping[str, Any], metrics: MetricsFile):
        self._metrics, self._split = metrics, arguments["dataset_split"]
        self._lengths: Mapping[str, int] | None = arguments["sequence_length"]
        self._scores, self._writes = arguments["eval_with_score"], arguments["output_eval_examples"]
        # The same name that eval_model gives it.
        folder = arguments["eval_summary_dir"] or f"{arguments['model_dir']}/{self._split}_eval"
        suffix = arguments["eval_dir_suffix"]
        # eval_model adds the suffix only if there is one, with an underscore.
        self._folder = Path(folder if suffix is None else f"{folder}_{suffix}")
        self._statistics: dict[str, Statistics] = {}
        self._examples: dict[str, int] = {}
        self._results: dict[str, dict[str, float]] = {}
        self._path, self._step, self._began, self._seconds = "", 0, 0.0, 0.0
        self._checkpoint: Checkpoint | None = None

    def begin(self, path: str, step: int) -> None:
        """Starts the clock for a checkpoint: it computes all outputs before any task's metrics."""
        self._path, self._step, self._checkpoint = path, step, None
        self._began, self._seconds = time.monotonic(), 0.0

    def end(self) -> None:
        """Writes provenance.json and prints the results of a checkpoint."""
        if self._checkpoint is not None:  # records were written
            write_facts(self._folder, self._checkpoint, [*self._results], _device())
        if self._results:
            print_results(self._results, self._step, self._folder)
        self._results = {}

    def record_dataset(self, dataset: Any) -> Any:
        """Returns the EvalDataset with its functions wrapped to record examples and results."""
        from mesh_tensorflow.transformer.dataset import EvalDataset

        dataset = EvalDataset(*dataset)
        functions = list(dataset.metric_fns or ())
        if not functions:
            return dataset
        # eval_model calls a task's metrics in their order, so the last one completes its record.
        return dataset._replace(
            postprocess_fn=self._count_targets(
                dataset.name, dataset.postprocess_fn, ranks_choices(functions)
            ),
            metric_fns=[
                self._record_results(dataset.name, each, each is functions[-1])
                for each in functions
            ],
        )

    def _count_targets(
        self, task: str, original: Callable[..., Any], ranked: bool
    ) -> Callable[..., Any]:
        """Counts each example once, when eval_model postprocesses its target.

        For a ranked task, removes the targets' padding, so that a choice's length is its number of
        tokens.
        """
        import seqio

        features = seqio.get_mixture_or_task(task).output_features
        statistics = Statistics(TruncationCounter(features, self._lengths))
        self._statistics[task], self._examples[task] = statistics, 0

        @functools.wraps(original)
        def postprocess(value: Any, **kwargs: Any) -> Any:
            if kwargs.get("is_target") and "example" in kwargs:
                statistics.add([kwargs["example"]])
                self._examples[task] += 1
                if ranked:
                    kwargs["example"] = strip_padding(kwargs["example"])
            return original(value, **kwargs)

        return postprocess

    def _record_results(
        self, task: str, metric_fn: Callable[..., Any], last: bool
    ) -> Callable[..., Any]:
        @functools.wraps(metric_fn)
        def compute(targets: Sequence[Any], predictions: Sequence[Any]) -> Any:
            # Only at the first metric: later tasks' metrics follow the same computation.
            self._seconds = self._seconds or time.monotonic() - self._began
            check_choices_have_tokens(task, metric_fn, targets)
            with explain_incomplete_inputs(_num_eval_examples()):
                result = metric_fn(targets, predictions)
            results = self._results.setdefault(task, {})
            if isinstance(result, Mapping):
                results.update(numbers(result.items()))
            if last:
                head = {"split": self._split, "step": self._step, "task": task}
                self._metrics.append({**head, **results})
                self._record(task)
            return result

        return compute

    def _record(self, task: str) -> None:
        """Writes a scored task's record, replacing any that an earlier run left."""
        # Remove it first, so that a record never describes another run's files if this run dies
        # here.
        records.remove_record(self._folder, task, self._step)
        if not (self._scores and self._writes):
            return
        names = (f"{task}_targets", f"{task}_inputs", f"{task}_{self._step}_predictions")
        digests = {name: records.file_digest(self._folder / name) for name in names}
        files = {name: digest for name, digest in digests.items() if digest is not None}
        if len(files) < len(names):
            return  # records are only read from local file systems
        if self._checkpoint is None:
            self._checkpoint = _describe_checkpoint(self._path, self._step)
        limit, statistics = _num_eval_examples(), self._statistics[task].as_record()
        settings = EvaluationSettings(
            split=self._split,
            limit=limit,
            lengths=dict(self._lengths or {}),
            activation=_query_bound("utils.get_variable_dtype.activation_dtype", "float32"),
            use_cached=_query_bound("mesh_eval_dataset_fn.use_cached", False),
        )
        folder = EvaluationFolder(
            self._folder, self._checkpoint, settings, command="score_eval on Mesh TensorFlow"
        )
        # All tasks are scored together, so each gets a share in proportion to its examples.
        share = self._examples[task] / max(sum(self._examples.values()), 1)
        details = {
            "pairs": self._examples[task],
            "available": None if limit else statistics["inputs"],
            "seconds": self._seconds * share,
        }
        metrics = self._results[task]
        folder.record(TaskResult(task, self._step, metrics, statistics, files), details)


def _describe_checkpoint(path: str, step: int) -> Checkpoint:
    """A record's facts about a checkpoint; the digest is empty if it is not a T5."""
    try:
        reader = sources.open_checkpoint(finding.find_checkpoint(path))
        digest = parameters_digest(reader.tensors, reader.read)
    except UserError:
        digest = ""
    return Checkpoint(path, step, digest, params={}, model=None)


def _device() -> str:
    """The devices available to TensorFlow."""
    config = tensorflow.config
    devices = config.list_physical_devices("GPU") or config.list_physical_devices("CPU")
    details = config.experimental.get_device_details(devices[0])
    name = details.get("device_name", devices[0].device_type.lower())
    return f"{len(devices)} x {name}, {os.cpu_count()} CPU cores"


def _query_bound(parameter: str, default: Any) -> Any:
    """The value that gin binds to a parameter."""
    try:
        return gin.query_parameter(parameter)
    except ValueError:  # not bound
        return default


def _num_eval_examples() -> int | None:
    """The number of first examples per task that gin binds; None for all."""
    count = _query_bound("mesh_eval_dataset_fn.num_eval_examples", None)
    return count if isinstance(count, int) and count >= 0 else None
