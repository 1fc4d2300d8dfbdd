"""The checks of `t0repro doctor`: versions, devices, whether the core works, what is missing.

A finding with a problem carries the command that fixes it. Missing extras and data are not errors,
since they are optional; anything broken is an error.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from t0repro import compat
from t0repro.cloud.trackers.table import TRACKER_PACKAGES
from t0repro.compat import installed_version
from t0repro.errors import UserError
from t0repro.tasks.rows import splits_on_disk
from t0repro.tasks.user_files import data_folders
from t0repro.tasks.vocabulary import DEFAULT_ADDRESS, VOCABULARY_VARIABLE, default_vocabulary
from t0repro.words import columns, counted

State = Literal["ok", "missing", "broken"]

PACKAGES = (
    "t0repro", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "tensorflow",
    "tensorflow-text", "mesh-tensorflow", "t5", "seqio", "gin-config", "tensorflow-estimator",
    "promptsource", "sentencepiece",
)  # fmt: skip

# Extra -> the modules that it brings.
EXTRAS: Mapping[str, tuple[str, ...]] = {
    "parquet": ("pyarrow",),
    "browse": ("starlette", "uvicorn"),
    "hf": ("torch", "transformers", "peft"),
    "gpu": ("jax_cuda13_plugin",),
    "tpu": ("libtpu",),
    "s3": ("s3fs",),
    "gs": ("gcsfs",),
    "lm-eval": ("lm_eval",),
    **{package: (package,) for package in TRACKER_PACKAGES.values() if package},
    "vertex": ("google.cloud.aiplatform", "google.cloud.storage", "google.cloud.logging"),
}

_SETUP = "bash scripts/setup.sh"
_REFERENCE = "TIER=reference bash scripts/setup.sh"
# cc_all.32000.100extra itself has 32,000 pieces; SeqIO adds the 100 sentinels.
_T5_PIECES = 32_100  # sentinels included
_TRIAL_SECONDS = 300
_STACK = "mesh tensorflow"  # the finding that tells the reference tier from the core


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that was checked.

    Attributes:
      state: `missing` if it was never installed or set, `broken` if it is there and fails.
      fix: The command that fixes it, or "".
    """

    name: str
    state: State
    detail: str
    fix: str = ""


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """All findings, grouped: the core, the optional extras and the data."""

    versions: Mapping[str, str | None]
    core: tuple[Finding, ...]
    extras: tuple[Finding, ...]
    data: tuple[Finding, ...]

    @property
    def works(self) -> bool:
        """Whether all of the core that is installed runs; a stack may be missing on purpose."""
        return all(finding.state != "broken" for finding in self.core)

    @property
    def tier(self) -> str:
        """The tier of this environment: core, or reference with the core."""
        absent = {finding.name for finding in self.core if finding.state == "missing"}
        return "core" if _STACK in absent else "reference"

    @property
    def broken(self) -> tuple[Finding, ...]:
        """Everything that is there and fails, including data and extras."""
        findings = (*self.core, *self.extras, *self.data)
        return tuple(finding for finding in findings if finding.state == "broken")

    def to_json(self) -> dict[str, Any]:
        """The findings, with `works` and `tier`."""
        return {"works": self.works, "tier": self.tier, **dataclasses.asdict(self)}

    def to_text(self) -> str:
        """The findings as a page for a terminal."""
        blocks = [
            "Versions",
            *_indent([[name, found or "-"] for name, found in self.versions.items()]),
        ]
        tier = f"{self.tier.capitalize()} tier"
        for title, findings in ((tier, self.core), ("Extras", self.extras), ("Data", self.data)):
            rows = [[item.state, item.name, item.detail] for item in findings]
            blocks += ["", title, *_indent(rows)]
            blocks += [f"  to fix {item.name}: {item.fix}" for item in findings if item.fix]
        missing = [finding.name for finding in self.core if finding.state == "missing"]
        without = f", without {' and '.join(missing)}" if missing else ""
        works = f"The {self.tier} tier works{without}."
        verdict = works if self.works else f"The {self.tier} tier does not work."
        if self.broken:
            verdict += f" Broken: {', '.join(finding.name for finding in self.broken)}."
        return "\n".join([*blocks, "", verdict])


def _indent(rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"  {line}" for line in columns(rows)]


def diagnose() -> Diagnosis:
    """Runs all checks; takes several seconds, mostly for importing TensorFlow."""
    return Diagnosis(
        versions={
            "python": platform.python_version(),
            **{name: installed_version(name) for name in PACKAGES},
        },
        core=(
            check("python 3.11 or later", _python),
            check("jax", _jax),
            check(_STACK, _mesh_tensorflow),
        ),
        extras=tuple(_extra(name, modules) for name, modules in EXTRAS.items()),
        data=(check("T0REPRO_DATA_DIR", _data_dir), check("T0REPRO_VOCAB", _vocabulary)),
    )


def check(name: str, look: Callable[[], tuple[State, str, str]]) -> Finding:
    """Runs a check that returns (state, detail, fix); an exception counts as `broken`."""
    try:
        return Finding(name, *look())
    except Exception as error:
        return Finding(name, "broken", f"{type(error).__name__}: {error}".split("\n")[0], _SETUP)


def _python() -> tuple[State, str, str]:
    recent = sys.version_info >= (3, 11)
    state: State = "ok" if recent else "broken"
    fix = "" if recent else "PYTHON=/path/to/python3.11 bash scripts/setup.sh"
    return state, platform.python_version(), fix


def _jax() -> tuple[State, str, str]:
    if not _is_importable("jax"):
        return "missing", "no jax: converts and reports only", "pip install 't0repro[jax]'"
    import jax
    import jax.numpy as jnp

    total = int(jnp.arange(4).sum())
    # Lists the devices found, since JAX raises no error for a GPU that it does not find.
    devices = ", ".join(f"{device.platform}:{device.device_kind}" for device in jax.devices())
    return ("ok", devices, "") if total == 6 else ("broken", f"0+1+2+3 gave {total}", _SETUP)


def _mesh_tensorflow() -> tuple[State, str, str]:
    """Trains one step in a separate process, since v1 behavior applies to a whole process."""
    if not _is_importable("tensorflow"):
        return "missing", "no TensorFlow or SeqIO: docs/tiers.md lists what needs them", _REFERENCE
    ended = subprocess.run(
        # -P keeps the checkout's folder gin/ from being imported instead of gin-config.
        [sys.executable, "-P", "-c", "from t0repro import doctor; doctor.try_mesh_tensorflow()"],
        capture_output=True,
        text=True,
        timeout=_TRIAL_SECONDS,
        check=False,
    )
    if ended.returncode:
        lines = ended.stderr.strip().splitlines() or [f"exit code {ended.returncode}"]
        return "broken", lines[-1], _SETUP
    # Only the last line: libraries may have printed others before it.
    losses = json.loads(ended.stdout.splitlines()[-1])
    detail = f"one step took a loss from {losses['before']:.3f} to {losses['after']:.3f} on CPU"
    return "ok", detail, ""


def try_mesh_tensorflow() -> None:
    """Prints {"before": loss, "after": loss} of one Adafactor step.

    Raises:
      RuntimeError: If the step did not lower the loss.
    """
    before, after = _train_one_step()
    if not after < before:
        raise RuntimeError(f"one step took the loss from {before} to {after}")
    print(json.dumps({"before": before, "after": after}))


def _train_one_step() -> tuple[float, float]:
    """Losses of a linear model before and after one step of Mesh TensorFlow's Adafactor."""
    compat.install()
    import mesh_tensorflow as mtf
    import tensorflow
    from mesh_tensorflow.optimize import AdafactorOptimizer
    from mesh_tensorflow.placement_mesh_impl import PlacementMeshImpl

    tf = tensorflow.compat.v1
    with tf.Graph().as_default():
        tf.set_random_seed(0)
        graph = mtf.Graph()
        mesh = mtf.Mesh(graph, "mesh")
        batch, width = mtf.Dimension("batch", 8), mtf.Dimension("width", 4)
        inputs = mtf.import_tf_tensor(
            mesh, tf.random.stateless_normal([8, 4], [0, 1]), [batch, width]
        )
        weights = mtf.get_variable(
            mesh, "weights", [width], initializer=tf.constant_initializer(1.0)
        )
        loss = mtf.reduce_mean(mtf.square(mtf.einsum([inputs, weights], output_shape=[batch])))
        gradients = mtf.gradients([loss], [weights])
        updates = AdafactorOptimizer(learning_rate=0.1).apply_grads(
            gradients, graph.trainable_variables
        )
        lowering = mtf.Lowering(graph, {mesh: PlacementMeshImpl([], [], [""])})
        value = lowering.export_to_tf_tensor(loss)
        step = [lowering.lowered_operation(update) for update in updates]
        with tf.Session() as session:
            session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
            session.run(lowering.copy_masters_to_slices())
            before = float(session.run(value))
            session.run(step)
            return before, float(session.run(value))


def _extra(name: str, modules: tuple[str, ...]) -> Finding:
    absent = [module for module in modules if not _is_importable(module)]
    if absent:
        return Finding(
            name, "missing", f"no {', '.join(absent)}", f"EXTRAS={name} bash scripts/setup.sh"
        )
    return Finding(name, "ok", ", ".join(modules))


def _is_importable(module: str) -> bool:
    # find_spec does not import the module; torch and transformers are slow to import.
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _data_dir() -> tuple[State, str, str]:
    fix = "export T0REPRO_DATA_DIR=DIR, with DIR/<dataset>/<subset or default>/<split>.jsonl"
    value = os.environ.get("T0REPRO_DATA_DIR")
    if not value:
        return "missing", "not set: only the embedded demo's data is there", fix
    try:
        roots = data_folders()
    except UserError:
        return "broken", f"{value} is not a directory", fix
    folders = [path for root in roots for path in root.glob("*/*/")]
    splits = [held for folder in folders if (held := splits_on_disk(folder))]
    if not splits:
        return "broken", f"{value} holds no <dataset>/<subset>/<split> files", fix
    return (
        "ok",
        f"{value}: {counted(sum(map(len, splits)), 'split')} of {counted(len(splits), 'dataset')}",
        "",
    )


def _vocabulary() -> tuple[State, str, str]:
    if not (value := os.environ.get(VOCABULARY_VARIABLE)):
        fix = f"export {VOCABULARY_VARIABLE}=FILE, a copy of {DEFAULT_ADDRESS}"
        return "missing", "not set: a run that needs T5's vocabulary downloads it", fix
    try:
        vocabulary = default_vocabulary()
        size, added = vocabulary.vocab_size, vocabulary.extra_ids
    except UserError as error:
        return "broken", f"{error.where}: {error.what}", error.fix or ""
    # A smaller vocabulary, such as the demo's, is not a mistake.
    note = "" if size == _T5_PIECES else f" (T5's has {_T5_PIECES})"
    sentinels = f" and {counted(added, 'sentinel')} that it lacks" if added else ""
    return "ok", f"{value}: {size - added} pieces{sentinels}{note}", ""
