"""Reads from an iterator in a thread, a few items before they are asked for."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Iterator
from typing import TypeVar

Item = TypeVar("Item")


def read_ahead(items: Iterable[Item], count: int = 2) -> Iterator[Item]:
    """Yields the items in order, of which up to `count` have been read before.

    So the next batch is made while the device computes, even if making it takes Python. An error
    of `items` is raised where its item would have come. Closing the generator ends the thread.
    """
    ready: queue.SimpleQueue[tuple[Item] | BaseException | None] = queue.SimpleQueue()
    room, closed = threading.Semaphore(count), threading.Event()

    def read() -> None:
        iterator = iter(items)
        try:
            # Room first: what has been read and not asked for is held in memory.
            while room.acquire() and not closed.is_set():
                ready.put((next(iterator),))
        except StopIteration:
            ready.put(None)
        except BaseException as error:
            ready.put(error)

    thread = threading.Thread(target=read, name="read ahead", daemon=True)
    thread.start()
    try:
        while (item := ready.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            room.release()
            yield item[0]
    finally:
        closed.set()
        room.release()
        thread.join()
