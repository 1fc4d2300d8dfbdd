"""A job: some datasets to train on, prompts and datasets held out of training, two mixtures."""

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
    """A dataset of a job and the templates that it is used with.

    Attributes:
      dataset: the Hugging Face name.
      subset: the configuration, or None.
      train: templates of the training mixture.
      evaluate: templates of the evaluation mixture; none of them is trained on.
      validation: where the validation split comes from.
      suffix: added to the tasks' names, for instance `_r1` for ANLI's first round.
    """

    dataset: str
    subset: str | None
    train: Sequence[str] = ()
    evaluate: Sequence[str] = ()
    validation: Split = Split("validation")
    suffix: str = ""


def register_job(
    job: str,
    datasets: Sequence[PromptedDataset],
    *,
    root: Path | None = None,
    vocabulary: VocabularyFile | None = None,
) -> None:
    """Registers a job's tasks and its mixtures `<job>_train` and `<job>_eval_score_eval`.

    Tasks are named `<job>_` and T0's name: their rows and splits are the job's, so that neither a
    process nor a cache folder can take them for T0's. Those trained on have a training split alone
    and those evaluated a validation split, which keeps their caches small.

    Args:
      job: prefix of all names.
      datasets: what the job uses.
      root: the folder of the datasets; None is the one that T0REPRO_DATA_DIR names.
      vocabulary: of all tasks; None is T5's.
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
                    name=f"{job}_{t0_name}{entry.suffix}",
                )
                if "train" in splits:
                    rates[task.name] = len(template_names(entry.dataset, entry.subset))
                else:
                    evaluated.append(task.name + SCORE_EVAL_SUFFIX)

    def training_rate(rows: PromptedRows) -> float:
        return t0_rate(rows.num_input_examples("train"), rates[rows.name])

    add_mixture(f"{job}_train", list(rates), training_rate)
    add_mixture(f"{job}_eval_score_eval", evaluated, evaluation_rate)


def evaluation_rate(rows: PromptedRows) -> float:
    """Validation rows, up to 500,000; used only if one trains on the mixture."""
    return min(rows.num_input_examples("validation"), MAX_EXAMPLES)
