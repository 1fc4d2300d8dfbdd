"""Runs of Mesh TensorFlow that the parity tests compare with: batches, options and results."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import numpy as np

from t0repro.config.model import ModelConfig
from t0repro.config.optimizer import AdafactorConfig, ScheduleConfig
from t0repro.parameters import naming

from ..helpers import tiny_models
from ..helpers.kept import COMPAT

SCRIPT = Path(__file__).with_name("run_mesh_model.py")
ADAFACTOR = AdafactorConfig()
STEPS = 20

BINDINGS = """
include 'defaults.gin'
include 'models/{gin}.gin'
utils.get_variable_dtype.activation_dtype = 'float32'
dropout_rate = 0.0
num_layers = 2
num_heads = 2
d_kv = 64
d_model = 128
d_ff = 160
{more}
"""


@dataclasses.dataclass(frozen=True)
class Case:
    """One model with its batches and options, given to both stacks."""

    name: str
    gin: str
    model: ModelConfig
    packed: bool
    num_microbatches: int
    schedule: ScheduleConfig
    start_step: int
    more: str = ""

    def batches(self) -> list[dict[str, np.ndarray]]:
        generator = np.random.default_rng(0)
        make = packed_batch if self.packed else unpacked_batch
        return [make(generator, 8, 24, 12) for _ in range(STEPS)]


def model_config(**changes) -> ModelConfig:
    """A T5 1.1 that is small and has factored slots, of square and of oblong matrices."""
    config = dataclasses.replace(
        tiny_models.T5_1_1,
        num_encoder_layers=2,
        num_decoder_layers=2,
        d_model=128,
        d_ff=160,
        d_kv=64,
        vocab_size=256,
        relative_attention_num_buckets=32,
        z_loss=1e-4,
    )
    return dataclasses.replace(config, **changes)


CASES = [
    Case(
        name="t5.1.1 packed in microbatches",
        gin="t5.1.1.small",
        model=model_config(),
        packed=True,
        num_microbatches=4,
        schedule=ScheduleConfig("constant_learning_rate", {"learning_rate": 0.01}, 100),
        start_step=1000,
    ),
    Case(
        name="t5.1.0 unpacked, tied, smoothed, rsqrt",
        gin="t5.1.0.small",
        model=model_config(
            activations=("relu",), logits_from_embedding=True, label_smoothing=0.1, z_loss=0.001
        ),
        packed=False,
        num_microbatches=1,
        schedule=ScheduleConfig(
            "learning_rate_schedule_noam",
            {"warmup_steps": 10, "linear_decay_fraction": 0.0, "multiplier": 0.3, "offset": 0},
            100,
        ),
        start_step=0,
        more="decoder/Unitransformer.label_smoothing = 0.1\nUnitransformer.z_loss = 0.001",
    ),
    Case(
        name="t5.1.1 with its own loss denominator",
        gin="t5.1.1.small",
        model=model_config(loss_denominator=50.0),
        packed=True,
        num_microbatches=2,
        schedule=ScheduleConfig(
            "learning_rate_schedule_noam",
            {"warmup_steps": 4, "linear_decay_fraction": 0.5, "multiplier": 0.1, "offset": 2},
            40,
        ),
        start_step=10,
        more="Unitransformer.loss_denominator = 50.0",
    ),
]


def packed_batch(generator, rows: int, inputs: int, targets: int) -> dict[str, np.ndarray]:
    """Rows of one to three examples each, with padding, some targets negative (without loss)."""
    batch = {
        f"{name}{suffix}": np.zeros((rows, length), np.int32)
        for name, length in (("inputs", inputs), ("targets", targets))
        for suffix in ("", "_segmentation", "_position")
    }
    for row in range(rows):
        count = int(generator.integers(1, 4))
        for name, length in (("inputs", inputs), ("targets", targets)):
            start = 0
            for segment in range(1, count + 1):
                size = int(generator.integers(2, length // count + 1))
                place = slice(start, start + size)
                tokens = generator.integers(2, 250, size)
                tokens[-1] = 1
                if name == "targets" and generator.random() < 0.3:
                    tokens[0] *= -1
                batch[name][row, place] = tokens
                batch[f"{name}_segmentation"][row, place] = segment
                batch[f"{name}_position"][row, place] = np.arange(size)
                start += size
    return batch


def unpacked_batch(generator, rows: int, inputs: int, targets: int) -> dict[str, np.ndarray]:
    """One example a row, padded; one row has no inputs and one no targets at all."""
    batch = {}
    for name, length in (("inputs", inputs), ("targets", targets)):
        tokens = generator.integers(2, 250, (rows, length)).astype(np.int32)
        sizes = generator.integers(2, length + 1, rows)
        sizes[0 if name == "inputs" else 1] = 0
        tokens[np.arange(length) >= sizes[:, None]] = 0
        tokens[np.arange(length) == sizes[:, None] - 1] = 1
        batch[name] = tokens
    return batch


def run_mesh(jobs: list[dict]) -> None:
    """Runs jobs of run_mesh_model.py in one process of their own."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT), json.dumps(jobs)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]


# What its results depend on.
SOURCES = (Path(__file__), SCRIPT, COMPAT, Path(tiny_models.__file__))


def run_cases(directory: Path) -> None:
    """Writes what Mesh TensorFlow makes of each case, and its position buckets."""
    jobs: list[dict] = [{"buckets": 2048, "out": str(directory / "buckets.npz")}]
    for index, case in enumerate(CASES):
        batches = directory / f"batches_{index}.npz"
        arrays = {
            f"{step}/{name}": x
            for step, batch in enumerate(case.batches())
            for name, x in batch.items()
        }
        np.savez(batches, **arrays)
        jobs.append(
            {
                "out": str(directory / f"{index}.npz"),
                "batches": str(batches),
                "bindings": BINDINGS.format(gin=case.gin, more=case.more),
                "start_step": case.start_step,
                "num_microbatches": case.num_microbatches,
                "schedule": case.schedule.name,
                "arguments": dict(case.schedule.arguments),
                "total_train_steps": case.schedule.total_train_steps,
            }
        )
    run_mesh(jobs)


def read_cases(directory: Path) -> dict[str, dict[str, np.ndarray]]:
    """What run_cases wrote, by the case's name; and "buckets"."""
    files = {"buckets": "buckets", **{case.name: index for index, case in enumerate(CASES)}}
    return {name: dict(np.load(directory / f"{file}.npz")) for name, file in files.items()}


def flat_tree(results: dict[str, np.ndarray], when: str, step: int) -> dict[str, np.ndarray]:
    """What was saved as `initial`, `gradients`, `first` or `last`, by T5X's names."""
    found = {
        name.removeprefix(f"{when}/"): x
        for name, x in results.items()
        if name.startswith(f"{when}/")
    }
    tree = {naming.STEP: np.asarray(step, np.int32)}
    for name, value in found.items():
        variable, slot = naming.split_mtf_slot(name)
        path = naming.mtf_to_path(variable)
        assert path is not None, name
        if slot is None:
            tree[naming.PARAMETERS + path] = value
        else:
            tree[naming.slot_key(path, naming.slot_from_mtf(slot, found[variable].shape))] = value
    return tree
