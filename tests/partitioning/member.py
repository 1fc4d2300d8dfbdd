"""One process of several that train a small model on CPU, as a program:

    python member.py JSON

Which one it is, the environment says. JSON: {"folder": model_dir, "steps": last step, "data",
"model", "fully_sharded": the layout, "in_shards": true for batches in four shards, "at": {step:
[index, signal]} of a process that sends itself a signal, "notice": index of a process that jax
tells of a preemption, "evaluate": true for scores and texts of the last state, "overflows": true to
start from parameters with which the first step overflows, and to stop at it, "read": true to write
and read a large state, and to compare tasks, instead of training}. The first process prints what
came out as JSON.
"""

import dataclasses
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import ClassVar

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
import numpy as np
import tensorstore as ts
from helpers.tiny_models import (
    FLOAT32,
    OPTIMIZER,
    PLAN,
    batches,
    mesh_plan,
    model_config,
    run_config,
)
from jax.sharding import NamedSharding, PartitionSpec

from t0repro.config.decoding import DecodingConfig
from t0repro.config.model import Layout
from t0repro.config.run import TerminateOnNanConfig
from t0repro.data.checks import check_same_tasks
from t0repro.data.resuming import ResumableBatches
from t0repro.errors import UserError
from t0repro.evaluation.engine import score_examples
from t0repro.evaluation.generation import generate_tokens
from t0repro.model.t5 import T5, initial_parameters
from t0repro.partitioning import joining
from t0repro.runs.train import train
from t0repro.training.checkpoints import (
    checkpoint_path,
    list_checkpoints,
    load_sharded_tree,
    save_checkpoint,
)
from t0repro.training.loop import Hook
from t0repro.training.train_state import TrainState, new_train_state, to_flat_tree

# Scanned layers, which a trainer holds stacked, and checkpoints have each by itself.
LOOP = {"num_encoder_layers": 2, "scan_layers": True}
MODEL = model_config(
    d_model=32, d_ff=64, num_heads=4, d_kv=8, z_loss=1e-4, dropout_rate=0.1, **LOOP
)


class Batches:
    """The same batches for whoever asks; the one of a step is decided by its number."""

    def open(self, step, saved):
        assert (saved is not None) == (step > 0), "the position was saved by the first process"
        return batches(20, rows=8)[step:]

    def save(self, folder):
        (folder / "position.json").write_text("{}")


class BatchesInShards(ResumableBatches):
    """The same batches in four shards; notes which of them this process makes."""

    made: ClassVar[list[int]] = []

    def __init__(self):
        super().__init__(seed=1, num_shards=4)

    def dataset(self, seed, shard=0):
        self.made.append(shard)
        rows = slice(2 * shard, 2 * shard + 2)
        return [{name: x[rows] for name, x in batch.items()} for batch in batches(20, rows=8)]

    def _arguments(self):
        return {"num_shards": self.num_shards}

    def _to_numpy(self, element):
        return element


class NoticedBatches(Batches):
    """Gives one process jax's notice of a preemption, and takes its time until all know of it."""

    def __init__(self, index):
        self._index = index

    def open(self, step, saved):
        if jax.process_index() == self._index:
            # Here the signal's handler is still jax's own, which looks for it once a second.
            os.kill(os.getpid(), signal.SIGTERM)
        return self._slowly(super().open(step, saved))

    def _slowly(self, batches):
        for batch in batches:
            time.sleep(0.3)
            yield batch


class SignalMyself(Hook):
    """Sends signals to this process after steps."""

    def __init__(self, signals):
        self._signals = {int(step): number for step, number in signals.items()}

    def after_step(self, trainer):
        if trainer.step in self._signals:
            os.kill(os.getpid(), self._signals[trainer.step])


def trained(folder, steps, signals=(), notice=None, in_shards=False, **layout):
    """Trains to a step, from the latest checkpoint."""
    config = run_config(
        folder,
        steps,
        model=MODEL,
        batch_size=8,
        layout=Layout(**layout),
        plan=mesh_plan(save_checkpoints_steps=2),
    )
    source = Batches() if notice is None else NoticedBatches(notice)
    source = BatchesInShards() if in_shards else source
    return train(config, source, hooks=[SignalMyself(dict(signals))])


def overflowing(folder, **layout):
    """Trains from parameters with which the first step is NaN or Inf, and stops at it."""
    state = new_train_state(initial_parameters(T5(MODEL, FLOAT32), jax.random.key(0)), OPTIMIZER)
    tree = {name: np.array(x) for name, x in to_flat_tree(state).items()}
    tree["target/encoder/layers_1/mlp/wi_0/kernel"][:] = 1e38
    stop = {"TRAIN": (TerminateOnNanConfig("train", "loss"),)}
    config = run_config(
        folder,
        2,
        model=MODEL,
        batch_size=8,
        layout=Layout(**layout),
        plan=dataclasses.replace(PLAN, actions=stop),
    )
    return train(config, BatchesInShards(), restore_from=tree)


def evaluated(params):
    """Scores of pairs and generated tokens; no number of rows divides among the devices."""
    model, generator = T5(MODEL, FLOAT32), np.random.default_rng(0)
    examples = [
        {"inputs": generator.integers(2, 128, 3 + n % 7), "targets": generator.integers(2, 128, 3)}
        for n in range(13)
    ]
    inputs = [example["inputs"].astype(np.int32) for example in examples[:5]]
    greedy = DecodingConfig(prefilter=2)
    sampled = DecodingConfig(temperature=1.0, keep_top_k=5, prefilter=2)
    return {
        "scores": score_examples(params, model, examples, None).tolist(),
        "texts": [
            generate_tokens(params, model, inputs, config, length=8, batch_size=5)
            for config in (greedy, sampled)
        ],
    }


def large_state(make):
    """A state of one parameter, 4 MB, whose rows are sharded across all devices."""
    mesh = jax.make_mesh((jax.device_count(),), ("all",))
    rows = NamedSharding(mesh, PartitionSpec("all"))
    scalar = NamedSharding(mesh, PartitionSpec())
    params = {"kernel": make(((1024, 1024), jnp.float32), rows)}
    return TrainState(step=make(((), jnp.int32), scalar), params=params, slots={})


def random_values(described, sharding):
    """An array that no compression makes smaller, the same in every process."""
    shape, dtype = described
    values = np.random.default_rng(0).normal(size=shape).astype(dtype)
    return jax.make_array_from_callback(shape, sharding, lambda index: values[index])


def bytes_read():
    """How many bytes of files this process has read by TensorStore."""
    found = ts.experimental_collect_matching_metrics("/tensorstore/kvstore/file/bytes_read")
    return sum(value["value"] for count in found for value in count["values"])


def refused():
    """How a run is refused whose processes have different tasks, after one that is not."""
    check_same_tasks("mixture", "train", ["both"])
    try:
        check_same_tasks("mixture", "train", ["both", f"task_{jax.process_index()}"])
    except UserError as error:
        return error.what
    return None


def read(folder):
    """Reads the state of step 0, which it writes first if it is not there, and compares it."""
    state = large_state(random_values)
    if not list_checkpoints(folder):
        save_checkpoint(folder, state)
    like = large_state(lambda described, place: jax.ShapeDtypeStruct(*described, sharding=place))
    before = bytes_read()
    tree = load_sharded_tree(checkpoint_path(folder, 0), like)
    (own,), (wanted,) = (
        kernel.addressable_shards for kernel in (tree["target/kernel"], state.params["kernel"])
    )
    return {
        "bytes": bytes_read() - before,
        "rows": own.data.shape[0],
        "equal": bool((own.data == wanted.data).all()),
        "refused": refused(),
    }


def main(asked):
    """Runs what is asked for."""
    layout = {name: asked[name] for name in ("data", "model", "fully_sharded") if name in asked}
    with joining.join_processes(joining.ProcessFlags()):
        if asked.get("read"):
            print(json.dumps(read(asked["folder"])))
            return
        if asked.get("overflows"):
            overflowing(asked["folder"], **layout)
            return
        index = jax.process_index()
        signals = {s: number for s, (who, number) in asked.get("at", {}).items() if who == index}
        notice = asked.get("notice")
        in_shards = asked.get("in_shards", False)
        state = trained(
            asked["folder"], asked["steps"], signals, notice=notice, in_shards=in_shards, **layout
        )
        if in_shards:
            made = json.dumps(BatchesInShards.made)
            Path(asked["folder"], f"shards_{index}.json").write_text(made)
        if asked.get("evaluate"):
            print(json.dumps(evaluated(state.params)))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
