"""T0's tasks, its mixtures and their rates, derived from T0's table."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from t0repro.tasks.catalog import T0Dataset, catalog, rounds_of, t0_datasets
from t0repro.tasks.registration import add_mixture, add_prompted_task
from t0repro.tasks.source import PromptedRows, Split
from t0repro.tasks.task import SCORE_EVAL_SUFFIX, PromptedTask
from t0repro.tasks.templates import task_name, template_datasets, template_names
from t0repro.tasks.vocabulary import VocabularyFile

MAX_EXAMPLES = 500_000
"""T0 counts a larger dataset as this many examples, which its templates share."""

# Each model's training data: values of the column do_train in T0's table.
TRAINED_ON: Mapping[str, tuple[str, ...]] = {
    "t0_train": ("BASE",),
    "t0+_train": ("BASE", "GPT_EVAL"),
    "t0++_train": ("BASE", "GPT_EVAL", "SGLUE"),
}

# T0 leaves some tasks out of every mixture because their inputs are too long or their cache was
# broken. Only this one belongs to a dataset in its table, and promptsource 0.1.0 lacks its
# template.
EXCLUDED_TASKS = frozenset({"gigaword_summarize_"})

# Prefixes of tasks that T0 excludes from t0_train_score_eval: too many examples or choices.
WITHOUT_TRAIN_SCORE_EVAL = (
    "paws_labeled_final",
    "adversarial_qa_dbidaf",
    "adversarial_qa_dbert",
    "duorc_ParaphraseRC",
    "dream",
    "amazon_polarity",
    "app_reviews",
    "imdb",
    "wiki_bio",
    "gigaword",
    "multi_news",
    "samsum",
    "dbpedia_14",
    "trec",
)

EXCLUDED_SCORE_EVALS = frozenset(
    {
        "amazon_polarity_Is_this_product_review_positive_score_eval",
        "amazon_polarity_Is_this_review_negative_score_eval",
        "amazon_polarity_Is_this_review_score_eval",
        "amazon_polarity_User_recommend_this_product_score_eval",
        "amazon_polarity_convey_negative_or_positive_sentiment_score_eval",
        "amazon_polarity_flattering_or_not_score_eval",
        "amazon_polarity_negative_or_positive_tone_score_eval",
        "amazon_polarity_user_satisfied_score_eval",
        "amazon_polarity_would_you_buy_score_eval",
        "dbpedia_14_given_a_choice_of_categories__score_eval",
        "dbpedia_14_given_list_what_category_does_the_paragraph_belong_to_score_eval",
        "dbpedia_14_pick_one_category_for_the_following_text_score_eval",
        "wiki_hop_original_choose_best_object_affirmative_1_score_eval",
        "wiki_hop_original_choose_best_object_affirmative_2_score_eval",
        "wiki_hop_original_choose_best_object_affirmative_3_score_eval",
        "wiki_hop_original_choose_best_object_interrogative_1_score_eval",
        "wiki_hop_original_choose_best_object_interrogative_2_score_eval",
    }
)


@dataclasses.dataclass(frozen=True)
class T0Task:
    """A task of T0 and the row of T0's table that it comes from.

    Attributes:
      task: The registered task, not its twin.
      entry: The row of the table.
      num_templates: Number of the dataset's templates, whether used in a mixture or not.
    """

    task: PromptedTask
    entry: T0Dataset
    num_templates: int


@dataclasses.dataclass(frozen=True)
class T0Mixture:
    """A mixture: its tasks, sorted, and, if it is for training, the rate of each."""

    name: str
    tasks: Sequence[str]
    rates: Mapping[str, int] | None = None


def t0_rate(train_size: int, num_templates: int) -> int:
    """T0's mixing rate for each of a dataset's tasks, in examples.

    Args:
      train_size: Number of training examples in the dataset, before a template drops any.
      num_templates: Number of templates that promptsource has for it, used or not.
    """
    # Above the limit, templates share the limit; below it, each has the dataset's size.
    return MAX_EXAMPLES // num_templates if train_size > MAX_EXAMPLES else train_size


def t0_mixtures(tasks: Sequence[T0Task]) -> list[T0Mixture]:
    """The eight mixtures of these tasks."""
    used = [each for each in tasks if each.task.name not in EXCLUDED_TASKS]
    mixtures = [
        # Bind `groups` now; a closure would see the loop's last one.
        _training(name, used, lambda each, groups=groups: each.entry.train in groups)
        for name, groups in TRAINED_ON.items()
    ]
    first = _first_original_tasks(used)
    return [
        *mixtures,
        _evaluation("t0_eval_score_eval", used, _is_held_out),
        _evaluation("t0_train_score_eval", used, _is_evaluated_in_training),
        _training("t0_train_one_og_prompt", used, lambda each: each.task.name in first),
        _training(
            "t0_train_all_og_prompts",
            used,
            lambda each: each.entry.train == "BASE" and each.task.original_task,
        ),
        _evaluation(
            "bias_fairness_eval_score_eval",
            used,
            lambda each: each.entry.evaluate == "BIAS_FAIRNESS",
        ),
    ]


def _training(name: str, tasks: Sequence[T0Task], chosen: Callable[[T0Task], bool]) -> T0Mixture:
    rates = {
        each.task.name: t0_rate(each.entry.train_size, each.num_templates)
        for each in tasks
        if chosen(each)
    }
    rates = dict(sorted(rates.items()))
    return T0Mixture(name, list(rates), rates)


def _evaluation(name: str, tasks: Sequence[T0Task], chosen: Callable[[T0Task], bool]) -> T0Mixture:
    return T0Mixture(
        name,
        sorted(
            each.task.name + SCORE_EVAL_SUFFIX
            for each in tasks
            if each.task.has_answer_choices and chosen(each)
        ),
    )


def _is_held_out(each: T0Task) -> bool:
    return each.entry.evaluate == "BASE" and each.task.original_task


def _is_evaluated_in_training(each: T0Task) -> bool:
    return (
        each.entry.train == "BASE"
        and each.task.original_task
        and not each.task.name.startswith(WITHOUT_TRAIN_SCORE_EVAL)
        and each.task.name + SCORE_EVAL_SUFFIX not in EXCLUDED_SCORE_EVALS
    )


def _first_original_tasks(tasks: Sequence[T0Task]) -> set[str]:
    """Names of the tasks of each BASE dataset's first original-task template."""
    first: dict[T0Dataset, str] = {}
    for each in tasks:
        # The first in the order of the table and of the templates' names.
        if each.entry.train == "BASE" and each.task.original_task:
            first.setdefault(each.entry, each.task.name)
    return set(first.values())


# The tasks --------------------------------------------------------------------------------------


def splits_in_catalog(entry: T0Dataset) -> list[str]:
    """The splits that a dataset in the table had in T0's time."""
    return list(catalog()[entry.dataset, entry.subset].splits)


def register_t0_tasks(
    held: Callable[[T0Dataset], list[str]] = splits_in_catalog,
) -> list[T0Task]:
    """Registers the tasks of every dataset in T0's table, and their twins, by T0's names.

    Args:
      held: Returns the splits to register for a dataset; tasks that would have none are not
        registered.

    Returns:
      The tasks, in the table's order.
    """
    prompted = set(template_datasets())
    registered = []
    for entry in t0_datasets():
        dataset, subset = entry.dataset, entry.subset
        if (dataset, subset) not in prompted:  # jigsaw_toxicity_pred has no templates
            continue
        names = template_names(dataset, subset)
        for suffix, splits in _splits_of_tasks(dataset, held(entry)).items():
            for template in names:
                name = task_name(dataset, subset, template) + suffix
                task = add_prompted_task(dataset, subset, template, splits, name=name)
                registered.append(T0Task(task, entry, len(names)))
    return registered


def _splits_of_tasks(dataset: str, held: list[str]) -> dict[str, dict[str, Split]]:
    """Task name suffix -> splits, without suffixes that would have no splits."""
    rounds = rounds_of(dataset) or {"": {split: split for split in held}}
    found = {
        suffix: {name: Split(file) for name, file in splits.items() if file in held}
        for suffix, splits in rounds.items()
    }
    return {suffix: splits for suffix, splits in found.items() if splits}


def evaluation_rate(rows: PromptedRows) -> float:
    """Number of examples, up to 500,000: T0's rate for tasks used only in evaluations.

    Counts the training split, else validation, else test; the counts come from the catalog, so
    no rows are read.
    """
    sizes: Mapping[str, int] = catalog()[rows.dataset, rows.subset].splits
    files = rows.files_of_splits
    split = next(name for name in ("train", "validation", "test") if name in files)
    return float(min(sizes[files[split].file], MAX_EXAMPLES))


# ---- A training mixture, and an evaluation mixture of the prompts and datasets held out of it ----


@dataclasses.dataclass(frozen=True)
class PromptedDataset:
    """A dataset, with its training and evaluation templates.

    Attributes:
      dataset: The Hugging Face name.
      subset: The configuration, or None.
      train: Templates in the training mixture.
      evaluate: Templates in the evaluation mixture; none of them is trained on.
      validation: Where the validation split comes from.
      suffix: Appended to the tasks' names, for instance `_r1` for ANLI's first round.
    """

    dataset: str
    subset: str | None
    train: Sequence[str] = ()
    evaluate: Sequence[str] = ()
    validation: Split = Split("validation")
    suffix: str = ""


def register_train_and_eval(
    prefix: str,
    datasets: Sequence[PromptedDataset],
    *,
    root: Path | None = None,
    vocabulary: VocabularyFile | None = None,
) -> None:
    """Registers tasks, and the mixtures `<prefix>_train` and `<prefix>_eval_score_eval` of them.

    Task names are T0's with the prefix. Their rows and splits are not T0's, so they must not be
    mistaken for T0's in a process or a cache folder. Training tasks have only a training split and
    evaluation tasks only a validation split, which keeps their caches small.

    Args:
      prefix: The prefix of all names.
      datasets: The datasets to train on and to evaluate.
      root: The folder of datasets; defaults to the one that T0REPRO_DATA_DIR names.
      vocabulary: Vocabulary of all tasks; defaults to `default_vocabulary()`.
    """
    rates: dict[str, int] = {}
    evaluated: list[str] = []
    for entry in datasets:
        uses: tuple[tuple[Sequence[str], Mapping[str, Split]], ...] = (
            (entry.train, {"train": Split("train")}),
            (entry.evaluate, {"validation": entry.validation}),
        )
        for templates, splits in uses:
            for template in templates:
                t0_name = task_name(entry.dataset, entry.subset, template)
                task = add_prompted_task(
                    entry.dataset,
                    entry.subset,
                    template,
                    splits,
                    root=root,
                    vocabulary=vocabulary,
                    name=f"{prefix}_{t0_name}{entry.suffix}",
                )
                # T0 shares a dataset's rate among all of its templates, used here or not.
                if "train" in splits:
                    rates[task.name] = len(template_names(entry.dataset, entry.subset))
                else:
                    evaluated.append(task.name + SCORE_EVAL_SUFFIX)

    # A function of the rows, so that nothing is counted until the rate is needed.
    def training_rate(rows: PromptedRows) -> float:
        return t0_rate(rows.num_input_examples("train"), rates[rows.name])

    add_mixture(f"{prefix}_train", list(rates), training_rate)
    add_mixture(f"{prefix}_eval_score_eval", evaluated, _validation_rate)


def _validation_rate(rows: PromptedRows) -> float:
    """Number of validation rows, up to 500,000; matters only if the mixture is trained on."""
    return min(rows.num_input_examples("validation"), MAX_EXAMPLES)
