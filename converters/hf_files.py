"""The files beside a Hugging Face model's weights: configuration, tokenizer and model card."""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from t0repro.converters.hf_config import Computation, feed_forward_proj
from t0repro.converters.tensor_bundle import protobuf_fields
from t0repro.errors import UserError
from t0repro.parameters.shape import ModelShape, describe

# 3 special tokens, 256 bytes and 125 sentinels.
_BYT5_VOCABULARY = 384
_BYT5_EXTRA_IDS = 125
_T5_EXTRA_IDS = 100
_MODEL_MAX_LENGTH = 512


def model_config(family: ModelShape, dtype: str, arithmetic: Computation) -> dict[str, Any]:
    """The content of config.json.

    Args:
      family: the model.
      dtype: of the parameters, as numpy names it.
      arithmetic: what the weights do not tell.
    """
    # As in `ModelShape.name`: mT5 differs from T5 1.1 in its vocabulary alone.
    model_type = "mt5" if family.vocab_size >= 250_000 else "t5"
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
        "dropout_rate": 0.1,
        "layer_norm_epsilon": arithmetic.epsilon,
        "initializer_factor": 1.0,
        **feed_forward_proj(arithmetic),
        "is_encoder_decoder": True,
        "use_cache": True,
        "tie_word_embeddings": family.tied,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "decoder_start_token_id": 0,
        "dtype": dtype,
    }


_ARCHITECTURES = {
    "t5": "T5ForConditionalGeneration",
    "mt5": "MT5ForConditionalGeneration",
    "umt5": "UMT5ForConditionalGeneration",
}


def generation_config() -> dict[str, Any]:
    """The content of generation_config.json."""
    return {"decoder_start_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}


# --- Tokenizer -----------------------------------------------------------------------------------


def tokenizer_files(vocabulary: Path | None, family: ModelShape) -> dict[str, bytes]:
    """The tokenizer's files, by name; none if no vocabulary is given and the model needs one.

    Args:
      vocabulary: a SentencePiece model; ByT5 needs none.
      family: the model, whose embedding the tokens must fit.

    Raises:
      UserError: if the file is no SentencePiece model or has more pieces than the embedding rows.
    """
    if vocabulary is None:
        if family.vocab_size != _BYT5_VOCABULARY:
            return {}
        config = {"tokenizer_class": "ByT5Tokenizer", "extra_ids": _BYT5_EXTRA_IDS}
        return {"tokenizer_config.json": _json(config | _special_tokens())}
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
        pieces, charsmap, byte_fallback = _parse_sentencepiece(content)
    except (IndexError, struct.error, UnicodeDecodeError):
        raise no_model from None
    if not pieces:
        raise no_model
    if len(pieces) > family.vocab_size:
        raise UserError(
            f"The vocabulary has {len(pieces)} pieces, but the embedding only {family.vocab_size}"
            " rows.",
            where=str(vocabulary),
            fix="Give the vocabulary that the model was trained with.",
        )
    # Sentinels only where the embedding has rows for them.
    extra_ids = _T5_EXTRA_IDS if len(pieces) + _T5_EXTRA_IDS <= family.vocab_size else 0
    config: dict[str, Any] = {"tokenizer_class": "T5Tokenizer", "extra_ids": extra_ids}
    if byte_fallback:
        # transformers 5's T5Tokenizer makes a tokenizer of its own, without bytes.
        config = {"tokenizer_class": "PreTrainedTokenizerFast"}
    return {
        "spiece.model": content,
        "tokenizer.json": _json(
            _fast_tokenizer(pieces, charsmap, extra_ids, byte_fallback), indent=None
        ),
        "tokenizer_config.json": _json(config | _special_tokens()),
    }


def _special_tokens() -> dict[str, Any]:
    return {
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "pad_token": "<pad>",
        "model_max_length": _MODEL_MAX_LENGTH,
    }


def _parse_sentencepiece(content: bytes) -> tuple[list[tuple[str, float]], bytes, bool]:
    """Pieces with their scores, the normalisation table, and whether unknown characters are spelled
    in bytes, as mT5's are (sentencepiece_model.proto).
    """
    pieces, charsmap, byte_fallback = [], b"", False
    for number, value in protobuf_fields(content):
        # Of ModelProto: 1 is pieces, 2 trainer_spec (35 in it is byte_fallback), 3
        # normalizer_spec.
        if number == 1:
            fields = dict(protobuf_fields(value))
            # protobuf_fields gives a float's 32 bits as an integer.
            score = struct.unpack("<f", fields.get(2, 0).to_bytes(4, "little"))[0]
            pieces.append((fields[1].decode(), score))
        elif number == 2:
            byte_fallback = bool(dict(protobuf_fields(value)).get(35, False))
        elif number == 3:
            charsmap = dict(protobuf_fields(value)).get(2, b"")
    return pieces, charsmap, byte_fallback


def _fast_tokenizer(
    pieces: list[tuple[str, float]], charsmap: bytes, extra_ids: int, byte_fallback: bool
) -> dict[str, Any]:
    """The content of tokenizer.json, as transformers makes it of a T5's SentencePiece model."""
    # T5 calls padding, end and unknown by these names, whatever the model calls ids 0, 1 and 2.
    vocabulary: list[list[Any]] = [[token, 0.0] for token in ("<pad>", "</s>", "<unk>")]
    vocabulary += [[piece, score] for piece, score in pieces[3:]]
    # Sentinels count down: <extra_id_0> has the last id.
    vocabulary += [[f"<extra_id_{n}>", 0.0] for n in range(extra_ids - 1, -1, -1)]
    special = [0, 1, 2, *range(len(pieces), len(vocabulary))]
    end = {"SpecialToken": {"id": "</s>", "type_id": 0}}
    first, second = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    metaspace = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
    decoder = metaspace
    if byte_fallback:
        decoder = {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, metaspace]}
    normalizer = base64.b64encode(charsmap).decode()
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_added_token(token, vocabulary[token][0]) for token in special],
        "normalizer": {"type": "Precompiled", "precompiled_charsmap": normalizer}
        if charsmap
        else None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "WhitespaceSplit"}, metaspace],
        },
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [first, end],
            "pair": [first, end, second, end],
            "special_tokens": {"</s>": {"id": "</s>", "ids": [1], "tokens": ["</s>"]}},
        },
        "decoder": decoder,
        "model": {
            "type": "Unigram",
            "unk_id": 2,
            "vocab": vocabulary,
            "byte_fallback": byte_fallback,
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
      slots: whether the optimizer's slots are beside the weights.
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
