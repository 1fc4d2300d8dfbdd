import numpy as np

from t0repro.evaluation.journal import Journal, read_journal


def test_scores_are_there_when_the_journal_is_opened_again(tmp_path):
    journal = Journal(tmp_path / "key" / "pairs.bin")
    assert journal.scores == {}
    journal.add([b"a" * 16, bytes(16)], np.array([-1.5, -0.1]))
    journal.close()
    again = Journal(tmp_path / "key" / "pairs.bin")
    assert again.scores == {b"a" * 16: -1.5, bytes(16): -0.1}
    again.add([b"c" * 16], np.array([-2.0]))
    again.close()
    assert len(read_journal(tmp_path / "key" / "pairs.bin")) == 3


def test_a_record_that_was_cut_off_is_dropped_and_written_over(tmp_path):
    path = tmp_path / "pairs.bin"
    journal = Journal(path)
    journal.add([b"a" * 16, b"b" * 16], np.array([-1.0, -2.0]))
    journal.close()
    path.write_bytes(path.read_bytes()[:-1])
    journal = Journal(path)
    assert journal.scores == {b"a" * 16: -1.0}
    journal.add([b"c" * 16], np.array([-3.0]))
    journal.close()
    assert read_journal(path) == {b"a" * 16: -1.0, b"c" * 16: -3.0}
