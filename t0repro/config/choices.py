"""The losses of T-Few over an example's answer choices, as configured in gin.

A module of its own, because gin files import it: `from t0repro.config import choices`.

Source: Liu et al. 2022, https://arxiv.org/abs/2205.05638, section 3.2, and their code
(r-three/t-few, src/models/EncoderDecoder.py).
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, ClassVar

from t0repro.config.settings import Range


@dataclasses.dataclass(frozen=True)
class ChoiceLoss:
    """Adds two losses over an example's answer choices to the loss of the correct one.

    Attributes:
      unlikelihood: What the unlikelihood of the wrong choices is multiplied by.
      length_normalized: What the loss of choosing the correct one is multiplied by; a choice's
        score is the mean log-likelihood of its tokens.
      choices: The most answer choices that a row of a batch can hold.
    """

    IN_GIN: ClassVar = "@choices.ChoiceLoss()"

    unlikelihood: Annotated[float, Range(at_least=0)] = 1.0
    length_normalized: Annotated[float, Range(at_least=0)] = 1.0
    choices: Annotated[int, Range(at_least=2)] = 4
