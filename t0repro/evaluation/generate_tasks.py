"""Tasks without answer choices: decoded greedily, judged by their templates' metrics."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from t0repro.config.run_config import DecodingConfig
from t0repro.data.batches import EvalTask
from t0repro.evaluation.energy import EnergyMeter
from t0repro.evaluation.opened import Checkpoint

# As T0 decodes: Mesh TensorFlow's decode with beam_size 1 and temperature 0 (t5's eval.gin).
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
_BATCH = {"cpu": 32, "gpu": 256, "tpu": 256}

Record = Callable[[EvalTask, Sequence[str], Mapping[str, Any]], None]


def generate_tasks(
    checkpoint: Checkpoint,
    tasks: Sequence[EvalTask],
    lengths: Mapping[str, int],
    vocabulary: Any,
    record: Record,
) -> Iterator[tuple[int, float]]:
    """Decodes each task's inputs greedily and hands the texts to `record`.

    Args:
      checkpoint: to decode with.
      tasks: with their examples.
      lengths: tokens of an input, and that an output has room for (`targets`).
      vocabulary: a seqio vocabulary.
      record: is called with each task, its texts and what it cost.

    Yields:
      Of each task, its examples and the seconds that decoding them took.
    """
    import jax

    from t0repro.evaluation.generation import generate_tokens, texts_of

    meter = EnergyMeter()
    for task in tasks:
        started = time.monotonic()
        tokens = generate_tokens(
            checkpoint.params,
            checkpoint.model,
            [example["inputs"] for example in task.examples],
            GREEDY,
            length=lengths["targets"],
            batch_size=min(_BATCH.get(jax.default_backend(), 32), len(task.examples)),
            inputs_length=lengths["inputs"],
        )
        seconds, joules = time.monotonic() - started, meter.joules()
        cost: dict[str, Any] = {"seconds": seconds}
        if joules is not None:
            cost |= {"joules": joules, "energy_source": meter.source}
        record(task, texts_of(tokens, vocabulary), cost)
        yield len(task.examples), seconds
