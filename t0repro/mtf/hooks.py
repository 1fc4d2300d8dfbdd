"""The Mesh TensorFlow stack's reports beyond t5's own files: metrics.jsonl, records, progress.

t5 and Mesh TensorFlow do the work. The functions here and in `evaluation_hooks` wrap three of their
entry points (`TPUEstimator.train`, `TPUEstimator.evaluate`, `utils.eval_model`) and change no
computation.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow

from t0repro.errors import UserError
from t0repro.mtf.evaluation_hooks import record_evaluation, record_perplexity
from t0repro.mtf.metrics_file import MetricsFile, is_on_this_disk
from t0repro.training.metrics import LOSS_PER_TOKEN, METRICS_FILE, step_line

tf = tensorflow.compat.v1

_SECONDS_BETWEEN_LINES = 5.0


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
    record_evaluation(utils, metrics)


def record_training(estimator_class: Any, metrics: MetricsFile) -> None:
    """Adds a LossRecorder to every `train` call of the estimator class."""
    original = estimator_class.train

    @functools.wraps(original)
    def train(self: Any, input_fn: Callable[..., Any], hooks: Any = None, **kwargs: Any) -> Any:
        structure: dict[str, int] = {}

        def note_structure(params: Any) -> Any:
            dataset = input_fn(params)
            # tf.data flattens a dictionary in the order of its sorted keys.
            names = sorted(dataset.element_spec)
            structure.update({name: index for index, name in enumerate(names)})
            return dataset

        with record_losses() as losses:
            recorder = LossRecorder(metrics, structure, kwargs.get("max_steps"), losses)
            result = original(self, note_structure, hooks=[*(hooks or ()), recorder], **kwargs)
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
def record_losses() -> Iterator[list[_Loss]]:
    """Records the summed loss of each graph built within the context."""
    from mesh_tensorflow.transformer.transformer import Unitransformer

    found: list[_Loss] = []
    original = Unitransformer.loss_denominator

    @functools.wraps(original)
    def note(self: Any, targets: Any, num_microbatches: int) -> float:
        denominator = original(self, targets, num_microbatches)
        length = targets.shape.dims[-1].size
        found.append(_Loss(denominator, length, self.loss_on_targets_only))
        return denominator

    Unitransformer.loss_denominator = note
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
