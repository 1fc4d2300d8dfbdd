"""Batches as T5X's DatasetConfig gives them: SeqIO's get_dataset and encoder-decoder converter.

SeqIO makes every batch itself, so their order is the one that T5X sees; only the names of the
features change to this project's (`t0repro.data.batches`). What the model derives by itself, the
decoder's inputs and the loss weights, is left out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from t0repro.config.training_plan import SeqioDataConfig, TrainingPlan
from t0repro.data.resuming import Batch, ResumableBatches
from t0repro.errors import UserError
from t0repro.progress import say

# seqio.EncDecFeatureConverter's features -> those of t0repro.data.batches.
FEATURE_NAMES = {
    "encoder_input_tokens": "inputs",
    "encoder_positions": "inputs_position",
    "encoder_segment_ids": "inputs_segmentation",
    "decoder_target_tokens": "targets",
    "decoder_positions": "targets_position",
    "decoder_segment_ids": "targets_segmentation",
}


class SeqioTrainBatches(ResumableBatches):
    """The endless training batches of a dataset; implements `training.batches.BatchSource`.

    Without `save_dataset`, a resumed run reads its data from the beginning again, as in T5X. With
    it, checkpoints hold the state of the input pipeline. If the pipeline runs Python functions, it
    has no state to save; checkpoints then hold the position, and earlier batches are rebuilt and
    skipped.

    Args:
      data: The dataset; its sequence_length is given.
      save_dataset: Whether checkpoints say where the data were.
      resumed: Whether training continues from a checkpoint of its own model_dir.
    """

    def __init__(self, data: SeqioDataConfig, *, save_dataset: bool, resumed: bool = False):
        super().__init__(data.seed, data.num_shards)
        self._data, self._save_dataset, self._resumed = data, save_dataset, resumed

    def open(self, step: int, saved: Path | None) -> Iterator[Batch]:
        """Batches from where the run continues; see `training.batches.BatchSource`."""
        if self._data.seed is not None and not self._save_dataset:
            say(
                "warning: the data have a seed but are not saved in checkpoints: after each restart"
                " the run sees the same examples from the beginning; bind"
                " utils.SaveCheckpointConfig.save_dataset = True"
            )
        return super().open(step, saved)

    def save(self, folder: Path) -> None:
        """Writes the position after the last batch taken, if the dataset is to be saved."""
        if self._save_dataset:
            super().save(folder)

    def _is_resumed(self) -> bool:
        if self._resumed and not self._save_dataset:
            say("data: from the beginning, because save_dataset is False")
        return self._resumed and self._save_dataset

    def _can_save_iterator(self, dataset: Any) -> bool:
        return self._save_dataset and not runs_python(dataset)

    def _to_numpy(self, element: Mapping[str, Any]) -> Batch:
        return renamed({name: tensor.numpy() for name, tensor in element.items()})

    def _arguments(self) -> dict[str, Any]:
        values = dataclasses.asdict(self._data)
        return {
            name: values[name]
            for name in values
            if name not in ("seed", "use_memory_cache")  # neither decides what a batch holds
        }

    def _dataset(self, seed: int, shard: int = 0) -> Any:
        return seqio_dataset(self._data, seed=seed, num_epochs=None, shard=shard).prefetch(2)


def train_eval_batches(data: SeqioDataConfig, eval_steps: int) -> dict[str, EvalBatches]:
    """Batches for evaluating the loss: for each task with the split, and for a mixture of them.

    Each has `eval_steps` full batches; examples repeat where there are too few. No batches at all
    if no task has the split.

    Source: t5x.utils.get_training_eval_datasets.
    """
    import seqio

    provider = seqio.get_mixture_or_task(data.mixture_or_task_name)
    names = [task.name for task in seqio.get_subtasks(provider) if data.split in task.splits]
    if names and isinstance(provider, seqio.Mixture):
        names.append(provider.name)
    return {
        name: EvalBatches(dataclasses.replace(data, mixture_or_task_name=name), eval_steps)
        for name in names
    }


def train_eval(plan: TrainingPlan) -> Mapping[str, EvalBatches]:
    """Batches for evaluating a run's loss, by task; none if no task has the split."""
    data = plan.train_eval_data
    if data is None:
        return {}
    found = train_eval_batches(data, plan.eval_steps)
    if not found:
        say(f"train_eval: no task of {data.mixture_or_task_name} has {data.split}")
    return found


class EvalBatches:
    """The first batches of a dataset, the same ones each time that it is iterated over.

    Args:
      data: The dataset; its seed may be None only if nothing is random.
      eval_steps: Number of batches.
    """

    def __init__(self, data: SeqioDataConfig, eval_steps: int):
        self._data, self._steps = data, eval_steps
        self._kept: list[Batch] = []

    def __iter__(self) -> Iterator[Batch]:
        """Reads the batches, or takes them from memory.

        Raises:
          UserError: If there is no example.
        """
        if self._kept:
            yield from self._kept
            return
        batches: list[Batch] = []
        for batch in self._dataset().as_numpy_iterator():
            batches.append(renamed(batch))
            yield batches[-1]
        if not batches:
            raise UserError(
                f"{self._data.mixture_or_task_name!r} has no example to evaluate.",
                where=f"split {self._data.split!r}",
                fix="Choose another split, or remove the task from the mixture.",
            )
        # Kept only after a full pass: an iteration that was given up has too few batches.
        if self._data.use_memory_cache:
            self._kept = batches

    def _dataset(self) -> Any:
        # A finite number of epochs ends even if every example is filtered out.
        rows = seqio_dataset(
            dataclasses.replace(self._data, batch_size=1),
            seed=self._data.seed,
            num_epochs=self._steps * self._data.batch_size,
        )
        # Batched again across epochs, so that a task with fewer examples than a batch still
        # fills them.
        batches = rows.unbatch().repeat().batch(self._data.batch_size, drop_remainder=True)
        return batches.take(self._steps)


def seqio_dataset(
    data: SeqioDataConfig, *, seed: int | None, num_epochs: int | None, shard: int = 0
) -> Any:
    """The batched tf.data.Dataset with the features of seqio.EncDecFeatureConverter.

    Args:
      data: The dataset; its own seed is not read.
      seed: Seed for the order of examples and for random preprocessors.
      num_epochs: How many times to go through the examples; None repeats them without end.
      shard: Which of `data.num_shards` shards, whose batches have as many times fewer rows. It is
        what T5X reads on one of so many hosts.
    """
    # compat has to be installed before anything imports t5 or seqio.
    from t0repro import compat

    compat.install()
    import seqio

    assert data.sequence_length is not None
    return seqio.get_dataset(
        data.mixture_or_task_name,
        task_feature_lengths=dict(data.sequence_length),
        feature_converter=seqio.EncDecFeatureConverter(pack=data.pack),
        dataset_split=data.split,
        use_cached=data.use_cached,
        shuffle=data.shuffle,
        num_epochs=num_epochs,
        seed=seed,
        batch_size=data.batch_size // data.num_shards,
        shard_info=None if data.num_shards == 1 else seqio.ShardInfo(shard, data.num_shards),
        trim_output_features=data.trim_output_features,
        verbose=False,
    )


def renamed(batch: Mapping[str, Any]) -> Batch:
    """A SeqIO batch under this project's names: int32 [batch_size, length]."""
    return {
        ours: np.asarray(batch[theirs], np.int32)
        for theirs, ours in FEATURE_NAMES.items()
        if theirs in batch
    }


def runs_python(dataset: Any) -> bool:
    """Whether a tf.data pipeline calls Python functions, whose state TensorFlow cannot save.

    It does not say so itself: it saves such a pipeline's state without an error, and restores it
    to another place (docs/decisions/0012).
    """
    import tensorflow as tf

    graph = tf.raw_ops.DatasetToGraphV2(
        # tf.data has no public function that gives a pipeline's graph.
        input_dataset=dataset._variant_tensor,
        external_state_policy=1,  # ignore stateful operations, which this is to find
        strip_device_assignment=True,
    )
    return b"PyFunc" in graph.numpy()
