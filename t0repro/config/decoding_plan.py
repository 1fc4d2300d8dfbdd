"""How T5X's eval and infer generate: its two decoding functions and their arguments."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, Literal

from t0repro.config.ranges import Range

NEVER = -1e7  # T5X's minus infinity: the log-probability of a beam that does not exist


@dataclasses.dataclass(frozen=True)
class DecodingPlan:
    """The arguments of EncoderDecoderModel.predict_batch_with_aux and of its decode_fn.

    Attributes:
      method: A beam search or sampling. A beam search with one beam is not always greedy: a longer
        output may score better than one that ends at once.
      num_decodes: Beams, or samples.
      return_all_decodes: Whether all of them are returned; otherwise the best.
      prompt_with_targets: Whether each output begins with its example's targets.
      eos_id: The token that ends an output.
      alpha: Exponent of the length penalty ((5 + length) / 6)**alpha of a beam search.
      max_decode_len: Maximum tokens of a beam search; None stands for the targets' length.
      max_decode_step: Maximum number of positions of a beam search, if above 0; an output may then
        lack its end.
      min_log_prob: A beam search ends if no live beam has at least this log-probability.
      temperature: Divides the logits before sampling; 1e-4 or less takes the likeliest token.
      topk: Sample among this many of the likeliest tokens; 0 keeps all.
      topp: Sample among the fewest tokens with at least this much probability; 0 keeps all.
      max_decode_steps: Maximum tokens sampled after the prompt; None: the targets' length.
      rescale_log_probs: Whether a sample's score counts the temperature, topk and topp.
    """

    method: Literal["beam_search", "temperature_sample"] = "beam_search"
    num_decodes: Annotated[int, Range(at_least=1)] = 1
    return_all_decodes: bool = False
    prompt_with_targets: bool = False
    eos_id: Annotated[int, Range(at_least=0)] = 1
    alpha: Annotated[float, Range(at_least=0)] = 0.6
    max_decode_len: Annotated[int | None, Range(at_least=1)] = None
    max_decode_step: int = -1
    min_log_prob: float = NEVER
    temperature: Annotated[float, Range(at_least=0)] = 1.0
    topk: Annotated[int, Range(at_least=0)] = 1
    topp: Annotated[float, Range(at_least=0, at_most=1)] = 0.0
    max_decode_steps: Annotated[int | None, Range(at_least=1)] = None
    rescale_log_probs: bool = True

    def function_options(self) -> dict[str, Any]:
        """The arguments of T5X's decoding function besides what it decodes."""
        names = ("alpha", "max_decode_len", "max_decode_step", "min_log_prob")
        if self.method == "temperature_sample":
            names = ("temperature", "topk", "topp", "max_decode_steps", "rescale_log_probs")
        return {name: getattr(self, name) for name in ("eos_id", "num_decodes", *names)}
