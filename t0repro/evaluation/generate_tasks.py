"""Greedy decoding of tasks without answer choices, as T0 decodes them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from t0repro.config.decoding_config import GREEDY
from t0repro.evaluation.energy import Cost, EnergyMeter

if TYPE_CHECKING:
    from t0repro.evaluation.opened import Checkpoint

_BATCH = {"cpu": 32, "gpu": 256, "tpu": 256}


def decode_examples(
    checkpoint: Checkpoint,
    examples: Sequence[Mapping[str, Any]],
    lengths: Mapping[str, int],
    vocabulary: Any,
) -> tuple[list[str], Cost]:
    """Decodes a task's inputs greedily.

    Args:
      checkpoint: the checkpoint to decode with.
      examples: the task's examples, at least one.
      lengths: maximum tokens of an input (`inputs`) and of an output (`targets`).
      vocabulary: a SeqIO vocabulary.

    Returns:
      The texts in the order of the examples, and what they cost.
    """
    import jax

    from t0repro.evaluation.generation import generate_tokens, texts_of

    meter = EnergyMeter()
    started = time.monotonic()
    tokens = generate_tokens(
        checkpoint.params,
        checkpoint.model,
        [example["inputs"] for example in examples],
        GREEDY,
        length=lengths["targets"],
        batch_size=min(_BATCH.get(jax.default_backend(), 32), len(examples)),
        inputs_length=lengths["inputs"],
    )
    cost = Cost(time.monotonic() - started, meter.joules(), meter.source)
    return texts_of(tokens, vocabulary), cost
