"""Counts inputs and targets that were cut to the evaluation's lengths.

A cut input has lost its end, which in many prompts is the question, so a report has to say how many
there are. The tokens alone do not show it, because text that just fits fills its length as well.
Rows that fill their length are therefore tokenized again, from the text that comes with them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


class TruncationCounter:
    """Counts the cut texts of one task.

    Args:
      features: SeqIO's features by name, `inputs` and `targets`.
      lengths: maximum tokens per feature; None if nothing is cut.
    """

    def __init__(self, features: Mapping[str, Any], lengths: Mapping[str, int] | None):
        self._features, self._lengths = features, lengths
        self._cut: dict[str, int | None] = {"inputs": 0, "targets": 0}
        self._inputs = 0
        self._seen: set[int] = set()

    def add(self, examples: Sequence[Mapping[str, Any]]) -> None:
        """Counts the target of each example, and an input once for all of its choices."""
        for example in examples:
            number = int(example["idx"][0]) if "idx" in example else None
            # Other inputs' choices may come between its own, as SeqIO reads a cache of several
            # files.
            if number is None or number not in self._seen:
                self._inputs += 1
                self._count(example, "inputs")
            if number is not None:
                self._seen.add(number)
            self._count(example, "targets")

    def as_record(self) -> dict[str, Any]:
        """Counts of inputs, cut inputs and cut targets; None where examples came without text."""
        return {
            "inputs": self._inputs,
            "cut_inputs": self._cut["inputs"],
            "cut_targets": self._cut["targets"],
        }

    def _count(self, example: Mapping[str, Any], name: str) -> None:
        count = self._cut[name]
        if self._lengths is None or count is None:
            return
        # Shorter than the limit: nothing was cut, and tokenizing can be spared.
        if np.count_nonzero(example[name]) < self._lengths[name]:
            return
        text = example.get(f"{name}_pretokenized")
        # One text that is unknown makes the whole count unknown.
        self._cut[name] = None if text is None else count + self._is_cut(name, text)

    def _is_cut(self, name: str, text: bytes | str) -> bool:
        assert self._lengths is not None
        feature = self._features[name]
        text = text.decode("utf-8") if isinstance(text, bytes) else text
        tokens = len(feature.vocabulary.encode(text)) + bool(feature.add_eos)
        return tokens > self._lengths[name]
