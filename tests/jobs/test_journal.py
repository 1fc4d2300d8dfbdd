"""A journal survives what kills and power failures leave, and says when someone edited it."""

import pytest

from t0repro.errors import UserError
from t0repro.jobs.journal import JobJournal, Point

POINT = Point(3, "m")


@pytest.fixture
def journal(tmp_path):
    journal = JobJournal(tmp_path)
    journal.add("seen", POINT)
    journal.add("started", POINT, attempt=1)
    journal.add("failed", POINT, reason="exit code 1")
    return journal


def test_what_was_written_is_read_back(tmp_path, journal):
    again = JobJournal(tmp_path)
    assert again.progress == journal.progress
    progress = again.progress[POINT]
    assert (progress.state, progress.attempt, progress.failures) == ("retrying", 1, 1)
    assert again.add("succeeded", POINT, seconds=2.5, metric=("accuracy", 0.5)).is_final


@pytest.mark.parametrize("cut", [1, 5, 30])
def test_a_line_that_was_cut_is_dropped_and_swallows_nothing(tmp_path, journal, cut):
    data = journal.path.read_bytes()
    journal.path.write_bytes(data[:-cut])
    again = JobJournal(tmp_path)
    assert again.progress[POINT].state == ("retrying" if cut == 1 else "running")
    again.add("started", POINT, attempt=2)
    assert JobJournal(tmp_path).progress[POINT].attempt == 2


@pytest.mark.parametrize(
    "line", ["{}", "nonsense}", '{"event": "no such", "step": 1, "mixture": "m"}']
)
def test_an_edited_line_is_named(tmp_path, journal, line):
    lines = journal.path.read_text().splitlines()
    journal.path.write_text("\n".join([lines[0], line, *lines[2:]]) + "\n")
    with pytest.raises(UserError, match="Line 2 of the journal cannot be read"):
        JobJournal(tmp_path)
