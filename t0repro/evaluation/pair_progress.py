"""Pairs scored so far: a bar on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

_SECONDS_BETWEEN_LINES = 5.0


@contextlib.contextmanager
def pair_progress(
    total: int, doing: str = "scoring", things: str = "pairs", done_word: str = "scored"
) -> Iterator[Callable[[int], None]]:
    """Yields a function to be told how many more pairs are scored, of `total`.

    The words say what else is done with what other things.
    """
    from rich import console, progress

    terminal = console.Console(stderr=True)
    if not terminal.is_terminal:
        yield _line_printer(terminal.print, total, f"{done_word} {{}} of {total} {things}")
        return
    columns = (
        progress.TextColumn(doing),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TextColumn(f"{things}, {{task.fields[rate]:.1f}}/s, left"),
        progress.TimeRemainingColumn(),
    )
    started, done = time.monotonic(), 0
    with progress.Progress(*columns, console=terminal) as bar:
        task = bar.add_task(doing, total=total, rate=0.0)

        def advance(count: int) -> None:
            nonlocal done
            done += count
            bar.update(task, advance=count, rate=done / (time.monotonic() - started))

        yield advance


def _line_printer(
    print_line: Callable[[str], None], total: int, text: str
) -> Callable[[int], None]:
    done, started = 0, time.monotonic()
    last = started

    def advance(count: int) -> None:
        nonlocal done, last
        done += count
        now = time.monotonic()
        if now - last >= _SECONDS_BETWEEN_LINES or done == total:
            last = now
            rate = done / max(now - started, 1e-9)
            left = (total - done) / rate
            print_line(f"{text.format(done)}, {rate:.1f}/s, about {left:.0f} s left")

    return advance
