"""A training mixture, and an evaluation mixture of the prompts and datasets held out of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

from t0repro.tasks.registration import add_mixture, add_prompted_task
from t0repro.tasks.source import PromptedRows, Split
from t0repro.tasks.t0_mixtures import MAX_EXAMPLES, t0_rate
from t0repro.tasks.task import SCORE_EVAL_SUFFIX
from t0repro.tasks.templates import task_name, template_names
from t0repro.tasks.vocabulary import VocabularyFile


@dataclasses.dataclass(frozen=True)
class PromptedDataset:
    """A dataset, and the templates that it is trained on and evaluated with.

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

    Task names are T0's with the prefix: their rows and splits are not T0's, so they must not be
    mistaken for T0's in a process or a cache folder. Training tasks have only a training split and
    evaluation tasks only a validation split, which keeps their caches small.

    Args:
      prefix: Of all names.
      datasets: What is trained on and evaluated.
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

    # A function of the rows, so that nothing is counted until somebody asks for the rate.
    def training_rate(rows: PromptedRows) -> float:
        return t0_rate(rows.num_input_examples("train"), rates[rows.name])

    add_mixture(f"{prefix}_train", list(rates), training_rate)
    add_mixture(f"{prefix}_eval_score_eval", evaluated, evaluation_rate)


def evaluation_rate(rows: PromptedRows) -> float:
    """Number of validation rows, up to 500,000; matters only if the mixture is trained on."""
    return min(rows.num_input_examples("validation"), MAX_EXAMPLES)
