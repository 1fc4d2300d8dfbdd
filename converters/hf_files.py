"""The files beside a Hugging Face model's weights: configuration, tokenizer and model card."""

from __future__ import annotations

import base64
import dataclasses
import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from t0repro.converters.hf_config import Computation, TokenIds, feed_forward_proj
from t0repro.converters.tensor_bundle import protobuf_fields
from t0repro.errors import UserError
from t0repro.parameters.shape import ModelShape, describe

# 3 special tokens, 256 bytes and 125 sentinels.
_BYT5_VOCABULARY = 384
_BYT5_EXTRA_IDS = 125
_T5_EXTRA_IDS = 100
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
    model_type = "mt5" if family.name.startswith("mT5") else "t5"
    if family.position_bias_per_layer:
        model_type = "umt5"
    return {
        "architectures": [_ARCHITECTURES[model_type]],
        "model_type": model_type,
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
        "is_encoder_decoder": True,
        "use_cache": True,
        "tie_word_embeddings": family.tied,
        **generation_config(ids),
        "dtype": dtype,
    }


_ARCHITECTURES = {
    "t5": "T5ForConditionalGeneration",
    "mt5": "MT5ForConditionalGeneration",
    "umt5": "UMT5ForConditionalGeneration",
}


def generation_config(ids: TokenIds) -> dict[str, Any]:
    """The content of generation_config.json."""
    return {"decoder_start_token_id": 0, "eos_token_id": ids.eos, "pad_token_id": ids.pad}


# --- Tokenizer -----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Pieces:
    """The parts of a SentencePiece model from which transformers makes a tokenizer.

    Attributes:
      content: The model's bytes.
      scored: Pieces and their scores, by id.
      charsmap: Its table for normalizing text.
      byte_fallback: Whether unknown characters are spelled in bytes, as mT5's are.
      ids: Ids of padding and end.
      unknown: Id of unknown characters.
    """

    content: bytes
    scored: list[tuple[str, float]]
    charsmap: bytes
    byte_fallback: bool
    ids: TokenIds
    unknown: int

    @property
    def as_t5(self) -> bool:
        """Whether ids 0, 1 and 2 are padding, end and unknown, as in T5's own models."""
        return (self.ids, self.unknown) == (TokenIds(), 2)

    def name(self, token: int) -> str:
        """What transformers' tokenizer calls an id."""
        # T5's own names for these, whatever the SentencePiece model calls them.
        own = ("<pad>", "</s>", "<unk>") if self.as_t5 else ()
        return own[token] if token < len(own) else self.scored[token][0]


def read_pieces(vocabulary: Path, family: ModelShape) -> Pieces:
    """Reads a SentencePiece model.

    Args:
      vocabulary: the file.
      family: the model, whose embedding the tokens must fit.

    Raises:
      UserError: if the file is no unigram model or has more pieces than the embedding rows.
    """
    fix = "Name the SentencePiece model that the checkpoint was trained with."
    try:
        content = vocabulary.read_bytes()
    except OSError as error:
        raise UserError(
            f"The vocabulary cannot be read: {error.strerror}.", where=str(vocabulary), fix=fix
        ) from None
    no_model = UserError(
        "The vocabulary is not a SentencePiece model.", where=str(vocabulary), fix=fix
    )
    try:
        pieces, kind = _parse_sentencepiece(content)
    except (IndexError, struct.error, UnicodeDecodeError):
        raise no_model from None
    if max(pieces.ids.pad, pieces.ids.eos, pieces.unknown) >= len(pieces.scored):
        raise no_model
    if kind != _UNIGRAM:
        raise UserError(
            "The vocabulary is no unigram model, as T5's are. (Pile-T5's, for instance, is Llama's,"
            " of byte pairs.)",
            where=str(vocabulary),
            fix="Leave --vocab out, and copy the tokenizer files of the released model.",
        )
    if len(pieces.scored) > family.vocab_size:
        raise UserError(
            f"The vocabulary has {len(pieces.scored)} pieces, but the embedding only"
            f" {family.vocab_size} rows.",
            where=str(vocabulary),
            fix="Give the vocabulary that the model was trained with.",
        )
    return pieces


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
        return {"tokenizer_config.json": _json(config | _special_tokens(*names))}
    # Sentinels only where the embedding has rows for them.
    there = len(pieces.scored)
    extra_ids = _T5_EXTRA_IDS if there + _T5_EXTRA_IDS <= family.vocab_size else 0
    config: dict[str, Any] = {"tokenizer_class": "T5Tokenizer", "extra_ids": extra_ids}
    if pieces.byte_fallback or not pieces.as_t5:
        # transformers 5's T5Tokenizer makes a tokenizer of its own: without bytes, with T5's ids.
        config = {"tokenizer_class": "PreTrainedTokenizerFast"}
    names = tuple(map(pieces.name, (pieces.ids.pad, pieces.ids.eos, pieces.unknown)))
    return {
        "spiece.model": pieces.content,
        "tokenizer.json": _json(_fast_tokenizer(pieces, extra_ids), indent=None),
        "tokenizer_config.json": _json(config | _special_tokens(*names)),
    }


def _special_tokens(pad: str, end: str, unknown: str) -> dict[str, Any]:
    return {
        "eos_token": end,
        "unk_token": unknown,
        "pad_token": pad,
        "model_max_length": _MODEL_MAX_LENGTH,
    }


_UNIGRAM = 1  # TrainerSpec.ModelType
_NONE = 2**64 - 1  # -1


def _parse_sentencepiece(content: bytes) -> tuple[Pieces, int]:
    """What a SentencePiece model holds, and its type (sentencepiece_model.proto)."""
    scored: list[tuple[str, float]] = []
    charsmap, trainer = b"", {}
    for number, value in protobuf_fields(content):
        # Of ModelProto: 1 is pieces, 2 trainer_spec, 3 normalizer_spec.
        if number == 1:
            fields = dict(protobuf_fields(value))
            # protobuf_fields returns a float's 32 bits as an integer.
            score = struct.unpack("<f", fields.get(2, 0).to_bytes(4, "little"))[0]
            scored.append((fields[1].decode(), score))
        elif number == 2:
            trainer = dict(protobuf_fields(value))
        elif number == 3:
            charsmap = dict(protobuf_fields(value)).get(2, b"")
    # Of TrainerSpec: 3 is model_type, 35 byte_fallback, 40 to 43 the ids of unknown, begin, end and
    # padding. An id that the model does not have is -1, which protobuf writes as 64 bits.
    unknown, begin, end, pad = (
        trainer.get(number, default) for number, default in ((40, 0), (41, 1), (42, 2), (43, _NONE))
    )
    if pad == _NONE:
        # Pad with a token that no text has: the begin's, as in transformers' MADLAD-400.
        pad = unknown if begin == _NONE else begin
    ids = TokenIds(pad, end)
    pieces = Pieces(content, scored, charsmap, bool(trainer.get(35, False)), ids, unknown)
    return pieces, trainer.get(3, _UNIGRAM)


def _fast_tokenizer(pieces: Pieces, extra_ids: int) -> dict[str, Any]:
    """The content of tokenizer.json, as transformers makes it of a T5's SentencePiece model."""
    own = sorted({pieces.ids.pad, pieces.ids.eos, pieces.unknown})
    vocabulary: list[list[Any]] = [list(piece) for piece in pieces.scored]
    for token in own:
        vocabulary[token] = [pieces.name(token), 0.0]
    # Sentinels count down: <extra_id_0> has the last id.
    vocabulary += [[f"<extra_id_{n}>", 0.0] for n in range(extra_ids - 1, -1, -1)]
    special = [*own, *range(len(pieces.scored), len(vocabulary))]
    eos = pieces.name(pieces.ids.eos)
    end = {"SpecialToken": {"id": eos, "type_id": 0}}
    first, second = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    metaspace = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
    decoder = metaspace
    if pieces.byte_fallback:
        decoder = {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, metaspace]}
    normalizer = base64.b64encode(pieces.charsmap).decode()
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_added_token(token, vocabulary[token][0]) for token in special],
        "normalizer": {"type": "Precompiled", "precompiled_charsmap": normalizer}
        if pieces.charsmap
        else None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "WhitespaceSplit"}, metaspace],
        },
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
            "vocab": vocabulary,
            "byte_fallback": pieces.byte_fallback,
        },
    }


def _added_token(token: int, text: str) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token, "content": text, **flags, "special": True}


# --- Model card ----------------------------------------------------------------------------------


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
    return f"""---
library_name: transformers
pipeline_tag: text2text-generation
tags:
- t5
- text2text-generation
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

    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(".")
    model = AutoModelForSeq2SeqLM.from_pretrained(".")

Mesh TensorFlow's T5s for multitask prompted training see inputs without an end token; transformers'
tokenizer appends one, which `tokenizer(text, add_special_tokens=False)` leaves out.
"""


def _json(value: Any, indent: int | None = 2) -> bytes:
    return (json.dumps(value, indent=indent, ensure_ascii=False) + "\n").encode()
