"""The Mesh TensorFlow stack's reports beyond t5's own files: metrics.jsonl, records, progress.

t5 and Mesh TensorFlow do the work. The functions here wrap three of their entry points
(`TPUEstimator.train`, `TPUEstimator.evaluate`, `utils.eval_model`) and change no computation.

metrics.jsonl in model_dir has one JSON object per line:

    {"split": "train", "step": 1, "loss": 10.373483657836914}
    {"split": "validation", "step": 4, "task": "rte_GPT_3_style_score_eval", "accuracy": 52.7}

A line's step is the global step after the update; its loss uses the parameters before the update
and has float32's full precision.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tensorflow

import gin
from t0repro.converters import sources
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
from t0repro.storage import make_folder, scheme_of, write_atomically
from t0repro.storage.disk import name_in_errors
from t0repro.training.metrics import LOSS_PER_TOKEN, METRICS_FILE, drop_partial_line, step_line

tf = tensorflow.compat.v1

_SECONDS_BETWEEN_LINES = 5.0


def is_on_this_disk(folder: str) -> bool:
    """Whether this project can lock a folder and write there beside TensorFlow.

    At an address such as gs://, TensorFlow alone writes, through its own client.
    """
    return scheme_of(folder) is None


def install(model_dir: str) -> None:
    """Makes training and evaluation in this process write model_dir/metrics.jsonl.

    If model_dir is an address, only TensorFlow writes there, and this project adds nothing. Must be
    called after t0repro.compat.install().
    """
    silence_loss_print()
    if not is_on_this_disk(model_dir):
        print(f"{METRICS_FILE} is not written to {model_dir}: only to folders", file=sys.stderr)
        return
    from mesh_tensorflow.transformer import utils
    from tensorflow.python.tpu import tpu_estimator

    metrics = MetricsFile(os.path.join(model_dir, METRICS_FILE))
    record_training(tpu_estimator.TPUEstimator, metrics)
    record_perplexity(tpu_estimator.TPUEstimator, metrics)
    _record_evaluation(utils, metrics)


class MetricsFile:
    """Appends lines to model_dir/metrics.jsonl; a resumed run drops lines that it will repeat."""

    def __init__(self, path: str):
        self._path = Path(path)
        self._appended = False

    def append(self, record: Mapping[str, Any]) -> None:
        """Appends one record as a line; the file is closed again after each."""
        make_folder(self._path.parent)
        if not self._appended:
            # A killed run can leave a partial line, which would corrupt the next one.
            drop_partial_line(self._path)
            self._appended = True
        with name_in_errors(self._path), open(self._path, "a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    def drop_training_after(self, step: int) -> None:
        """Removes training lines after a step: a run that resumes there writes them again."""
        if not self._path.exists():
            return
        lines = self._path.read_text(encoding="utf-8").splitlines()
        # Keep evaluations' lines: a resumed run does not repeat those evaluations.
        kept = [line for line in lines if not _is_training_after(line, step)]
        if len(kept) < len(lines):
            write_atomically(self._path, "".join(f"{line}\n" for line in kept))


def _is_training_after(line: str, step: int) -> bool:
    try:
        record = json.loads(line)
    except json.JSONDecodeError:  # the line that an interrupted run was writing
        return True
    return record.get("split") == "train" and record.get("step", 0) > step


# ---- Training ------------------------------------------------------------------------------------


def record_training(estimator_class: Any, metrics: MetricsFile) -> None:
    """Adds a LossRecorder to every `train` call of the estimator class."""
    original = estimator_class.train

    @functools.wraps(original)
    def train(self: Any, input_fn: Callable[..., Any], hooks: Any = None, **kwargs: Any) -> Any:
        structure: dict[str, int] = {}

        def noting_structure(params: Any) -> Any:
            dataset = input_fn(params)
            # tf.data flattens a dictionary in the order of its sorted keys.
            names = sorted(dataset.element_spec)
            structure.update({name: index for index, name in enumerate(names)})
            return dataset

        with noted_losses() as losses:
            recorder = LossRecorder(metrics, structure, kwargs.get("max_steps"), losses)
            result = original(self, noting_structure, hooks=[*(hooks or ()), recorder], **kwargs)
        # The Estimator treats the end of the data as the end of training, and counts a step for it.
        if recorder.steps == 0:
            raise UserError(
                "There are no batches to train on; the checkpoint that was saved now holds the"
                " parameters that training began with.",
                where=self.model_dir,
                fix="Check that the task has rows in this split, and that they are not filtered"
                " out; then remove that checkpoint, and start the same command again.",
            )
        return result

    estimator_class.train = train


class _Loss(NamedTuple):
    """What a graph's loss is made of: its divisor, the length of its rows, and whose tokens."""

    denominator: float
    length: int
    on_targets_only: bool


@contextlib.contextmanager
def noted_losses() -> Iterator[list[_Loss]]:
    """Records the summed loss of each graph built within the context."""
    from mesh_tensorflow.transformer.transformer import Unitransformer

    found: list[_Loss] = []
    original = Unitransformer.loss_denominator

    @functools.wraps(original)
    def noting(self: Any, targets: Any, num_microbatches: int) -> float:
        denominator = original(self, targets, num_microbatches)
        length = targets.shape.dims[-1].size
        found.append(_Loss(denominator, length, self.loss_on_targets_only))
        return denominator

    Unitransformer.loss_denominator = noting
    try:
        yield found
    finally:
        Unitransformer.loss_denominator = original


class LossRecorder(tf.train.SessionRunHook):
    """Writes one metrics line per training step and shows progress.

    Args:
      metrics: Where the lines go.
      structure: Feature name -> its index among the tensors of the input iterator; filled in when
        the input function has run, which is before `begin`.
      last_step: The global step at which training ends, or None.
      losses: The model function's summed losses, the latest last; filled in with the graph.

    Attributes:
      steps: Number of steps done; None before the session begins, as where no step is left to do.
    """

    def __init__(
        self,
        metrics: MetricsFile,
        structure: Mapping[str, int],
        last_step: int | None,
        losses: Sequence[_Loss],
    ):
        self._metrics, self._structure, self._losses = metrics, structure, losses
        self.steps: int | None = None
        self._progress = ProgressLine(last_step)
        self._fetches: dict[str, Any] = {}
        self._step = 0

    def begin(self) -> None:
        """Finds the tensors to fetch in the graph that the model function built."""
        # The Estimator puts the model function's loss at the end of this collection.
        loss = tf.get_collection(tf.GraphKeys.LOSSES)[-1]
        self._fetches = {"loss": loss, **_batch_counts(self._structure, self._loss)}

    def after_create_session(self, session: Any, coord: Any) -> None:
        """Reads the step that training starts from."""
        del coord
        self.steps = 0
        self._step = int(session.run(tf.train.get_global_step()))
        # Not in `begin`: only the session knows which checkpoint was restored.
        self._metrics.drop_training_after(self._step)

    @property
    def _loss(self) -> _Loss | None:
        return self._losses[-1] if self._losses else None

    def before_run(self, run_context: Any) -> Any:
        """Fetches the loss and the counts along with each step."""
        del run_context
        return tf.train.SessionRunArgs(self._fetches)

    def after_run(self, run_context: Any, run_values: Any) -> None:
        """Writes the step's line and shows progress."""
        del run_context
        values = run_values.results
        # Count here, because reading global_step in the run that increments it is a race.
        self._step += 1
        self.steps = (self.steps or 0) + 1
        loss, tokens = float(values["loss"]), int(values.get("tokens", 0))
        line, per_token = {"split": "train", "step": self._step, "loss": loss}, None
        if self._loss is not None and tokens:
            # The divisor counts padding too.
            line[LOSS_PER_TOKEN] = per_token = loss * self._loss.denominator / tokens
        self._metrics.append(line)
        self._progress.show(self._step, loss, int(values.get("examples", 0)), tokens, per_token)

    def end(self, session: Any) -> None:
        """Ends the progress line."""
        del session
        self._progress.close()


def _batch_counts(structure: Mapping[str, int], loss: _Loss | None) -> dict[str, Any]:
    """Tensors that count the examples and the target tokens with loss in the current batch.

    Packed sequences hold several examples, numbered from 1 by targets_segmentation.
    """
    try:
        # TensorFlow's name for the batch's tensors in the graph of a tf.data pipeline.
        features = tf.get_default_graph().get_operation_by_name("IteratorGetNext").outputs
    except KeyError:
        return {}
    if "targets" not in structure:
        return {}
    features = {name: features[index] for name, index in structure.items()}
    targets = features["targets"]
    tokens = tf.math.count_nonzero(_mark_scored(features, loss))
    if "targets_segmentation" in structure:
        segments = features["targets_segmentation"]
        # Segments are numbered from 1, so the largest number is the count.
        examples = tf.reduce_sum(tf.reduce_max(segments, axis=-1))
    else:
        # Rows of padding have no target.
        examples = tf.math.count_nonzero(tf.reduce_max(targets, axis=-1))
    return {"tokens": tokens, "examples": examples}


def _mark_scored(features: Mapping[str, Any], loss: _Loss | None) -> Any:
    """Which tokens have loss, as in Unitransformer._compute_loss; of a subclass's loss, any."""
    text = features["targets"]
    if loss is not None and loss.length > text.shape[-1]:
        # A delimited_lm's, joined as in mesh_tensorflow.transformer.utils._dynamic_text2self.
        joined = {
            name: tf.concat([features["inputs" + name], features["targets" + name]], axis=1)
            for name in ("", "_segmentation")
            if "inputs" + name in features
        }
        text = joined[""]
        segments = joined.get("_segmentation", tf.cast(tf.not_equal(text, 0), text.dtype))
        order = tf.where(
            tf.equal(segments, 0), tf.fill(tf.shape(segments), segments.dtype.max), segments
        )
        text = tf.gather(text, tf.argsort(order, axis=1, stable=True), batch_dims=1)
    scored = text > 0
    if loss is not None and loss.on_targets_only:
        # Of an example's two parts the second, after an odd number of EOS; see
        # transformer.delimited_lm_inputs_mask.
        ends = tf.cast(tf.equal(text, 1), tf.int32)
        scored &= tf.equal(tf.cumsum(ends, axis=-1, exclusive=True) % 2, 1)
    return scored


class ProgressLine:
    """Progress line: step, loss, rates, time left; rewritten in place, or printed every 5 s."""

    def __init__(self, last_step: int | None):
        self._last_step = last_step
        self._first_step: int | None = None
        self._start = self._shown = 0.0
        self._examples = self._tokens = 0
        self._terminal = sys.stderr.isatty()

    def show(
        self, step: int, loss: float, examples: int, tokens: int, per_token: float | None = None
    ) -> None:
        """Counts one step and shows the line when it is due.

        Args:
          step: The global step.
          loss: Mesh TensorFlow's loss.
          examples: The batch's examples.
          tokens: The batch's target tokens.
          per_token: The loss per target token, if known.
        """
        now = time.monotonic()
        if self._first_step is None:
            # The first step includes building and warming up the graph, so rates start after it.
            self._first_step, self._start = step, now
        else:
            self._examples += examples
            self._tokens += tokens
        last = step == self._last_step
        # A terminal's line may be rewritten ten times a second; a log gets a line every few
        # seconds.
        if not last and now - self._shown < (0.1 if self._terminal else _SECONDS_BETWEEN_LINES):
            return
        self._shown = now
        line = step_line(
            step, self._last_step, per_token, loss, *self._rates(step, now - self._start)
        )
        sys.stderr.write(f"\r{line}\033[K" if self._terminal else f"{line}\n")
        sys.stderr.flush()

    def _rates(self, step: int, seconds: float) -> tuple[tuple[float, float] | None, float | None]:
        """Examples and target tokens per second, and seconds left; None where not known."""
        assert self._first_step is not None
        steps = step - self._first_step
        if not steps or seconds <= 0:
            return None, None
        speed = (self._examples / seconds, self._tokens / seconds) if self._examples else None
        return speed, (self._last_step - step) * seconds / steps if self._last_step else None

    def close(self) -> None:
        """Ends the line that a terminal shows."""
        if self._terminal and self._first_step is not None:
            sys.stderr.write("\n")


def silence_loss_print() -> None:
    """Turns off tf.Print, by which the model function prints every loss off TPU.

    The progress line shows the loss instead.
    """

    def pass_through(input_: Any, data: Any, message: Any = None, **kwargs: Any) -> Any:
        del data, message, kwargs
        return input_

    tf.Print = pass_through


# ---- Evaluation ----------------------------------------------------------------------------------

# The record of a scored task and provenance.json have the facts that Mesh TensorFlow's own files do
# not give the report: how many inputs and targets were truncated, the digest of the checkpoint, and
# the device.


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


def _record_evaluation(utils: Any, metrics: MetricsFile) -> None:
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
        def noting_datasets_fn(*args: Any, **kwargs: Any) -> list[Any]:
            return [evaluation.noting(dataset) for dataset in datasets_fn(*args, **kwargs)]

        if datasets_fn is not None:
            call.arguments["eval_dataset_fn"] = noting_datasets_fn
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

    def noting(self, dataset: Any) -> Any:
        """Returns the EvalDataset with its functions wrapped to record examples and results."""
        from mesh_tensorflow.transformer.dataset import EvalDataset

        dataset = EvalDataset(*dataset)
        functions = list(dataset.metric_fns or ())
        if not functions:
            return dataset
        # eval_model calls a task's metrics in their order, so the last one completes its record.
        return dataset._replace(
            postprocess_fn=self._noting_targets(
                dataset.name, dataset.postprocess_fn, ranks_choices(functions)
            ),
            metric_fns=[
                self._noting_results(dataset.name, each, each is functions[-1])
                for each in functions
            ],
        )

    def _noting_targets(
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

    def _noting_results(
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
            self._checkpoint = _identified(self._path, self._step)
        limit, statistics = _num_eval_examples(), self._statistics[task].as_record()
        settings = EvaluationSettings(
            split=self._split,
            limit=limit,
            lengths=dict(self._lengths or {}),
            activation=_bound("utils.get_variable_dtype.activation_dtype", "float32"),
            use_cached=_bound("mesh_eval_dataset_fn.use_cached", False),
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


def _identified(path: str, step: int) -> Checkpoint:
    """A record's facts about a checkpoint; the digest is empty if it is not a T5."""
    try:
        reader = sources.open_checkpoint(sources.find_checkpoint(path))
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


def _bound(parameter: str, default: Any) -> Any:
    """The value that gin binds to a parameter."""
    try:
        return gin.query_parameter(parameter)
    except ValueError:  # not bound
        return default


def _num_eval_examples() -> int | None:
    """The number of first examples per task that gin binds; None for all."""
    count = _bound("mesh_eval_dataset_fn.num_eval_examples", None)
    return count if isinstance(count, int) and count >= 0 else None
