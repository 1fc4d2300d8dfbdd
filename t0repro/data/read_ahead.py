"""Reads from an iterator in a thread, a few items before they are asked for."""

from __future__ import annotations

import atexit
import queue
import threading
from collections.abc import Generator, Iterable, Iterator
from typing import Any, TypeVar

Item = TypeVar("Item")


def read_ahead(items: Iterable[Item], count: int = 2) -> Iterator[Item]:
    """The items in order, with up to `count` read ahead, starting now.

    The next batch is thus built while the device computes, even if building it takes Python. An
    error of `items` is raised in place of its item. The thread ends when the iterator is closed or
    dropped, and at exit.
    """
    reading = _read_ahead(items, count)
    next(reading)  # starts the thread; closing a generator ends it only if it has started
    return reading


def _read_ahead(items: Iterable[Item], count: int) -> Generator[Any]:
    """Yields once when the thread has started, then the items."""
    ready: queue.SimpleQueue[tuple[Item] | BaseException | None] = queue.SimpleQueue()
    room, closed = threading.Semaphore(count), threading.Event()

    def read() -> None:
        iterator = iter(items)
        try:
            # Acquire room first: items that were read but not yet requested are held in memory.
            while room.acquire() and not closed.is_set():
                ready.put((next(iterator),))
        except StopIteration:
            ready.put(None)
        except BaseException as error:
            ready.put(error)

    thread = threading.Thread(target=read, name="read ahead", daemon=True)
    thread.start()

    def end() -> None:
        closed.set()
        room.release()
        thread.join()

    atexit.register(end)
    try:
        yield
        while (item := ready.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            room.release()
            yield item[0]
    finally:
        # If nobody closed it, `end` ran at exit; the iterator is dropped after the modules that
        # `end` needs have been torn down.
        if not closed.is_set():
            atexit.unregister(end)
            end()
