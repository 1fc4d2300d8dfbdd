"""The judge of a task's outputs: what turns them into targets, predictions and metrics."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from t0repro.data.batches import EvalTask
from t0repro.evaluation.rank import empty_choice_error, postprocess_rank, rank_metrics
from t0repro.tasks.metrics import find_metrics, postprocess
from t0repro.tasks.registry import DescribedTask

Example = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Judge:
    """Postprocesses and evaluates a task's outputs.

    Attributes:
      task: the SeqIO task's name.
      postprocess: turns a score, a decoded text or an example's target into what the metrics
        compare.
      metric_fns: each called as metric(targets, predictions) -> {name: value}.
    """

    task: str
    postprocess: Callable[..., Any]
    metric_fns: Sequence[Callable[..., Mapping[str, float]]]

    @property
    def ranks(self) -> bool:
        """Whether a metric ranks answer choices."""
        return ranks_choices(self.metric_fns)

    def target(self, example: Example) -> Any:
        """An example's target, postprocessed for the metrics."""
        # Mesh TensorFlow evaluates against the text, whatever truncation left of its tokens.
        text = example["targets_pretokenized"]
        text = text.decode("utf-8") if isinstance(text, bytes) else text
        example = strip_padding(example) if self.ranks else example
        return self.postprocess(text, example=example, is_target=True)

    def metrics_of(self, examples: Sequence[Example], outputs: Iterable[Any]) -> dict[str, float]:
        """The metrics, by name, of one score or decoded text per example."""
        pairs = zip(outputs, examples, strict=True)
        predictions = [self.postprocess(output, example=example) for output, example in pairs]
        return self.metrics([self.target(example) for example in examples], predictions)

    def metrics(self, targets: Sequence[Any], predictions: Sequence[Any]) -> dict[str, float]:
        """The task's metrics, by name.

        Raises:
          UserError: see `check_choices_have_tokens`.
        """
        metrics: dict[str, float] = {}
        with warnings.catch_warnings():
            # sklearn warns about metrics that are undefined for few examples; they are NaN.
            warnings.filterwarnings("ignore", module=r"sklearn\.")
            for metric in self.metric_fns:
                check_choices_have_tokens(self.task, metric, targets)
                values = metric(targets, predictions).items()
                metrics |= {name: float(value) for name, value in values}
        return metrics


def strip_padding(example: Example) -> Example:
    """The example with its targets' tokens up to EOS.

    Mesh TensorFlow's evaluation pads targets to the sequence length, and t5's postprocessor of rank
    classification takes a choice's number of tokens from them.
    """
    return {**example, "targets": np.trim_zeros(np.asarray(example["targets"]), "b")}


def make_judge(task: EvalTask) -> Judge:
    """The judge of an evaluation task's outputs."""
    return Judge(task.name, task.postprocess, task.metric_fns)


def make_task_judge(task: Any) -> Judge:
    """The judge of the outputs of SeqIO's task, or of a described one.

    Raises:
      KeyError: If only t5 has a described task's metrics (`t0repro.tasks.prompted_examples`).
    """
    if not isinstance(task, DescribedTask):
        return Judge(task.name, task.postprocess_fn, task.metric_fns)
    choices = task.prompt.fixed_choices
    if not task.prompt.score_eval:
        compared = functools.partial(postprocess, label_classes=choices)
        return Judge(task.name, compared, find_metrics(task.prompt))
    metric = functools.partial(rank_metrics, num_classes=len(choices) if choices else None)
    return Judge(task.name, postprocess_rank, [metric])


def ranks_choices(metric_fns: Iterable[Any]) -> bool:
    """Whether a metric is t5's rank_classification or ours, also as a functools.partial."""
    names = ("rank_classification", rank_metrics.__name__)
    return any(_name(metric) in names for metric in metric_fns)


def _name(metric: Any) -> str:
    # t5's tasks bind the metric's options by functools.partial, possibly nested.
    while isinstance(metric, functools.partial):
        metric = metric.func
    return getattr(metric, "__name__", "")


def check_choices_have_tokens(task: str, metric: Any, targets: Sequence[Any]) -> None:
    """Refuses targets without tokens if the metric divides scores by the number of tokens.

    Args:
      task: the SeqIO task's name.
      metric: a metric; only t5's rank_classification with normalize_by_target_length divides, and
        0 / 0 would be ranked first.
      targets: the metric's targets, (idx, is_correct, weight, number of tokens) each.

    Raises:
      UserError: if a choice has no tokens; it names the choice.
    """
    # A partial of a partial has the keywords of both.
    options = metric.keywords if isinstance(metric, functools.partial) else {}
    if ranks_choices([metric]) and options.get("normalize_by_target_length"):
        for (example, choice), *_, length in targets:
            if not length:
                raise empty_choice_error(task, example, choice)
