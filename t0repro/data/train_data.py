"""The training batches of Mesh TensorFlow's mesh_train_dataset_fn, with their position."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from t0repro.config.run_config import RunConfig
from t0repro.config.training_plan import TrainDataConfig
from t0repro.data.batches import MODEL_FEATURES
from t0repro.data.resuming import Batch, ResumableBatches
from t0repro.data.seqio_data import SeqioTrainBatches, runs_python
from t0repro.errors import UserError


class TrainBatches(ResumableBatches):
    """The batches of a RunConfig's training data; implements `training.batches.BatchSource`.

    Args:
      config: A configuration of mode "train".
      has_checkpoint: Whether model_dir has a checkpoint of any kind, which is what Mesh TensorFlow
        takes to mean that a run is resumed.
    """

    def __init__(self, config: RunConfig, *, has_checkpoint: bool = False):
        data = config.plan.train_data
        assert isinstance(data, TrainDataConfig) and config.sequence_length is not None
        self._config, self._data = config, data
        self._has_checkpoint = has_checkpoint
        super().__init__(self._data.seed, self._data.num_shards)

    def _is_resumed(self) -> bool:
        # Bound either way, skip_seen_data is Mesh TensorFlow's own way to resume and
        # decides alone.
        return self._data.skip_seen_data is None and self._has_checkpoint

    def _first(self, step: int, position: Mapping[str, Any]) -> int:
        if self._data.skip_seen_data and self._has_checkpoint:
            # Mesh TensorFlow counts from the step at which the data began, whatever was
            # really read.
            return max(0, step - self._data.seen_data_init_step)
        return super()._first(step, position)

    def _to_numpy(self, element: Mapping[str, Any]) -> Batch:
        return {
            name: element[name].numpy().astype(np.int32)
            for name in MODEL_FEATURES
            if name in element
        }

    def _can_save_iterator(self, dataset: Any) -> bool:
        """Whether the input pipeline's state is asked for.

        Raises:
          UserError: If it is, but the data are not cached.
        """
        if not self._data.checkpoint_input_pipeline:
            return False
        # tf.data saves the state of Python generators without complaint, even with the
        # external-state policy FAIL (docs/decisions/0012). With use_cached too, tasks that
        # SeqIO cannot cache may run them.
        if not self._data.use_cached or runs_python(dataset):
            raise UserError(
                "The input pipeline cannot be saved: it runs Python functions.",
                where="run.checkpoint_input_pipeline",
                fix="Cache the tasks and bind mesh_train_dataset_fn.use_cached = True, or"
                " remove the binding: a resumed run finds its place all the same.",
            )
        return True

    def _arguments(self) -> dict[str, Any]:
        data = self._data
        return {
            "mixture_or_task_name": data.mixture_or_task_name,
            "split": data.split,
            "use_cached": data.use_cached,
            "pack": data.pack,
            "shuffle": data.shuffle,
            "sequence_length": dict(self._config.sequence_length or {}),
            "batch_size": self._config.batch_size,
            "num_shards": data.num_shards,
        }

    def _dataset(self, seed: int, shard: int = 0) -> Any:
        """Endless batches as `train_model` makes them: a tf.data.Dataset of int tensors by feature.

        Source: mesh_tensorflow.transformer.utils.train_model, which repeats the dataset and drops
        any remainder that does not fill a batch.
        """
        from t0repro import compat

        compat.install()
        from t5.models import mesh_transformer

        data, config = self._data, self._config
        assert config.sequence_length is not None
        # The state of tf.data's iterator can only be read into a pipeline like the one that saved
        # it, so such a pipeline stays as it is, as does one without a cache, which was not timed.
        light = data.use_cached and not data.checkpoint_input_pipeline
        with (
            light_steps_in_place() if light else contextlib.nullcontext(),
            reading_shard(data.mixture_or_task_name, shard, data.num_shards),
        ):
            dataset = mesh_transformer.mesh_train_dataset_fn(
                mixture_or_task_name=data.mixture_or_task_name,
                sequence_length=dict(config.sequence_length),
                dataset_split=data.split,
                shuffle=data.shuffle,
                seed=seed,
                use_cached=data.use_cached,
                pack=data.pack,
            )
        rows = config.batch_size // data.num_shards
        batches = dataset.repeat().batch(rows, drop_remainder=True).prefetch(2)
        return without_autotune(batches) if light else batches


def train_batches(config: RunConfig, *, resumed: bool) -> ResumableBatches:
    """The training batches of a run, by the dataset function that its plan's data are for.

    Args:
      config: A configuration of mode "train" with data.
      resumed: Whether model_dir has a checkpoint of any kind.
    """
    plan = config.plan
    assert plan.train_data is not None, "a command has data to train on"
    if isinstance(plan.train_data, TrainDataConfig):
        return TrainBatches(config, has_checkpoint=resumed)
    saves = plan.save is not None and plan.save.data
    return SeqioTrainBatches(plan.train_data, save_dataset=saves, resumed=resumed)


@contextlib.contextmanager
def reading_shard(name: str, shard: int, num_shards: int) -> Iterator[None]:
    """Context in which a task or mixture gives one shard of its examples, as SeqIO divides them.

    t5's mesh_train_dataset_fn has no argument for it.
    """
    import seqio

    if num_shards == 1:
        yield
        return
    provider = seqio.get_mixture_or_task(name)
    info = seqio.ShardInfo(shard, num_shards)
    # In the place of the method, for this object alone.
    provider.get_dataset = functools.partial(provider.get_dataset, shard_info=info)
    try:
        yield
    finally:
        del provider.get_dataset


# ---- The light steps of a tf.data pipeline run where their example is ----------------------------

# SeqIO and Mesh TensorFlow map a function over single examples seven or more times to select,
# cast and cut features, each time with `num_parallel_calls=AUTOTUNE`. Such a function takes a
# microsecond or two; handing the example to another thread and back, and modelling for AUTOTUNE
# what that took, took ten times what is left without it (docs/benchmarks.md, "Full batches"). A
# parallel map keeps its order, so the examples and their order are the same either way.


# The functions of SeqIO 0.0.20, t5 0.9.4 and Mesh TensorFlow 0.1.21 that define light steps. Every
# other stays parallel: packing, which works on 1,024 examples at once, the reading of files, and
# the tasks' own preprocessors.
_LIGHT = {
    # Parse a record, cast its integers, rename; AutoGraph puts tf__ before what interleaving calls.
    "tf__read_file_fn",
    "tf___rename_plaintext_to_pretokenized",
    "trim_dataset",
    "get_task_dataset",
    "mesh_train_dataset_fn",
    "pack_dataset",
    "trim_and_pad_dataset",
    "ensure_dataset_eos",
}


@contextlib.contextmanager
def light_steps_in_place() -> Iterator[None]:
    """Context in which datasets are built whose light steps start no thread."""
    import tensorflow as tf
    from tensorflow.python.data.ops import map_op

    original = tf.data.Dataset.map

    def map_in_place(self: Any, map_func: Callable[..., Any], *args: Any, **options: Any) -> Any:
        if _LIGHT.isdisjoint(map_func.__qualname__.split(".")):
            return original(self, map_func, *args, **options)
        # Dataset.map does not offer the executor that runs a function in the thread that asks.
        return map_op._MapDataset(
            self, map_func, preserve_cardinality=True, use_inter_op_parallelism=False
        )

    tf.data.Dataset.map = map_in_place
    try:
        yield
    finally:
        tf.data.Dataset.map = original


def without_autotune(dataset: Any) -> Any:
    """The dataset, whose parallel steps use as many threads as there are processors."""
    import tensorflow as tf

    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset.with_options(options)
