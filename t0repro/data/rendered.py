"""Training batches of prompted tasks without a cache: rows are rendered as they are read."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from t0repro.data.mixing import FEATURES, HELD, Example, MixedBatches
from t0repro.tasks.prompted_examples import UNCUT, prompted_examples
from t0repro.tasks.task import task_descriptions


class RenderedBatches(MixedBatches):
    """Endless training batches of described tasks; implements `training.feed.BatchSource`.

    They equal SeqIO's (t0repro.data.mixing) of the same tasks with `use_cached = False`. A task of
    fewer than 10,000 rows for each shard stays in memory; a larger one is rendered again in each
    epoch, with the same random choices.

    Args:
      rates: Name of each task -> its rate in the mixture.
      sequence_length: Tokens per row of `inputs` and of `targets`; longer examples are truncated.
      batch_size: Rows in a batch.
      **options: As for `MixedBatches`.
    """

    def __init__(
        self,
        rates: Mapping[str, float],
        sequence_length: Mapping[str, int],
        batch_size: int,
        **options: Any,
    ):
        self._tasks = {name: task_descriptions()[name] for name in sorted(rates)}
        in_order = {name: rates[name] for name in self._tasks}
        super().__init__(in_order, sequence_length, batch_size, **options)

    def _arguments(self) -> dict[str, Any]:
        return {"rendered": self._rates, **super()._arguments()}

    def _epochs(self, task: str, seed: int, shard: int) -> Iterator[Iterator[Example]]:
        del seed  # which decides nothing before examples are shuffled
        # Counting also checks all rows: an error in them comes before the first step.
        held = self._tasks[task].rows.num_input_examples(self._split) < HELD * self.num_shards
        return self._held(task, shard) if held else self._read_again(task, shard)

    def _read_again(self, task: str, shard: int) -> Iterator[Iterator[Example]]:
        while True:
            yield self._read(task, shard)

    def _held(self, task: str, shard: int) -> Iterator[Iterator[Example]]:
        """The same, rendered during the first epoch."""
        first, again = itertools.tee(self._read(task, shard))
        yield first
        examples = list(again)
        while True:
            yield iter(examples)

    def _read(self, task: str, shard: int) -> Iterator[Example]:
        read = prompted_examples(
            self._tasks[task],
            self._split,
            UNCUT,
            # SeqIO shards the rendered rows, before a twin makes an example of each choice.
            lambda rendered: itertools.islice(rendered, shard, None, self.num_shards),
        )
        for example in read:
            yield {name: example[name][: self._lengths[name]] for name in FEATURES}
