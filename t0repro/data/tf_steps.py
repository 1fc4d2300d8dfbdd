"""The light steps of a tf.data pipeline run where their example is.

SeqIO and Mesh TensorFlow map a function over single examples seven or more times, to select, cast
and truncate features, each time with `num_parallel_calls=AUTOTUNE`. Such a function takes a
microsecond or two. Passing the example to another thread and back, and AUTOTUNE's modeling of
that time, took ten times as long as everything else (benchmarks.md, "Full batches"). A
parallel map keeps its order, so the examples and their order do not change.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

# The functions of SeqIO 0.0.20, t5 0.9.4 and Mesh TensorFlow 0.1.21 that define light steps. All
# others stay parallel: packing, which processes 1,024 examples at once, reading files, and the
# tasks' own preprocessors.
_LIGHT = {
    # Parse a record, cast its integers, rename; AutoGraph prefixes functions that interleave calls
    # with tf__.
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
def run_light_steps_in_place() -> Iterator[None]:
    """Context in which new datasets run their light steps without starting threads."""
    import tensorflow as tf
    from tensorflow.python.data.ops import map_op

    original = tf.data.Dataset.map

    def map_in_place(self: Any, map_func: Callable[..., Any], *args: Any, **options: Any) -> Any:
        if _LIGHT.isdisjoint(map_func.__qualname__.split(".")):
            return original(self, map_func, *args, **options)
        # Dataset.map has no option for the executor that runs a function in the calling thread.
        return map_op._MapDataset(
            self, map_func, preserve_cardinality=True, use_inter_op_parallelism=False
        )

    tf.data.Dataset.map = map_in_place
    try:
        yield
    finally:
        tf.data.Dataset.map = original


def disable_autotune(dataset: Any) -> Any:
    """The dataset, whose parallel steps use as many threads as there are processors."""
    import tensorflow as tf

    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset.with_options(options)
