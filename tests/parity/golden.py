"""Golden runs: what Mesh TensorFlow computes in a few configurations, as small text files.

A case consists of gin bindings only. Its parameters and batches are drawn with numpy from seeds
that depend only on names, so that either stack can run anywhere and be compared with the file:

    losses, learning_rates    one per step
    gradient_norms            Euclidean norms for the first batch, by parameter
    first_norms, last_norms   of parameters and slots after the first and the last step

A case with dropout has instead the mean, standard error and standard deviation of its losses, over
steps that change no parameter: the stacks' random streams differ, their statistics must not.
"""

from __future__ import annotations

import dataclasses
import json
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from t0repro.config.mtf.parser import MeshInputs
from t0repro.config.run import TrainRun
from t0repro.parity.jax_run import StackResult, as_stack_result, run_jax
from t0repro.parity.mesh_jobs import MeshJob, run_mesh, save_batches

# Small cases, since their files are read and recomputed by tests.
ROWS, LENGTHS = 8, {"inputs": 24, "targets": 12}
_SMALL = ("d_model = 128", "d_kv = 64", "num_heads = 2", "d_ff = 160", "num_layers = 1")
_TINY = ("d_model = 16", "d_kv = 8", "num_heads = 2", "d_ff = 24", "num_layers = 1")
_COMMON = (
    "MIXTURE_NAME = 'demo_train'",
    f"run.batch_size = {ROWS}",
    f"run.sequence_length = {LENGTHS}",
    "run.train_steps = 100",
    "serialize_num_microbatches.tokens_per_microbatch_per_replica = None",
    "pack_dataset.use_custom_ops = False",
    "utils.run.mesh_shape = []",
)
_SCHEDULE = "run.learning_rate_schedule = @learning_rate_schedules."
_MICROBATCHES = "serialize_num_microbatches.tokens_per_microbatch_per_replica = "


@dataclasses.dataclass(frozen=True)
class Case:
    """One configuration.

    Attributes:
      name: name of the golden file.
      model: t5's gin file of the model.
      params: bindings in addition to the common ones.
      size: bindings of the model's size.
      packed: whether batches are packed.
      inputs_read: False for a language model, whose batches have only targets.
      start_step: the global step at the start.
      steps: number of training steps.
      dropout: dropout rate; 0 for the exact cases.
      dtype: activation dtype.
    """

    name: str
    model: str = "models/t5.1.1.small.gin"
    params: tuple[str, ...] = ()
    size: tuple[str, ...] = _TINY
    packed: bool = True
    inputs_read: bool = True
    start_step: int = 0
    steps: int = 5
    dropout: float = 0.0
    dtype: str = "float32"

    def inputs(self) -> MeshInputs:
        """What t5_mesh_transformer would be given."""
        kinds = {"master": "float32", "slice": "float32", "activation": self.dtype}
        dtypes = [f"utils.get_variable_dtype.{kind}_dtype = '{x}'" for kind, x in kinds.items()]
        params = (*_COMMON, *self.size, f"dropout_rate = {self.dropout}", *dtypes, *self.params)
        files = ("dataset.gin", self.model, "learning_rate_schedules/constant_0_001.gin")
        return MeshInputs("unused", files, params, module_imports=("t0repro.tasks.demo",))

    def config(self) -> TrainRun:
        """The JAX stack's configuration."""
        from t0repro.config.mtf.dialect import load

        return load(self.inputs(), float32_activations=self.dtype == "float32").run

    def batches(self) -> list[dict[str, np.ndarray]]:
        """Draws the same batches in every process; with dropout, a single batch, repeated."""
        generator = np.random.default_rng(zlib.crc32(b"batches"))
        make = packed_batch if self.packed else unpacked_batch
        count = 1 if self.dropout else self.steps
        # With dropout one batch is repeated: what varies is the noise alone.
        batches = [make(generator) for _ in range(count)] * (self.steps // count)
        return [
            {name: x for name, x in batch.items() if self.inputs_read or "inputs" not in name}
            for batch in batches
        ]


_RATE = "learning_rate_schedules.constant_learning_rate.learning_rate = 0.01"

# MomentumOptimizer is left out: off TPU it assigns its velocity while it subtracts it, so which of
# the two values is read depends on threads (losses differ by 1e-4 from run to run).
CASES = (
    Case("t5_1_1_packed_microbatches", params=(f"{_MICROBATCHES}48", _RATE), size=_SMALL,
         start_step=1000),
    Case("t5_1_1_unpacked", params=(_RATE,), packed=False),
    Case("t5_1_0_packed", "models/t5.1.0.small.gin", (_RATE,)),
    Case("t5_1_0_unpacked_smoothed", "models/t5.1.0.small.gin",
         ("decoder/Unitransformer.label_smoothing = 0.1", "Unitransformer.z_loss = 0.001"),
         packed=False),
    Case("loss_denominator", params=("Unitransformer.loss_denominator = 50.0", _RATE)),
    Case("adafactor_with_momentum", params=("AdafactorOptimizer.beta1 = 0.9", _RATE), size=_SMALL),
    Case("adafactor_unfactored", params=("AdafactorOptimizer.factored = False", _RATE)),
    Case("adam_weight_decay", params=("run.optimizer = @optimize.AdamWeightDecayOptimizer",
         "AdamWeightDecayOptimizer.weight_decay_rate = 0.01")),
    Case("sgd", params=("run.optimizer = @optimize.SgdOptimizer", _RATE)),
    Case("schedule_noam", params=(f"{_SCHEDULE}learning_rate_schedule_noam",
         "learning_rate_schedule_noam.warmup_steps = 4",
         "learning_rate_schedule_noam.linear_decay_fraction = 0.5",
         "learning_rate_schedule_noam.multiplier = 0.1"), start_step=48),
    Case("schedule_linear_decay", params=(f"{_SCHEDULE}linear_decay_learning_rate",
         "linear_decay_learning_rate.initial_lr = 0.05"), start_step=20),
    Case("schedule_slanted_triangular", params=(f"{_SCHEDULE}slanted_triangular",), start_step=8),
    Case("schedule_factors", params=("run.learning_rate_schedule = [0.5,"
         " @learning_rate_schedules.linear_warmup, @learning_rate_schedules.truncated_rsqrt,"
         " @learning_rate_schedules.linear_decay]",
         "linear_warmup.steps_or_fraction = 10", "truncated_rsqrt.warmup_steps = 7",
         "linear_decay.steps_or_fraction = 0.95"), start_step=5),
    Case("decoder_only", "models/lm_v1.gin", (_RATE,), inputs_read=False),
    Case("bfloat16", params=(_RATE,), size=_SMALL, dtype="bfloat16"),
    Case("dropout", params=(
         "learning_rate_schedules.constant_learning_rate.learning_rate = 0.0",),
         steps=200, dropout=0.1),
)  # fmt: skip


# ---- Parameters and batches of every process ----------------------------------------------------


def start_tree(config: TrainRun, step: int) -> dict[str, np.ndarray]:
    """Float32 parameters under T5X's names, each drawn from a seed made of its name; no slots."""
    import flax.traverse_util

    from t0repro.model.t5 import T5, parameter_shapes
    from t0repro.parameters import naming

    model = T5(config.model, config.dtypes)
    shapes = parameter_shapes(model)
    tree = {naming.STEP: np.asarray(step, np.int32)}
    for path, leaf in flax.traverse_util.flatten_dict(shapes, sep="/").items():
        draw = np.random.default_rng(zlib.crc32(path.encode())).standard_normal(leaf.shape)
        # Around 1, so that a forgotten scale shows.
        if path.endswith("scale"):
            draw = 1 + 0.1 * draw
        elif path.endswith("rel_embedding"):
            draw = 0.1 * draw
        elif path.endswith("kernel"):
            # The scale of initial kernels; queries hold attention's 1/sqrt(d_kv) as
            # well.
            width = leaf.shape[0] * (config.model.d_kv if "/query/" in path else 1)
            draw = draw * width**-0.5
        tree[naming.PARAMETERS + path] = draw.astype(np.float32)
    return tree


def packed_batch(generator: np.random.Generator) -> dict[str, np.ndarray]:
    """Rows of one to three examples each, with padding; some targets negative, without loss."""
    batch = {
        f"{name}{suffix}": np.zeros((ROWS, length), np.int32)
        for name, length in LENGTHS.items()
        for suffix in ("", "_segmentation", "_position")
    }
    for row in range(ROWS):
        count = int(generator.integers(1, 4))
        for name, length in LENGTHS.items():
            start = 0
            for segment in range(1, count + 1):
                # At most an equal share, so that every segment of the row has room.
                size = int(generator.integers(2, length // count + 1))
                place = slice(start, start + size)
                batch[name][row, place] = _tokens(generator, size)
                batch[f"{name}_segmentation"][row, place] = segment
                batch[f"{name}_position"][row, place] = np.arange(size)
                start += size
    return batch


def unpacked_batch(generator: np.random.Generator) -> dict[str, np.ndarray]:
    """One example a row, padded."""
    batch = {}
    for name, length in LENGTHS.items():
        batch[name] = np.zeros((ROWS, length), np.int32)
        for row in range(ROWS):
            size = int(generator.integers(2, length + 1))
            batch[name][row, :size] = _tokens(generator, size)
    return batch


def _tokens(generator: np.random.Generator, size: int) -> np.ndarray:
    # From 2 on: 0 is padding and 1 is EOS.
    tokens = generator.integers(2, 1000, size)
    tokens[-1] = 1
    return tokens


# ---- Running and summarizing ---------------------------------------------------------------------


def run_on_mesh(cases: Sequence[Case], folder: str | Path) -> list[dict[str, Any]]:
    """Computes the contents of the cases' files with Mesh TensorFlow, in one process."""
    from t0repro.converters.convert import convert
    from t0repro.training.checkpoints import save_tree

    jobs = []
    for case in cases:
        out = Path(folder) / case.name
        tree = start_tree(case.config(), case.start_step)
        # Written as a JAX checkpoint and converted, as a user would bring it to Mesh
        # TensorFlow.
        save_tree(out / "jax" / f"checkpoint_{case.start_step}", tree)
        convert(out / "jax", out / "start", "mtf")
        job = MeshJob(
            out=str(out),
            inputs=dataclasses.replace(case.inputs(), model_dir=str(out)),
            batches=save_batches(out / "batches.npz", case.batches()),
            start=str(out / "start" / f"model.ckpt-{case.start_step}"),
            snapshots=() if case.dropout else (1, case.steps),
            tensors=not case.dropout,
            float32=case.dtype == "float32",
        )
        jobs.append(job)
    # One process for all cases: each start of TensorFlow takes seconds.
    results = run_mesh(jobs)
    return [
        summary(case, as_stack_result(result, job.snapshots))
        for case, job, result in zip(cases, jobs, results, strict=True)
    ]


def run_on_jax(case: Case) -> dict[str, Any]:
    """Computes the contents of a case's file with the JAX stack."""
    config = case.config()
    result = run_jax(
        config,
        case.batches(),
        start_tree(config, case.start_step),
        snapshots=() if case.dropout else (1, case.steps),
        gradients=not case.dropout,
    )
    return summary(case, result)


def summary(case: Case, result: StackResult) -> dict[str, Any]:
    """The contents of a case's file, with numbers to nine significant digits."""
    found: dict[str, Any] = {"case": case.name, "start_step": case.start_step}
    found["bindings"] = [f"include {case.model}", *case.size, *case.params]
    if case.dropout:
        losses = np.asarray(result.losses, np.float64)
        deviation = float(losses.std(ddof=1))
        found |= {"mean": float(losses.mean()), "deviation": deviation}
        return found | {"standard_error": deviation / len(losses) ** 0.5, "steps": len(losses)}
    found["losses"] = [_digits(x) for x in result.losses]
    found["learning_rates"] = [_digits(x) for x in result.learning_rates]
    found["gradient_norms"] = _norms(result.gradients)
    found["first_norms"] = _norms(result.trees[1])
    found["last_norms"] = _norms(result.trees[case.steps])
    return found


def _norms(arrays: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Euclidean norms, without unused slots, which are zeros of shape (1,)."""
    return {
        name: _digits(np.linalg.norm(np.asarray(x, np.float64)))
        for name, x in sorted(arrays.items())
        if not (x.shape == (1,) and x[0] == 0)
    }


def _digits(x: Any) -> float:
    # Enough to tell float32 numbers apart, and short enough for a diff.
    return float(f"{float(x):.9g}")


def to_text(golden: Mapping[str, Any]) -> str:
    """A file's text, with one number per line, so that a diff shows what changed."""
    return json.dumps(golden, indent=1) + "\n"
