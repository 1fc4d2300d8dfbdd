import numpy as np
import pytest

from t0repro.evaluation.score_journal import DIGEST, ScoreJournal

RECORD = 32


def digests(*letters):
    return np.array([letter.encode() * 16 for letter in letters], DIGEST)


def known(path, *letters):
    """The scores of pairs that a journal knows, by letter."""
    journal = ScoreJournal(path)
    found = dict(zip(letters, journal.look_up(digests(*letters))[0].tolist(), strict=True))
    journal.close()
    return {letter: score for letter, score in found.items() if not np.isnan(score)}


def write(path, **scores):
    journal = ScoreJournal(path)
    journal.add(digests(*scores), np.array(list(scores.values())))
    journal.close()


def test_scores_are_there_when_the_journal_is_opened_again(tmp_path):
    path = tmp_path / "key" / "pairs.bin"
    journal = ScoreJournal(path)
    journal.add(digests("b", "a"), np.array([-1.5, -0.1]), 0.5)
    journal.add(np.array([bytes(16)], DIGEST), np.array([-2.0]))
    journal.close()
    again = ScoreJournal(path)
    asked = np.array([b"a" * 16, b"x" * 16, b"b" * 16, bytes(16)], DIGEST)
    scores, seconds = again.look_up(asked)
    again.close()
    np.testing.assert_array_equal(scores, [-0.1, np.nan, -1.5, -2.0])
    np.testing.assert_array_equal(seconds, [0.5, 0, 0.5, 0])


def test_a_record_that_was_cut_off_is_dropped_and_written_over(tmp_path):
    path = tmp_path / "pairs.bin"
    write(path, a=-1.0, b=-2.0)
    path.write_bytes(path.read_bytes()[:-1])
    write(path, c=-3.0)
    assert known(path, "a", "b", "c") == {"a": -1.0, "c": -3.0}


def test_an_edited_byte_anywhere_costs_its_record_and_no_other(tmp_path):
    path = tmp_path / "pairs.bin"
    write(path, a=-1.0, b=-2.0, c=-3.0)
    whole = path.read_bytes()
    for at in range(RECORD, 2 * RECORD):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        assert known(path, "a", "b", "c") == {"a": -1.0, "c": -3.0}, at


@pytest.mark.parametrize("score", [np.inf, -np.inf, np.nan])
def test_a_score_that_is_not_finite_is_not_believed(tmp_path, score):
    path = tmp_path / "pairs.bin"
    write(path, a=-1.0, b=score)
    assert known(path, "a", "b") == {"a": -1.0}


@pytest.mark.parametrize("content", [b"", bytes(5 * RECORD), b"\xff" * 100, b"text\n" * 50])
def test_a_file_of_something_else_is_no_dead_end(tmp_path, content):
    path = tmp_path / "pairs.bin"
    path.write_bytes(content)
    assert known(path, "a") == {}
    write(path, a=-1.0)
    assert known(path, "a") == {"a": -1.0}


def test_bytes_lost_in_the_middle_cost_what_follows_and_later_scores_are_kept(tmp_path):
    path = tmp_path / "pairs.bin"
    write(path, a=-1.0, b=-2.0, c=-3.0)
    whole = path.read_bytes()
    path.write_bytes(whole[: RECORD + 7] + whole[RECORD + 8 :])
    assert known(path, "a", "b", "c") == {"a": -1.0}
    write(path, c=-3.0)
    assert known(path, "a", "b", "c") == {"a": -1.0, "c": -3.0}
