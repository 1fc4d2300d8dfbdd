"""Evaluates checkpoints with SeqIO's own Evaluator, whose loggers write what T5X's runs write.

Below `<folder>/inference_eval`: TensorBoard's events in `<task>/`, and for each task
`<task>-metrics.jsonl` and `<task>-<step>.jsonl` with every prediction. A training run evaluates
in the same way (infer_eval).
"""

from __future__ import annotations

import functools
import logging
import os
import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from t0repro.config.decoding_plan import DecodingPlan
from t0repro.config.run_config import RunConfig
from t0repro.config.training_plan import EvaluatorConfig, LoggerConfig, SeqioDataConfig
from t0repro.errors import UserError
from t0repro.evaluation.model_functions import functions_of
from t0repro.log_records import only_records
from t0repro.model.layer_stacks import by_layer, stacks_in
from t0repro.model.t5 import T5

if TYPE_CHECKING:
    from t0repro.training.loop import TrainingLoop

FOLDER = "inference_eval"


class TaskEvaluator:
    """The tasks of an evaluation: their examples are read once, for all steps.

    Args:
      data: The examples; if its lengths are None, those of the longest example are used.
      evaluator: How many examples, and which loggers.
      folder: Where the loggers write, in `inference_eval` below it.
      decoding: How outputs are generated.
    """

    def __init__(
        self,
        data: SeqioDataConfig,
        evaluator: EvaluatorConfig,
        folder: str | os.PathLike[str],
        decoding: DecodingPlan,
    ):
        # compat has to be installed before anything imports t5 or seqio.
        from t0repro import compat

        compat.install()
        import seqio

        self._data, self._decoding = data, decoding
        self._num_examples = evaluator.num_examples
        self._evaluator = seqio.Evaluator(
            data.mixture_or_task_name,
            seqio.EncDecFeatureConverter(pack=False),
            eval_split=data.split,
            use_cached=data.use_cached,
            seed=data.seed,
            sequence_length=None if data.sequence_length is None else dict(data.sequence_length),
            num_examples=evaluator.num_examples,
            logger_cls=[_logger_class(logger) for logger in evaluator.loggers],
            log_dir=os.path.join(os.fspath(folder), FOLDER),
            use_memory_cache=data.use_memory_cache and evaluator.use_memory_cache,
            async_compute_metrics=False,  # an error in a metric is to stop the run where it occurs
        )

    @property
    def tasks(self) -> list[str]:
        """Names of the tasks that are evaluated."""
        return [task.name for task in self._evaluator.eval_tasks]

    def evaluate(self, model: Any, params: Any, step: int) -> dict[str, dict[str, float]]:
        """Evaluates a model, lets the loggers write, and returns each task's metrics by name.

        Args:
          model: the network, or a model of the user's with methods that generate and score.
          params: its parameters.
          step: their step, for the loggers.
        """
        # SeqIO's types ask for a second argument, which it never passes.
        functions: Any = functions_of(model, params, self._decoding, self._data.batch_size)
        with warnings.catch_warnings(), only_records("absl", _is_worth_logging):
            # sklearn warns about metrics that are undefined for few examples.
            warnings.filterwarnings("ignore", module=r"sklearn\.")
            try:
                metrics, _ = self._evaluator.evaluate(
                    compute_metrics=True,
                    step=step,
                    predict_fn=functions.predict,
                    predict_with_aux_fn=functions.predict_with_aux,
                    score_fn=functions.score,
                )
            except ValueError as error:
                # Without a limit the error is not about the number of examples.
                if self._num_examples is None:
                    raise
                raise UserError(
                    f"{error}.",
                    where=f"seqio.Evaluator.num_examples = {self._num_examples}",
                    fix="It counts pairs of an input and a choice: take a multiple of the numbers"
                    " of choices, or None for all.",
                ) from error
        return {task: _numbers(values) for task, values in metrics.result().items()}


def infer_eval(
    config: RunConfig, folder: str | os.PathLike[str], say: Callable[[str], None]
) -> Callable[[TrainingLoop], Mapping[str, Mapping[str, float]]] | None:
    """Evaluates the tasks' own metrics in a training run; None if the run has no such evaluation.

    Args:
      config: The run.
      folder: See `TaskEvaluator`.
      say: Receives a line if no task has the split and a metric.
    """
    data, evaluator, decoding = (
        config.plan.infer_eval_data,
        config.plan.evaluator,
        config.plan.decoding,
    )
    if data is None or evaluator is None or decoding is None:
        return None
    # Every process evaluates, since they share the devices, but only the first keeps results.
    evaluated = TaskEvaluator(data, evaluator, folder, decoding)
    if not evaluated.tasks:
        say(f"infer_eval: no task of {data.mixture_or_task_name} has {data.split} and a metric")
        return None
    model, users = T5(config.model, config.dtypes), "model" in config.plan.user_classes

    def evaluate(loop: TrainingLoop) -> Mapping[str, Mapping[str, float]]:
        params = loop.held_state.params
        # The network alone for this project's own model; a user's generates by its methods.
        trained = loop.trainer.model if users else model
        return evaluated.evaluate(trained, by_layer(params, stacks_in(params)), loop.step)

    return evaluate


def nothing_to_evaluate(data: SeqioDataConfig) -> UserError:
    """The error for data without a task that has the split and a metric."""
    return UserError(
        f"{data.mixture_or_task_name!r} has nothing to evaluate: no task has both the split"
        f" {data.split!r} and a metric.",
        where="utils.DatasetConfig",
        fix="Choose another split (MIXTURE_OR_TASK_SPLIT) or mixture.",
    )


def _is_worth_logging(record: logging.LogRecord) -> bool:
    # SeqIO logs the failure of a metric, and raises it as well.
    return not str(record.msg).startswith("Failed to evaluate task")


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """The metrics that are single numbers."""
    # SeqIO wraps metrics in objects with a `value`; others are plain.
    plain = {name: getattr(value, "value", value) for name, value in values.items()}
    return {name: float(value) for name, value in plain.items() if _is_number(value)}


def _is_number(value: Any) -> bool:
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return True


def _logger_class(logger: LoggerConfig) -> Any:
    """What SeqIO's Evaluator calls with its output_dir, which wins over a logger's own."""
    import seqio

    if logger.name == "py":
        return seqio.PyLoggingLogger
    if logger.name == "tensorboard":
        return seqio.TensorBoardLogger
    return functools.partial(seqio.JSONLogger, write_n_results=logger.write_n_results)
