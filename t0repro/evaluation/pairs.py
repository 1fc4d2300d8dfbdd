"""The distinct (input, choice) pairs of an evaluation, each scored only once.

Examples of all tasks come in as token ids. Prompts that render alike share their inputs, and all
choices of an example share its input, so that there are far fewer distinct inputs than pairs:

    examples   (A, yes) (A, no) (B, yes) (B, no) (A, yes)
    inputs     A  B
    pairs      A-yes  A-no  B-yes  B-no                       index  0 1 2 3 0
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from t0repro.model.shapes import Float, Int

Tokens = Int[np.ndarray, " length"]


@dataclasses.dataclass(frozen=True, eq=False)
class Pairs:
    """Distinct pairs in the order of their first appearance.

    Attributes:
      inputs: tokens of each distinct input, padding removed.
      targets: tokens of each pair's choice, EOS included, padding removed.
      input_of: index of each pair's input.
      index: index of each example's pair.
    """

    inputs: tuple[Tokens, ...]
    targets: tuple[Tokens, ...]
    input_of: Int[np.ndarray, " pairs"]
    index: Int[np.ndarray, " examples"]

    def __len__(self) -> int:
        return len(self.targets)

    def expand_to_examples(
        self, scores: Float[np.ndarray, " pairs"]
    ) -> Float[np.ndarray, " examples"]:
        """Expands scores of pairs to scores of examples."""
        return scores[self.index]

    def digest(self, pair: int) -> bytes:
        """16-byte digest of the pair's tokens, the same in every process."""
        target, source = self.targets[pair], self.inputs[self.input_of[pair]]
        # The length keeps apart pairs whose concatenated tokens are equal.
        text = len(source).to_bytes(4, "little") + source.tobytes() + target.tobytes()
        return hashlib.blake2b(text, digest_size=16).digest()


def collect_pairs(
    examples: Iterable[Mapping[str, Any]], lengths: Mapping[str, int] | None = None
) -> Pairs:
    """Finds the distinct inputs and pairs.

    Args:
      examples: token ids under `inputs` and `targets`; zeros at the end are padding.
      lengths: maximum tokens per feature; longer ones are truncated as in Mesh TensorFlow. None
        keeps all.

    Raises:
      ValueError: if a target has an id below 1 before its last token, so that its log-likelihood
        would not be a sum over consecutive tokens.
    """
    lengths = lengths or {}
    inputs: dict[bytes, int] = {}
    pairs: dict[tuple[int, bytes], int] = {}
    index: list[int] = []
    for number, example in enumerate(examples):
        source, target = (
            _strip_padding(example[name], lengths.get(name)) for name in ("inputs", "targets")
        )
        if (target <= 0).any():
            raise ValueError(f"Example {number}: a target holds an id below 1 before its end.")
        # Number entries in order of first appearance: the dictionaries are then sets with an index.
        at = inputs.setdefault(source.tobytes(), len(inputs))
        index.append(pairs.setdefault((at, target.tobytes()), len(pairs)))
    return Pairs(
        inputs=tuple(np.frombuffer(tokens, np.int32) for tokens in inputs),
        targets=tuple(np.frombuffer(tokens, np.int32) for _, tokens in pairs),
        input_of=np.array([at for at, _ in pairs], np.int64),
        index=np.array(index, np.int64),
    )


def _strip_padding(tokens: Any, length: int | None) -> Tokens:
    """Tokens up to the last one that is not zero."""
    tokens = np.asarray(tokens, np.int32)[:length]
    present = np.flatnonzero(tokens)
    return np.ascontiguousarray(tokens[: present[-1] + 1 if present.size else 0])
