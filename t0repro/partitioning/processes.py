"""Several processes, on one machine or many, that train or evaluate together.

Every process runs the same program on the devices of all of them (jax.distributed). This module
coordinates them: only the first process writes, the others adopt its choices
(`broadcast_from_first`), all compare what each has (`gather`), and all wait for each other before
they use what was written (`wait_for_all`).

A single process counts as the first of one, and all of this has no effect on it. Where one process
ends, t0repro.partitioning.watch ends the others.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from t0repro.storage import output_path

Value = TypeVar("Value")

_FOR_EVER = 7 * 24 * 3600 * 1000  # milliseconds; a process's death ends the waiting
_numbers = itertools.count()  # equal in every process, since all make the same calls
scratch_folders: list[str] = []  # the folder of `output_folder` in processes other than the first


def is_first() -> bool:
    """Whether this process writes the files that are written once."""
    return _client() is None or jax.process_index() == 0


def is_alone() -> bool:
    """Whether this is the only process."""
    return _client() is None or jax.process_count() == 1


def wait_for_all() -> None:
    """Returns once every process has made this call."""
    make_barrier()()


def make_barrier() -> Callable[[], None]:
    """A function that returns once every process has called its own, from any thread.

    Call it from the main thread, in the same order as this module's other calls in every process;
    background threads can then meet there.
    """
    if is_alone():
        return lambda: None
    name = f"t0repro/{next(_numbers)}"
    return lambda: _client().wait_at_barrier(name, _FOR_EVER)


def broadcast_from_first(value: Callable[[], Value]) -> Value:
    """A function's result in the first process, returned in all; it must be JSON."""
    if is_alone():
        return value()
    service, key = _client(), f"t0repro/{next(_numbers)}"
    if is_first():
        result = value()
        service.key_value_set(key, json.dumps(result))
        return result
    return json.loads(service.blocking_key_value_get(key, _FOR_EVER))


def gather(value: Value) -> list[Value]:
    """Every process's value, by the processes' index; it must be JSON."""
    if is_alone():
        return [value]
    service, name = _client(), f"t0repro/{next(_numbers)}"
    service.key_value_set(f"{name}/{jax.process_index()}", json.dumps(value))
    keys = [f"{name}/{index}" for index in range(jax.process_count())]
    return [json.loads(service.blocking_key_value_get(key, _FOR_EVER)) for key in keys]


@functools.cache
def all_agree(question: str, answer: bool) -> bool:
    """Whether every process answers a question with True; each must ask it.

    Unlike this module's other calls, it may be made while a program is traced, in any order: its
    name is what it asks.
    """
    if is_alone():
        return answer
    service, keys = _client(), [f"t0repro/{question}/{n}" for n in range(jax.process_count())]
    service.key_value_set(keys[jax.process_index()], json.dumps(answer))
    return all(json.loads(service.blocking_key_value_get(key, _FOR_EVER)) for key in keys)


@contextlib.contextmanager
def enter_in_first(block: Callable[[], contextlib.AbstractContextManager[Any]]) -> Iterator[None]:
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
    copy = Path(tempfile.mkdtemp(dir=scratch_folders[0]))
    if resumed:
        if os.path.isdir(folder):
            skip = shutil.ignore_patterns("checkpoint_*", "model.ckpt*", ".*")
            shutil.copytree(folder, copy, ignore=skip, dirs_exist_ok=True)
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

    def exchange(self, number: int) -> int:
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


def coordinator_address() -> str:
    """HOST:PORT of the first process; "" for a single process."""
    from jax._src import distributed

    return distributed.global_state.coordinator_address or ""
