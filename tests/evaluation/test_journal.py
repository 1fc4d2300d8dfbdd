import numpy as np

from t0repro.evaluation.journal import Journal, read_journal


def test_scores_are_there_when_the_journal_is_opened_again(tmp_path):
    journal = Journal(tmp_path / "key" / "pairs.bin")
    assert journal.entries == {}
    journal.add([b"a" * 16, bytes(16)], np.array([-1.5, -0.1]), 0.5, 2.0)
    journal.close()
    again = Journal(tmp_path / "key" / "pairs.bin")
    assert again.entries == {b"a" * 16: (-1.5, 0.5, 2.0), bytes(16): (-0.1, 0.5, 2.0)}
    again.add([b"c" * 16], np.array([-2.0]))
    again.close()
    read = read_journal(tmp_path / "key" / "pairs.bin")
    assert len(read) == 3 and np.isnan(read[b"c" * 16].joules)


def test_a_record_that_was_cut_off_is_dropped_and_written_over(tmp_path):
    path = tmp_path / "pairs.bin"
    journal = Journal(path)
    journal.add([b"a" * 16, b"b" * 16], np.array([-1.0, -2.0]))
    journal.close()
    path.write_bytes(path.read_bytes()[:-1])
    journal = Journal(path)
    assert [entry.score for entry in journal.entries.values()] == [-1.0]
    journal.add([b"c" * 16], np.array([-3.0]))
    journal.close()
    read = {digest: entry.score for digest, entry in read_journal(path).items()}
    assert read == {b"a" * 16: -1.0, b"c" * 16: -3.0}
