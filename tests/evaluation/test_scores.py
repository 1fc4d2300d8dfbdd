import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from t0repro.evaluation.outputs import read_task_scores
from t0repro.evaluation.task_output import LineFile
from t0repro.evaluation.task_scores import ScoredPairs

# With a lower bound, Hypothesis draws no float64 that it must reject as none of float32's.
LOWEST = float(np.finfo(np.float32).min)
floats = st.floats(LOWEST, 0.0, width=32, allow_infinity=False)


@st.composite
def pairs_in_any_order(draw):
    """(input, choice, correct, length, score) of inputs whose choices count up from 0."""
    inputs = draw(st.dictionaries(st.integers(0, 50), st.integers(1, 6), min_size=1, max_size=12))
    values = st.tuples(st.booleans(), st.integers(1, 99), floats)
    pairs = [(i, c, *draw(values)) for i, choices in inputs.items() for c in range(choices)]
    return draw(st.permutations(pairs))


@given(pairs=pairs_in_any_order(), parts=st.integers(1, 4))
@settings(max_examples=50)
def test_files_give_back_the_pairs_sorted_and_metrics_get_them_as_they_came(
    pairs, parts, tmp_path_factory
):
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
    by_index = sorted(pairs, key=lambda pair: pair[:2])
    columns = (read.input_index, read.choice_index, read.is_correct, read.target_length)
    assert list(zip(*(column.tolist() for column in columns), strict=True)) == [
        pair[:4] for pair in by_index
    ]
    # A file holds the shortest decimal that stands for a float32.
    assert read.score.tolist() == [float(str(np.float32(pair[-1]))) for pair in by_index]
    again, given_scores = collected.as_metric_arguments()
    assert list(map(str, again)) == list(map(str, targets))
    assert [score.tobytes() for score in given_scores] == [score.tobytes() for score in scores]


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
    assert collected.as_metric_arguments()[1] == [-1.0]
