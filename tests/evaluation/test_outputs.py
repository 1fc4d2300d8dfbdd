import numpy as np
import pytest

from t0repro.errors import UserError
from t0repro.evaluation.outputs import find_tasks, read_first_input, read_task_scores
from t0repro.reports.run import find_evaluation

TASK = "super_glue_rte_GPT_3_style_score_eval"
OLD_NUMPY = ["((0, 0), True, 1.0, 3)", "((0, 1), False, 1.0, 2)"]
NEW_NUMPY = [
    "((np.int32(0), np.int32(0)), np.True_, np.float32(1.0), 3)",
    "((np.int32(0), np.int32(1)), np.False_, np.float32(1.0), 2)",
]


def write_lines(path, lines):
    """As mesh_tensorflow's write_lines_to_file: str(), newlines become spaces, each line ended."""
    with open(path, "w", encoding="utf-8", newline="") as file:
        file.writelines("{}\n".format(str(line).replace("\n", " ")) for line in lines)


def write_task(folder, targets=OLD_NUMPY, scores=(-1.5, -2.25), inputs=("q", "q"), step=10):
    folder.mkdir(exist_ok=True)
    write_lines(folder / f"{TASK}_targets", targets)
    write_lines(folder / f"{TASK}_inputs", inputs)
    write_lines(folder / f"{TASK}_{step}_predictions", scores)


@pytest.mark.parametrize("targets", [OLD_NUMPY, NEW_NUMPY])
def test_both_numpy_forms_of_a_target_are_read(tmp_path, targets):
    write_task(tmp_path, targets)
    (scores,) = read_task_scores(tmp_path)
    assert (scores.task, scores.step) == (TASK, 10)
    np.testing.assert_array_equal(scores.input_index, [0, 0])
    np.testing.assert_array_equal(scores.choice_index, [0, 1])
    np.testing.assert_array_equal(scores.is_correct, [True, False])
    np.testing.assert_array_equal(scores.weight, [1.0, 1.0])
    np.testing.assert_array_equal(scores.target_length, [3, 2])
    np.testing.assert_array_equal(scores.score, [-1.5, -2.25])


def test_targets_of_the_installed_t5_postprocessor_are_read(tmp_path):
    from t5.data.postprocessors import rank_classification

    examples = [
        {"idx": np.array([i, j], np.int32), "is_correct": np.bool_(j == 1), "targets": [5, 6, 1]}
        for i in range(2)
        for j in range(2)
    ]
    targets = [rank_classification("", example, is_target=True) for example in examples]
    targets += [rank_classification("", examples[0] | {"idx": np.array([2, 0], np.int32),
                                    "weight": np.float32(0.5)}, is_target=True)]  # fmt: skip
    write_task(tmp_path, targets, [0.0] * 5, [b"a"] * 5)
    (scores,) = read_task_scores(tmp_path)
    np.testing.assert_array_equal(scores.is_correct, [False, True, False, True, False])
    np.testing.assert_array_equal(scores.weight, [1, 1, 1, 1, 0.5])
    np.testing.assert_array_equal(scores.target_length, [3] * 5)


@pytest.mark.mtf
def test_files_written_by_mesh_tensorflow_itself_are_read(tmp_path):
    from t0repro import compat

    compat.install()
    from mesh_tensorflow.transformer.utils import write_lines_to_file

    write_lines_to_file(
        [((np.int32(0), np.int32(0)), np.True_, 1.0, 3)], str(tmp_path / f"{TASK}_targets")
    )
    write_lines_to_file(["caf\u00e9\nnext".encode()], str(tmp_path / f"{TASK}_inputs"))
    write_lines_to_file([-0.125], str(tmp_path / f"{TASK}_7_predictions"))
    (scores,) = read_task_scores(tmp_path, with_inputs=True)
    assert scores.inputs == ("caf\u00e9 next",)
    assert scores.score[0] == -0.125


def test_pairs_come_back_sorted_by_input_then_choice(tmp_path):
    targets = ["((10, 0), False, 1.0, 2)", "((2, 1), True, 1.0, 2)", "((2, 0), False, 1.0, 2)"]
    write_task(tmp_path, targets, [-1, -2, -3], ["c", "b", "a"])
    (scores,) = read_task_scores(tmp_path, with_inputs=True)
    np.testing.assert_array_equal(scores.input_index, [2, 2, 10])
    np.testing.assert_array_equal(scores.score, [-3, -2, -1])
    assert scores.inputs == ("a", "b", "c")


def test_only_a_line_feed_ends_a_line(tmp_path):
    odd = "one\rtwo\u2028three\x0bfour\x85five"
    write_task(tmp_path, inputs=[odd, odd])
    (scores,) = read_task_scores(tmp_path, with_inputs=True)
    assert scores.inputs == (odd, odd)


def test_inputs_that_mesh_tensorflow_wrote_as_bytes_are_decoded(tmp_path):
    text = 'It\'s "caf\u00e9"\nyes or no?'
    write_task(tmp_path, inputs=[text.encode(), text])
    (scores,) = read_task_scores(tmp_path, with_inputs=True)
    assert scores.inputs == ('It\'s "caf\u00e9" yes or no?',) * 2
    assert read_first_input(tmp_path, TASK) == scores.inputs[0]


def test_an_empty_inputs_file_means_no_inputs(tmp_path):
    write_task(tmp_path, inputs=[])
    (scores,) = read_task_scores(tmp_path, with_inputs=True)
    assert scores.inputs is None
    assert read_first_input(tmp_path, TASK) is None


def test_the_latest_step_is_read_unless_one_is_named(tmp_path):
    write_task(tmp_path, step=9)
    write_task(tmp_path, scores=[-3, -4], step=10)
    assert find_tasks(tmp_path) == {TASK: [9, 10]}
    assert read_task_scores(tmp_path)[0].score[0] == -3
    assert read_task_scores(tmp_path, 9)[0].score[0] == -1.5


def test_a_task_whose_name_ends_in_a_number_keeps_its_own_predictions(tmp_path):
    for name in ("task", "task_1"):
        write_lines(tmp_path / f"{name}_targets", OLD_NUMPY)
        write_lines(tmp_path / f"{name}_20_predictions", [0, 0])
    assert find_tasks(tmp_path) == {"task": [20], "task_1": [20]}


def test_an_empty_folder_is_a_users_mistake(tmp_path):
    with pytest.raises(UserError, match="holds no evaluation outputs"):
        read_task_scores(tmp_path)
    with pytest.raises(UserError, match="no folder"):
        read_task_scores(tmp_path / "absent")


def test_results_of_lm_eval_are_told_the_option_that_reads_them(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "samples_boolq_2024-01-01T00-00-00.jsonl").write_text("")
    with pytest.raises(UserError) as caught:
        find_evaluation(tmp_path)
    assert "--from lm-eval" in str(caught.value.fix)


def test_an_evaluation_of_seqios_metrics_is_told_what_writes_scores(tmp_path):
    (tmp_path / "inference_eval").mkdir()
    (tmp_path / "inference_eval" / "trec-metrics.jsonl").touch()
    for folder in (tmp_path, tmp_path / "inference_eval"):
        for read in (read_task_scores, find_evaluation):
            with pytest.raises(UserError, match="evaluation by `t0repro eval`(.|\n)*rank-eval"):
                read(folder)


def test_the_only_evaluation_in_a_folder_is_found_by_it(tmp_path):
    folder = tmp_path / "validation_eval"
    folder.mkdir()
    write_lines(folder / f"{TASK}_targets", OLD_NUMPY)
    assert find_evaluation(tmp_path) == find_evaluation(folder) == (folder, None)


def test_targets_without_predictions_are_a_users_mistake(tmp_path):
    write_lines(tmp_path / f"{TASK}_targets", OLD_NUMPY)
    with pytest.raises(UserError, match="no predictions"):
        read_task_scores(tmp_path)


def test_an_empty_split_is_a_users_mistake(tmp_path):
    write_task(tmp_path, targets=[], scores=[], inputs=[])
    with pytest.raises(UserError, match="no examples"):
        read_task_scores(tmp_path)


def test_a_missing_step_and_a_missing_task_are_named(tmp_path):
    write_task(tmp_path)
    with pytest.raises(UserError, match=r"step 11 \(steps there: 10\)"):
        read_task_scores(tmp_path, 11)
    with pytest.raises(UserError, match="Nearest names there: '" + TASK):
        read_task_scores(tmp_path, tasks=["super_glue_rte_GPT_3_style"])


def test_counts_that_disagree_name_both_files(tmp_path):
    write_task(tmp_path, scores=[-1])
    with pytest.raises(UserError, match="2 lines in .*_targets.*1 in .*_10_predictions"):
        read_task_scores(tmp_path)
    write_task(tmp_path, inputs=["q"])
    with pytest.raises(UserError, match="2 lines in .*_targets.*1 in .*_inputs"):
        read_task_scores(tmp_path, with_inputs=True)


@pytest.mark.parametrize(
    "line", ["yes", "(0, True, 1.0, 3)", "((0, 0), True, 1.0)", "__import__('os')", ""]
)
def test_a_target_that_is_none_names_file_and_line(tmp_path, line):
    write_task(tmp_path, [OLD_NUMPY[0], line])
    with pytest.raises(UserError, match="_targets:2"):
        read_task_scores(tmp_path)


def test_a_prediction_that_is_text_names_file_and_line(tmp_path):
    write_task(tmp_path, scores=["-1.0", "entailment"])
    with pytest.raises(UserError, match="_10_predictions:2"):
        read_task_scores(tmp_path)


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("((0, 2), False, 1.0, 2)", r"choice 2 and no choice 1(.|\n)*_targets:2"),
        ("((1, 1), False, 1.0, 2)", r"Example 1 has choice 1 and no choice 0(.|\n)*_targets:2"),
        ("((0, 1), False, nan, 2)", r"weight of example 0 is nan(.|\n)*_targets:2"),
        ("((0, 1), False, inf, 2)", r"weight of example 0 is inf(.|\n)*_targets:2"),
        ("((0, 1), False, 1e308, 2)", r"weight of example 0 is 1e308(.|\n)*_targets:2"),
        ("((0, 1), False, -1.0, 2)", r"weight of example 0 is -1.0(.|\n)*_targets:2"),
        ("((0, 9999999999999999999999), False, 1.0, 2)", r"not a rank-class(.|\n)*_targets:2"),
    ],
)
def test_choices_with_gaps_and_impossible_weights_name_file_and_line(tmp_path, target, words):
    write_task(tmp_path, [OLD_NUMPY[0], target])
    with pytest.raises(UserError, match=words):
        read_task_scores(tmp_path)


@pytest.mark.parametrize(("score", "words"), [(0.25, "at most 0"), ("nan", "cannot be ranked")])
def test_what_is_no_log_likelihood_names_file_and_line(tmp_path, score, words):
    write_task(tmp_path, scores=(0.0, score))
    with pytest.raises(UserError, match=rf"{words}(.|\n)*_predictions:2"):
        read_task_scores(tmp_path)


def test_a_pair_that_comes_twice_names_file_and_line(tmp_path):
    write_task(tmp_path, [OLD_NUMPY[1], OLD_NUMPY[1]])
    with pytest.raises(UserError, match=r"idx \(0, 1\) comes more than once(.|\n)*_targets:2"):
        read_task_scores(tmp_path)


@pytest.mark.parametrize("score", ["inf", "-inf", "nan"])
def test_a_score_that_is_not_finite_names_file_and_line(tmp_path, score):
    write_task(tmp_path, scores=["-1.0", score])
    with pytest.raises(UserError, match="(?s)cannot be ranked.*_10_predictions:2"):
        read_task_scores(tmp_path)
