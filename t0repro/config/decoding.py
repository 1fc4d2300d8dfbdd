"""Decoding options: those of Mesh TensorFlow's modes, with their files of text, and T5X's."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, Literal

from t0repro.config.settings import MOST_32, RULE, Mtf, Only, Range, T5x, arguments, freeze


@arguments(mtf="Bitransformer.decode")
@dataclasses.dataclass(frozen=True)
class DecodingConfig:
    """Decoding options: the arguments of Bitransformer.decode and of its beam search.

    Attributes:
      beam_size: 1 for greedy decoding or sampling, more for beam search.
      alpha: Exponent of the length penalty ((5 + length) / 6)**alpha, which divides a beam's
        log-probability.
      temperature: 0 takes the likeliest token; otherwise Gumbel noise, multiplied by the
        temperature, is added to the logits.
      keep_top_k: Sample among only this many of the likeliest tokens; -1 keeps all.
      length_multiplier: A beam search ends after this multiple of its batch's longest input...
      length_constant: ...plus this.
      max_length: Maximum tokens of an output; None stands for the inputs' length.
      prefilter: Candidates that compete per beam and per shard of the vocabulary (0: all needed).
      vocab_parts: Shards of the vocabulary for that: the mesh's size along it.
    """

    beam_size: Annotated[int, Range(at_least=1)] = 1
    alpha: Annotated[float, Range(at_least=0)] = 0.6
    temperature: Annotated[float, Range(at_least=0)] = 0.0
    keep_top_k: Annotated[int, Range(at_least=1, also=(-1,)), Mtf("sampling_keep_top_k")] = -1
    length_multiplier: Annotated[float, Range(at_least=0), Mtf("decode_length_multiplier")] = 1.5
    length_constant: Annotated[float, Range(at_least=0), Mtf("decode_length_constant")] = 10.0
    max_length: Annotated[
        int | None, Range(at_least=1, at_most=MOST_32), Mtf("max_decode_length")
    ] = None
    # Mesh TensorFlow's way around a slow top-k on TPUs; in theory it can lose a candidate.
    prefilter: Annotated[
        int,
        Range(at_least=0),
        Mtf("beam_search.beam_search.num_prefilter", read=lambda value: value or 0),
    ] = 0
    # Outputs may depend on it: each shard contributes `prefilter` candidates of its own.
    vocab_parts: Annotated[int, Range(at_least=1), Only(mtf=RULE)] = 1


# T0's decoding: Mesh TensorFlow's decode with beam_size 1 and temperature 0 (t5's eval.gin). The
# other values are its defaults, except for prefilter, which only a beam search reads.
GREEDY = DecodingConfig()


@arguments(mtf="utils.decode_from_file")
@dataclasses.dataclass(frozen=True)
class InferConfig:
    """The arguments of mode infer's decode_from_file."""

    input_filename: str
    output_filename: str
    eos_id: Annotated[int, Range(at_least=0)]
    repeats: Annotated[int, Range(at_least=1)]


@arguments(mtf="utils.score_from_strings")
@dataclasses.dataclass(frozen=True)
class ScoreStringsConfig:
    """The arguments of score_from_strings; inputs and targets are lines, or a file of them."""

    inputs: Annotated[str | tuple[str, ...] | None, Mtf(read=freeze)]
    targets: Annotated[str | tuple[str, ...], Mtf(read=freeze)]
    eos_id: Annotated[int, Range(at_least=0)]
    score_eos: bool


NEVER = -1e7  # T5X's minus infinity: the log-probability of a beam that does not exist


@arguments(t5x="models.EncoderDecoderModel.predict_batch_with_aux")
@dataclasses.dataclass(frozen=True)
class DecodingPlan:
    """The arguments of EncoderDecoderModel.predict_batch_with_aux and of its decode_fn.

    Attributes:
      method: Beam search or sampling.
      num_decodes: Beams, or samples.
      return_all_decodes: Whether to return all of them, or only the best.
      prompt_with_targets: Whether each output begins with its example's targets.
      eos_id: The token that ends an output.
      alpha: Exponent of the length penalty ((5 + length) / 6)**alpha of a beam search.
      max_decode_len: Maximum tokens of a beam search; None stands for the targets' length.
      max_decode_step: Maximum number of positions of a beam search, if above 0; an output may then
        end without EOS.
      min_log_prob: A beam search ends if no live beam has at least this log-probability.
      temperature: Divides the logits before sampling; 1e-4 or less takes the likeliest token.
      topk: Sample among this many of the likeliest tokens; 0 keeps all.
      topp: Sample among the fewest tokens with at least this much probability; 0 keeps all.
      max_decode_steps: Maximum tokens sampled after the prompt; None: the targets' length.
      rescale_log_probs: Whether a sample's score counts the temperature, topk and topp.
    """

    # A beam search with one beam is not always greedy: a longer output may score better than one
    # that ends at once.
    method: Annotated[
        Literal["beam_search", "temperature_sample"],
        T5x("models.EncoderDecoderModel.decode_fn", hint=Any, default=None),
    ] = "beam_search"
    num_decodes: Annotated[int, Range(at_least=1)] = 1
    return_all_decodes: bool = False
    prompt_with_targets: bool = False
    # An option that T5X's models pass to either function, in decoder_params.
    eos_id: Annotated[int, Range(at_least=0), Only(t5x=RULE)] = 1
    alpha: Annotated[float, Range(at_least=0), T5x("decoding.beam_search.alpha")] = 0.6
    max_decode_len: Annotated[
        int | None,
        Range(at_least=1, at_most=MOST_32),
        T5x("decoding.beam_search.max_decode_len"),
    ] = None
    max_decode_step: Annotated[int, Range(), T5x("decoding.beam_search.max_decode_step")] = -1
    min_log_prob: Annotated[float, Range(), T5x("decoding.beam_search.min_log_prob")] = NEVER
    temperature: Annotated[
        float, Range(at_least=0), T5x("decoding.temperature_sample.temperature")
    ] = 1.0
    topk: Annotated[int, Range(at_least=0), T5x("decoding.temperature_sample.topk")] = 1
    topp: Annotated[
        float, Range(at_least=0, at_most=1), T5x("decoding.temperature_sample.topp")
    ] = 0.0
    max_decode_steps: Annotated[
        int | None,
        Range(at_least=1, at_most=MOST_32),
        T5x("decoding.temperature_sample.max_decode_steps"),
    ] = None
    rescale_log_probs: Annotated[bool, T5x("decoding.temperature_sample.rescale_log_probs")] = True

    def function_options(self) -> dict[str, Any]:
        """The arguments of T5X's decoding function, without the inputs to decode."""
        names = ("alpha", "max_decode_len", "max_decode_step", "min_log_prob")
        if self.method == "temperature_sample":
            names = ("temperature", "topk", "topp", "max_decode_steps", "rescale_log_probs")
        return {name: getattr(self, name) for name in ("eos_id", "num_decodes", *names)}
