"""Checks a job without a network: gin, machines, memory, paths."""

from __future__ import annotations

from collections.abc import Iterator

from t0repro.config.run_config import RunConfig
from t0repro.errors import UserError
from t0repro.vertex.arguments import MESH_TRANSFORMER, Arguments, JobMode
from t0repro.vertex.configuration import Configured, read
from t0repro.vertex.machines import ACCELERATORS, check_machines
from t0repro.vertex.spec import Machines
from t0repro.vertex.staging import MOUNT, mounted


def check(
    arguments: Arguments, machines: Machines, location: str
) -> tuple[Configured, tuple[str, ...]]:
    """Checks a job; nothing is sent.

    Returns:
      What the gin files say, and a line for each thing that was checked or could not be.

    Raises:
      UserError: For the first thing that is wrong.
    """
    lines = check_machines(machines, location)
    _check_replicas(arguments, machines)
    configured = read(arguments)
    _check_paths(configured, arguments)
    lines += [f"warning: {warning}" for warning in configured.warnings]
    if configured.run is not None and arguments.backend == "jax":
        lines += _memory(configured.run, machines)
    return configured, tuple(lines)


def _check_replicas(arguments: Arguments, machines: Machines) -> None:
    """Refuses several machines that would each do the whole work, into one folder."""
    alone = arguments.mode is JobMode.AUX or arguments.backend == "mtf"
    if machines.replica_count > 1 and alone:
        what = arguments.mode or f"{MESH_TRANSFORMER} --backend=mtf"
        raise UserError(
            f"{what} runs on one machine.",
            where="--replica_count",
            fix="Leave it out; choose a machine with more accelerators.",
        )


def _check_paths(configured: Configured, arguments: Arguments) -> None:
    """Refuses results that would vanish with the machine, or that the stack cannot write."""
    # What a container can open: addresses of stores, and buckets where they are mounted. It writes
    # to the latter alone, into which `staging.stage` turns gs:// on the command line.
    written = ("gs://", f"{MOUNT}/")
    seen = (*written, "hf://", "s3://")
    fix = f"Give a folder in a bucket: gs://BUCKET/..., which containers see at {MOUNT}/BUCKET/..."
    if configured.output and not configured.output.startswith(written):
        raise UserError(
            f"Results at {configured.output} would be on a machine that is gone with the job.",
            where=configured.output,
            fix=fix,
        )
    for path in configured.checkpoints:
        if not path.startswith(seen):
            raise UserError(f"The job's container has no checkpoint {path}.", where=path, fix=fix)
    output = configured.output or ""
    # `staging.stage` rewrites the command line for the container; gin files are sent as they are.
    on_line = any(output in word for word in arguments.words)
    if output.startswith("gs://") and arguments.backend == "jax" and not on_line:
        raise UserError(
            f"The gin files put the results at {output}, but the JAX stack writes files.",
            where=output,
            fix=f"Bind {mounted(output)}, at which the container sees it.",
        )


def _memory(run: RunConfig, machines: Machines) -> Iterator[str]:
    """Whether a run fits into the machines' memory, in words.

    Raises:
      UserError: If it does not.
    """
    kind = ACCELERATORS.get(machines.accelerator_type or "")
    if kind is None:
        yield "memory: not checked, for want of figures about the machine"
        return
    # The count is each machine's; a TPU slice is one replica.
    devices = machines.accelerator_count * machines.replica_count
    if kind.topology is not None:
        yield from _on_slice(run, f"{kind.topology}-{devices}", devices)
        return
    from t0repro.partitioning.memory import check_fits

    assert kind.memory is not None
    yield f"memory (estimated): {check_fits(run, kind.memory, kind.memory, devices)}"


def _on_slice(run: RunConfig, topology: str, count: int) -> Iterator[str]:
    """What libtpu's compiler says of a run on a slice; an estimate where it is not installed."""
    import importlib.util

    from t0repro.partitioning import topologies
    from t0repro.partitioning.memory import check_fits

    if importlib.util.find_spec("libtpu") is None:
        memory = topologies.chip_of(topology).memory
        line = check_fits(run, memory, memory, count)
        yield f"memory (estimated; the extra tpu lets precompile compile it): {line}"
        return
    from t0repro.runs import precompile

    devices, chip = topologies.devices_of(topology)
    run, partitioning, why = precompile.arranged(run, devices)
    if why:
        yield why
    for program in precompile.compiled_programs(run, partitioning):
        verdict = precompile.fits(program, run, partitioning, chip)
        if not program.fits_in(chip):
            raise UserError(
                f"The job's {program.name} step {verdict}.",
                where=topology,
                fix="Choose a larger slice, or what the message offers.",
            )
        yield f"memory: the {program.name} step {verdict} on {topology}"
