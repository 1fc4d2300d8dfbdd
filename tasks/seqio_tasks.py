"""Adds prompted tasks and mixtures to SeqIO, with T0's metrics."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import seqio
import t5.data
import tensorflow as tf
from t5.data import glue_utils, postprocessors, preprocessors
from t5.evaluation import metrics

from t0repro.errors import UserError
from t0repro.tasks.catalog import modeled_on
from t0repro.tasks.metrics import METRIC_FUNCTIONS, PROMPTSOURCE_METRICS, postprocess
from t0repro.tasks.registry import name_is_taken
from t0repro.tasks.rendering import fixed_choices
from t0repro.tasks.source import PromptedRows
from t0repro.tasks.task import ADDS_EOS, TaskDescription
from t0repro.tasks.vocabulary import (
    BYTES,
    VocabularyFile,
    are_same,
    check_ids,
    default_vocabulary,
    local_copy,
)

# T5's metrics for these two need pre- and postprocessing that prompted tasks do not have.
ACCURACY_ONLY = ("wsc.fixed", "multirc")


def add_task(description: TaskDescription) -> None:
    """Adds a described task to SeqIO's registry, replacing the same task with other splits.

    Raises:
      UserError: If a task that is not a prompted one has the same name.
    """
    name, rows = description.prompt.name, description.rows
    if name in seqio.TaskRegistry.names():
        source = seqio.TaskRegistry.get(name).source
        if not isinstance(source, PromptedSource):
            raise name_is_taken(name, "that renders no prompt")
        if source.files_of_splits == rows.files_of_splits:
            return
        # SeqIO refuses to add a name twice.
        seqio.TaskRegistry.remove(name)
    ranks = description.prompt.score_eval
    vocabulary = seqio_vocabulary(description.vocabulary)
    seqio.TaskRegistry.add(
        name,
        PromptedSource(rows),
        preprocessors=[
            # Make the twin's examples before tokenizing: one per answer choice.
            *([_expand_choices()] if ranks else []),
            tokenize,
            seqio.preprocessors.append_eos,
            # Where seqio_cache_tasks splits the pipeline; a run may work without the cache.
            seqio.CacheDatasetPlaceholder(required=False),
        ],
        output_features={
            feature: seqio.Feature(vocabulary, add_eos=add_eos, dtype=tf.int32)
            for feature, add_eos in ADDS_EOS.items()
        },
        **(_make_rank_metrics(rows) if ranks else _make_decoding_metrics(rows)),
    )


def add_mixture(
    name: str,
    tasks: Sequence[str] | Mapping[str, float],
    default_rate: Callable[[PromptedRows], float] | None,
) -> None:
    """Adds a mixture to SeqIO's registry unless it is there already.

    Args:
      name: The mixture's name.
      tasks: Task names, each mapped to its rate unless there is a default.
      default_rate: Computes a task's rate from its rows; required if `tasks` has no rates.
    """
    if name in seqio.MixtureRegistry.names():
        return
    if isinstance(tasks, Mapping):
        seqio.MixtureRegistry.add(name, list(tasks.items()))
    else:
        assert default_rate is not None
        rate = functools.partial(_rate_of_task, default_rate)
        seqio.MixtureRegistry.add(name, list(tasks), default_rate=rate)


def _rate_of_task(rate: Callable[[PromptedRows], float], task: seqio.Task) -> float:
    assert isinstance(task.source, PromptedSource)
    return rate(task.source)


def tokenize(dataset: tf.data.Dataset, output_features: Mapping[str, Any]) -> tf.data.Dataset:
    """SeqIO's tokenize, after loading the vocabularies.

    If they were loaded while AutoGraph traces, a missing file would raise AutoGraph's StagingError
    rather than a UserError.
    """
    for feature in output_features.values():
        load = getattr(feature.vocabulary, "load_model", None)
        if load is not None:
            load()
    return _tokenize(dataset, output_features=output_features)


# AutoGraph would rewrite SeqIO's functions, which do not branch on a tensor's value.
_tokenize = tf.autograph.experimental.do_not_convert(seqio.preprocessors.tokenize)


def check_features(
    task: seqio.Task,
    split: str,
    lengths: Mapping[str, int] | None,
    *,
    use_cached: bool = False,
    seed: int | None = None,
) -> None:
    """Checks that a task's preprocessors give its output features; reads no example.

    Args:
      task: The task.
      split: One of its splits.
      lengths: Tokens per feature; None stands for any.
      use_cached: Whether it is read from its cache, if it has a place for one.
      seed: The seed with which it is read.

    Raises:
      UserError: If a feature is missing, or has another type or rank; if its vocabulary's ids are
        not what T5 takes them for; or if its dataset function takes no seed and one is given.
    """
    for feature in task.output_features.values():
        check_ids(getattr(feature, "vocabulary", None))
    # Preprocessors may need lengths, but features do not depend on them.
    lengths = lengths or dict.fromkeys(task.output_features, 512)
    cached = use_cached and task.supports_caching
    try:
        task.get_dataset(lengths, split, use_cached=cached, shuffle=False, seed=seed)
    except ValueError as error:
        # SeqIO's checks of features and of functions, which otherwise end a run that has started.
        if str(error).startswith("Task dataset "):
            fix = (
                "Correct its preprocessors (a reader's field names, for instance), or the"
                " output_features with which seqio.TaskRegistry.add registers it."
            )
        elif takes_no_seed(task.source) and "'seed'" in str(error):
            fix = "Give the function a third parameter, seed=None."
        else:
            raise
        raise UserError(
            f"The task {task.name} cannot be read: {error}.", where=f"split {split!r}", fix=fix
        ) from error


def takes_no_seed(source: seqio.DataSource) -> bool:
    """Whether a source is a function of a split and shuffle_files alone, which SeqIO allows."""
    if not isinstance(source, seqio.FunctionDataSource):
        return False
    return [*inspect.signature(source._dataset_fn).parameters][2:3] != ["seed"]


@contextlib.contextmanager
def read_without_seed(tasks: Iterable[Any]) -> Iterator[None]:
    """Context in which dataset functions that take no seed are called without one.

    SeqIO refuses to call them with a seed, but without one they can be trained on.
    """
    sources = [task.source for task in tasks if takes_no_seed(task.source)]
    for source in sources:
        # Replace the method for this object only.
        source.get_dataset = functools.partial(_get_without_seed, source.get_dataset)
    try:
        yield
    finally:
        for source in sources:
            del source.get_dataset


def _get_without_seed(get_dataset: Callable[..., Any], *, seed: int | None, **options: Any) -> Any:
    del seed
    return get_dataset(**options)


class PromptedSource(PromptedRows, seqio.FunctionDataSource):
    """Prompted rows as a SeqIO data source.

    Yields scalar strings `inputs` and `targets` and, if the template has answer choices,
    `answer_choices`, strings of shape [choices].
    """

    def __init__(self, rows: PromptedRows):
        # Each base has its own constructor, so call each by name.
        PromptedRows.__init__(
            self,
            rows.name,
            rows.dataset,
            rows.subset,
            rows.template,
            rows.files_of_splits,
            rows.root,
        )
        seqio.FunctionDataSource.__init__(self, self._dataset, splits=tuple(rows.files_of_splits))

    @property
    def splits(self) -> Sequence[str]:
        """Names of the splits, less those that were dropped."""
        # SeqIO raises an error for a task without any.
        return tuple(self.files_of_splits) or ("",)

    @tf.autograph.experimental.do_not_convert
    def _dataset(self, split: str, shuffle_files: bool, seed: int | None = None) -> tf.data.Dataset:
        del shuffle_files, seed  # one file a split; SeqIO shuffles the examples
        # Find broken rows here, where the user still gets the Python exception unchanged.
        self.checked_count(split)
        signature: dict[str, tf.TensorSpec] = {
            "inputs": tf.TensorSpec((None,), tf.string),
            "targets": tf.TensorSpec((None,), tf.string),
        }
        if self.template.answer_choices:
            signature["answer_choices"] = tf.TensorSpec((None, None), tf.string)
        # A call from tf.data into Python costs more than rendering an example.
        blocks = tf.data.Dataset.from_generator(
            lambda: batch_examples(self.examples(split)), output_signature=signature
        )
        return blocks.unbatch()


def batch_examples(
    examples: Iterable[dict[str, Any]], size: int = 64
) -> Iterator[dict[str, list[Any]]]:
    """The examples in order, up to `size` at a time: {feature: one value of each}.

    All examples of a block have equally many answer choices, so that each feature is one array.
    """
    choices = itertools.groupby(examples, lambda example: len(example.get("answer_choices", ())))
    for _, alike in choices:
        while block := list(itertools.islice(alike, size)):
            yield {name: [example[name] for example in block] for name in block[0]}


class LazyVocabulary(seqio.SentencePieceVocabulary):
    """A `VocabularyFile` as SeqIO's class: opened and checked in the same place.

    Equal to, and pickled like, `seqio.SentencePieceVocabulary` of the same file. A file in a bucket
    is fetched once over HTTPS and kept in the user's cache folder: TensorFlow's own reader retries
    for minutes on a machine without network or credentials.
    """

    def __init__(self, address: str, extra_ids: int | None = None):
        super().__init__(address)
        self.given_ids = extra_ids

    def _model_context(self):
        if self._model is None:
            # Do this before TensorFlow sees the address and tries the network.
            path = local_copy(self._sentencepiece_model_file)
            self._model = seqio.SentencePieceVocabulary(path, self.extra_ids)._model_context()
        return self._model

    @property
    def extra_ids(self) -> int:
        """Number of sentinels that are added to the file's pieces."""
        return VocabularyFile(self._sentencepiece_model_file, self.given_ids).extra_ids

    def __eq__(self, other: object) -> bool:
        return isinstance(other, seqio.SentencePieceVocabulary) and are_same(self, other)

    __hash__ = None  # as SeqIO's

    @property
    def tf_tokenizer(self):
        """TensorFlow's tokenizer, created outside of tf.data's traced functions.

        If it is created inside such a function, as SeqIO does, it is looked up for every text,
        which takes as long as tokenizing the text.
        """
        with tf.init_scope():
            return super().tf_tokenizer


def seqio_vocabulary(vocabulary: VocabularyFile | seqio.Vocabulary) -> seqio.Vocabulary:
    """A task's vocabulary as SeqIO's class."""
    if not isinstance(vocabulary, VocabularyFile):
        return vocabulary
    if vocabulary.address == BYTES:
        return seqio.ByteVocabulary(vocabulary.extra_ids)
    return LazyVocabulary(vocabulary.address, vocabulary.given_ids)


def read_t5s_vocabulary_as_ours() -> None:
    """Makes t5's tasks registered from now on use `default_vocabulary()`.

    It has the same pieces at another address (`t0repro.data.checks`). t5's own would be read from a
    bucket even if T0REPRO_VOCAB names a copy.
    """

    def get_default_vocabulary() -> seqio.Vocabulary:
        return seqio_vocabulary(default_vocabulary())

    # A star import puts the name into t5.data, where users' modules look it up.
    for module in (t5.data, t5.data.utils):
        module.get_default_vocabulary = get_default_vocabulary  # pyright: ignore[reportAttributeAccessIssue]


# t5's metrics for questions with several right answers: they take a list for each question, and
# would treat every character of a prompt's single target as a right answer.
_OF_SEVERAL_ANSWERS = ("squad", "trivia_qa", "coqa_f1")


def _make_decoding_metrics(rows: PromptedRows) -> dict[str, Any]:
    return {
        "metric_fns": task_metrics(rows.dataset, rows.subset, rows.template),
        "postprocess_fn": functools.partial(
            postprocess, label_classes=fixed_choices(rows.template)
        ),
    }


def task_metrics(dataset: str, subset: str | None, template: Any) -> list[Callable[..., Any]]:
    """T0's metrics for a task: T5's for GLUE and SuperGLUE, else those named by the template."""
    dataset = modeled_on(dataset)
    if dataset == "glue":
        return glue_utils.get_glue_metric(subset)
    if dataset == "super_glue":
        only_accuracy = subset in ACCURACY_ONLY
        return [metrics.accuracy] if only_accuracy else glue_utils.get_super_glue_metric(subset)
    return [_metric(PROMPTSOURCE_METRICS[name]) for name in template.metadata.metrics or ()]


def _metric(name: str) -> Callable[..., Any]:
    metric = getattr(metrics, name, None)
    if metric is None:  # one that t5 lacks
        return METRIC_FUNCTIONS[name]
    if name not in _OF_SEVERAL_ANSWERS:
        return metric

    @functools.wraps(metric)
    def of_one_answer(targets: Sequence[str], predictions: Sequence[str]) -> dict[str, float]:
        return metric([[target] for target in targets], predictions)

    return of_one_answer


def _expand_choices() -> Callable[[tf.data.Dataset], tf.data.Dataset]:
    return functools.partial(
        preprocessors.rank_classification,
        inputs_fn=_input_of_each_choice,
        targets_fn=_choices,
        is_correct_fn=_is_each_choice_correct,
        weight_fn=_weight,
    )


def _make_rank_metrics(rows: PromptedRows) -> dict[str, Any]:
    choices = fixed_choices(rows.template)
    # A partial has no name, and t5 names its results after the metric function.
    metric = functools.partial(
        metrics.rank_classification, num_classes=len(choices) if choices else None
    )
    return {"metric_fns": [metric], "postprocess_fn": postprocessors.rank_classification}


def _input_of_each_choice(example: Mapping[str, tf.Tensor]) -> tf.Tensor:
    return tf.repeat(example["inputs"], tf.size(example["answer_choices"]))


def _choices(example: Mapping[str, tf.Tensor]) -> tf.Tensor:
    return example["answer_choices"]


def _is_each_choice_correct(example: Mapping[str, tf.Tensor]) -> tf.Tensor:
    # Targets may have a leading space; choices are already stripped (see `postprocess`).
    return tf.equal(example["answer_choices"], tf.strings.strip(example["targets"]))


def _weight(example: Mapping[str, tf.Tensor]) -> float:
    del example
    return 1.0
