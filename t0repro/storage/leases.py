"""Allows one run at a time below an address of a bucket: a lease, which its owner keeps renewing.

A lease is a numbered object in `<address>/.t0repro.lease/`; the highest number is the one that
counts. Who finds it released, or its owner dead, creates the next number, which the store lets one
of several do. So a lease is taken over without a moment in which there are two owners.

An owner renews its object every 20 seconds. Another machine takes the lease over once it has
watched the object for a minute without seeing it renewed; its clock does not matter.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import socket
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from t0repro.errors import UserError
from t0repro.progress import Waiting
from t0repro.storage import buckets
from t0repro.words import remove_passwords

LEASES = ".t0repro.lease"

_SECONDS_BETWEEN_RENEWALS = 20.0
_SECONDS_TO_EXPIRE = 75.0  # longer than three renewals
_POLL_SECONDS = 1.0
# Older objects are removed; some stay, so that a listing that lags behind finds none of those free.
_KEPT_RECORDS = 10


class Lease:
    """A lease on an address, as `hold` yields it.

    Args:
      address: what is held.
      purpose: what the owner does, such as "training", for the message that others get.
    """

    def __init__(self, address: str, purpose: str):
        self._address, self._number, self._beat = address, 0, 0
        self._owner = {
            "owner": uuid.uuid4().hex,
            "purpose": purpose,
            "command": remove_passwords(shlex.join(sys.argv)),
            "host": socket.gethostname(),
            "process": os.getpid(),
            "machine": _machine(),
        }
        self._released, self._writing = threading.Event(), threading.Lock()

    def acquire(self, fix: str) -> None:
        """Takes the lease.

        Raises:
          UserError: if a live owner holds it.
        """
        number, holder = _latest(self._address)
        if holder is not None and not _is_free(holder):
            _wait_until_expired(self._address, number, holder, fix)
        if faster := self._create_after(number):
            raise _is_held(self._address, faster, fix)

    def acquire_now(self, also_free: str = "") -> bool:
        """Takes the lease if it is free, without waiting to see whether its owner is alive.

        Args:
          also_free: a purpose whose owners are known to be dead.

        Returns:
          Whether it is held now.
        """
        number, holder = _latest(self._address)
        if holder is not None and not (_is_free(holder) or holder.get("purpose") == also_free):
            return False
        return self._create_after(number) is None

    def _create_after(self, number: int) -> Mapping[str, Any] | None:
        """Creates the object after a number, or after those that others create meanwhile.

        Returns:
          None, or the live owner of one that was created meanwhile.
        """
        while not buckets.create(_object(self._address, number + 1), self._content()):
            # Another run was faster. A listing that lags behind may not have shown a later number.
            number += 1
            other = _record(self._address, number)
            if other is not None and other.get("owner") == self._owner["owner"]:
                # The store had taken it, but its answer was lost and the library asked again.
                number -= 1
                break
            if other is not None and not _is_free(other):
                return other
        self._number = number + 1
        for old in buckets.objects(f"{self._address}/{LEASES}"):
            if old.isdecimal() and int(old) <= self._number - _KEPT_RECORDS:
                buckets.remove(_object(self._address, int(old)))
        threading.Thread(target=self._renew, daemon=True).start()
        return None

    def check(self) -> None:
        """Raises UserError if another run has taken the lease over, as after a long suspension."""
        if not self._released.is_set() and buckets.exists(_object(self._address, self._number + 1)):
            raise UserError(
                "Another run took over while this one did not answer for a minute.",
                where=self._address,
                fix="Let that run continue. What this one wrote since its last upload is dropped.",
            )

    def release(self) -> None:
        """Gives the lease back, unless another run has taken it over."""
        self._released.set()
        # A renewal on its way must not arrive after this, or the lease would look held.
        with self._writing, contextlib.suppress(UserError):  # it then expires
            buckets.write(_object(self._address, self._number), self._content(released=True))

    def _content(self, *, released: bool = False) -> bytes:
        self._beat += 1
        return json.dumps({**self._owner, "beat": self._beat, "released": released}).encode()

    def _renew(self) -> None:
        while not self._released.wait(_SECONDS_BETWEEN_RENEWALS):
            with self._writing, contextlib.suppress(UserError):  # the next renewal may succeed
                if not self._released.is_set():
                    buckets.write(_object(self._address, self._number), self._content())


_PINS = ".t0repro.pins"
_READING = "reading a checkpoint"
_UNWANTED = "unwanted"


def pin(checkpoint: str) -> Lease | None:
    """Keeps a checkpoint of a bucket until the lease is released; the caller then looks for it.

    The caller alone pins checkpoints of that folder, so an earlier pin's owner is dead.

    Returns:
      None if the checkpoint is being removed.
    """
    lease = Lease(_pin_of(checkpoint), _READING)
    return lease if lease.acquire_now(_READING) else None


@contextlib.contextmanager
def hold_for_removal(checkpoint: str) -> Iterator[bool]:
    """Within the block, nobody pins a checkpoint of a bucket; False if it is pinned already.

    The process that releases that pin then finds it `is_unwanted`.
    """
    lease = Lease(_pin_of(checkpoint), "removing a checkpoint")
    if not lease.acquire_now():
        buckets.write(f"{_pin_of(checkpoint)}/{_UNWANTED}", b"")
        # Once more: if the pin was released just before that, nobody has seen it.
        if not lease.acquire_now():
            yield False
            return
    try:
        yield True
    finally:
        lease.release()
    buckets.remove_all(_pin_of(checkpoint))


def is_unwanted(checkpoint: str) -> bool:
    """Whether a checkpoint of a bucket was to be removed while it was pinned."""
    return buckets.exists(f"{_pin_of(checkpoint)}/{_UNWANTED}")


def _pin_of(checkpoint: str) -> str:
    """Beside the checkpoint, since a removed one takes what is in it along."""
    folder, _, name = checkpoint.rpartition("/")
    return f"{folder}/{_PINS}/{name}"


@contextlib.contextmanager
def hold(address: str, purpose: str, *, fix: str) -> Iterator[Lease]:
    """Holds the lease on an address within the block.

    Args:
      address: what is held.
      purpose: what the owner does, such as "training", for the message that others get.
      fix: what others can do instead.

    Raises:
      UserError: if a live owner holds it.
    """
    lease = Lease(address, purpose)
    lease.acquire(fix)
    try:
        yield lease
    finally:
        lease.release()


def _object(address: str, number: int) -> str:
    return f"{address}/{LEASES}/{number:08d}"


def _latest(address: str) -> tuple[int, Mapping[str, Any] | None]:
    """The highest number and what its object says; 0 and None if there is none."""
    numbers = [int(name) for name in buckets.objects(f"{address}/{LEASES}") if name.isdecimal()]
    if not numbers:
        return 0, None
    return max(numbers), _record(address, max(numbers))


def _record(address: str, number: int) -> Mapping[str, Any] | None:
    """What an object says: nothing, {}, if it is damaged, and None if it is gone."""
    try:
        value = json.loads(buckets.read(_object(address, number)))
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _is_free(holder: Mapping[str, Any]) -> bool:
    """Whether a lease was released or its owner is known to be dead: a process of this machine."""
    if holder.get("released") is True:
        return True
    process = holder.get("process")
    # A damaged record does not show that its owner is dead.
    if type(process) is not int or not 0 < process < 2**31:
        return False
    return holder.get("machine") == _machine() and not is_alive(process)


def _wait_until_expired(
    address: str,
    number: int,
    holder: Mapping[str, Any],
    fix: str,
) -> None:
    """Returns once an owner has not renewed its lease for too long, or has released it."""
    if holder.get("machine") == _machine():
        raise _is_held(address, holder, fix)  # a live process of this machine
    waiting, limit = Waiting(), f"{_SECONDS_TO_EXPIRE:.0f} s"
    # By how long it was watched, since two machines' clocks may differ.
    end = time.monotonic() + _SECONDS_TO_EXPIRE
    while time.monotonic() < end:
        waiting.report(f"waiting up to {limit} to see whether {_place(holder)} is still alive")
        time.sleep(_POLL_SECONDS)
        now = _record(address, number) or {}
        if now.get("released") is True:
            return
        if now.get("beat") != holder.get("beat"):
            raise _is_held(address, now, fix)


def _is_held(address: str, holder: Mapping[str, Any], fix: str) -> UserError:
    command = f": {holder['command']}" if holder.get("command") else ""
    return UserError(
        f"Another run holds this address for {holder.get('purpose', 'a run')}"
        f" ({_place(holder)}){command}.",
        where=address,
        fix=fix,
    )


def _place(holder: Mapping[str, Any]) -> str:
    return f"process {holder.get('process', '?')} on {holder.get('host', 'another machine')}"


def is_alive(process: int) -> bool:
    """Whether this machine has a process of this number."""
    try:
        os.kill(process, 0)  # sends nothing
    except ProcessLookupError:
        return False
    except PermissionError:  # somebody else's process, which is there
        return True
    return True


def _machine() -> str:
    """What tells machines apart, and containers of a machine that number their own processes."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # not Linux
        return socket.gethostname()
