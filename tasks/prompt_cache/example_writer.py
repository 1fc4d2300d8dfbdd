"""Renderings as a task's examples, and its twin's, which has one per answer choice.

The features are those that SeqIO caches for tasks registered by t0repro.tasks.registration.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from t0repro.tasks.prompt_cache.records import FeatureEncoder, example, varint
from t0repro.tasks.vocabulary import processor_of

if TYPE_CHECKING:
    from t0repro.tasks.templates import Rendering


class Tokenizer:
    """A vocabulary that returns tokens as joined varints (see `count`).

    Args:
      model: The vocabulary's serialized model, including its extra ids.
      threads: Number of threads that SentencePiece uses for a batch of texts.
    """

    def __init__(self, model: bytes, threads: int = 1):
        self._model = processor_of(model)
        # Encoded once per token: most of the work of writing an example is joining these.
        self._varints = [varint(token) for token in range(self._model.get_piece_size())]
        self._threads = threads

    def encode(self, texts: Sequence[str]) -> list[bytes]:
        """Each text's tokens, without EOS."""
        table = self._varints
        encoded = self._model.encode(list(texts), num_threads=self._threads)
        return [b"".join([table[token] for token in tokens]) for tokens in encoded]


_CONTINUED = bytes(range(0x80, 0x100))


def count(tokens: bytes) -> int:
    """The number of tokens; the last byte of each varint is its only one below 0x80."""
    return len(tokens.translate(None, _CONTINUED))


_TOKENS = {"shape": [None], "dtype": "int32"}


_STRING = {"shape": [], "dtype": "string"}


# Tokenize repeated targets, such as classes and answer choices, only once.
_REMEMBERED_TARGETS = 1 << 14


_SHORT = 200  # characters


@dataclasses.dataclass
class Statistics:
    """The contents of SeqIO's statistics file for a split; EOS does not count as a token."""

    examples: int = 0
    inputs_tokens: int = 0
    inputs_max_tokens: int = 0
    targets_tokens: int = 0
    targets_max_tokens: int = 0

    def add(self, inputs: int, targets: int) -> None:
        """Counts an example with these numbers of tokens."""
        self.examples += 1
        self.inputs_tokens += inputs
        self.targets_tokens += targets
        self.inputs_max_tokens = max(self.inputs_max_tokens, inputs)
        self.targets_max_tokens = max(self.targets_max_tokens, targets)

    def merge(self, other: Statistics) -> None:
        """Adds another part's counts."""
        self.examples += other.examples
        self.inputs_tokens += other.inputs_tokens
        self.targets_tokens += other.targets_tokens
        self.inputs_max_tokens = max(self.inputs_max_tokens, other.inputs_max_tokens)
        self.targets_max_tokens = max(self.targets_max_tokens, other.targets_max_tokens)


def feature_types(score_eval: bool, has_choices: bool) -> dict[str, Mapping[str, Any]]:
    """Name -> shape and type of a cached example's features, as in SeqIO's info file."""
    found: dict[str, Mapping[str, Any]] = {
        "inputs": _TOKENS,
        "inputs_pretokenized": _STRING,
        "targets": _TOKENS,
        "targets_pretokenized": _STRING,
    }
    if score_eval:
        found["idx"] = _TOKENS
        found["is_correct"] = {"shape": [], "dtype": "bool"}
        found["weight"] = {"shape": [], "dtype": "float32"}
    elif has_choices:
        found["answer_choices"] = {"shape": [None], "dtype": "string"}
    return found


class ExampleWriter:
    """Serializes renderings as Examples of the task or of its twin.

    Args:
      tokenizer: Tokenizer for inputs and targets.
      eos: Feature -> id of the token to append, or None.
    """

    def __init__(self, tokenizer: Tokenizer, eos: Mapping[str, int | None]):
        self._tokenizer = tokenizer
        # Encoded once: the same token ends every target.
        self._eos = {name: b"" if token is None else varint(token) for name, token in eos.items()}
        names = [*feature_types(True, True), *feature_types(False, True)]
        self._targets_seen: dict[str, tuple[bytes, int]] = {}
        self._encoders = {name: FeatureEncoder(name) for name in names}
        self._yes, self._no = (
            self._encoders["is_correct"].varints(varint(value)) for value in (1, 0)
        )
        self._weight = self._encoders["weight"].floats([1.0])

    def inputs(self, renderings: Sequence[Rendering]) -> list[tuple[bytes, int]]:
        """For each rendering, its input's two encoded features and its number of tokens."""
        texts = [rendering.inputs for rendering in renderings]
        tokens, text = self._encoders["inputs"], self._encoders["inputs_pretokenized"]
        return [
            (
                tokens.varints(encoded + self._eos["inputs"]) + text.strings([raw.encode()]),
                count(encoded),
            )
            for raw, encoded in zip(texts, self._tokenizer.encode(texts), strict=True)
        ]

    def _targets(self, target: str) -> tuple[bytes, int]:
        """A target's two encoded features and its number of tokens; short targets are cached."""
        found = self._targets_seen.get(target)
        if found is None:
            (encoded,) = self._tokenizer.encode([target])
            tokens, text = self._encoders["targets"], self._encoders["targets_pretokenized"]
            packed = tokens.varints(encoded + self._eos["targets"])
            found = packed + text.strings([target.encode()]), count(encoded)
            # Long targets seldom repeat and would fill memory.
            if len(target) <= _SHORT and len(self._targets_seen) < _REMEMBERED_TARGETS:
                self._targets_seen[target] = found
        return found

    def as_text(
        self, rendering: Rendering, inputs: tuple[bytes, int], has_choices: bool, seen: Statistics
    ) -> bytes:
        """The task's example, serialized; `seen` is updated."""
        targets, length = self._targets(rendering.targets)
        seen.add(inputs[1], length)
        entries = [inputs[0], targets]
        if has_choices:
            choices = [choice.encode() for choice in rendering.answer_choices or ()]
            entries.insert(0, self._encoders["answer_choices"].strings(choices))
        return example(entries)

    def as_ranking(
        self, rendering: Rendering, inputs: tuple[bytes, int], ordinal: int, seen: Statistics
    ) -> Iterator[bytes]:
        """Yields the twin's serialized examples, one per choice, with `idx` [ordinal, choice].

        Source: t5.data.preprocessors.rank_classification.
        """
        for index, choice in enumerate(rendering.answer_choices or ()):
            targets, length = self._targets(choice)
            seen.add(inputs[1], length)
            idx = self._encoders["idx"].varints(varint(ordinal) + varint(index))
            correct = self._yes if choice == rendering.targets else self._no
            yield example([idx, inputs[0], correct, targets, self._weight])
