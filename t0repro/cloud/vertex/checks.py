"""Checks a job without a network: gin, machines, memory, paths."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterator

from t0repro.cloud.vertex.accelerators import ACCELERATORS, check_machines, tpu_slice
from t0repro.cloud.vertex.command_line import MESH_TRANSFORMER, Arguments, JobMode
from t0repro.cloud.vertex.job_config import JobConfig, read_job_config
from t0repro.cloud.vertex.spec import CLOUD_TPU, MOUNT, Machines
from t0repro.config.run import Run
from t0repro.errors import UserError
from t0repro.partitioning import topologies
from t0repro.partitioning.memory import check_fits
from t0repro.runs.checks import Check, Cost, run_checks


def check_job(
    arguments: Arguments, machines: Machines, location: str, *, compiles: bool = True
) -> tuple[JobConfig, tuple[str, ...]]:
    """Checks a job; sends nothing.

    With `compiles`, and where libtpu is installed, the steps are compiled for a TPU slice, which
    takes minutes; otherwise memory is estimated.

    Returns:
      What the gin files say, and a line for each thing that was checked or could not be.

    Raises:
      UserError: For the first thing that is wrong.
    """
    # Read by the first check that needs it, so that impossible machines are refused at once.
    config = functools.cache(lambda: read_job_config(arguments))
    lines: list[str] = []
    run_checks(
        (
            Check("machines", Cost.NAMES, lambda: check_machines(machines, location)),
            Check("replicas", Cost.NAMES, lambda: _check_replicas(arguments, machines)),
            Check("stack", Cost.NAMES, lambda: _check_stack(arguments, machines)),
            Check("gin", Cost.FILES, lambda: [f"warning: {x}" for x in config().warnings]),
            Check("paths", Cost.FILES, lambda: _check_paths(config())),
            Check(
                "memory",
                Cost.COMPILE,
                lambda: _check_memory(config(), arguments, machines, compiles),
            ),
        ),
        lambda name, line: lines.append(line),
        # Nothing compiles for minutes for a job that is refused anyway.
        all_at_once=False,
    )
    return config(), tuple(lines)


def check_fit(arguments: Arguments, machines: Machines, *, dry_run: bool) -> None:
    """Raises UserError for --fit if it would change nothing."""
    fix = "Leave out --fit."
    if not dry_run:
        what = "What is submitted is compiled without --fit, where the extra tpu is installed."
        fix = "Leave out --fit, or add --dry_run."
    elif arguments.backend != "jax" or not (
        machines.machine_type == CLOUD_TPU or tpu_slice(machines)
    ):
        what = "Only the JAX stack's steps are compiled here, and only for TPU slices."
    elif importlib.util.find_spec("libtpu") is None:
        what = "Compiling for a TPU slice takes libtpu, which is not installed."
        fix = "Install the extra tpu: EXTRAS=tpu bash scripts/setup.sh."
    else:
        return
    raise UserError(what, where="--fit", fix=fix)


def _check_replicas(arguments: Arguments, machines: Machines) -> None:
    """Refuses several machines that would each do all of the work, into one folder."""
    alone = arguments.mode is JobMode.AUX or arguments.backend == "mtf"
    if machines.replica_count > 1 and alone:
        what = arguments.mode or f"{MESH_TRANSFORMER} --backend=mtf"
        raise UserError(
            f"{what} runs on one machine.",
            where="--replica_count",
            fix="Leave it out; choose a machine with more accelerators.",
        )


def _check_stack(arguments: Arguments, machines: Machines) -> None:
    """Refuses Mesh TensorFlow on TPUs that TensorFlow does not support."""
    tpu = tpu_slice(machines)
    if tpu and tpu[0].startswith("v6e-") and arguments.backend == "mtf":
        raise UserError(
            "Mesh TensorFlow cannot run on TPU v6e, which TensorFlow does not support.",
            where="--backend=mtf",
            fix="Give --backend=jax, or choose an older TPU.",
        )


def _check_paths(config: JobConfig) -> None:
    """Refuses results that would vanish with the machine, and checkpoints that exist only here."""
    # What a container can open: addresses of stores, and buckets where they are mounted.
    writable = ("gs://", f"{MOUNT}/")
    readable = (*writable, "hf://", "s3://")
    fix = f"Give a folder in a bucket: gs://BUCKET/..., which containers see at {MOUNT}/BUCKET/..."
    if config.output and not config.output.startswith(writable):
        raise UserError(
            f"Results at {config.output} would be lost with the job's machine.",
            where=config.output,
            fix=fix,
        )
    for path in config.checkpoints:
        if not path.startswith(readable):
            raise UserError(f"The job's container has no checkpoint {path}.", where=path, fix=fix)


def _check_memory(
    config: JobConfig, arguments: Arguments, machines: Machines, compiles: bool
) -> Iterator[str]:
    """Whether a run on JAX fits into the machines' memory, in words.

    Raises:
      UserError: If it does not.
    """
    run = config.run
    if run is None or arguments.backend != "jax":
        return
    if tpu := tpu_slice(machines):
        yield from _check_slice(run, *tpu, compiles)
        return
    kind = ACCELERATORS.get(machines.accelerator_type or "")
    if kind is None or not (kind.topology or kind.memory):
        yield "memory: not checked, because no figures are known for this machine"
        return
    # The count is each machine's; a TPU slice is one replica.
    devices = machines.accelerator_count * machines.replica_count
    if kind.topology is not None:
        yield from _check_slice(run, f"{kind.topology}-{devices}", devices, compiles)
        return
    assert kind.memory is not None
    yield f"memory (estimated): {check_fits(run, kind.memory, kind.memory, devices)}"


def _check_slice(run: Run, topology: str, count: int, compiles: bool) -> Iterator[str]:
    """What libtpu's compiler says of a run on a slice, or without `compiles` an estimate."""
    installed = importlib.util.find_spec("libtpu") is not None
    if not (installed and compiles):
        memory = topologies.chip_of(topology).memory
        line = check_fits(run, memory, memory, count)
        how = "--fit compiles it" if installed else "the extra tpu lets precompile compile it"
        yield f"memory (estimated; {how}): {line}"
        return
    from t0repro.runs import fitting, programs

    devices, chip = topologies.devices_of(topology)
    run, partitioning, why = programs.arrange_run(run, devices)
    if why:
        yield why
    for program in programs.compile_programs(run, partitioning):
        verdict = fitting.fits(program, run, partitioning, chip)
        if not program.fits_in(chip):
            raise UserError(
                f"The job's {program.name} step {verdict}.",
                where=topology,
                fix="Choose a larger slice, or apply a suggestion above.",
            )
        yield f"memory: the {program.name} step {verdict} on {topology}"
