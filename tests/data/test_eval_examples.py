"""Evaluation examples without SeqIO, against those of t5's mesh_eval_dataset_fn and of SeqIO."""

import json

import numpy as np
import pytest
import seqio

from t0repro.config.data import EvalDataConfig, EvaluatorConfig, LoggerConfig, SeqioDataConfig
from t0repro.config.decoding import DecodingPlan
from t0repro.data.batches import eval_tasks
from t0repro.data.eval_examples import eval_examples
from t0repro.errors import UserError
from t0repro.evaluation import evaluator
from t0repro.event_files import read_scalars
from t0repro.tasks.registry import DescribedTask, add_cache_dirs, task_descriptions

from ..tasks.prompt_caches import make

pytestmark = pytest.mark.mtf

RANKED = "demo_synthetic_glue_mrpc_want_to_know_score_eval"
NAMES = (
    "demo_synthetic_glue_mrpc_want_to_know",
    "demo_synthetic_openbookqa_main_pick_answer_with_options",
    RANKED,
)
SPLIT = "validation"
SHORT = {"inputs": 40, "targets": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with caches of the tasks."""
    import t0repro.tasks.demo  # noqa: F401

    folder = tmp_path_factory.mktemp("cached")
    make(folder, *NAMES, min_shards=3)
    return folder


@pytest.fixture(autouse=True)
def cached(folder):
    add_cache_dirs([folder])


def described(name: str) -> DescribedTask:
    return DescribedTask(task_descriptions()[name])


def assert_same(ours, theirs):
    """All features of all examples are equal, apart from padding."""
    assert len(ours) == len(theirs) > 10
    for our, their in zip(ours, theirs, strict=True):
        assert our.keys() == their.keys()
        for name, value in their.items():
            if name in ("inputs", "targets"):
                value = np.trim_zeros(value, "b")
            np.testing.assert_array_equal(our[name], value, name)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("use_cached", "lengths"), [(True, None), (True, SHORT), (False, None), (False, SHORT)]
)
def test_examples_are_those_of_mesh_tensorflows_evaluation(name, use_cached, lengths):
    data = EvalDataConfig(name, SPLIT, use_cached, False, -1, False, None)
    (task,) = eval_tasks(data, lengths)
    ours = eval_examples(described(name), SPLIT, lengths, use_cached=use_cached, mesh=True)
    assert_same(list(ours), list(task.examples))


@pytest.mark.parametrize("name", NAMES)
def test_examples_are_those_that_seqio_reads_for_t5x(name):
    task = seqio.TaskRegistry.get(name)
    theirs = task.get_dataset(SHORT, SPLIT, use_cached=True, shuffle=False).as_numpy_iterator()
    assert_same(list(eval_examples(described(name), SPLIT, SHORT, use_cached=True)), list(theirs))


class Functions:
    """A model that answers with what is right for the example before, and scores by length."""

    def __init__(self, *_):
        pass

    def predict(self, dataset):
        rows = [row for _, row in self._rows(dataset)]
        return [(at, rows[at - 1].tolist()) for at in reversed(range(len(rows)))]

    def score(self, dataset):
        return [(at, -float(row.sum() % 97) / 7) for at, row in self._rows(dataset)]

    predict_with_aux = predict

    def _rows(self, dataset):
        pairs = dataset.as_numpy_iterator() if hasattr(dataset, "as_numpy_iterator") else dataset
        return [(int(at), np.asarray(row["decoder_target_tokens"])) for at, row in pairs]


@pytest.fixture
def evaluate(monkeypatch, tmp_path):
    """Evaluates a task by either evaluator; returns its metrics and the contents of its files."""
    monkeypatch.setattr(evaluator, "make_functions", Functions)

    def evaluated(made, name, lengths, num_examples, kinds=("py", "tensorboard", "json")):
        loggers = tuple(LoggerConfig(kind, None) for kind in kinds)
        data = SeqioDataConfig(name, lengths, SPLIT, 8, False, 0, use_cached=True)
        folder = tmp_path / made.__name__
        of_task = made(data, EvaluatorConfig(loggers, num_examples, True), folder, DecodingPlan())
        metrics = of_task.evaluate(None, None, 3)
        written = folder / evaluator.FOLDER
        lines = {
            path.name: [json.loads(line) for line in path.read_text().splitlines()]
            for path in written.glob("*.jsonl")
        }
        events = read_scalars(str(written / name)) if "tensorboard" in kinds else {}
        return metrics, lines, events

    return evaluated


@pytest.mark.parametrize("lengths", [None, {"inputs": 64, "targets": 8}])
@pytest.mark.parametrize("name", NAMES)
def test_metrics_and_files_are_those_of_seqios_evaluator(monkeypatch, evaluate, name, lengths):
    monkeypatch.setattr(evaluator, "find_tasks_with_metrics", lambda *_: [described(name)])
    ours = evaluate(evaluator.DescribedEvaluator, name, lengths, 12)
    theirs = evaluate(evaluator.SeqioEvaluator, name, lengths, 12)
    assert len(ours[1][f"{name}-000003.jsonl"]) == 12
    # As texts, in which NaN equals NaN.
    assert json.dumps(ours, sort_keys=True) == json.dumps(theirs, sort_keys=True)


@pytest.mark.parametrize("made", [evaluator.DescribedEvaluator, evaluator.SeqioEvaluator])
def test_a_new_folder_is_made_for_json_and_a_repeated_evaluation_leaves_each_row_once(
    monkeypatch, evaluate, made
):
    monkeypatch.setattr(evaluator, "find_tasks_with_metrics", lambda *_: [described(RANKED)])
    _, first, _ = evaluate(made, RANKED, None, 12, ["json"])
    _, again, _ = evaluate(made, RANKED, None, 12, ["json"])
    assert again == first and len(first[f"{RANKED}-metrics.jsonl"]) == 1


def test_too_few_pairs_to_rank_are_refused(monkeypatch, evaluate):
    monkeypatch.setattr(evaluator, "find_tasks_with_metrics", lambda *_: [described(RANKED)])
    with pytest.raises(UserError, match="num_examples = 11"):
        evaluate(evaluator.DescribedEvaluator, RANKED, None, 11)
