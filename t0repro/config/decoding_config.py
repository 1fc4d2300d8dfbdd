"""How Mesh TensorFlow's modes generate, and which lines infer and score_from_strings read."""

from __future__ import annotations

import dataclasses
from typing import Annotated

from t0repro.config.ranges import Range


@dataclasses.dataclass(frozen=True)
class DecodingConfig:
    """How targets are generated: the arguments of Bitransformer.decode and of its beam search.

    Attributes:
      beam_size: 1 for greedy decoding or sampling, more for beam search.
      alpha: Exponent of the length penalty ((5 + length) / 6)**alpha, which divides a beam's
        log-probability.
      temperature: 0 takes the likeliest token; otherwise Gumbel noise, multiplied by the
        temperature, is added to the logits.
      keep_top_k: Sample among only this many of the likeliest tokens; -1 keeps all.
      length_multiplier: A beam search ends after this times the longest input of its batch...
      length_constant: ...plus this.
      max_length: Tokens that an output has room for; None stands for the inputs' length.
      prefilter: Candidates that compete per beam and per part of the vocabulary (0: all needed).
      vocab_parts: Parts that the vocabulary is split into for that: the mesh's size along it.
    """

    beam_size: Annotated[int, Range(at_least=1)]
    alpha: Annotated[float, Range(at_least=0)]
    temperature: Annotated[float, Range(at_least=0)]
    keep_top_k: Annotated[int, Range(at_least=1, also=(-1,))]
    length_multiplier: Annotated[float, Range(at_least=0)]
    length_constant: Annotated[float, Range(at_least=0)]
    max_length: Annotated[int | None, Range(at_least=1)]
    prefilter: Annotated[int, Range(at_least=0)]
    vocab_parts: Annotated[int, Range(at_least=1)]


# As T0 decodes: Mesh TensorFlow's decode with beam_size 1 and temperature 0 (t5's eval.gin). The
# other values are its defaults, except for prefilter, which only a beam search reads.
GREEDY = DecodingConfig(
    beam_size=1,
    alpha=0.6,
    temperature=0.0,
    keep_top_k=-1,
    length_multiplier=1.5,
    length_constant=10.0,
    max_length=None,
    prefilter=0,
    vocab_parts=1,
)


@dataclasses.dataclass(frozen=True)
class InferConfig:
    """The arguments of mode infer's decode_from_file."""

    input_filename: str
    output_filename: str
    eos_id: Annotated[int, Range(at_least=0)]
    repeats: Annotated[int, Range(at_least=1)]


@dataclasses.dataclass(frozen=True)
class ScoreStringsConfig:
    """The arguments of score_from_strings; inputs and targets are lines, or a file of them."""

    inputs: str | tuple[str, ...] | None
    targets: str | tuple[str, ...]
    eos_id: Annotated[int, Range(at_least=0)]
    score_eos: bool
