"""Datasets and templates of a job, as data: light to import."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from t0repro.tasks.splits import Split


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
