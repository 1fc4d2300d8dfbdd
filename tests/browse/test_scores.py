"""Scores on the bench are those of t0repro.score, with the accuracy over the rows shown."""

import numpy as np
import pytest

import t0repro
from t0repro.browse.bench import make_bench
from t0repro.browse.models import open_models
from t0repro.browse.pages import Pages
from t0repro.browse.scores import accuracy_of, differ
from t0repro.browse.shown_rows import show_rows
from t0repro.errors import UserError
from t0repro.evaluation.opened import open_checkpoint
from t0repro.tasks.demo.datasets import VOCABULARY
from t0repro.tasks.modules import load_tasks

from .started import PROMPT, run_bench


@pytest.fixture(scope="module")
def bench():
    load_tasks(["t0repro.tasks.demo"], into_seqio=False)
    return make_bench(mixture="demo_eval_score_eval")


def test_probabilities_predictions_and_accuracy_are_those_of_t0repro_score(bench, models):
    opened = open_models({"a": str(models / "a"), "b": str(models / "b")}, {})
    task = bench.find(PROMPT)
    rows = show_rows(task, "validation", 0, 12)
    inputs = [row.example.inputs for row in rows]
    right = [row.example.choices.index(row.example.targets) for row in rows]
    found = {}
    for label in opened.labels:
        found[label] = opened.score(label, task, rows)
        model = open_checkpoint(str(models / label), None, "float32")
        choices = rows[0].example.choices
        expected = t0repro.score(model, inputs, choices, vocabulary=VOCABULARY)
        given = np.array([each.probabilities for each in found[label]])
        chances = np.exp(expected - expected.max(1, keepdims=True))
        np.testing.assert_allclose(given, chances / chances.sum(1, keepdims=True), rtol=1e-4)
        assert [each.predicted for each in found[label]] == expected.argmax(1).tolist()
        accuracy = accuracy_of(found[label])
        assert (accuracy.right, accuracy.examples) == ((expected.argmax(1) == right).sum(), 12)
        assert accuracy.low <= accuracy.percent <= accuracy.high
    text = Pages(bench, opened).comparison((task, task), ("a", "b"), None, 0, 12, True)
    several = sum(differ(*pair) for pair in zip(found["a"], found["b"], strict=True))
    assert text.count("<article") == several > 0 and f"They differ on {several} of 12 rows" in text


def test_a_models_vocabulary_is_checked_and_an_adapter_needs_its_base(bench, models, tmp_path):
    with pytest.raises(UserError):
        open_models({"a": str(models / "a")}, {"x": str(tmp_path)})


def test_a_static_file_without_scores_says_why_on_the_console_too(models, tmp_path):
    (tmp_path / "films.csv").write_text("text,label\nGood.,1\n")
    (tmp_path / "mine.yaml").write_text(
        "dataset: films\ntemplates:\n  5b1c9f7e-0000-0000-0000-000000000001: !Template\n"
        "    name: ask\n    jinja: '{{text}} ||| {{answer_choices[label]}}'\n"
        "    answer_choices: no ||| yes\n"
    )
    done = run_bench(
        *(f"--rows={tmp_path}/films.csv", f"--templates={tmp_path}/mine.yaml"),
        *(f"--checkpoint={models / 'a'}", f"--out={tmp_path}/a.html"),
        T0REPRO_VOCAB=str(tmp_path / "none.model"),
    )
    assert done.returncode == 0, done.stderr
    assert "1 prompt without any score, such as films_ask: The vocabulary " in done.stdout
