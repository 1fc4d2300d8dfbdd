import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from t0repro.evaluation.outputs import read_task_scores
from t0repro.evaluation.scores import ScoredPairs, as_written
from t0repro.evaluation.task_output import LineFile

floats = st.floats(width=32, allow_nan=False, allow_infinity=False)
pairs = st.lists(
    st.tuples(st.integers(0, 50), st.integers(0, 5), st.booleans(), st.integers(1, 99), floats),
    min_size=1,
    unique_by=lambda pair: pair[:2],
)


@given(pairs=pairs, parts=st.integers(1, 4))
@settings(deadline=None, max_examples=50)
def test_scores_from_memory_are_those_that_the_files_give(pairs, parts, tmp_path_factory):
    targets = [
        ((np.int32(i), np.int32(c)), np.bool_(right), np.float32(1.0), length)
        for i, c, right, length, _ in pairs
    ]
    scores = np.array([pair[-1] for pair in pairs], np.float32)
    collected = ScoredPairs()
    for part in np.array_split(np.arange(len(pairs)), parts):
        collected.add([targets[at] for at in part], scores[part])
    folder = tmp_path_factory.mktemp("scores")
    for name, lines in (("task_targets", targets), ("task_7_predictions", scores)):
        file = LineFile(folder / name)
        file.write(lines)
        file.commit()
    (read,) = read_task_scores(folder)
    memory = collected.task_scores("task", 7)
    for name in ("input_index", "choice_index", "is_correct", "weight", "target_length", "score"):
        ours, theirs = getattr(memory, name), getattr(read, name)
        assert ours.dtype == theirs.dtype and ours.tolist() == theirs.tolist(), name
    again, given_scores = collected.for_metrics()
    assert list(map(str, again)) == list(map(str, targets))
    assert [score.tobytes() for score in given_scores] == [score.tobytes() for score in scores]


def test_a_number_in_memory_is_the_decimal_that_its_file_holds():
    values = np.array([-12.345678, 1e-7, -0.1], np.float32)
    assert as_written(values).tolist() == [float(str(value)) for value in values]


def test_files_appear_only_when_they_are_whole(tmp_path):
    file = LineFile(tmp_path / "task_inputs")
    file.write(["one\ntwo", 3])
    assert not (tmp_path / "task_inputs").exists()
    file.commit()
    assert (tmp_path / "task_inputs").read_text() == "one two\n3\n"
    file = LineFile(tmp_path / "task_inputs")
    file.write(["half"])
    file.discard()
    assert [path.name for path in tmp_path.iterdir()] == ["task_inputs"]
    assert (tmp_path / "task_inputs").read_text() == "one two\n3\n"


@pytest.mark.parametrize("parts", [1, 3])
def test_empty_parts_do_not_matter(parts):
    collected = ScoredPairs()
    for _ in range(parts):
        collected.add([], np.zeros(0, np.float32))
    collected.add([((0, 0), True, 1.0, 2)], np.array([-1.0], np.float32))
    assert collected.task_scores("task", 1).score.tolist() == [-1.0]
