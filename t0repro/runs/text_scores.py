"""Scores answer choices given as text with a checkpoint of any format: `t0repro.score`."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence

import numpy as np

from t0repro.config.run_config import DType
from t0repro.errors import UserError
from t0repro.evaluation.engine import score_examples
from t0repro.evaluation.opened import Checkpoint, adapter_at, open_checkpoint, with_adapter
from t0repro.evaluation.selection import padded_rows
from t0repro.tasks.vocabulary import VocabularyFile, default_vocabulary

LENGTHS = {"inputs": 1024, "targets": 256}  # T0's


def score(
    model: str | os.PathLike[str] | Checkpoint,
    inputs: Sequence[str],
    choices: Sequence[str] | Sequence[Sequence[str]],
    *,
    vocabulary: str | os.PathLike[str] | None = None,
    lengths: Mapping[str, int] = LENGTHS,
    activation: DType = "float32",
    adapter: str | os.PathLike[str] | None = None,
) -> np.ndarray:
    """Log-likelihood of each answer choice given its input: float32 [inputs, choices], natural log.

    Scores sum over the choice's tokens, EOS included, and are not divided by their number. They
    equal those of `t0repro rank-eval`, which predicts the choice with the highest score. If an
    input has fewer choices than another, its row ends in -inf.

    Args:
      model: A checkpoint's path in any format that t0repro converts, or an opened checkpoint. A
        path's latest checkpoint stays in memory for the next call, until there is a newer one.
      inputs: The rendered prompts.
      choices: The choices of all inputs, or a sequence of choices for each input.
      vocabulary: The SentencePiece model, without T5's sentinels; by default T5's own, or the one
        that T0REPRO_VOCAB names.
      lengths: Maximum tokens of `inputs` and `targets`; longer ones are cut.
      activation: dtype of the activations, if `model` is a path.
      adapter: An adapter's checkpoint, or a folder of PEFT's, for which `model` is the base.

    Raises:
      UserError: If the checkpoint or the vocabulary is missing or they do not fit together, an
        input has no choice, or the adapter was trained on another base.
    """
    of_each = _of_each(inputs, choices)
    path = default_vocabulary().address if vocabulary is None else os.fspath(vocabulary)
    file = VocabularyFile(path)
    checkpoint = model if isinstance(model, Checkpoint) else _opened(os.fspath(model), activation)
    if adapter is not None:
        checkpoint = with_adapter(checkpoint, adapter_at(os.fspath(adapter)))
    check_vocabulary_fits(file, checkpoint)
    examples = _examples(file, inputs, of_each, lengths)
    found = iter(score_examples(checkpoint.params, checkpoint.model, examples, lengths))
    scores = np.full((len(inputs), max(map(len, of_each), default=0)), -np.inf, np.float32)
    for row, its_choices in zip(scores, of_each, strict=True):
        row[: len(its_choices)] = [next(found) for _ in its_choices]
    return scores


def _opened(path: str, activation: DType) -> Checkpoint:
    from t0repro.converters import sources

    ref = sources.find_checkpoint(path)
    # A folder's latest checkpoint changes during training, and a file when it is replaced.
    files = [file for file in sources.files_of(ref) if os.path.exists(file)]
    version = (ref.path, *(os.stat(file).st_mtime_ns for file in files))
    return _kept(path, version, activation)


@functools.lru_cache(maxsize=1)
def _kept(path: str, version: tuple[str | int, ...], activation: DType) -> Checkpoint:
    del version  # only part of the cache key
    return open_checkpoint(path, None, activation)


def _of_each(
    inputs: Sequence[str], choices: Sequence[str] | Sequence[Sequence[str]]
) -> list[list[str]]:
    """The choices for each input."""
    if isinstance(inputs, str) or isinstance(choices, str):
        raise UserError(
            "The inputs or the choices are a single string.",
            where="score",
            fix="Give lists of strings.",
        )
    # A sequence of texts serves every input; a sequence of sequences has one for each.
    shared = [choice for choice in choices if isinstance(choice, str)]
    of_each = [shared] * len(inputs) if shared else [list(each) for each in choices]
    if len(of_each) != len(inputs) or not all(of_each) or 0 < len(shared) < len(choices):
        raise UserError(
            f"{len(inputs)} inputs, but choices for {len(choices)}.",
            where="score",
            fix="Give a list of texts, for all inputs, or a list of such lists, one an input.",
        )
    return of_each


def check_vocabulary_fits(file: VocabularyFile, checkpoint: Checkpoint) -> None:
    """Raises UserError if the embedding has another size than the vocabulary, padded."""
    size, rows = file.processor().vocab_size(), checkpoint.model.config.vocab_size
    padded = padded_rows(size)
    if padded != rows:
        raise UserError(
            f"The checkpoint has a vocabulary of {rows} and the SentencePiece model one of {size}"
            f" ({padded} when padded).",
            where=checkpoint.path,
            fix="Name the vocabulary that the checkpoint was trained with: vocabulary=, or"
            " T0REPRO_VOCAB.",
        )


def _examples(
    file: VocabularyFile,
    inputs: Sequence[str],
    choices: Sequence[Sequence[str]],
    lengths: Mapping[str, int],
) -> list[dict[str, np.ndarray]]:
    """One example per pair; as in T0's tasks, only targets end with EOS, truncated or not."""
    # T0's tasks cut first and append EOS afterwards (SeqIO's append_eos_after_trim).
    processor, room = file.processor(), lengths["targets"] - 1
    examples = []
    for text, of_input in zip(inputs, choices, strict=True):
        tokens = np.array(processor.encode(text), np.int32)
        for choice in of_input:
            target = [*processor.encode(choice)[:room], file.eos_id]
            examples.append({"inputs": tokens, "targets": np.array(target, np.int32)})
    return examples
