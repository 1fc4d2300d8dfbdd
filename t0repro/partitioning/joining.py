"""How a process joins the others of its run."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import glob
import importlib.util
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping

import jax

from t0repro.errors import UserError
from t0repro.partitioning.processes import (
    broadcast_from_first,
    coordinator_address,
    is_first,
    scratch_folders,
)
from t0repro.partitioning.watch import Watch
from t0repro.progress import working

ADDRESS, COUNT, INDEX = (
    "T0REPRO_COORDINATOR_ADDRESS",
    "T0REPRO_PROCESS_COUNT",
    "T0REPRO_PROCESS_INDEX",
)
# `Watch` notices a dead process at once; this is for a dead machine or network.
_HEARTBEAT_SECONDS = 30
# JAX's own default; seconds until all processes have to have started.
_INITIALIZATION_SECONDS = 300


@dataclasses.dataclass(frozen=True)
class ProcessFlags:
    """A command line's settings about the processes of a run; None leaves them to the environment.

    Attributes:
      address: HOST:PORT of the first process.
      count: number of processes.
      index: this process's number, from 0.
      timeout: seconds to wait for the others to start.
      detect: let JAX look for a cluster even if the environment shows no sign of one.
    """

    address: str | None = None
    count: int | None = None
    index: int | None = None
    timeout: int | None = None
    detect: bool = False


@contextlib.contextmanager
def join_processes(flags: ProcessFlags) -> Iterator[None]:
    """Runs the block as one of several processes, if flags or the environment say so.

    If one of them ends early, the others end within seconds and name it. Within the block,
    processes other than the first print nothing, except an error that leaves the block.

    Args:
      flags: the command line's.

    Raises:
      UserError: if the flags are incomplete, or the others cannot be reached.
    """
    flags = read_environment(flags, os.environ)
    if not is_several(flags, os.environ):
        yield
        return
    _initialize(flags)
    if jax.process_count() == 1:
        yield
        return
    # Commands started by this one, such as auxiliary jobs, do not belong to this run.
    os.environ[COUNT] = "1"
    with contextlib.ExitStack() as quiet:
        host = coordinator_address().rpartition(":")[0].strip("[]")
        watch = Watch(jax.process_index(), jax.process_count(), host, broadcast_from_first)
        if not is_first():
            nowhere = quiet.enter_context(open(os.devnull, "w"))
            quiet.enter_context(contextlib.redirect_stdout(nowhere))
            quiet.enter_context(contextlib.redirect_stderr(nowhere))
            scratch_folders[:] = [quiet.enter_context(tempfile.TemporaryDirectory())]
        print(
            f"processes: {jax.process_count()}, coordinated by {coordinator_address()}",
            file=sys.stderr,
        )
        try:
            yield
        except SystemExit:  # stopped by a signal, as all are
            _leave(watch)
            raise
        except BaseException as error:
            if not isinstance(error, UserError | KeyboardInterrupt):
                watch.end_with_others()
            # This breaks the connections, so that the others end at once instead of waiting for a
            # heartbeat.
            watch.abandon()
            # At exit JAX would wait in vain for the others, and then abort the process.
            interrupted = isinstance(error, KeyboardInterrupt)
            code = 130 if interrupted else 2 if isinstance(error, UserError) else 1
            atexit.register(_end, code)  # as t0repro.cli.gate ends these
            raise
        _leave(watch)


def _end(code: int) -> None:
    """Ends the process without JAX's own shutdown."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _leave(watch: Watch) -> None:
    """Ends this process's part in order; JAX then waits for the others, up to a timeout."""
    watch.leave()
    jax.distributed.shutdown()


def read_environment(flags: ProcessFlags, environment: Mapping[str, str]) -> ProcessFlags:
    """The flags, completed by variables: T0REPRO_*, a Kubernetes job's, Open MPI's and Vertex AI's.

    Raises:
      UserError: if a variable cannot be read, or the index is not below the count.
    """
    detect = flags.detect or environment.get(COUNT) == "auto"
    address = flags.address or environment.get(ADDRESS)
    numbers: dict[str, int | None] = {}
    for field, value, variable in (
        ("count", flags.count, COUNT),
        ("index", flags.index, INDEX),
    ):
        text = environment.get(variable)
        if value is None and text is not None and text != "auto":
            value = _number(variable, text)
        numbers[field] = value
    # Kubernetes gives the pods of an indexed job their index but not their number.
    index = numbers["index"]
    if index is None and (numbers["count"] or 1) > 1 and "JOB_COMPLETION_INDEX" in environment:
        index = _number("JOB_COMPLETION_INDEX", environment["JOB_COMPLETION_INDEX"])
    count = numbers["count"]
    # Open MPI 5 no longer gives the first process's address, which JAX reads from Open MPI 4's
    # variables; if an address is set, only the numbers are missing.
    if address is not None and count is None and index is None:
        count, index = (
            None if variable not in environment else _number(variable, environment[variable])
            for variable in ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK")
        )
    if count is not None and (count < 1 or not 0 <= (index or 0) < count):
        raise UserError(
            f"There is no process {index or 0} of {count}.",
            where="--process_count, --process_index",
            fix="Indices count from 0 and are less than --process_count.",
        )
    if index and count is None:
        raise UserError(
            f"This is process {index}, but the number of processes is missing.",
            where="--process_index",
            fix="Give --process_count and --coordinator_address too.",
        )
    # Vertex AI gives a job's replicas all three; a caller who sets one must set all.
    if address is None and count is None and index is None:
        address, count, index = _replicas_of_vertex_ai(environment)
    return ProcessFlags(address, count, index, flags.timeout, detect)


def _replicas_of_vertex_ai(
    environment: Mapping[str, str],
) -> tuple[str, int, int] | tuple[None, None, None]:
    """The first replica's address, the number of replicas, and this one's index; None for one.

    Vertex AI's CLUSTER_SPEC has the addresses of each pool of machines and this replica's place:
    `{"cluster": {"workerpool0": ["host:2222"], ...}, "task": {"type": "workerpool0", "index": 0}}`.

    Raises:
      UserError: if CLUSTER_SPEC lacks any of these.
    """
    text = environment.get("CLUSTER_SPEC")
    if text is None:
        return None, None, None
    try:
        spec = json.loads(text)
        pools, task = spec["cluster"], spec["task"]
        replicas = [(pool, at) for pool in sorted(pools) for at in range(len(pools[pool]))]
        index = replicas.index((task["type"], int(task["index"])))
        first = pools["workerpool0"][0]
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise UserError(
            f"CLUSTER_SPEC does not say which replica of a job this is: {error!r}",
            where="CLUSTER_SPEC",
            fix=f"Vertex AI sets it. Elsewhere unset it, or set {COUNT}=1.",
        ) from error
    return (first, len(replicas), index) if len(replicas) > 1 else (None, None, None)


def _number(variable: str, text: str) -> int:
    if not text.isdecimal():
        raise UserError(
            f"{variable} is {text!r}, which is not a number.",
            where=variable,
            fix="Set it to a whole number, or unset it to start a single process.",
        )
    return int(text)


def is_several(flags: ProcessFlags, environment: Mapping[str, str]) -> bool:
    """Whether a process is one of several; a count of 1 overrides the environment."""
    if flags.count is not None:
        return flags.count > 1
    return flags.detect or flags.address is not None or cluster(environment) is not None


def cluster(environment: Mapping[str, str]) -> str | None:
    """The launcher that started this process as one of several, according to its variables.

    JAX then detects this process's index and the first one's address by itself.
    """
    if int(environment.get("SLURM_STEP_NUM_TASKS", 1)) > 1 and "SLURM_PROCID" in environment:
        return "Slurm"
    if int(environment.get("OMPI_COMM_WORLD_SIZE", 1)) > 1:
        return "Open MPI"
    if "," in environment.get("TPU_WORKER_HOSTNAMES", ""):
        return "TPU pod"
    if {"KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX"} <= environment.keys():
        # JAX gets the number of pods from the cluster's API, which needs this package.
        return "Kubernetes" if importlib.util.find_spec("kubernetes") else None
    # A TPU VM of Compute Engine shows what it belongs to only on its metadata server.
    if importlib.util.find_spec("libtpu") and glob.glob("/dev/accel[0-9]*"):
        return "TPU pod"
    return None


def _initialize(flags: ProcessFlags) -> None:
    """Starts jax.distributed.

    Raises:
      UserError: if the other processes' addresses are unknown, or they cannot be reached.
    """
    timeout = flags.timeout or _INITIALIZATION_SECONDS
    others = "the other processes" if flags.count is None else f"all {flags.count} processes"
    try:
        with working(f"waiting up to {timeout} s for {others} of this run", every=60.0):
            jax.distributed.initialize(
                flags.address,
                flags.count,
                flags.index,
                initialization_timeout=timeout,
                heartbeat_timeout_seconds=_HEARTBEAT_SECONDS,
                shutdown_timeout_seconds=_HEARTBEAT_SECONDS,
            )
    except (ValueError, RuntimeError) as error:
        line = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(
            f"The processes of this run cannot reach each other: {line}",
            where=f"coordinator {flags.address or 'not given'}, process {flags.index or 0} of"
            f" {flags.count or 'unknown'}",
            fix="Start --process_count processes with the same --coordinator_address HOST:PORT,"
            " which is process 0's, and --process_index 0, 1, ...",
        ) from error
