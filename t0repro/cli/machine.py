"""Says, before a run, what TPU flags mean on this machine and whether the batch fits."""

from __future__ import annotations

import sys
from typing import Any

from t0repro.config.configuration import Configuration, NotOnJax

_TPU_FLAGS = ("tpu", "gcp_project", "tpu_zone", "tpu_job_name")


def say_what_runs_here(options: Any, configuration: Configuration, *, on_jax: bool) -> None:
    """Prints a line for each flag that means something else here, and one about memory.

    Args:
      options: t5_mesh_transformer's flags.
      configuration: The run's configuration.
      on_jax: Whether the JAX stack runs it; Mesh TensorFlow runs on the CPU.

    Raises:
      UserError: If the run certainly does not fit into the device's memory.
    """
    name, total, free = _device(on_jax)
    devices = _count(on_jax)
    lines = tpu_lines(options, configuration, name, devices)
    run = configuration.run_or_refusal
    if not isinstance(run, NotOnJax):
        from t0repro.partitioning.memory import check_fits

        # Virtual devices of a CPU share its memory.
        shares = 1 if name == "the CPU" or devices == 1 else devices
        fit = check_fits(run, total, free, shares)
        # A fit is worth a line only where something else was said; a misfit always is.
        if lines or not fit.endswith("it fits."):
            lines.append(fit)
    for line in lines:
        print(f"t5_mesh_transformer: {line}", file=sys.stderr)


def tpu_lines(
    options: Any, configuration: Configuration, device: str, several: int = 1
) -> list[str]:
    """Lines that say what each TPU flag and binding means on a machine without a TPU.

    Args:
      options: t5_mesh_transformer's flags.
      configuration: The run's configuration.
      device: What computes here.
      several: How many of those devices there are.
    """
    given = [f"--{flag}={getattr(options, flag)}" for flag in _TPU_FLAGS if getattr(options, flag)]
    lines = []
    # A TPU on this machine would make them mean what they say.
    if given and "tpu" not in device.lower():
        lines.append(f"{', '.join(given)}: no effect without a TPU; this runs on {device}.")
    inputs = configuration.inputs
    if inputs.tpu_mesh and several < 2:
        lines.append(
            f"mesh_shape {inputs.tpu_mesh}, of tpu_mesh_shape: one device here; the batch stays"
            f" {inputs.batch_size:,} sequences."
        )
    return lines


def _count(on_jax: bool) -> int:
    """Number of devices that compute."""
    if not on_jax:
        return 1
    import jax

    return jax.device_count()


def _device(on_jax: bool) -> tuple[str, int, int]:
    """The name of the device that computes, its memory and its free memory, in bytes."""
    if on_jax:
        import jax

        device = jax.local_devices()[0]
        # CPU devices have no statistics; the machine's memory stands for theirs.
        statistics = device.memory_stats() or {}
        if "bytes_limit" in statistics:
            total = statistics["bytes_limit"]
            return device.device_kind, total, total - statistics.get("bytes_in_use", 0)
    import psutil

    memory = psutil.virtual_memory()
    return "the CPU", memory.total, memory.available
