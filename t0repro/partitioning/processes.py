"""Several processes, on one machine or many, that train or evaluate together.

Every process runs the same program on the devices of all of them (jax.distributed). This module
coordinates them: only the first process writes, the others adopt its choices (`from_first`), and
all wait for each other before they use what was written (`wait_for_all`).

A single process counts as the first of one, and all of this has no effect on it. Where one process
ends, `Watch` ends the others.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import dataclasses
import glob
import importlib.util
import itertools
import json
import os
import secrets
import selectors
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from t0repro.errors import UserError
from t0repro.files import output_path

Value = TypeVar("Value")

ADDRESS, COUNT, INDEX = (
    "T0REPRO_COORDINATOR_ADDRESS",
    "T0REPRO_PROCESS_COUNT",
    "T0REPRO_PROCESS_INDEX",
)
# `Watch` notices a dead process at once; this is for a dead machine or network.
_HEARTBEAT_SECONDS = 30
# JAX's own default; seconds until all processes have to have started.
_INITIALIZATION_SECONDS = 300
_FOR_EVER = 7 * 24 * 3600 * 1000  # milliseconds; a process's death ends the waiting
_numbers = itertools.count()  # equal in every process, since all make the same calls
_scratch: list[str] = []  # the folder of `output_folder` in processes other than the first


@dataclasses.dataclass(frozen=True)
class Asked:
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


# ---- Joining ------------------------------------------------------------------------------------


@contextlib.contextmanager
def joined(asked: Asked) -> Iterator[None]:
    """Runs the block as one of several processes, if flags or the environment say so.

    If one of them ends early, the others end within seconds and name it. Within the block,
    processes other than the first print nothing, except an error that leaves the block.

    Args:
      asked: the flags.

    Raises:
      UserError: if the flags are incomplete, or the others cannot be reached.
    """
    wanted = with_environment(asked, os.environ)
    if not is_several(wanted, os.environ):
        yield
        return
    _initialize(wanted)
    if jax.process_count() == 1:
        yield
        return
    # Commands started by this one, such as auxiliary jobs, do not belong to this run.
    os.environ[COUNT] = "1"
    with contextlib.ExitStack() as quiet:
        host = _address().rpartition(":")[0].strip("[]")
        watch = Watch(jax.process_index(), jax.process_count(), host, from_first)
        if not is_first():
            nowhere = quiet.enter_context(open(os.devnull, "w"))
            quiet.enter_context(contextlib.redirect_stdout(nowhere))
            quiet.enter_context(contextlib.redirect_stderr(nowhere))
            _scratch[:] = [quiet.enter_context(tempfile.TemporaryDirectory())]
        print(f"processes: {jax.process_count()}, coordinated by {_address()}", file=sys.stderr)
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


def with_environment(asked: Asked, environment: Mapping[str, str]) -> Asked:
    """The flags, completed by variables: T0REPRO_*, a Kubernetes job's, Open MPI's and Vertex AI's.

    Raises:
      UserError: if a variable cannot be read, or the index is not below the count.
    """
    detect = asked.detect or environment.get(COUNT) == "auto"
    address = asked.address or environment.get(ADDRESS)
    numbers: dict[str, int | None] = {}
    for field, given, variable in (
        ("count", asked.count, COUNT),
        ("index", asked.index, INDEX),
    ):
        text = environment.get(variable)
        if given is None and text is not None and text != "auto":
            given = _number(variable, text)
        numbers[field] = given
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
    return Asked(address, count, index, asked.timeout, detect)


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
        raise UserError(f"{variable} is {text!r}, which is not a number.", where=variable)
    return int(text)


def is_several(asked: Asked, environment: Mapping[str, str]) -> bool:
    """Whether a process is one of several; a count of 1 overrides the environment."""
    if asked.count is not None:
        return asked.count > 1
    return asked.detect or asked.address is not None or cluster(environment) is not None


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


def _initialize(asked: Asked) -> None:
    """Starts jax.distributed.

    Raises:
      UserError: if the other processes' addresses are unknown, or they cannot be reached.
    """
    timeout = asked.timeout or _INITIALIZATION_SECONDS
    try:
        jax.distributed.initialize(
            asked.address,
            asked.count,
            asked.index,
            initialization_timeout=timeout,
            heartbeat_timeout_seconds=_HEARTBEAT_SECONDS,
            shutdown_timeout_seconds=_HEARTBEAT_SECONDS,
        )
    except (ValueError, RuntimeError) as error:
        line = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(
            f"The processes of this run cannot reach each other: {line}",
            where=f"coordinator {asked.address or 'not given'}, process {asked.index or 0} of"
            f" {asked.count or 'unknown'}",
            fix="Start --process_count processes with the same --coordinator_address HOST:PORT,"
            " which is process 0's, and --process_index 0, 1, ...",
        ) from error


# ---- Among the processes ------------------------------------------------------------------------


def is_first() -> bool:
    """Whether this process writes the files that are written once."""
    return _client() is None or jax.process_index() == 0


def is_alone() -> bool:
    """Whether this is the only process."""
    return _client() is None or jax.process_count() == 1


def wait_for_all() -> None:
    """Returns once every process has made this call."""
    meeting_point()()


def meeting_point() -> Callable[[], None]:
    """A function that returns once every process has called its own, from any thread.

    Call it from the main thread, in the same order as this module's other calls in every process;
    background threads can then meet there.
    """
    if is_alone():
        return lambda: None
    name = f"t0repro/{next(_numbers)}"
    return lambda: _client().wait_at_barrier(name, _FOR_EVER)


def from_first(value: Callable[[], Value]) -> Value:
    """A function's result in the first process, returned in all; it must be JSON."""
    if is_alone():
        return value()
    client, key = _client(), f"t0repro/{next(_numbers)}"
    if is_first():
        found = value()
        client.key_value_set(key, json.dumps(found))
        return found
    return json.loads(client.blocking_key_value_get(key, _FOR_EVER))


@contextlib.contextmanager
def held_by_first(block: Callable[[], contextlib.AbstractContextManager[Any]]) -> Iterator[None]:
    """A context that the first process enters on behalf of all, such as a folder's lock.

    The others continue once it has been entered, and it is left when all are done.
    """
    with block() if is_first() else contextlib.nullcontext():
        wait_for_all()
        yield
        wait_for_all()


def output_folder(folder: str | os.PathLike[str], *, resumed: bool = False) -> Path:
    """The folder for files written once: the given one, or a scratch folder in other processes.

    All processes compute the same results, and only the first one's are kept.

    Args:
      folder: the folder.
      resumed: whether the folder's content decides what is left to do, as in an evaluation. The
        other processes then get a copy as of now, without checkpoints.
    """
    if is_first():
        # Wait until all have copied it: the first must not write into the folder while others read
        # it.
        if resumed:
            wait_for_all()
        return output_path(folder)
    copy = Path(tempfile.mkdtemp(dir=_scratch[0]))
    if resumed:
        if os.path.isdir(folder):
            ignored = shutil.ignore_patterns("checkpoint_*", "model.ckpt*", ".*")
            shutil.copytree(folder, copy, ignore=ignored, dirs_exist_ok=True)
        wait_for_all()
    return copy


class SharedSignal:
    """The maximum of the processes' numbers, which all learn at the same step.

    The numbers that processes give after a step are combined on the devices during the next step
    and known to all after it: no process waits, and none is a step ahead of the answer.
    """

    def __init__(self) -> None:
        self._pending: jax.Array | None = None
        devices = np.array(jax.devices())
        mesh = Mesh(devices, ("all",), axis_types=(AxisType.Auto,))
        self._sharding = NamedSharding(mesh, PartitionSpec("all"))
        everywhere = NamedSharding(mesh, PartitionSpec())
        self._largest = jax.jit(lambda numbers: numbers.max(), out_shardings=everywhere)

    def after_step(self, number: int) -> int:
        """Gives this process's number; returns the maximum given after the previous step."""
        before, shape = self._pending, (self._sharding.mesh.size,)
        numbers = jax.make_array_from_callback(
            shape, self._sharding, lambda index: np.full(shape, number, np.int32)[index]
        )
        self._pending = self._largest(numbers)
        return 0 if before is None else int(before)


def _client() -> Any:
    """JAX's client of the coordination service; None for a single process.

    JAX has no public name for it; Orbax and Flax read it here too.
    """
    from jax._src import distributed

    return distributed.global_state.client


def _address() -> str:
    from jax._src import distributed

    return distributed.global_state.coordinator_address or ""


# ---- What ends the others when a process ends ----------------------------------------------------
#
# JAX notices a dead process by its heartbeat, half a minute late; until then the others hang in a
# collective operation. Here each process holds a TCP connection to the first one, which the system
# closes when a process dies, however it dies:
#
#     process 1 ----+
#     process 2 ----+---- process 0, which tells the others
#     process 3 ----+
#
# A process that ends in order sends a byte before it closes its connection.
#
# When the first process dies, JAX's own connection to it breaks at the same moment, and JAX aborts
# the process from a C++ thread. `_delay_aborts` delays that by some seconds, so that the message is
# printed first.

_LEAVING, _TOKEN_BYTES = b".", 16
_HEAD = _TOKEN_BYTES + 4  # the run's token and the index of a process, big-endian
_FAILURE = 1
# JAX aborts every process once the first one is gone, so the first waits this long before it ends.
# A process whose collective fails waits equally long to be notified that another process has ended.
_SECONDS_FOR_NEWS = 1.0


class Watch:
    """Watches the other processes of a run in a separate thread.

    Args:
      index: this process's number, from 0.
      count: number of processes.
      host: the host name at which the others reach the first process.
      from_first: returns in every process the result of its argument in the first one.
    """

    def __init__(
        self, index: int, count: int, host: str, from_first: Callable[[Callable[[], Any]], Any]
    ):
        self._index, self._count = index, count
        self._left, self._lost = False, threading.Event()
        server = _server(count) if index == 0 else None
        # The token excludes strangers who find the port, since hanging up would end the run.
        port, token = from_first(
            lambda: server and [server.getsockname()[1], secrets.token_hex(_TOKEN_BYTES)]
        )
        self._names = {0: host}
        if server is not None:
            self._peers = _accepted(server, count, bytes.fromhex(token))
            for at, peer in self._peers.items():
                # A socket for both protocols shows an IPv4 address in IPv6's form.
                self._names[at] = peer.getpeername()[0].removeprefix("::ffff:")
        else:
            peer = socket.create_connection((host, port))
            peer.sendall(bytes.fromhex(token) + index.to_bytes(4, "big"))
            self._peers = {0: peer}
        # A machine that loses its power closes no connection, but it stops answering keepalives.
        for peer in self._peers.values():
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        _delay_aborts()
        threading.Thread(target=self._run, name="watch", daemon=True).start()

    def leave(self) -> None:
        """Announces to the others that this process ends in order."""
        self._left = True
        for peer in self._peers.values():
            _send(peer, _LEAVING)

    def abandon(self) -> None:
        """Lets the others know at once that this process fails."""
        self._left = True
        for peer in self._peers.values():
            with contextlib.suppress(OSError):
                peer.shutdown(socket.SHUT_RDWR)

    def end_with_others(self) -> None:
        """Does not return if another process has ended, which may be why this one fails."""
        if self._lost.wait(_SECONDS_FOR_NEWS):
            time.sleep(2 * _SECONDS_FOR_NEWS)  # meanwhile `_end` ends this process

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            for at, peer in self._peers.items():
                selector.register(peer, selectors.EVENT_READ, at)
            while selector.get_map():
                for key, _ in selector.select():
                    assert isinstance(key.fileobj, socket.socket)
                    said = _receive(key.fileobj)
                    if not said or said.startswith(_LEAVING):
                        selector.unregister(key.fileobj)
                    if not said.startswith(_LEAVING):
                        # A closed connection, or process 0's news about another process.
                        self._end(int(said.split()[0]) if said else key.data)

    def _end(self, lost: int) -> None:
        """Ends this process because another one has ended."""
        if self._left:
            return
        self._lost.set()
        for at, peer in self._peers.items():
            if self._index == 0 and at != lost:
                _send(peer, f"{lost}\n".encode())
        name = f" on {self._names[lost]}" if lost in self._names else ""
        print(
            f"Process {lost} of {self._count}{name} has ended, so process {self._index} ends too.\n"
            "  to do: Look at its own messages; then start all processes again with the same"
            " command, which continues where it stopped.",
            # Not sys.stderr, which `joined` has redirected to nowhere in all processes but the
            # first.
            file=sys.__stderr__,
            flush=True,
        )
        if self._index == 0:
            time.sleep(_SECONDS_FOR_NEWS)
        # An ordinary exit would wait for the process that has ended: JAX meets all others first.
        os._exit(_FAILURE)


def _delay_aborts() -> None:
    """Makes a C++ thread that aborts this process sleep first, while the others continue.

    The handler is the C library's own `sleep`, which may be called in one: Python's handlers run in
    the main thread, and not before C++ returns. Its argument is the signal's number, 6 seconds.
    """
    library = ctypes.CDLL(None)
    library.signal.argtypes = ctypes.c_int, ctypes.c_void_p
    library.signal(signal.SIGABRT, ctypes.cast(library.sleep, ctypes.c_void_p))


def _server(count: int) -> socket.socket:
    """Listens on a free port, also by IPv6 if available."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(
            ("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=count
        )
    return socket.create_server(("", 0), backlog=count)


def _accepted(server: socket.socket, count: int, token: bytes) -> dict[int, socket.socket]:
    """A connection from every other process; turns away all other callers."""
    peers: dict[int, socket.socket] = {}
    with server:
        while len(peers) < count - 1:
            peer, _ = server.accept()
            head = b""
            # A stranger who connects and sends nothing must not hold up the start for ever.
            peer.settimeout(10)
            while len(head) < _HEAD and (more := _receive(peer, _HEAD - len(head))):
                head += more
            if head[:_TOKEN_BYTES] == token and len(head) == _HEAD:
                peer.settimeout(None)
                peers[int.from_bytes(head[_TOKEN_BYTES:], "big")] = peer
            else:
                peer.close()
    return peers


def _receive(peer: socket.socket, size: int = 64) -> bytes:
    """The bytes received, or nothing at the end of a connection, however it ended."""
    try:
        return peer.recv(size)
    except OSError:
        return b""


def _send(peer: socket.socket, said: bytes) -> None:
    """Sends bytes to a process that may be gone."""
    with contextlib.suppress(OSError):
        peer.sendall(said)
