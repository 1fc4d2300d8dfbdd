"""A dataset as T5X's DatasetConfig describes it, in plain values."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated

from t0repro.config.ranges import Range


@dataclasses.dataclass(frozen=True)
class SeqioDataConfig:
    """Which examples are read from SeqIO, and in which batches.

    Attributes:
      mixture_or_task_name: A registered SeqIO task or mixture.
      sequence_length: Tokens by feature; None stands for the longest example's (unpacked evaluation only).
      batch_size: Sequences in a global batch; rows, when they are packed.
      shuffle: Whether examples are shuffled (in memory, and files in their order).
      seed: Seed for the order of the examples and for random preprocessors; None draws one at
        each start.
      use_cached: Whether the tasks are read from SeqIO's caches.
      pack: Whether several short examples share a row.
      trim_output_features: Whether SeqIO trims each feature to its length before packing.
      use_memory_cache: Whether evaluation batches stay in memory after they are first read.
    """

    mixture_or_task_name: str
    sequence_length: Annotated[Mapping[str, int] | None, Range(at_least=1)]
    split: str
    batch_size: Annotated[int, Range(at_least=1)]
    shuffle: bool
    seed: Annotated[int | None, Range(at_least=0)]
    use_cached: bool = False
    pack: bool = False
    trim_output_features: bool = True
    use_memory_cache: bool = True
