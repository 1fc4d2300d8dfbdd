"""Progress: a bar on a terminal, lines elsewhere, and the least that is of use."""

import io
import time

import pytest

from t0repro import progress


@pytest.fixture
def clock(monkeypatch):
    """The time in seconds, as a list of one number to be set."""
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    return now


def test_counts_say_now_and_then_how_fast_and_how_long_still(clock, capsys):
    with progress.count_progress(3000, "scoring", "pair", "scored") as advance:
        for _ in range(6):
            clock[0] += 2.0
            advance(500)
    assert capsys.readouterr().err.splitlines() == [
        "scoring 3,000 pairs ...",
        "scored 2,000 of 3,000 pairs, 250.0/s, about 4 s left",
        "scored 3,000 of 3,000 pairs, 250.0/s, about 0 s left",
    ]


def test_the_time_left_is_by_the_last_half_minute_and_not_by_what_was_compiled(clock, capsys):
    with progress.count_progress(5000, "scoring", "pair", "scored") as advance:
        clock[0] += 60.0
        for seconds in (0.0, 3.0, 3.0, 40.0, 6.0, 10.0):
            clock[0] += seconds
            advance(300)
    assert capsys.readouterr().err.splitlines() == [
        "scoring 5,000 pairs ...",
        "scored 900 of 5,000 pairs, 100.0/s, about 41 s left",
        "scored 1,200 of 5,000 pairs, 7.5/s, about 507 s left",
        "scored 1,500 of 5,000 pairs, 50.0/s, about 70 s left",
        "scored 1,800 of 5,000 pairs, 37.5/s, about 85 s left",
    ]


def test_one_thing_is_told_in_the_singular(clock, capsys):
    with progress.count_progress(1, "evaluating", "batch", "evaluated", "batches") as advance:
        clock[0] += 2.0
        advance(1)
    assert capsys.readouterr().err.splitlines() == [
        "evaluating 1 batch ...",
        "evaluated 1 of 1 batch, 0.5/s, about 0 s left",
    ]
    with progress.count_progress(2, "evaluating", "batch", "evaluated", "batches"):
        pass
    assert capsys.readouterr().err == "evaluating 2 batches ...\n"


def test_waiting_is_said_at_once_at_a_change_and_every_minute(clock, capsys):
    waiting = progress.Waiting()
    for second in range(0, 130, 10):
        clock[0] = 100.0 + second
        waiting.report("waiting for a file" if second < 20 else "waiting for a job", f"{second} s")
    assert capsys.readouterr().err.splitlines() == [
        "waiting for a file: 0 s",
        "waiting for a job: 20 s",
        "waiting for a job: 80 s",
    ]


def test_work_that_cannot_count_says_at_once_what_it_does_and_then_that_it_still_does():
    said = io.StringIO()
    with progress.working("compiling", said, every=0.01):
        assert said.getvalue() == "compiling ...\n"
        while said.getvalue().count("\n") < 3:
            time.sleep(0.01)
    lines = said.getvalue().splitlines()
    time.sleep(0.03)
    assert lines[1] == "compiling: 0 s" and said.getvalue().splitlines() == lines


def test_small_work_on_bytes_says_nothing_and_large_work_speaks_in_gigabytes(clock, capsys):
    with progress.byte_progress("reading", 10) as advance:
        advance(10)
    assert capsys.readouterr().err == ""
    with progress.byte_progress("reading", 4_000_000_000) as advance:
        clock[0] += 10.0
        advance(1_000_000_000)
    assert capsys.readouterr().err == "reading: 1.00 of 4.00 GB, about 30 s left\n"


def test_a_terminal_has_a_bar(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    with progress.count_progress(7, "caching", "row", "cached") as advance:
        advance(7)
    shown = capsys.readouterr().err
    assert "7/7" in shown and "caching" in shown and "cached" not in shown


def test_lines_go_to_standard_error_or_to_the_innermost_listener(capsys):
    outer, inner = [], []
    progress.say("before")
    with progress.heard_by(outer.append):
        with progress.heard_by(inner.append):
            progress.say("within")
        progress.say("between")
    progress.say("\x1b[31mafter")
    assert (outer, inner) == (["between"], ["within"])
    assert capsys.readouterr().err == "before\n\\x1b[31mafter\n"
