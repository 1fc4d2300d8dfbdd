"""What ends the others when a process ends.

JAX notices a dead process by its heartbeat, half a minute late; until then the others hang in a
collective operation. Here each process holds a TCP connection to the first one, which the system
closes when a process dies, however it dies:

    process 1 ----+
    process 2 ----+---- process 0, which tells the others
    process 3 ----+

A process that ends in order sends a byte before it closes its connection.

When the first process dies, JAX's own connection to it breaks at the same moment, and JAX aborts
the process from a C++ thread. `_delay_aborts` delays that by some seconds, so that the message is
printed first.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

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
      broadcast: returns in every process the result of its argument in the first one.
    """

    def __init__(
        self, index: int, count: int, host: str, broadcast: Callable[[Callable[[], Any]], Any]
    ):
        self._index, self._count = index, count
        self._left, self._lost = False, threading.Event()
        server = _server(count) if index == 0 else None
        # The token excludes strangers who find the port, since hanging up would end the run.
        port, token = broadcast(
            lambda: server and [server.getsockname()[1], secrets.token_hex(_TOKEN_BYTES)]
        )
        self._names = {0: host}
        if server is not None:
            self._peers = _accept_peers(server, count, bytes.fromhex(token))
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
                    message = _receive(key.fileobj)
                    if not message or message.startswith(_LEAVING):
                        selector.unregister(key.fileobj)
                    if not message.startswith(_LEAVING):
                        # A closed connection, or process 0's news about another process.
                        self._end(int(message.split()[0]) if message else key.data)

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
            "  fix: Look at its own messages; then start all processes again with the same"
            " command, which continues where it stopped.",
            # Not sys.stderr, which `join_processes` has redirected to nowhere in all processes but
            # the first.
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


def _accept_peers(server: socket.socket, count: int, token: bytes) -> dict[int, socket.socket]:
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


def _send(peer: socket.socket, message: bytes) -> None:
    """Sends bytes to a process that may be gone."""
    with contextlib.suppress(OSError):
        peer.sendall(message)
