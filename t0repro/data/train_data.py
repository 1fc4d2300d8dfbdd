"""Training batches that track their position, so that a resumed run continues exactly.

A checkpoint's folder `data/` holds position.json:

    batches     number trained on since the data began
    seed        for the order of the data: bound in gin, or drawn when the run began
    arguments   what else decides the order (the mixture, lengths, the batch size, ...)

and, with run.checkpoint_input_pipeline = True, the state of tf.data's iterator. Without that state
the batches before the position are made again and skipped. This is exact on every path, because a
given seed produces the same data in every process.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from t0repro.config.run_config import RunConfig, TrainDataConfig
from t0repro.data.batches import MODEL_FEATURES
from t0repro.errors import UserError
from t0repro.files import write_atomically
from t0repro.progress import count_progress
from t0repro.words import counted

POSITION, ITERATOR = "position.json", "iterator"
_FEW = 50  # skipping fewer batches than this shows no progress bar

Say = Callable[[str], None]


class TrainBatches:
    """The batches of a RunConfig's training data; implements training.train.BatchSource.

    Args:
      config: A configuration of mode "train".
      has_checkpoint: Whether model_dir has a checkpoint of any kind, which is what Mesh TensorFlow
        takes to mean that a run is resumed.
    """

    def __init__(self, config: RunConfig, *, has_checkpoint: bool = False):
        assert config.train_data is not None and config.sequence_length is not None
        self._config, self._data = config, config.train_data
        self._has_checkpoint = has_checkpoint
        self._seed = self._data.seed
        self._taken = 0
        self._iterator: Any = None

    def open(self, step: int, saved: Path | None, say: Say) -> Iterator[dict[str, np.ndarray]]:
        """Batches from where the run continues; see `training.train.BatchSource`.

        Raises:
          UserError: If the input pipeline's state is to be saved but the data are not cached.
        """
        position = self._position(saved, say)
        if self._seed is None:
            # Drawn here and saved: without a seed, a resumed run could not make its batches again.
            self._seed = position.get("seed") or secrets.randbits(31) + 1
        self._taken = self._first(step, position)
        if self._data.checkpoint_input_pipeline:
            self._check_iterator()
        self._iterator = iter(_dataset(self._config, self._seed))
        if self._taken:
            self._go_on(saved, position, say)
        return self._batches()

    def save(self, folder: Path) -> None:
        """Writes the position after the last batch taken, and the pipeline's state if asked for."""
        position = {"batches": self._taken, "seed": self._seed, "arguments": self._arguments()}
        if self._data.checkpoint_input_pipeline:
            self._tracked().write(str(folder / ITERATOR))
            position["iterator"] = ITERATOR
        write_atomically(folder / POSITION, json.dumps(position, indent=1) + "\n")

    def _batches(self) -> Iterator[dict[str, np.ndarray]]:
        for batch in self._iterator:
            self._taken += 1
            yield {
                name: batch[name].numpy().astype(np.int32)
                for name in MODEL_FEATURES
                if name in batch
            }

    def _position(self, saved: Path | None, say: Say) -> dict[str, Any]:
        """The position that a checkpoint records, or {} to start over, with the reason reported."""
        if self._data.skip_seen_data is not None or not self._has_checkpoint:
            return {}
        if saved is None or not (saved / POSITION).is_file():
            say("data: from the beginning, since the checkpoint does not say where they were")
            return {}
        position = json.loads((saved / POSITION).read_text())
        ours, theirs = self._arguments(), position["arguments"]
        changed = [name for name in ours if ours[name] != theirs.get(name)]
        if self._data.seed not in (None, position["seed"]):
            changed.append("seed")
        if changed:
            say(f"data: from the beginning, since {' and '.join(changed)} changed")
            return {}
        return position

    def _first(self, step: int, position: dict[str, Any]) -> int:
        """Number of batches to skip before the first one."""
        if self._data.skip_seen_data and self._has_checkpoint:
            return max(0, step - self._data.seen_data_init_step)
        return int(position.get("batches", 0))

    def _go_on(self, saved: Path | None, position: dict[str, Any], say: Say) -> None:
        """Moves the iterator past the batches already taken."""
        taken = counted(self._taken, "batch", "batches")
        if self._data.checkpoint_input_pipeline and position.get("iterator"):
            assert saved is not None
            say(f"data: after {taken}, by the input pipeline's state")
            self._tracked().read(str(saved / ITERATOR)).assert_consumed()
            return
        say(f"data: after {taken}, which are made again and skipped")
        if self._taken < _FEW:
            for _ in range(self._taken):
                next(self._iterator)
            return
        with count_progress(self._taken, "passing over", "batches", "passed over") as advance:
            for _ in range(self._taken):
                next(self._iterator)
                advance(1)

    def _tracked(self) -> Any:
        import tensorflow as tf

        return tf.train.Checkpoint(iterator=self._iterator)

    def _check_iterator(self) -> None:
        """Refuses to save the state of a pipeline that runs Python functions."""
        # tf.data saves the state of Python generators without complaint, even with the
        # external-state policy FAIL (tried; see docs/decisions.md).
        if not self._data.use_cached:
            raise UserError(
                "The input pipeline cannot be saved: it runs Python functions.",
                where="run.checkpoint_input_pipeline",
                fix="Cache the tasks and bind mesh_train_dataset_fn.use_cached = True, or"
                " remove the binding: a resumed run finds its place all the same.",
            )

    def _arguments(self) -> dict[str, Any]:
        """What decides the batches, apart from the seed."""
        data = self._data
        return {
            "mixture_or_task_name": data.mixture_or_task_name,
            "split": data.split,
            "use_cached": data.use_cached,
            "pack": data.pack,
            "shuffle": data.shuffle,
            "sequence_length": dict(self._config.sequence_length or {}),
            "batch_size": self._config.batch_size,
        }


def _dataset(config: RunConfig, seed: int | None) -> Any:
    """Endless batches as `train_model` makes them: a tf.data.Dataset of int tensors by feature.

    Source: mesh_tensorflow.transformer.utils.train_model, which repeats the dataset and drops any
    remainder that does not fill a batch.
    """
    from t0repro.mesh import compat

    compat.install()
    from t5.models import mesh_transformer

    data = config.train_data
    assert isinstance(data, TrainDataConfig) and config.sequence_length is not None
    dataset = mesh_transformer.mesh_train_dataset_fn(
        mixture_or_task_name=data.mixture_or_task_name,
        sequence_length=dict(config.sequence_length),
        dataset_split=data.split,
        shuffle=data.shuffle,
        seed=seed,
        use_cached=data.use_cached,
        pack=data.pack,
    )
    return dataset.repeat().batch(config.batch_size, drop_remainder=True).prefetch(2)
