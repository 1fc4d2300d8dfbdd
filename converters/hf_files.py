"""The files beside a Hugging Face model's weights: configuration, tokenizer and model card."""

from __future__ import annotations

import base64
import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from t0repro.converters.hf_config import Computation, TokenIds, feed_forward_proj
from t0repro.converters.own_tokenizer import PIECES, SENTINEL, SETTINGS, TOKENIZER
from t0repro.errors import UserError
from t0repro.parameters.shape import ModelShape, describe
from t0repro.tasks.vocabulary import (
    SENTINELS_VARIABLE,
    named_vocabulary,
    not_a_model,
    processor_of,
    refuse_other_paths,
    sentinels_lacking,
)

# 3 special tokens, 256 bytes and 125 sentinels.
_BYT5_VOCABULARY = 384
_BYT5_EXTRA_IDS = 125
_MODEL_MAX_LENGTH = 512


def model_config(
    family: ModelShape, dtype: str, arithmetic: Computation, ids: TokenIds
) -> dict[str, Any]:
    """The content of config.json.

    Args:
      family: the model.
      dtype: of the parameters, as numpy names it.
      arithmetic: what the weights do not show.
      ids: of padding and end.
    """
    prefix = "MT5" if "mT5" in family.name else "T5"
    if family.position_bias_per_layer:
        prefix = "UMT5"
    kind = "EncoderModel" if family.encoder_only else "ForConditionalGeneration"
    return {
        "architectures": [prefix + kind],
        "model_type": prefix.lower(),
        "vocab_size": family.vocab_size,
        "d_model": family.d_model,
        "d_kv": family.d_kv,
        "d_ff": family.d_ff,
        "num_layers": family.num_encoder_layers,
        "num_decoder_layers": family.num_decoder_layers,
        "num_heads": family.num_heads,
        "relative_attention_num_buckets": family.relative_attention_num_buckets,
        "relative_attention_max_distance": arithmetic.max_distance,
        # transformers' default: no checkpoint shows the rate that it was trained with.
        "dropout_rate": 0.1,
        "layer_norm_epsilon": arithmetic.epsilon,
        "initializer_factor": 1.0,
        **feed_forward_proj(arithmetic),
        "is_encoder_decoder": not family.encoder_only,
        "use_cache": True,
        "tie_word_embeddings": family.tied,
        **generation_config(ids),
        "dtype": dtype,
    }


def generation_config(ids: TokenIds) -> dict[str, Any]:
    """The content of generation_config.json."""
    return {"decoder_start_token_id": 0, "eos_token_id": ids.eos, "pad_token_id": ids.pad}


_FIX = "Name the SentencePiece model that the checkpoint was trained with."


@dataclasses.dataclass(frozen=True)
class Pieces:
    """The parts of a SentencePiece model from which transformers makes a tokenizer.

    Attributes:
      content: The model's bytes, without sentinels if `is_like_t5`.
      scored: Pieces and their scores, by id. Sentinels have transformers' names and are counted in,
        whether the model holds them or lacks them.
      special: Ids that no text has: of control pieces, of the unknown one and of sentinels.
      charsmap: Its table for normalizing text.
      byte_fallback: Whether unknown characters are spelled in bytes, as mT5's are.
      has_t5_spaces: Whether texts become words as T5's do: any white space is one space, none is
        left at the ends, and each word begins with the mark of a space.
      has_dummy_prefix: Whether a text begins with the mark of a space.
      removes_spaces: Whether several spaces become one, and none at the ends.
      ids: Ids of padding and end.
      unknown: Id of unknown characters.
      note: The number of sentinels that was assumed, as a sentence; "" for T5's own.
    """

    content: bytes
    scored: list[tuple[str, float]]
    special: list[int]
    charsmap: bytes
    byte_fallback: bool
    has_t5_spaces: bool
    has_dummy_prefix: bool
    removes_spaces: bool
    ids: TokenIds
    unknown: int
    note: str

    @property
    def sentinels(self) -> int:
        """Number of sentinels."""
        return sum(bool(SENTINEL.fullmatch(self.scored[token][0])) for token in self.special)

    @property
    def is_like_t5(self) -> bool:
        """Whether transformers' own T5Tokenizer makes the same of the pieces without sentinels."""
        last = range(len(self.scored) - self.sentinels, len(self.scored))
        ids = (self.special, self.ids, self.unknown)
        return self.has_t5_spaces and ids == ([0, 1, 2, *last], TokenIds(), 2)


def read_pieces(vocabulary: Path, family: ModelShape, sentinels: int | None = None) -> Pieces:
    """Reads a SentencePiece model.

    Ids and special pieces are those that SentencePiece reports, not those of its training: people
    insert pieces afterward.

    Args:
      vocabulary: the file.
      family: the model, whose embedding the tokens must fit.
      sentinels: how many the model was trained with, if its gin file says so.

    Raises:
      UserError: if the file is not a unigram model or has more pieces than the embedding rows.
    """
    content, model, processor = _read_model(vocabulary)
    rules = model.normalizer_spec
    if model.trainer_spec.model_type != model.trainer_spec.UNIGRAM:
        raise UserError(
            "The vocabulary is not a unigram model, as T5's are. (Pile-T5's, for instance, is"
            " Llama's, of byte pairs.)",
            where=str(vocabulary),
            fix="Leave it (--vocab) out, and copy the tokenizer files of the released model.",
        )
    if model.trainer_spec.treat_whitespace_as_suffix or not rules.escape_whitespaces:
        raise UserError(
            "The vocabulary marks the ends of words instead of their beginnings, or does not mark"
            " spaces; no tokenizer of transformers does that.",
            where=str(vocabulary),
            fix="Leave it (--vocab) out, and tokenize with the SentencePiece model itself.",
        )
    unknown, eos = processor.unk_id(), processor.eos_id()
    if eos < 0:
        raise UserError(
            "The vocabulary has no token that ends a text.", where=str(vocabulary), fix=_FIX
        )
    # Pad with a token that no text has: the begin's, as in transformers' MADLAD-400.
    pads = (processor.pad_id(), processor.bos_id(), unknown)
    pad = next(token for token in pads if token >= 0)
    scored, special = [], []
    for token, piece in enumerate(model.pieces):
        sentinel = SENTINEL.fullmatch(piece.piece)
        scored.append((sentinel[1] if sentinel else piece.piece, piece.score))
        if sentinel or piece.type in (piece.CONTROL, piece.UNKNOWN):
            special.append(token)
    added, note = _sentinels_to_add(vocabulary, model, eos, family, sentinels)
    # Sentinels count down: <extra_id_0> has the last id.
    scored += [(f"<extra_id_{number}>", 0.0) for number in reversed(range(added))]
    special += range(len(model.pieces), len(scored))
    pieces = Pieces(
        content,
        scored,
        special,
        rules.precompiled_charsmap,
        model.trainer_spec.byte_fallback,
        processor.normalize(" a\t\n\u3000 b ") == "\u2581a\u2581b",
        rules.add_dummy_prefix,
        rules.remove_extra_whitespaces,
        TokenIds(pad, eos),
        unknown,
        note,
    )
    if pieces.is_like_t5 and not added:
        del model.pieces[len(scored) - pieces.sentinels :]
        return dataclasses.replace(pieces, content=model.SerializeToString())
    return pieces


def _read_model(vocabulary: Path) -> tuple[bytes, Any, Any]:
    """A SentencePiece model's file, its message and its processor."""
    from google.protobuf.message import DecodeError
    from sentencepiece import sentencepiece_model_pb2

    if not vocabulary.is_file():
        refuse_other_paths(str(vocabulary), "--vocab")
    try:
        content = vocabulary.read_bytes()
        model = sentencepiece_model_pb2.ModelProto.FromString(content)
        return content, model, processor_of(content)
    except OSError as error:
        raise UserError(
            f"The vocabulary cannot be read: {error.strerror}.", where=str(vocabulary), fix=_FIX
        ) from None
    except (DecodeError, RuntimeError) as error:
        raise not_a_model(str(vocabulary), error) from None


def _sentinels_to_add(
    vocabulary: Path, model: Any, eos: int, family: ModelShape, bound: int | None
) -> tuple[int, str]:
    """The number of sentinels that a model of pieces lacks, and a sentence if it is assumed."""
    pieces, rows = len(model.pieces), family.vocab_size
    added, assumed_of = sentinels_lacking([piece.piece for piece in model.pieces], eos)
    given = named_vocabulary(vocabulary).given_ids
    given = bound if given is None else given
    if added and given is not None:
        added = given
    elif pieces + added > rows:
        added = 0  # only where the embedding has rows for them
    if pieces + added > rows:
        raise UserError(
            f"The vocabulary has {pieces + added} pieces, but the embedding only {rows} rows.",
            where=str(vocabulary),
            fix="Give the vocabulary that the model was trained with.",
        )
    if not added or given is not None or assumed_of == "T5":
        return added, ""
    return added, (
        f"The tokenizer has {added} sentinels, as {assumed_of or 'T5'}'s; {SENTINELS_VARIABLE}"
        " gives another number."
    )


def tokenizer_files(pieces: Pieces | None, family: ModelShape) -> dict[str, bytes]:
    """The tokenizer's files, by name; none if no vocabulary is given and the model needs one.

    Args:
      pieces: those of the vocabulary; ByT5 needs none.
      family: the model that they are for.
    """
    if pieces is None:
        if family.vocab_size != _BYT5_VOCABULARY:
            return {}
        config = {"tokenizer_class": "ByT5Tokenizer", "extra_ids": _BYT5_EXTRA_IDS}
        names = ("<pad>", "</s>", "<unk>")
        return {SETTINGS: _json(config | _special_tokens(*names))}
    config: dict[str, Any] = {"tokenizer_class": "T5Tokenizer", "extra_ids": pieces.sentinels}
    if pieces.byte_fallback or not pieces.is_like_t5:
        # transformers 5's T5Tokenizer makes a tokenizer of its own: without bytes, with T5's ids.
        config = {"tokenizer_class": "PreTrainedTokenizerFast"}
    ids = (pieces.ids.pad, pieces.ids.eos, pieces.unknown)
    return {
        PIECES: pieces.content,
        TOKENIZER: _json(_fast_tokenizer(pieces), indent=None),
        SETTINGS: _json(config | _special_tokens(*(pieces.scored[i][0] for i in ids))),
    }


def _special_tokens(pad: str, end: str, unknown: str) -> dict[str, Any]:
    return {
        "eos_token": end,
        "unk_token": unknown,
        "pad_token": pad,
        "model_max_length": _MODEL_MAX_LENGTH,
    }


def _fast_tokenizer(pieces: Pieces) -> dict[str, Any]:
    """The content of tokenizer.json, as transformers makes it of a T5's SentencePiece model."""
    eos = pieces.scored[pieces.ids.eos][0]
    end = {"SpecialToken": {"id": eos, "type_id": 0}}
    first, second = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    scheme = "always" if pieces.has_dummy_prefix else "never"
    metaspace = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": True}
    decoder = metaspace
    if pieces.byte_fallback:
        decoder = {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, metaspace]}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": token, "content": pieces.scored[token][0], **flags, "special": True}
            for token in pieces.special
        ],
        "normalizer": _normalizer(pieces),
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "WhitespaceSplit"}, metaspace],
        }
        if pieces.has_t5_spaces
        else None,  # a piece may hold white space, or several marks of a space
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [first, end],
            "pair": [first, end, second, end],
            "special_tokens": {eos: {"id": eos, "ids": [pieces.ids.eos], "tokens": [eos]}},
        },
        "decoder": decoder,
        "model": {
            "type": "Unigram",
            "unk_id": pieces.unknown,
            "vocab": [list(piece) for piece in pieces.scored],
            "byte_fallback": pieces.byte_fallback,
        },
    }


def _normalizer(pieces: Pieces) -> dict[str, Any] | None:
    """What happens to a text before it is split; None for nothing."""
    charsmap = base64.b64encode(pieces.charsmap).decode()
    steps: list[dict[str, Any]] = []
    if charsmap:
        steps.append({"type": "Precompiled", "precompiled_charsmap": charsmap})
    if pieces.has_t5_spaces:  # the rest is the pre_tokenizer's
        return steps[0] if steps else None
    # As SentencePiece, which knows only U+0020 as a space.
    if pieces.removes_spaces:
        steps += [_replace({"Regex": r"\A +| +\z"}, ""), _replace({"Regex": " +"}, " ")]
    if pieces.has_dummy_prefix:
        steps.append({"type": "Prepend", "prepend": " "})
    steps.append(_replace({"String": " "}, "▁"))
    return {"type": "Sequence", "normalizers": steps}


def _replace(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def model_card(family: ModelShape, provenance: Mapping[str, Any], dtype: str, slots: bool) -> str:
    """README.md: what the model is and where it came from.

    Args:
      family: the model.
      provenance: source path, format and step, and the versions that converted it.
      dtype: of the parameters.
      slots: whether there is a file of optimizer slots beside the weights.
    """
    versions = ", ".join(
        f"{name} {version}" for name, version in provenance["versions"].items() if version
    )
    slots_line = (
        "The optimizer's slots are in `optimizer_slots.safetensors`, which `t0repro convert` reads"
        " back and transformers ignores."
        if slots
        else "The optimizer's slots are not kept here."
    )
    model_class, task = "AutoModelForSeq2SeqLM", "text2text-generation"
    if family.encoder_only:
        model_class, task = "AutoModelForTextEncoding", "feature-extraction"
    return f"""---
library_name: transformers
pipeline_tag: {task}
tags:
- t5
- {task}
---

# {family.name}

{describe(family)}; {family.parameter_count():,} parameters in {dtype}.

## Provenance

| | |
|---|---|
| Source | `{provenance["path"]}` |
| Format of the source | {provenance["format"]} |
| Global step | {provenance["step"]:,} |
| Converted by | {versions} |

{slots_line} `conversion.json` has the shape and SHA-256 of every tensor.

## Use

    from transformers import {model_class}, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(".")
    model = {model_class}.from_pretrained(".")

Mesh TensorFlow's T5s for multitask prompted training see inputs without an end token; transformers'
tokenizer appends one, which `tokenizer(text, add_special_tokens=False)` leaves out.
"""


def _json(value: Any, indent: int | None = 2) -> bytes:
    return (json.dumps(value, indent=indent, ensure_ascii=False) + "\n").encode()
