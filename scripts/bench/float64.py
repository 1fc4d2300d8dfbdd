"""Measures which part of the stacks' difference is float32's rounding: the same run in float64.

One checkpoint of the demo's model and the same batches train

- on both stacks in float32,
- on Mesh TensorFlow in float32 with each batch's rows in reverse order, so that all sums over rows
  are the same sums in another order,
- on both stacks in float64.

Neither stack has a float64 mode: the loss, the gradients' sums and the slots are float32 whatever
the configuration says. So the processes of the float64 runs replace the name `float32` of
TensorFlow's and JAX's modules before Mesh TensorFlow or this project reads it.

    .venv/bin/python -P scripts/bench/float64.py --steps 1000 --out runs/float64

writes losses.json, and a plot with --picture docs/images/float64.png.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
GIN_FILES = ["dataset.gin", "demo/t5.1.1.demo.gin", "learning_rate_schedules/constant_0_001.gin"]
GIN_PARAMS = [
    "MIXTURE_NAME = 'demo_train'",
    "run.batch_size = ('tokens_per_batch', 1024)",
    "run.sequence_length = {'inputs': 128, 'targets': 16}",
    "mesh_train_dataset_fn.seed = 1",
    "pack_dataset.use_custom_ops = False",
    "utils.run.mesh_shape = []",
    "dropout_rate = 0.0",
    # A power of 2, since Mesh TensorFlow rounds it to float32 in a constant.
    "constant_learning_rate.learning_rate = 0.0009765625",
]
DOUBLE = [
    f"utils.get_variable_dtype.{x}_dtype = 'float64'" for x in ("master", "slice", "activation")
]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--steps", type=int, default=1000)
    options.add_argument("--out", type=Path, required=True)
    options.add_argument("--picture", type=Path)
    # Of the processes that this script starts.
    options.add_argument("--mesh_in_float64", action="store_true")
    options.add_argument("--jax_in_float64", action="store_true")
    asked = options.parse_args()
    if asked.mesh_in_float64:
        return mesh_in_float64(asked.out)
    if asked.jax_in_float64:
        return jax_in_float64(asked.out)
    losses = run_all(asked.out, asked.steps)
    (asked.out / "losses.json").write_text(json.dumps(losses))
    for name, (one, other) in PAIRS.items():
        differences = relative(losses[one], losses[other])
        shown = ", ".join(
            f"{step}: {differences[step - 1]:.1e}"
            for step in (1, 10, 100, 300, 1000)
            if step <= len(differences)
        )
        print(f"{name:60} largest {differences.max():.1e}; at step {shown}")
    if asked.picture:
        draw(losses, asked.picture)


# What is compared: the title -> two runs.
PAIRS = {
    "JAX and Mesh TensorFlow in float32": ("jax", "mesh"),
    "Mesh TensorFlow in float32, and with its rows reversed": ("mesh reversed", "mesh"),
    "Mesh TensorFlow in float32 and in float64": ("mesh", "mesh float64"),
    "JAX and Mesh TensorFlow in float64": ("jax float64", "mesh float64"),
}


def relative(one: list[float], other: list[float]) -> np.ndarray:
    """Relative differences of losses, [steps]."""
    return np.abs(np.array(one) / np.array(other) - 1)


def draw(losses: dict[str, list[float]], path: Path) -> None:
    """Draws the differences of each pair by step."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 5), layout="constrained")
    for name, (one, other) in PAIRS.items():
        differences = relative(losses[one], losses[other])
        steps = np.arange(1, len(differences) + 1)
        # Equal losses have no logarithm, and no dot.
        drawn = np.where(differences > 0, differences, np.nan)
        axes.semilogy(steps, drawn, ".", markersize=2.5, label=name)
    axes.set(xlabel="step", ylabel="relative difference of the loss", xlim=(0, None))
    axes.grid(linewidth=0.4)
    axes.legend(frameon=False, loc="center right", markerscale=4)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def run_all(out: Path, steps: int) -> dict[str, list[float]]:
    """The losses of every run."""
    from t0repro.config.mtf.parser import MeshInputs
    from t0repro.converters.sources import load_any
    from t0repro.parity.jax_run import run_jax
    from t0repro.parity.mesh_jobs import MeshJob, read_result, run_mesh, save_batches
    from t0repro.parity.run import make_job
    from t0repro.tasks.modules import load_tasks

    load_tasks(["t0repro.tasks.demo"], into_seqio=True)
    params = [*GIN_PARAMS, f"run.train_steps = {steps}"]
    inputs = MeshInputs(str(out), GIN_FILES, params, module_imports=["t0repro.tasks.demo"])
    job = make_job(inputs, out, steps=steps)
    batches = save_batches(out / "batches.npz", job.batches)
    reversed_rows = [{name: x[::-1] for name, x in each.items()} for each in job.batches]

    def mesh_job(name: str, **changes: object) -> MeshJob:
        folder = out / name.replace(" ", "_")
        folder.mkdir(parents=True, exist_ok=True)
        inputs = dataclasses.replace(job.inputs, model_dir=str(folder))
        return MeshJob(out=str(folder), inputs=inputs, batches=batches, **changes)

    (mesh,) = run_mesh([mesh_job("mesh")])
    start = mesh.checkpoint(0)
    backward = save_batches(out / "reversed.npz", reversed_rows)
    (other,) = run_mesh(
        [dataclasses.replace(mesh_job("mesh reversed", start=start), batches=backward)]
    )
    jax = run_jax(job.config, job.batches, load_any(start))

    wide = mesh_job("mesh float64", start=widened(start, out), float32=False)
    wide = dataclasses.replace(
        wide,
        inputs=dataclasses.replace(wide.inputs, gin_params=[*wide.inputs.gin_params, *DOUBLE]),
    )
    (out / "float64.json").write_text(json.dumps([wide.to_json()]))
    again("--mesh_in_float64", out)
    (out / "float64.pickle").write_bytes(pickle.dumps((job.config, job.batches, load_any(start))))
    again("--jax_in_float64", out)
    found = {
        "mesh": mesh.arrays["losses"],
        "mesh reversed": other.arrays["losses"],
        "jax": jax.losses,
        "mesh float64": read_result(wide.out).arrays["losses"],
        "jax float64": np.load(out / "jax_float64.npy"),
    }
    assert found["mesh float64"].dtype == found["jax float64"].dtype == np.float64
    return {name: x.tolist() for name, x in found.items()}


def again(flag: str, out: Path) -> None:
    subprocess.run([sys.executable, "-P", __file__, f"--out={out}", flag], check=True)


def widened(prefix: str, out: Path) -> str:
    """A Mesh TensorFlow checkpoint with its float32 tensors as float64."""
    import tensorflow as tf

    reader = tf.train.load_checkpoint(prefix)
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        for name in reader.get_variable_to_shape_map():
            value = reader.get_tensor(name)
            wide = value.astype(np.float64) if value.dtype == np.float32 else value
            tf.compat.v1.get_variable(name, initializer=wide)
        session.run(tf.compat.v1.global_variables_initializer())
        saver = tf.compat.v1.train.Saver()
        return saver.save(session, str(out / "start_in_float64"), write_meta_graph=False)


def mesh_in_float64(out: Path) -> None:
    import tensorflow.compat.v1 as tf

    # Before Mesh TensorFlow, where it is the default of arguments too. TensorFlow's module takes a
    # new value only for a name that has been read.
    assert tf.float32 != tf.float64
    float32, tf.float32 = tf.float32, tf.float64
    from t0repro import compat

    compat.install()
    from mesh_tensorflow.transformer import transformer_layers

    buckets = transformer_layers._relative_position_bucket

    def in_float32(*arguments, **options):
        # In float64, distances on the edge of a bucket would be in the other one.
        tf.float32 = float32
        found = buckets(*arguments, **options)
        tf.float32 = tf.float64
        return found

    transformer_layers._relative_position_bucket = in_float32
    from t0repro.parity import mesh_run
    from t0repro.tasks.modules import load_tasks

    load_tasks(["t0repro.tasks.demo"], into_seqio=True)
    sys.argv = ["mesh_run", str(out / "float64.json")]
    mesh_run.main()


def jax_in_float64(out: Path) -> None:
    import jax

    jax.config.update("jax_enable_x64", True)
    jax.numpy.float32 = jax.numpy.float64
    jax.numpy.dtype = lambda x: np.dtype("float64" if x == "float32" else x)
    from t0repro.config.model import DTypePolicy
    from t0repro.parity.jax_run import run_jax
    from t0repro.training import train_state

    train_state._put_like.__defaults__ = (np.float64,)

    config, batches, start = pickle.loads((out / "float64.pickle").read_bytes())
    config = dataclasses.replace(config, dtypes=DTypePolicy("float64", "float64", "float64"))
    start = {
        name: x.astype(np.float64) if x.dtype == np.float32 else x for name, x in start.items()
    }
    np.save(out / "jax_float64.npy", run_jax(config, batches, start).losses)


if __name__ == "__main__":
    main()
