"""Checkpoints: real ones that Mesh TensorFlow trains once a session, and synthetic ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from t0repro.converters.tensor_bundle import BundleWriter
from t0repro.parameters import naming
from t0repro.parameters.shape import ModelShape

from ..helpers.kept import COMPAT

HERE = Path(__file__).parent

# Like T5 1.0's released checkpoints as a TPU would continue them: bfloat16 masters, norms under
# their legacy names; and with momentum.
LEGACY_BINDINGS = """
utils.get_variable_dtype.master_dtype = 'bfloat16'
AdafactorOptimizer.beta1 = 0.9
LayerStack.dropout_rate = 0.0
LayerStack.norm_epsilon = 1e-6
"""

# Its checkpoints are those of `lm`, but it takes examples with inputs and targets.
DECODER_ONLY_BINDINGS = "utils.run.model_type = 'delimited_lm'\n"


@pytest.fixture(scope="session")
def run_script(tmp_path_factory) -> Callable[..., None]:
    """Runs a script of this folder in a process of its own, failing with its output."""

    def run(script: str, *arguments: str) -> None:
        process = subprocess.run(
            [sys.executable, str(HERE / script), *arguments],
            capture_output=True,
            text=True,
            # On CPU Mesh TensorFlow's updates race with the backward pass's reads of the variables
            # that they change; one thread between operations always takes the same order.
            env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "TF_NUM_INTEROP_THREADS": "1"},
            cwd=tmp_path_factory.mktemp("cwd"),
        )
        assert process.returncode == 0, process.stdout[-2000:] + process.stderr[-6000:]

    return run


@pytest.fixture(scope="session")
def train_mesh_tensorflow(run_script, tmp_path_factory) -> Callable[[Sequence[dict]], None]:
    """Trains jobs as train_mesh_tensorflow.py takes them."""

    def train(jobs: Sequence[dict[str, Any]]) -> None:
        jobs_file = tmp_path_factory.mktemp("jobs") / "jobs.json"
        jobs_file.write_text(json.dumps(jobs, default=str))
        run_script("train_mesh_tensorflow.py", str(jobs_file))

    return train


@pytest.fixture(scope="session")
def mesh_checkpoints(train_mesh_tensorflow, once) -> dict[str, Path]:
    """Model directories at step 2 that Mesh TensorFlow trained: "t5_1_1", "t5_1_0" and "lm_v1"."""
    models = {
        "t5_1_1": {"model": "t5.1.1.small"},
        "t5_1_0": {"model": "t5.1.0.small", "bindings": LEGACY_BINDINGS},
        "lm_v1": {"model": "lm_v1", "bindings": DECODER_ONLY_BINDINGS},
    }
    root = once(
        "mesh_checkpoints",
        lambda root: train_mesh_tensorflow(
            [{"model_dir": root / name, "train_steps": 2, **models[name]} for name in models]
        ),
        repr(models),
        HERE / "train_mesh_tensorflow.py",
        COMPAT,
    )
    return {name: root / name for name in models}


@pytest.fixture(scope="session")
def tiny_family() -> ModelShape:
    """A T5 1.1 with square attention kernels that are factored, and few parameters."""
    return ModelShape(
        num_encoder_layers=1,
        num_decoder_layers=2,
        d_model=128,
        d_ff=16,
        num_heads=2,
        d_kv=64,
        vocab_size=128,
        relative_attention_num_buckets=32,
        wi_kernels=("wi_0", "wi_1"),
        tied=False,
    )


@pytest.fixture(scope="session")
def mesh_variables() -> Callable[..., dict[str, np.ndarray]]:
    """Makes the variables that Mesh TensorFlow would save for a family, with random values."""

    def make(
        family: ModelShape,
        *,
        step: int = 7,
        dtype: str = "float32",
        factor_at: int = 128,
        momentum: bool = False,
        norm_names: naming.NormNames = "rms_norm",
        seed: int = 0,
    ) -> dict[str, np.ndarray]:
        generator = np.random.default_rng(seed)
        variables = {"global_step": np.asarray(step, np.int64)}
        names = family.mesh_variables(norm_names)
        for path, shape in family.parameters().items():
            name = names[path]
            if family.num_heads == 1 and path.endswith(naming.RELATIVE_BIAS):
                shape = shape[1:]  # Mesh TensorFlow has no axis for a single head
            variables[name] = generator.normal(size=shape).astype(np.float32).astype(dtype)
            for slot, slot_shape in _mesh_slot_shapes(shape, factor_at).items():
                variables[f"{name}_slot_{slot}"] = generator.normal(size=slot_shape)
            if momentum:
                variables[f"{name}_slot_m"] = generator.normal(size=shape)
        return {
            name: array.astype(np.float32) if "_slot_" in name else array
            for name, array in variables.items()
        }

    return make


def _mesh_slot_shapes(shape: Sequence[int], factor_at: int) -> dict[str, tuple[int, ...]]:
    """AdafactorOptimizer's slots, from its own words: the two largest dimensions, stable."""
    order = sorted(range(len(shape)), key=lambda axis: -shape[axis])
    if len(shape) < 2 or shape[order[1]] < factor_at:
        return {"v": tuple(shape)}
    return {
        slot: tuple(size for axis, size in enumerate(shape) if axis != order[position])
        for position, slot in enumerate(("vr", "vc"))
    }


@pytest.fixture(scope="session")
def write_mesh_checkpoint() -> Callable[[Path, dict[str, np.ndarray]], Path]:
    """Writes variables as a checkpoint of their step in a new directory, which it returns."""

    def write(directory: Path, variables: dict[str, np.ndarray]) -> Path:
        directory.mkdir(parents=True, exist_ok=True)
        step = int(variables.get("global_step", 0))
        writer = BundleWriter(directory / f"model.ckpt-{step}")
        for name, array in variables.items():
            writer.add(name, array)
        writer.close()
        state = f'model_checkpoint_path: "model.ckpt-{step}"\n'
        (directory / "checkpoint").write_text(state)
        return directory

    return write


@pytest.fixture
def tiny_checkpoint(tmp_path, tiny_family, mesh_variables, write_mesh_checkpoint) -> Path:
    """A synthetic Mesh TensorFlow checkpoint of `tiny_family` at step 7, with slots."""
    return write_mesh_checkpoint(tmp_path / "source", mesh_variables(tiny_family))
