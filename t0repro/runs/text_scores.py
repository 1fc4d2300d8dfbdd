"""Lines of text, scored or continued by a checkpoint: `t0repro.score`, and t5's modes for texts.

`t0repro.score` takes a checkpoint of any format and answer choices. The modes infer,
score_from_dataset and score_from_strings read and write files.

Source: mesh_tensorflow.transformer.utils (get_inputs_from_file, encode_inputs, decode_from_file,
score_from_strings, save_scores, write_lines_to_file).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from t0repro.config.model import DType
from t0repro.converters.own_tokenizer import own_vocabulary
from t0repro.errors import UserError, check_choice
from t0repro.evaluation.engine import score_examples
from t0repro.evaluation.opened import (
    Checkpoint,
    attach_adapter,
    open_adapter_at,
    open_cached,
    open_checkpoint,
)
from t0repro.evaluation.selection import check_fits
from t0repro.progress import say
from t0repro.runs.given_texts import check_model, check_text, list_texts
from t0repro.tasks.vocabulary import VocabularyFile, named_vocabulary
from t0repro.words import counted

LENGTHS = {"inputs": 1024, "targets": 256}  # T0's


def score(
    model: str | os.PathLike[str] | Checkpoint,
    inputs: Sequence[str],
    choices: Sequence[str] | Sequence[Sequence[str]],
    *,
    step: int | None = None,
    vocabulary: str | os.PathLike[str] | VocabularyFile | None = None,
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
        path's latest checkpoint stays in memory for the next call, until there is a newer one or
        its files, or the gin files beside it, change.
      inputs: The rendered prompts.
      choices: The choices of all inputs, or a sequence of choices for each input.
      step: Step of the checkpoint; the latest by default.
      vocabulary: The SentencePiece model, with or without T5's sentinels, or "bytes" for ByT5's, or
        an opened one; by default the checkpoint's own, or T5's or T0REPRO_VOCAB's if it has none.
      lengths: Maximum tokens of `inputs` and `targets`; longer ones are cut, and counted on
        stderr.
      activation: dtype of the activations, if `model` is a path.
      adapter: An adapter's checkpoint, or a folder of PEFT's, for which `model` is the base.

    Raises:
      UserError: If the checkpoint or the vocabulary is missing or they do not fit together, an
        input has no choice, a text is not a string, a length is below 1, or the adapter was trained
        on another base.
    """
    check_model(model, "score")
    check_choice(activation, DType, "activation")
    inputs = list_texts(inputs, "inputs", "score")
    choices = list_texts(choices, "choices", "score")
    of_each = _list_choices(inputs, choices)
    _check_lengths(lengths)
    # Before the checkpoint is read, which takes longer.
    is_open = isinstance(vocabulary, VocabularyFile | None)
    file = vocabulary if is_open else named_vocabulary(vocabulary)
    checkpoint = open_cached(_open, model, activation, step)
    if adapter is not None:
        checkpoint = attach_adapter(checkpoint, open_adapter_at(os.fspath(adapter)))
    if file is None:
        own = filter(None, map(own_vocabulary, checkpoint.folders))
        file = next(own, None) or named_vocabulary(None)
    check_fits(file, checkpoint.model.config.vocab_size, checkpoint.path, checkpoint.folders)
    examples = _examples(file, inputs, of_each, lengths)
    found = iter(score_examples(checkpoint.params, checkpoint.model, examples, lengths))
    widest = max(map(len, of_each or [choices]))  # without inputs, as wide as with them
    scores = np.full((len(inputs), widest), -np.inf, np.float32)
    for row, its_choices in zip(scores, of_each, strict=True):
        row[: len(its_choices)] = [next(found) for _ in its_choices]
    return scores


def _open(path: str, activation: DType, step: int | None) -> Checkpoint:
    return open_checkpoint(path, step, activation)


def _list_choices(
    inputs: Sequence[str], choices: Sequence[str] | Sequence[Sequence[str]]
) -> list[list[str]]:
    """The choices for each input."""
    # A sequence of texts serves every input; a sequence of sequences has one for each.
    single = [
        each for each in choices if isinstance(each, str | bytes) or not isinstance(each, Iterable)
    ]
    of_each = (
        [single] * len(inputs)
        if single
        else [
            list_texts(each, f"choices of input {number}", "score")
            for number, each in enumerate(choices)
        ]
    )
    if len(of_each) != len(inputs) or not all(of_each) or 0 < len(single) < len(choices):
        raise UserError(
            f"{len(inputs)} inputs, but choices for {len(choices)}.",
            where="score",
            fix="Give one list of choices for all inputs, or a list of them for each input.",
        )
    for name, texts in (("inputs", [inputs]), ("choices", of_each)):
        for row in texts:
            for number, text in enumerate(row):
                if not isinstance(text, str):
                    raise UserError(
                        f"Number {number} of the {name} is {text!r}, not a string.",
                        where="score",
                        fix="Give strings; leave out what is missing.",
                    )
                check_text(text, f"score, number {number} of the {name}")
    return of_each


def _check_lengths(lengths: Mapping[str, int]) -> None:
    for name in LENGTHS:
        length = lengths.get(name)
        if isinstance(length, bool) or not isinstance(length, int | np.integer) or length < 1:
            raise UserError(
                f"The length of {name} is {length!r}, not a whole number above 0.",
                where="score, lengths",
                fix=f"Give both, as {LENGTHS}, or none for these.",
            )


def _examples(
    file: VocabularyFile,
    inputs: Sequence[str],
    choices: Sequence[Sequence[str]],
    lengths: Mapping[str, int],
) -> list[dict[str, np.ndarray]]:
    """One example per pair; as in T0's tasks, only targets end with EOS, truncated or not."""
    # T0's tasks cut first and append EOS afterward (SeqIO's append_eos_after_trim).
    processor, room = file.processor(), lengths["targets"] - 1
    examples, cut = [], {"input": 0, "choice": 0}
    for text, of_input in zip(inputs, choices, strict=True):
        tokens = np.array(processor.encode(text), np.int32)
        cut["input"] += len(tokens) > lengths["inputs"]
        for choice in of_input:
            target = processor.encode(choice)
            cut["choice"] += len(target) > room
            target = np.array([*target[:room], file.eos_id], np.int32)
            examples.append({"inputs": tokens, "targets": target})
    for what, length in (("input", lengths["inputs"]), ("choice", lengths["targets"])):
        if cut[what]:
            say(f"score: {counted(cut[what], what)} cut to {length} tokens")
    return examples
