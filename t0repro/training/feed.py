"""The batches of a training run: where they come from, and which of them a process reads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from t0repro.errors import UserError
from t0repro.partitioning.devices import Partitioning
from t0repro.partitioning.processes import is_alone
from t0repro.progress import say
from t0repro.training.start import Start
from t0repro.training.t5_model import T5Model
from t0repro.training.trainer import NumpyBatch
from t0repro.words import counted

_TOKENS = {"inputs", "targets", "decoder_inputs"}


@runtime_checkable
class BatchSource(Protocol):
    """Batches whose position is saved in checkpoints, so that a resumed run continues from it."""

    def open(self, step: int, saved: Path | None) -> Iterable[NumpyBatch]:
        """Batches for the updates after a global step.

        Args:
          step: The global step that training starts from.
          saved: The folder that `save` wrote, in the checkpoint that training resumes from; None if
            there is no such folder, or if training begins in this model_dir.
        """
        ...

    def save(self, folder: Path) -> None:
        """Writes into a checkpoint's folder how many batches have been used."""
        ...


@runtime_checkable
class ShardedBatchSource(BatchSource, Protocol):
    """Batches whose rows come in `num_shards` equal shards, each of which can be left out."""

    num_shards: int

    def make_only(self, shards: Sequence[int]) -> None:
        """Leaves the rows of all other shards zeros; called before `open`."""
        ...


Batches = Iterable[NumpyBatch] | Callable[[], Iterable[NumpyBatch]] | BatchSource


class Feed:
    """Opens batches for a run's updates.

    With several processes, each builds only the shards of a source that have rows on its devices.
    For any other kind of batches, every process builds the full batch.

    Args:
      batches: The batches to train on.
      rows: Rows of a batch.
      model: Names the features that it reads, and knows so many tokens.
      partitioning: The devices.

    Attributes:
      is_source: Whether the batches know their position, and their shapes before they are read.
      save: Writes that position into a checkpoint's folder; None for other batches.
    """

    def __init__(
        self,
        batches: Batches,
        rows: int,
        model: T5Model,
        partitioning: Partitioning,
    ):
        self._batches, self._model = batches, model
        self._rows, self._vocab_size = rows, model.module.config.vocab_size
        self._put, self._is_sharded = partitioning.put_batch, False
        self.is_source = isinstance(batches, BatchSource)
        self.save = batches.save if isinstance(batches, BatchSource) else None
        if is_alone() or not isinstance(batches, ShardedBatchSource) or batches.num_shards == 1:
            return
        count = batches.num_shards
        local_shards = {row // (rows // count) for row in partitioning.rows_here(rows)}
        batches.make_only(sorted(local_shards))
        self._is_sharded = True
        say(f"data: {count} shards, of which this process reads {len(local_shards)}")

    def open(self, start: Start) -> Iterable[Any]:
        """The batches from where training continues, each checked before use."""
        batches = self._batches
        if isinstance(batches, BatchSource):
            batches = batches.open(start.step, start.data)
        elif callable(batches):
            batches = batches()
        checked = self._check_batches(batches)
        if not self._is_sharded:
            return checked
        # From here on a batch holds the rows of every process.
        return (self._put(self._model.features(batch)) for batch in checked)

    def _check_batches(self, batches: Iterable[NumpyBatch]) -> Iterator[NumpyBatch]:
        """The batches, each checked for its number of rows and token ids out of range."""
        vocab_size = self._vocab_size
        for batch in batches:
            for name in _TOKENS & batch.keys():
                # Of a batch in shards, each process has a part.
                if not self._is_sharded and len(batch[name]) != self._rows:
                    raise UserError(
                        f"A batch has {counted(len(batch[name]), 'row')}, but the run's batch_size"
                        f" is {self._rows}.",
                        where="batches",
                        fix="Give both the same batch_size.",
                    )
                # A negative target is a token without loss.
                if name != "targets" and (smallest := batch[name].min(initial=0)) < 0:
                    raise UserError(
                        f"A batch has the token {smallest:,}, which no vocabulary has.",
                        where=name,
                        fix="Let the task give tokens of its vocabulary, and 0 as padding.",
                    )
                # XLA clamps an index out of range: the run would train on the last embedding.
                if (largest := abs(batch[name]).max(initial=0)) >= vocab_size:
                    raise UserError(
                        f"A batch has the token {largest:,}, but the model's vocabulary is"
                        f" {vocab_size:,}.",
                        where=name,
                        fix="Give the model the vocabulary of the tasks, padded to a multiple of"
                        " 128.",
                    )
            yield batch
