"""A progress bar in bytes on a terminal, a line every few seconds elsewhere, nothing for small
work.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

_SECONDS_BETWEEN_LINES = 5.0


@contextlib.contextmanager
def byte_progress(description: str, total: int) -> Iterator[Callable[[int], None]]:
    """Yields a function to be told of each number of bytes done, of `total`.

    Args:
      description: what is being done, a few words.
      total: bytes in all.
    """
    from rich import console, progress

    terminal = console.Console(stderr=True)
    if not terminal.is_terminal:
        yield _line_printer(terminal.print, description, total)
        return
    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.DownloadColumn(),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
    )
    with progress.Progress(*columns, console=terminal, transient=True) as bar:
        task = bar.add_task(description, total=total)
        yield lambda count: bar.advance(task, count)


def _line_printer(
    print_line: Callable[[str], None], description: str, total: int
) -> Callable[[int], None]:
    done, started = 0, time.monotonic()
    last = started

    def advance(count: int) -> None:
        nonlocal done, last
        done += count
        now = time.monotonic()
        if now - last >= _SECONDS_BETWEEN_LINES:
            last = now
            left = max(0.0, (now - started) * (total - done) / max(done, 1))
            print_line(
                f"{description}: {done / 1e9:.2f} of {total / 1e9:.2f} GB, about {left:.0f} s left"
            )

    return advance
