"""Registers a prompted SeqIO task, and the twin that rank classification evaluates, as T0 did."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import seqio
import tensorflow as tf
from t5.data import glue_utils, postprocessors, preprocessors
from t5.evaluation import metrics

from t0repro.errors import UserError
from t0repro.tasks import registry
from t0repro.tasks.sources import PromptedSource
from t0repro.tasks.splits import Split
from t0repro.tasks.templates import fixed_choices, load_template, task_name
from t0repro.tasks.vocabulary import default_vocabulary

# promptsource's names of metrics -> t5's functions; "Other" counts as accuracy in T0.
METRICS: Mapping[str, Callable[..., Any]] = {
    "Accuracy": metrics.accuracy,
    "AUC": metrics.auc,
    "BLEU": metrics.bleu,
    "COQA F1": metrics.coqa_f1,
    "Edit Distance": metrics.edit_distance,
    "MultiRC": metrics.multirc_f1_over_all_answers,
    "Other": metrics.accuracy,
    "Pearson Correlation": metrics.pearson_corrcoef,
    "ROUGE": metrics.rouge,
    "Sequence Accuracy": metrics.sequence_accuracy,
    "Span Squad": metrics.span_squad,
    "Spearman Correlation": metrics.spearman_corrcoef,
    "Squad": metrics.squad,
    "Trivia QA": metrics.trivia_qa,
}

# T5's metrics for these two want pre- and postprocessing that prompted tasks have not.
ACCURACY_ONLY = ("wsc.fixed", "multirc")


def add_prompted_task(
    dataset: str,
    subset: str | None,
    template_name: str,
    splits: Mapping[str, Split] | Sequence[str],
    *,
    root: Path | None = None,
    vocabulary: seqio.Vocabulary | None = None,
    name: str | None = None,
    template: Any = None,
) -> registry.PromptedTask:
    """Registers a task and, where its template has answer choices, `<name>_score_eval`.

    Nothing is read but the template. Registering the same task once more does nothing, unless it
    has splits besides: then it stands in for the first.

    Args:
      dataset: the Hugging Face name.
      subset: the configuration, or None.
      template_name: promptsource's name of the template.
      splits: the task's splits, by name -> where each comes from; a sequence of names stands for
        files of the same names.
      root: the folder of the datasets; None is the one that T0REPRO_DATA_DIR names.
      vocabulary: of both features; None is `default_vocabulary()`.
      name: of the task; None is T0's.
      template: a promptsource `Template` that promptsource does not hold, a user's own; None is
        the one of that name.

    Raises:
      UserError: if the dataset or the template does not exist, or another task has the name.
    """
    if template is None:
        template = load_template(dataset, subset, template_name)
    name = name or task_name(dataset, subset, template_name)
    if not isinstance(splits, Mapping):
        splits = {split: Split(split) for split in splits}
    source = PromptedSource(name, dataset, subset, template, splits, root)
    task = _describe(name, source)
    if _is_registered(task, source):
        return task
    _add(task.name, source, vocabulary, **_as_text(source))
    registry.record(task)
    if task.has_answer_choices:
        _add(task.twin().name, source, vocabulary, **_as_ranking(source))
        registry.record(task.twin())
    return task


def _describe(name: str, source: PromptedSource) -> registry.PromptedTask:
    template = source.template
    return registry.PromptedTask(
        name=name,
        dataset=source.dataset,
        subset=source.subset,
        template_name=template.name,
        template_id=template.id,
        has_answer_choices=bool(template.answer_choices),
        fixed_choices=fixed_choices(template),
        metrics=tuple(template.metadata.metrics or ()),
        original_task=bool(template.metadata.original_task),
        prompt=template.jinja,
    )


def _is_registered(task: registry.PromptedTask, source: PromptedSource) -> bool:
    """Whether the same task stands there with these splits or more; one with fewer is removed."""
    if task.name not in seqio.TaskRegistry.names():
        return False
    other = seqio.TaskRegistry.get(task.name).source
    if (
        registry.prompted_tasks().get(task.name) != task
        or not isinstance(other, PromptedSource)
        or other.root != source.root
        or not _agree(other.files_of_splits, source.files_of_splits)
    ):
        raise UserError(
            f"A task {task.name!r} with other data or another prompt is registered already.",
            fix="Import only one of the modules that register it, or give this one another name.",
        )
    if source.files_of_splits.keys() <= other.files_of_splits.keys():
        return True
    # t0repro.tasks.local takes what is at hand, t0repro.tasks.t0 all splits: in either order of
    # their imports, the task has all.
    for name in (task.name, task.twin().name):
        if name in seqio.TaskRegistry.names():
            seqio.TaskRegistry.remove(name)
    return False


def _agree(one: Mapping[str, Split], other: Mapping[str, Split]) -> bool:
    """Whether one has all splits of the other, of the same rows."""
    few, many = sorted((one, other), key=len)
    return few.items() <= many.items()


def _add(
    name: str,
    source: PromptedSource,
    vocabulary: seqio.Vocabulary | None,
    *,
    first: Sequence[Callable[..., tf.data.Dataset]],
    metric_fns: Sequence[Callable[..., Any]],
    postprocess_fn: Callable[..., Any],
) -> None:
    vocabulary = vocabulary or default_vocabulary()
    seqio.TaskRegistry.add(
        name,
        source,
        preprocessors=[
            *first,
            tokenize,
            seqio.preprocessors.append_eos,
            seqio.CacheDatasetPlaceholder(required=False),
        ],
        output_features={
            # T0 ends targets with EOS and inputs with nothing.
            "inputs": seqio.Feature(vocabulary, add_eos=False, dtype=tf.int32),
            "targets": seqio.Feature(vocabulary, add_eos=True, dtype=tf.int32),
        },
        metric_fns=metric_fns,
        postprocess_fn=postprocess_fn,
    )


def tokenize(dataset: tf.data.Dataset, output_features: Mapping[str, Any]) -> tf.data.Dataset:
    """SeqIO's tokenize, with the vocabularies read beforehand.

    Read while AutoGraph traces, a missing one would end as its StagingError, not as a UserError.
    """
    for feature in output_features.values():
        load = getattr(feature.vocabulary, "load_model", None)
        if load is not None:
            load()
    return seqio.preprocessors.tokenize(dataset, output_features=output_features)


# The task ----------------------------------------------------------------------------------------


def _as_text(source: PromptedSource) -> dict[str, Any]:
    return {
        "first": (),
        "metric_fns": task_metrics(source.dataset, source.subset, source.template),
        "postprocess_fn": functools.partial(
            postprocess, label_classes=fixed_choices(source.template)
        ),
    }


def task_metrics(dataset: str, subset: str | None, template: Any) -> list[Callable[..., Any]]:
    """T0's metrics: T5's tables for GLUE and SuperGLUE, else those that the template names.

    Raises:
      UserError: if the template names a metric that t5 has not.
    """
    if dataset == "glue":
        return glue_utils.get_glue_metric(subset)
    if dataset == "super_glue":
        only_accuracy = subset in ACCURACY_ONLY
        return [metrics.accuracy] if only_accuracy else glue_utils.get_super_glue_metric(subset)
    names = template.metadata.metrics or ()
    unknown = [name for name in names if name not in METRICS]
    if unknown:
        raise UserError(
            f"Template {template.name!r} of {dataset} names metrics that t5 has not: {unknown}.",
            fix="Leave the template out, or add its metric to t0repro.tasks.registration.METRICS.",
        )
    return [METRICS[name] for name in names]


def postprocess(
    output_or_target: str,
    example: Mapping[str, Any] | None = None,
    is_target: bool = False,
    label_classes: Sequence[str] | None = None,
) -> str | int:
    """The stripped text, or its class where the choices are fixed; -1 stands for none of them.

    Cached targets of P3 begin with a space, which is why both sides are stripped.
    """
    del example, is_target
    text = output_or_target.strip()
    if not label_classes:
        return text
    return postprocessors.string_label_to_class_id(text, label_classes=list(label_classes))


# The twin ----------------------------------------------------------------------------------------


def _as_ranking(source: PromptedSource) -> dict[str, Any]:
    choices = fixed_choices(source.template)
    expand = functools.partial(
        preprocessors.rank_classification,
        inputs_fn=_input_of_each_choice,
        targets_fn=_choices,
        is_correct_fn=_is_each_choice_correct,
        weight_fn=_weight,
    )
    # A partial has no name, and t5 names its results by the metric's.
    metric = functools.partial(
        metrics.rank_classification, num_classes=len(choices) if choices else None
    )
    return {
        "first": (expand,),
        "metric_fns": [metric],
        "postprocess_fn": postprocessors.rank_classification,
    }


def _input_of_each_choice(example: Mapping[str, tf.Tensor]) -> tf.Tensor:
    return tf.repeat(example["inputs"], tf.size(example["answer_choices"]))


def _choices(example: Mapping[str, tf.Tensor]) -> tf.Tensor:
    return example["answer_choices"]


def _is_each_choice_correct(example: Mapping[str, tf.Tensor]) -> tf.Tensor:
    return tf.equal(example["answer_choices"], tf.strings.strip(example["targets"]))


def _weight(example: Mapping[str, tf.Tensor]) -> float:
    del example
    return 1.0
