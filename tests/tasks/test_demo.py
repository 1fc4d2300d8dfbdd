"""The embedded demo: what is held out, how long examples are, that its files can be remade."""

import importlib
from pathlib import Path

import pytest
import sentencepiece
import seqio

from t0repro.tasks import prompted_tasks
from t0repro.tasks.catalog import features_of
from t0repro.tasks.demo.datasets import DEMO, FOLDER, VOCABULARY
from t0repro.tasks.metrics import metric_names
from t0repro.tasks.templates import load_template

MAX_INPUTS, MAX_TARGETS = 128, 32
SCRIPTS = Path(__file__).resolve().parents[2] / "scripts" / "demo"


@pytest.fixture
def script(monkeypatch):
    """Imports a script that makes the demo's files."""
    monkeypatch.syspath_prepend(SCRIPTS)
    return importlib.import_module


@pytest.fixture(scope="module", autouse=True)
def registered():
    """The demo's tasks and mixtures."""
    import t0repro.tasks.demo  # noqa: F401 - registers


def tasks_of(mixture: str):
    return [prompted_tasks()[task.name] for task in seqio.get_mixture_or_task(mixture).tasks]


def test_it_trains_on_four_datasets_and_evaluates_a_fifth():
    trained = {(task.dataset, task.subset) for task in tasks_of("demo_train")}
    evaluated = {(task.dataset, task.subset) for task in tasks_of("demo_eval_score_eval")}
    assert len(trained) == 4 and evaluated - trained == {("synthetic_imdb", None)}
    assert len(tasks_of("demo_train")) == 14 and len(tasks_of("demo_eval_score_eval")) == 9


def test_every_name_says_that_its_rows_are_generated():
    for mixture in ("demo_train", "demo_eval_score_eval"):
        for task in tasks_of(mixture):
            assert task.synthetic and task.dataset.startswith("synthetic_")
            assert task.name.startswith("demo_synthetic_")
    assert {path.name.split("_")[0] for path in FOLDER.iterdir()} == {"synthetic"}


def test_templates_columns_and_metrics_are_those_of_the_dataset_that_rows_are_modeled_on():
    task = prompted_tasks()["demo_synthetic_glue_mrpc_replace"]
    assert task.prompt == load_template("glue", "mrpc", "replace").jinja
    assert metric_names(task) == ("f1_score_with_invalid", "accuracy")
    assert features_of("synthetic_glue", "mrpc") == features_of("glue", "mrpc")


def test_no_prompt_is_both_trained_on_and_evaluated():
    trained = {task.template_id for task in tasks_of("demo_train")}
    assert not trained & {task.template_id for task in tasks_of("demo_eval_score_eval")}
    assert all(task.score_eval for task in tasks_of("demo_eval_score_eval"))


def test_no_validation_row_is_among_the_training_rows():
    for entry in DEMO:
        folder = FOLDER / entry.dataset / (entry.subset or "default")
        splits = {}
        for path in folder.glob("*.jsonl"):
            lines = path.read_text().splitlines()
            splits[path.stem] = {
                line.split('"idx"')[0].split('"question_stem"')[-1] for line in lines
            }
        assert not splits["validation"] & splits.get("train", set())


def test_a_task_has_the_one_split_that_the_job_uses():
    assert all(
        task.splits == (split,)
        for mixture, split in (("demo_train", "train"), ("demo_eval_score_eval", "validation"))
        for task in seqio.get_mixture_or_task(mixture).tasks
    )


def test_rates_are_the_training_rows_by_t0s_rule():
    mixture = seqio.get_mixture_or_task("demo_train")
    assert {mixture.get_rate(task) for task in mixture.tasks} == {640.0}


@pytest.mark.parametrize("mixture", ["demo_train", "demo_eval_score_eval"])
def test_examples_fit_the_lengths_without_an_unknown_piece(mixture):
    vocabulary = seqio.SentencePieceVocabulary(str(VOCABULARY), 100)
    for task in seqio.get_mixture_or_task(mixture).tasks:
        for example in task.source.examples(*task.splits):
            inputs = vocabulary.encode(example["inputs"])
            assert len(inputs) <= MAX_INPUTS and vocabulary.unk_id not in inputs
            for choice in example["answer_choices"]:
                assert len(vocabulary.encode(choice)) + 1 <= MAX_TARGETS


def test_every_target_is_among_its_choices():
    for mixture in ("demo_train", "demo_eval_score_eval"):
        for task in seqio.get_mixture_or_task(mixture).tasks:
            for example in task.source.examples(*task.splits):
                assert example["targets"] in example["answer_choices"]


def test_validation_labels_are_balanced():
    for task in seqio.get_mixture_or_task("demo_eval_score_eval").tasks:
        right = [
            example["answer_choices"].index(example["targets"])
            for example in task.source.examples("validation")
        ]
        classes = len(set(right))
        assert all(right.count(label) == len(right) // classes for label in range(classes))


def test_the_rows_can_be_generated_again_byte_for_byte(tmp_path, script):
    script("generate").generate(tmp_path)
    made = {path.relative_to(tmp_path): path.read_bytes() for path in tmp_path.rglob("*.jsonl")}
    held = {path.relative_to(FOLDER): path.read_bytes() for path in FOLDER.rglob("*.jsonl")}
    assert made == held


def test_the_vocabulary_can_be_trained_again_and_is_laid_out_as_t5s(script):
    model = script("train_vocabulary").train()
    made = sentencepiece.SentencePieceProcessor(model_proto=model)
    held = sentencepiece.SentencePieceProcessor(model_file=str(VOCABULARY))
    size = held.get_piece_size()
    pieces = [held.id_to_piece(index) for index in range(size)]
    assert [made.id_to_piece(index) for index in range(made.get_piece_size())] == pieces
    assert pieces[:3] == ["<pad>", "</s>", "<unk>"] and held.bos_id() == -1


def test_the_files_are_small():
    assert sum(path.stat().st_size for path in Path(FOLDER).rglob("*.*")) < 1_500_000
