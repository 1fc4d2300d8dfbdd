"""Renderings done, of all tasks: a bar on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

_SECONDS_BETWEEN_LINES = 5.0


@contextlib.contextmanager
def rendering_progress() -> Iterator[Callable[[int], Callable[[int], None]]]:
    """Yields a function that takes the number of renderings in all, once it is known, and gives
    one to be told how many more are done.
    """
    from rich import console, progress

    terminal = console.Console(stderr=True)
    if not terminal.is_terminal:
        yield lambda total: _line_printer(lambda line: terminal.print(line, highlight=False), total)
        return
    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TextColumn("rows, {task.fields[rate]:,.0f}/s, left"),
        progress.TimeRemainingColumn(),
    )
    with progress.Progress(*columns, console=terminal) as bar:
        task = bar.add_task("reading the list of tasks", total=None, rate=0.0)

        def begin(total: int) -> Callable[[int], None]:
            started, done = time.monotonic(), 0
            bar.reset(task, total=total, description="caching", rate=0.0)

            def advance(count: int) -> None:
                nonlocal done
                done += count
                bar.update(task, advance=count, rate=done / (time.monotonic() - started))

            return advance

        yield begin


def _line_printer(print_line: Callable[[str], None], total: int) -> Callable[[int], None]:
    done, started = 0, time.monotonic()
    last = started

    def advance(count: int) -> None:
        nonlocal done, last
        done += count
        now = time.monotonic()
        if now - last >= _SECONDS_BETWEEN_LINES:
            last = now
            rate = done / max(now - started, 1e-9)
            left = max(total - done, 0) / rate
            print_line(f"{done:,} of {total:,} rows, {rate:,.0f}/s, about {left:.0f} s left")

    return advance
