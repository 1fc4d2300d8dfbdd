"""The tokenizer files beside a checkpoint, which say what its vocabulary is.

transformers saves them with a model, and conversions copy them. A task's vocabulary of the same
size may have other pieces, or lack tokens that were added before training; its ids then mean
something else to the model, and only these files show it.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from t0repro import storage
from t0repro.converters.tensors import CheckpointRef
from t0repro.errors import UserError
from t0repro.tasks.vocabulary import (
    BYTES,
    VOCABULARY_VARIABLE,
    VocabularyFile,
    check_equal,
    is_here,
    model_of,
    named_vocabulary,
    processor_of,
    shown,
)
from t0repro.words import some

# The record of a training here, and where the vocabulary is in it.
TRAINED_WITH, OTHER_SETTINGS, VOCABULARY = "trained_with.json", "may_change", "vocabulary"
PIECES, _LLAMA_PIECES = "spiece.model", "tokenizer.model"
TOKENIZER, SETTINGS, _ADDED = "tokenizer.json", "tokenizer_config.json", "added_tokens.json"
_BYTE_PAIRS, _WORD_PIECES = ("vocab.json", "merges.txt"), "vocab.txt"
FILES = (
    *(PIECES, _LLAMA_PIECES, TOKENIZER, SETTINGS, _ADDED, "special_tokens_map.json"),
    *(*_BYTE_PAIRS, _WORD_PIECES),
)
# T5's sentinels begin with SentencePiece's mark of a word's beginning; transformers' do not.
SENTINEL = re.compile("\u2581?(<extra_id_[0-9]+>)")


def tokenizer_of(
    source: CheckpointRef, vocabulary: str | os.PathLike[str] | None
) -> dict[str, bytes]:
    """The files of a checkpoint's tokenizer by name, for a conversion to keep.

    Args:
      source: The checkpoint.
      vocabulary: The model from which new files will be made in their place, or None.

    Raises:
      UserError: If `vocabulary` is another than the tokenizer's, which then has no use.
    """
    names = [name for name in FILES if storage.is_file(source.beside(name))]
    if vocabulary is None:
        return {name: storage.read(source.beside(name)) for name in names}
    if names:
        check_own_tokenizer([source.folder], named_vocabulary(vocabulary))
    return {}


def own_vocabulary(checkpoint_folder: str) -> VocabularyFile | None:
    """The vocabulary beside a checkpoint, or in diffusers' folder beside it; None if there is none.

    Raises:
      UserError: If the tokenizer there has no SentencePiece model, and T5's own is another one.
    """
    folder, name = os.path.split(storage.normal(checkpoint_folder))
    # diffusers has text_encoder_2/ and tokenizer_2/ in a folder.
    pipeline = storage.join(folder, name.replace("text_encoder", "tokenizer"))
    for place in dict.fromkeys((checkpoint_folder, pipeline)):
        names = set(storage.list_names(place)) if storage.is_directory(place) else set()
        if model := _sentencepiece_in(names):
            return VocabularyFile(storage.join(place, model))
        settings = _read(place, SETTINGS) if SETTINGS in names else {}
        if settings.get("tokenizer_class") == "ByT5Tokenizer":
            return VocabularyFile(BYTES)
        if beside := names.intersection(FILES):
            default = named_vocabulary(None)
            try:
                check_own_tokenizer([place], default)
            except UserError as error:
                if is_here(default):
                    raise
                raise UserError(
                    f"Beside {' and '.join(sorted(beside))} there is no SentencePiece model, which"
                    " is what is read.",
                    where=place,
                    fix=f"Copy the tokenizer's {PIECES} there, or name it: {VOCABULARY_VARIABLE},"
                    " encode's --vocab, in Python vocabulary=.",
                ) from error
            return default
    return trained_vocabulary(checkpoint_folder)


def trained_vocabulary(folder: str) -> VocabularyFile | None:
    """The vocabulary that a run here recorded, unless it is T5's, or its file is gone."""
    # The record is the training's, which refuses a damaged one.
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError, AttributeError):
        record = json.loads(storage.read(storage.join(folder, TRAINED_WITH)))
        address, extra_ids = record[OTHER_SETTINGS][VOCABULARY]
        if address == BYTES or os.path.isfile(address):
            return VocabularyFile(address, extra_ids)
    return None


def check_own_tokenizer(folders: Sequence[str], *vocabularies: Any) -> bool:
    """Checks that vocabularies are that of the tokenizer beside a checkpoint, piece by piece.

    Args:
      folders: The checkpoint's folder and, of an adapter, its base's.
      *vocabularies: Each a `VocabularyFile`, or SeqIO's; of other kinds, nothing is compared.

    Returns:
      Whether there was anything to compare with.

    Raises:
      UserError: If a piece differs, if the tokenizer has added tokens, or if a file is damaged.
    """
    is_compared = False
    # Inputs and targets mostly have the same.
    distinct = {id(vocabulary): vocabulary for vocabulary in vocabularies if vocabulary is not None}
    for folder in folders:
        names = set(storage.list_names(folder)).intersection(FILES)
        for vocabulary in distinct.values():
            if names and model_of(vocabulary) is not None:
                is_compared |= _check_pieces(vocabulary, folder, names)
                _check_added(vocabulary, folder, names)
    return is_compared


def _sentencepiece_in(names: set[str]) -> str | None:
    return next((name for name in (PIECES, _LLAMA_PIECES) if name in names), None)


def _check_pieces(vocabulary: Any, folder: str, names: set[str]) -> bool:
    if model := _sentencepiece_in(names):
        own = VocabularyFile(storage.join(folder, model))
        check_equal(vocabulary, own, folder)
        _check_agree(own, model, folder, names)
        return True
    settings = _read(folder, SETTINGS) if SETTINGS in names else {}
    if settings.get("tokenizer_class") == "ByT5Tokenizer":
        check_equal(vocabulary, VocabularyFile(BYTES), folder)
        return True
    file = TOKENIZER
    model = _read(folder, file).get("model", {}) if file in names else {}
    if not model and names.issuperset(_BYTE_PAIRS):
        file, model = _BYTE_PAIRS[0], {"type": "BPE"}
    if not model and _WORD_PIECES in names:
        file, model = _WORD_PIECES, {"type": "WordPiece"}
    if not model:
        return False
    where = storage.join(folder, file)
    if model.get("type") != "Unigram":
        raise UserError(
            f"The checkpoint's tokenizer is of the kind {model.get('type')}; the tasks' vocabulary,"
            f" {shown(vocabulary)}, is a SentencePiece unigram model.",
            where=where,
            fix=_ELSEWHERE,
        )
    if differing := _find_difference(vocabulary, model):
        token, here, there = differing
        raise UserError(
            f"The tasks' vocabulary, {shown(vocabulary)}, is not the checkpoint's: id {token}"
            f" is {here!r} in it and {there!r} in {file}.",
            where=where,
            fix=f"Give the SentencePiece model that {file} was made from:"
            f" {VOCABULARY_VARIABLE}=FILE.",
        )
    return True


def _check_agree(own: VocabularyFile, name: str, folder: str, names: set[str]) -> None:
    """Checks that a SentencePiece model and the tokenizer.json beside it have the same pieces."""
    model = _read(folder, TOKENIZER).get("model", {}) if TOKENIZER in names else {}
    if differing := model and _find_difference(own, model):
        token, here, there = differing
        raise UserError(
            f"The checkpoint's tokenizer has two vocabularies: id {token} is {here!r} in {name} and"
            f" {there!r} in {TOKENIZER}, which transformers reads.",
            where=storage.join(folder, TOKENIZER),
            fix="Remove the file that the model was not trained with.",
        )


def _find_difference(vocabulary: Any, model: Mapping[str, Any]) -> tuple[int, str, str] | None:
    """The first id with different pieces in a vocabulary and in tokenizer.json, with both."""
    vocab = model.get("vocab", ())
    # Byte pairs have their ids beside them, a unigram model's pieces their scores.
    theirs = (
        sorted(vocab, key=vocab.__getitem__) if isinstance(vocab, dict) else [p[0] for p in vocab]
    )
    theirs, ours = [_plain(str(piece)) for piece in theirs], _names(vocabulary)
    # Sentinels at the end that only one of the two has do not count.
    for pieces in (theirs, ours):
        while pieces and SENTINEL.fullmatch(pieces[-1]):
            pieces.pop()
    pairs = itertools.zip_longest(ours, theirs, fillvalue="nothing")
    return next(
        ((token, here, there) for token, (here, there) in enumerate(pairs) if here != there), None
    )


_ELSEWHERE = "Evaluate it with transformers (docs/any_model.md has the harness's commands)."


def _check_added(vocabulary: Any, folder: str, names: set[str]) -> None:
    """Checks that no token was added to the tokenizer but sentinels and its special pieces."""
    files = {name: _read(folder, name) for name in (_ADDED, SETTINGS, TOKENIZER) if name in names}
    added, unbound = dict.fromkeys(files.get(_ADDED, ()), _ADDED), set()
    decoder = files.get(SETTINGS, {}).get("added_tokens_decoder") or {}
    for file, tokens in (
        (SETTINGS, decoder.values()),
        (TOKENIZER, files.get(TOKENIZER, {}).get("added_tokens") or ()),
    ):
        for token in tokens:
            added.setdefault(str(token["content"]), file)
            if not token.get("special") and not token.get("single_word"):
                unbound.add(str(token["content"]))
    if inside_words := unbound & _normal_pieces(vocabulary):
        first = min(inside_words)
        raise UserError(
            "The checkpoint's tokenizer takes these as tokens even inside words, which"
            f" SentencePiece does not: {some([*map(repr, sorted(inside_words))])}.",
            where=storage.join(folder, added[first]),
            fix=_ELSEWHERE,
        )
    # No text has padding, which T5 masks whatever its id.
    pad = files.get(SETTINGS, {}).get("pad_token")
    known = {*_names(vocabulary), pad.get("content") if isinstance(pad, dict) else pad}
    if lacking := [
        token for token in added if _plain(token) not in known and not SENTINEL.fullmatch(token)
    ]:
        raise UserError(
            f"Tokens were added to the checkpoint's tokenizer that the tasks' vocabulary,"
            f" {shown(vocabulary)}, lacks: {some([*map(repr, lacking)])}.",
            where=storage.join(folder, added[lacking[0]]),
            fix=f"{_ELSEWHERE} If no input or target has them, move the tokenizer's files out of"
            " the directory.",
        )


def _names(vocabulary: Any) -> list[str]:
    """A vocabulary's pieces by id; the special ones alone if they are bytes."""
    if getattr(vocabulary, "address", None) == BYTES:
        return ["<pad>", "</s>", "<unk>"]
    processor = processor_of(model_of(vocabulary) or b"")
    return [_plain(processor.id_to_piece(token)) for token in range(processor.get_piece_size())]


def _normal_pieces(vocabulary: Any) -> set[str]:
    """The pieces of which a text's words are made, without those that a text has whole."""
    if getattr(vocabulary, "address", None) == BYTES:
        return set()
    from sentencepiece import sentencepiece_model_pb2

    model = sentencepiece_model_pb2.ModelProto.FromString(model_of(vocabulary) or b"")
    return {piece.piece for piece in model.pieces if piece.type == piece.NORMAL}


def _plain(piece: str) -> str:
    """A piece; a sentinel without SentencePiece's mark, as transformers has it."""
    sentinel = SENTINEL.fullmatch(piece)
    return sentinel[1] if sentinel else piece


def _read(folder: str, name: str) -> Mapping[str, Any]:
    path = storage.join(folder, name)
    try:
        content = json.loads(storage.read(path))
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise UserError(f"{name} is not a JSON object.", where=path, fix="Copy the file again.")
    return content
