"""The batches of a run's training data in either dialect, and their position.

Rows hold packed examples, or an example and its answer choices, as ChoiceLoss needs them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from t0repro import compat
from t0repro.config.data import Converter, SeqioDataConfig, TrainDataConfig
from t0repro.config.run import TrainingPlan, TrainRun, to_seqio_config
from t0repro.data.batches import MODEL_FEATURES, mesh_train_dataset
from t0repro.data.choice_batches import ChoiceBatches
from t0repro.data.described_batches import make_described_batches, make_mesh_batches
from t0repro.data.fingerprints import Fingerprint, fingerprint_mixture
from t0repro.data.resuming import Batch, ResumableBatches
from t0repro.data.tf_steps import disable_autotune, run_light_steps_in_place
from t0repro.errors import UserError
from t0repro.progress import say
from t0repro.tasks.registry import find_tasks, is_described, registered_mixtures

# seqio.EncDecFeatureConverter's features -> those of t0repro.data.batches.
FEATURE_NAMES = {
    "encoder_input_tokens": "inputs",
    "encoder_positions": "inputs_position",
    "encoder_segment_ids": "inputs_segmentation",
    "decoder_target_tokens": "targets",
    "decoder_positions": "targets_position",
    "decoder_segment_ids": "targets_segmentation",
}


# The same for the other two converters.
DECODER_NAMES = FEATURE_NAMES | {
    "decoder_loss_weights": "loss_weights",
    "decoder_causal_attention": "full_attention",
}
PASSED_NAMES = DECODER_NAMES | {"decoder_input_tokens": "decoder_inputs"}


class SeqioTrainBatches(ResumableBatches):
    """The endless training batches of a dataset; implements `training.feed.BatchSource`.

    Without `save_dataset`, a resumed run reads its data from the beginning again, as in T5X. With
    it, checkpoints contain the state of SeqIO's input pipeline. A pipeline that runs Python
    functions, or batches made without SeqIO, have no state to save; checkpoints then contain the
    position, and earlier batches are rebuilt and skipped.

    Args:
      data: The dataset, with sequence_length set.
      save_dataset: Whether checkpoints record the position in the data.
      resumed: Whether training continues from a checkpoint of its own model_dir.
    """

    def __init__(self, data: SeqioDataConfig, *, save_dataset: bool, resumed: bool = False):
        super().__init__(data.seed, data.num_shards)
        self._data, self._save_dataset, self._resumed = data, save_dataset, resumed

    def open(self, step: int, saved: Path | None) -> Iterator[Batch]:
        """Batches from where the run continues; see `training.feed.BatchSource`."""
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
        # Without SeqIO there is no state of a pipeline; batches before the position are skipped.
        return self._save_dataset and not self._is_described and not runs_python(dataset)

    @functools.cached_property
    def _is_described(self) -> bool:
        """Whether the tasks are read without SeqIO, which has not been given them."""
        return is_described(self._data.mixture_or_task_name)

    def _to_numpy(self, element: Mapping[str, Any]) -> Batch:
        if self._is_described:
            return dict(element)
        features = {name: tensor.numpy() for name, tensor in element.items()}
        return rename_seqio_features(features, self._data.converter)

    def _arguments(self) -> dict[str, Any]:
        values = dataclasses.asdict(self._data)
        return {
            name: values[name]
            for name in values
            if name not in ("seed", "use_memory_cache")  # neither decides a batch's contents
            # Checkpoints from before there was a choice do not have it.
            and (name, values[name]) != ("converter", "encoder_decoder")
        }

    def fingerprint(self) -> Fingerprint:
        """See `ResumableBatches`; nothing without `save_dataset`, which records no position."""
        data = self._data
        if not self._save_dataset:
            return {}
        return fingerprint_mixture(
            data.mixture_or_task_name, data.split, use_cached=data.use_cached
        )

    def dataset(self, seed: int, shard: int = 0) -> Any:
        """Endless batches of a shard for a seed; see `ResumableBatches`."""
        if self._is_described:
            return make_described_batches(self._data, seed).dataset(seed, shard)
        return seqio_dataset(self._data, seed=seed, num_epochs=None, shard=shard).prefetch(2)


def make_train_eval_batches(plan: TrainingPlan) -> Mapping[str, EvalBatches]:
    """Batches for evaluating a run's loss, by task; none if no task has the split."""
    data = plan.train_eval_data
    if data is None:
        return {}
    batches = EvalBatches.for_each_task(data, plan.eval_steps)
    if not batches:
        say(f"train_eval: no task of {data.mixture_or_task_name} has {data.split}")
    return batches


class EvalBatches:
    """The first batches of a dataset, the same at each iteration.

    Args:
      data: The dataset; its seed may be None only if nothing is random.
      eval_steps: Number of batches.
    """

    def __init__(self, data: SeqioDataConfig, eval_steps: int):
        self._data, self._steps = data, eval_steps
        self._in_memory: list[Batch] = []

    @classmethod
    def for_each_task(cls, data: SeqioDataConfig, eval_steps: int) -> dict[str, EvalBatches]:
        """Batches for evaluating the loss: for each task with the split, and for a mixture of them.

        Each has `eval_steps` full batches; if there are too few examples, they repeat. Returns no
        batches if no task has the split.

        Source: t5x.utils.get_training_eval_datasets.
        """
        provider = data.mixture_or_task_name
        names = [task.name for task in find_tasks(provider) if data.split in task.splits]
        if names and provider in registered_mixtures():
            names.append(provider)
        return {
            name: cls(dataclasses.replace(data, mixture_or_task_name=name), eval_steps)
            for name in names
        }

    def __iter__(self) -> Iterator[Batch]:
        """Reads the batches, or takes them from memory.

        Raises:
          UserError: If there are no examples.
        """
        if self._in_memory:
            yield from self._in_memory
            return
        batches: list[Batch] = []
        for batch in self._batches():
            batches.append(batch)
            yield batch
        if not batches:
            raise UserError(
                f"{self._data.mixture_or_task_name!r} has no example to evaluate.",
                where=f"split {self._data.split!r}",
                fix="Choose another split, or remove the task from the mixture.",
            )
        # Keep them only after a full pass: an abandoned iteration has too few batches.
        if self._data.use_memory_cache:
            self._in_memory = batches

    def _batches(self) -> Iterator[Batch]:
        if is_described(self._data.mixture_or_task_name):
            yield from make_described_batches(self._data, self._data.seed).first(self._steps)
            return
        # A finite number of epochs ends even if every example is filtered out.
        rows = seqio_dataset(
            dataclasses.replace(self._data, batch_size=1),
            seed=self._data.seed,
            num_epochs=self._steps * self._data.batch_size,
        )
        # Batch again across epochs, so that a task with fewer examples than a batch still fills
        # one.
        batches = rows.unbatch().repeat().batch(self._data.batch_size, drop_remainder=True)
        for batch in batches.take(self._steps).as_numpy_iterator():
            yield rename_seqio_features(batch, self._data.converter)


def seqio_dataset(
    data: SeqioDataConfig, *, seed: int | None, num_epochs: int | None, shard: int = 0
) -> Any:
    """The batched tf.data.Dataset with the features that the data's converter makes.

    Args:
      data: The dataset; its own seed is not read.
      seed: Seed for the order of examples and for random preprocessors.
      num_epochs: How many times to go through the examples; None repeats them without end.
      shard: Which of `data.num_shards` shards; its batches have that many times fewer rows. It
        equals what T5X reads on one of that many hosts.
    """
    converter = make_seqio_converter(data.converter, pack=data.pack)
    import seqio

    assert data.sequence_length is not None
    return seqio.get_dataset(
        data.mixture_or_task_name,
        task_feature_lengths=dict(data.sequence_length),
        feature_converter=converter,
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


def make_seqio_converter(name: Converter, *, pack: bool = False) -> Any:
    """SeqIO's converter of examples to a model's features, packed several to a row or not."""
    # compat has to be installed before anything imports t5 or seqio.
    compat.install()
    import seqio

    # SeqIO's Evaluator reads both, which its own class lacks.
    lacking = {"TASK_FEATURES": {}, "pack": False}
    pass_through = type("PassThrough", (seqio.PassThroughFeatureConverter,), lacking)
    converters: dict[Converter, Any] = {
        "encoder_decoder": seqio.EncDecFeatureConverter,
        "decoder": seqio.DecoderFeatureConverter,
        "pass_through": pass_through,
    }
    return converters[name](pack=pack)


def rename_seqio_features(
    batch: Mapping[str, Any], converter: Converter = "encoder_decoder"
) -> Batch:
    """A SeqIO batch under this project's names: int32 [batch_size, length]; float32 fractions.

    Raises:
      UserError: If a batch that is passed through lacks what the decoder reads or has loss at
        padding.
    """
    names = {"encoder_decoder": FEATURE_NAMES, "decoder": DECODER_NAMES}.get(
        converter, PASSED_NAMES
    )
    renamed: dict[str, np.ndarray] = {
        name: np.asarray(batch[t5x_name], np.int32)
        for t5x_name, name in names.items()
        if t5x_name in batch
    }
    # A batch without targets is refused by the model, by name.
    if converter != "pass_through" or "targets" not in renamed:
        return renamed
    if "decoder_inputs" not in renamed:
        raise UserError(
            "A batch has no decoder_input_tokens.",
            where="seqio.PassThroughFeatureConverter",
            fix="Let the task give what the decoder reads: its targets, shifted right by one.",
        )
    # With a loss_normalizing_factor that is a number, T5X's loss counts every position without
    # weights; with a named one, the targets > 0. The two are the same if nothing is padding.
    weights = np.asarray(batch.get("decoder_loss_weights", np.ones_like(renamed["targets"])))
    if (weights[renamed["targets"] <= 0] != 0).any():
        raise UserError(
            "A batch has loss where decoder_target_tokens is padding (0)."
            if "decoder_loss_weights" in batch
            else "A batch has padding (0) in decoder_target_tokens and no decoder_loss_weights.",
            where="decoder_loss_weights",
            fix="Let the task give decoder_loss_weights that are 0 at padding, where this model's"
            " logits are not T5X's.",
        )
    renamed["loss_weights"] = weights.astype(np.float32 if weights.dtype.kind == "f" else np.int32)
    return renamed


def runs_python(dataset: Any) -> bool:
    """Whether a tf.data pipeline calls Python functions, whose state TensorFlow cannot save.

    TensorFlow does not report it: it saves such a pipeline's state without an error, and restores
    it to another place (decision 12).
    """
    import tensorflow as tf

    graph = tf.raw_ops.DatasetToGraphV2(
        # tf.data has no public function that returns a pipeline's graph.
        input_dataset=dataset._variant_tensor,
        external_state_policy=1,  # ignore stateful operations, since this code searches for them
        strip_device_assignment=True,
    )
    return b"PyFunc" in graph.numpy()


class TrainBatches(ResumableBatches):
    """The batches of a TrainRun's training data; implements `training.feed.BatchSource`.

    Args:
      config: A configuration of mode "train".
      has_checkpoint: Whether model_dir has a checkpoint of any kind, by which Mesh TensorFlow
        decides whether a run is resumed.
    """

    def __init__(self, config: TrainRun, *, has_checkpoint: bool = False):
        data = config.plan.train_data
        assert isinstance(data, TrainDataConfig) and config.sequence_length is not None
        self._config, self._data = config, data
        self._has_checkpoint = has_checkpoint
        super().__init__(self._data.seed, self._data.num_shards)

    def open(self, step: int, saved: Path | None) -> Iterator[Batch]:
        """Batches from where the run continues; see `training.feed.BatchSource`."""
        batches = super().open(step, saved)
        if self._data.seed is None:
            say(
                f"data: the examples' order is from seed {self._seed}, because"
                " mesh_train_dataset_fn.seed is not bound"
            )
        return batches

    def _is_resumed(self) -> bool:
        # If skip_seen_data is bound either way, Mesh TensorFlow's own way to resume applies.
        return self._data.skip_seen_data is None and self._has_checkpoint

    def _first(self, step: int, position: Mapping[str, Any]) -> int:
        if self._data.skip_seen_data and self._has_checkpoint:
            # Mesh TensorFlow counts from the step at which the data began, whatever was actually
            # read.
            return max(0, step - self._data.seen_data_init_step)
        return super()._first(step, position)

    def _to_numpy(self, element: Mapping[str, Any]) -> Batch:
        if is_described(self._data.mixture_or_task_name):
            return dict(element)
        return {
            name: element[name].numpy().astype(np.int32)
            for name in MODEL_FEATURES
            if name in element
        }

    def _can_save_iterator(self, dataset: Any) -> bool:
        """Whether the configuration requests the input pipeline's state.

        Raises:
          UserError: If it does, but the data is not cached.
        """
        if not self._data.checkpoint_input_pipeline:
            return False
        # tf.data saves the state of Python generators without an error, even with the
        # external-state policy FAIL (decision 12). Even with use_cached, tasks that SeqIO
        # cannot cache may run such generators.
        described = is_described(self._data.mixture_or_task_name)
        if not self._data.use_cached or (not described and runs_python(dataset)):
            raise UserError(
                "The input pipeline cannot be saved: it runs Python functions.",
                where="run.checkpoint_input_pipeline",
                fix="Cache the tasks and bind mesh_train_dataset_fn.use_cached = True, or"
                " remove the binding: resuming works without it.",
            )
        # Without SeqIO, batches before the position are rebuilt and skipped instead.
        return not described

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

    def fingerprint(self) -> Fingerprint:
        """See `ResumableBatches`."""
        data = self._data
        return fingerprint_mixture(
            data.mixture_or_task_name, data.split, use_cached=data.use_cached
        )

    def dataset(self, seed: int, shard: int = 0) -> Any:
        """Endless batches as `train_model` makes them: a tf.data.Dataset of int tensors by feature.

        Source: mesh_tensorflow.transformer.utils.train_model, which repeats the dataset and drops
        any remainder that does not fill a batch.
        """
        data, config = self._data, self._config
        if is_described(data.mixture_or_task_name):
            return make_mesh_batches(to_seqio_config(data, config), seed, shard)
        compat.install()
        assert config.sequence_length is not None
        # tf.data can restore an iterator's state only into a pipeline like the one that saved it,
        # so leave such a pipeline unchanged, and also one without a cache, which was not timed.
        light = data.use_cached and not data.checkpoint_input_pipeline
        with (
            run_light_steps_in_place() if light else contextlib.nullcontext(),
            read_only_shard(data.mixture_or_task_name, shard, data.num_shards),
        ):
            dataset = mesh_train_dataset(data, config.sequence_length, seed)
        rows = config.batch_size // data.num_shards
        batches = dataset.repeat().batch(rows, drop_remainder=True).prefetch(2)
        return disable_autotune(batches) if light else batches


def train_batches(config: TrainRun, *, resumed: bool) -> ResumableBatches:
    """The training batches of a run, made by its plan's dataset function.

    Args:
      config: A configuration of mode "train" with data.
      resumed: Whether model_dir has a checkpoint of any kind.
    """
    plan = config.plan
    assert plan.train_data is not None, "a command has data to train on"
    if config.model.choice_loss is not None:
        return ChoiceBatches(config)
    if isinstance(plan.train_data, TrainDataConfig):
        return TrainBatches(config, has_checkpoint=resumed)
    saves = plan.save is not None and plan.save.data
    return SeqioTrainBatches(plan.train_data, save_dataset=saves, resumed=resumed)


@contextlib.contextmanager
def read_only_shard(name: str, shard: int, num_shards: int) -> Iterator[None]:
    """Context in which a task or mixture yields one shard of its examples, as SeqIO divides them.

    t5's mesh_train_dataset_fn has no argument for this.
    """
    import seqio

    if num_shards == 1:
        yield
        return
    provider = seqio.get_mixture_or_task(name)
    info = seqio.ShardInfo(shard, num_shards)
    # Replace the method for this object only.
    provider.get_dataset = functools.partial(provider.get_dataset, shard_info=info)
    try:
        yield
    finally:
        del provider.get_dataset
