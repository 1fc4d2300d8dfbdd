"""`t0repro tasks overlap`: every planted overlap is found, and nothing that is not one."""

import itertools
import json
import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from t0repro.errors import UserError
from t0repro.reports.make_report import accuracies_without
from t0repro.tasks import overlap, run_index
from t0repro.tasks.template_registration import register_templates

from ..cli.commands import run

TEMPLATES = """
dataset: {name}
templates:
  11111111-0000-0000-0000-{number:012d}: !Template
    answer_choices: yes ||| no
    id: 11111111-0000-0000-0000-{number:012d}
    jinja: "{{{{text}}}} {{{{more}}}} Which? ||| {{{{answer_choices[label]}}}}"
    metadata: !TemplateMetadata
      choices_in_prompt: false
      metrics:
      - Accuracy
      original_task: true
    name: ask
    reference: ''
mixtures: {{{name}_all: {{{name}_ask: 1}}}}
"""
NGRAM = 13
NUMBERS = itertools.count()  # of the datasets, whose tasks stay registered


def words(seed: int, count: int) -> str:
    """Words that no other seed has."""
    return " ".join(f"w{seed}x{number}" for number in range(count))


@pytest.fixture
def mixtures(tmp_path, monkeypatch):
    """Registers a training and a held-out dataset of given texts; their mixtures' names."""

    def make(train: list[dict], held_out: list[dict]) -> tuple[str, str]:
        monkeypatch.setenv("T0REPRO_DATA_DIR", str(tmp_path / "data"))
        names = []
        number = next(NUMBERS)
        for kind, split, rows in (("learn", "train", train), ("held", "validation", held_out)):
            name = f"{kind}{number}"
            folder = tmp_path / "data" / name / "default"
            folder.mkdir(parents=True)
            lines = [json.dumps({"text": "", "more": "", "label": 0, **row}) for row in rows]
            (folder / f"{split}.jsonl").write_text("\n".join(lines) + "\n")
            path = tmp_path / f"{name}.yaml"
            path.write_text(TEMPLATES.format(name=name, number=2 * number + (kind == "held")))
            register_templates(path)
            names.append(f"{name}_all")
        return names[0], names[1]

    return make


def flagged(found):
    (rows,) = found.found.values()
    return sorted(rows)


@settings(
    max_examples=25,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(seed=st.integers(0, 10**6), memory=st.sampled_from([1, 1024]))
def test_every_planted_overlap_is_found_and_no_other_row(mixtures, seed, memory):
    draw = random.Random(seed)
    held_out, train, planted = [], [], set()
    for row in range(30):
        held_out.append({"text": words(row, draw.randint(20, 60)), "more": words(row + 100, 7)})
        train.append({"text": words(row + 1000, draw.randint(5, 80))})
    for row in draw.sample(range(30), 8):
        own = held_out[row]["text"].split()
        kind = draw.choice(["run", "field", "short"])
        start = draw.randint(0, len(own) - NGRAM)
        shared = {
            "run": " ".join(own[start : start + NGRAM]),
            "field": held_out[row]["more"],
            "short": " ".join(own[start : start + NGRAM - 1]),  # a word too few
        }[kind]
        # Case, punctuation and spaces do not matter; neither does what surrounds a run.
        shared = shared.upper().replace(" ", draw.choice([" ", ", ", " - "]))
        target = train[draw.randrange(30)]
        if kind == "field":
            target["more"] = shared if not target.get("more") else target["more"]
            if target["more"] != shared:
                continue
        else:
            target["text"] += f" {shared} {words(5000 + row, 3)}"
        if kind != "short":
            planted.add(row)
    learned, evaluated = mixtures(train, held_out)
    found = overlap.find_overlap(learned, evaluated, memory=memory)
    assert set(flagged(found)) == planted
    assert found.train and sum(found.train.values()) == 30


def test_an_index_in_parts_finds_what_a_whole_one_finds(mixtures, monkeypatch):
    texts = [words(row, 40) for row in range(12)]
    train = [{"text": text} for text in texts[::3]]
    learned, evaluated = mixtures(train, [{"text": text} for text in texts])
    whole = overlap.find_overlap(learned, evaluated)
    parts = []
    made = run_index._part

    def counting(*arguments):
        parts.append(made(*arguments))
        return parts[-1]

    monkeypatch.setattr(run_index, "_part", counting)
    monkeypatch.setattr(run_index, "_BYTES_A_RUN", 2**20 // 100)  # room for 100 runs in a MiB
    assert overlap.find_overlap(learned, evaluated, memory=1) == whole
    assert len(parts) > 3 and flagged(whole) == [0, 3, 6, 9]


def test_equal_hashes_alone_flag_nothing(mixtures, monkeypatch):
    learned, evaluated = mixtures([{"text": words(1, 20)}], [{"text": words(2, 20)}])
    monkeypatch.setattr(run_index, "hash", lambda word: 1, raising=False)
    assert flagged(overlap.find_overlap(learned, evaluated)) == []


def test_tasks_list_examples_and_a_report_leaves_them_out(mixtures, tmp_path, monkeypatch, capsys):
    texts = [words(row, 20) for row in range(4)]
    rows = [{"text": text, "label": number % 2} for number, text in enumerate(texts)]
    learned, evaluated = mixtures([{"text": f"before {texts[2]} after"}], rows)
    out = tmp_path / "overlap.json"
    code, printed, errors = run(
        monkeypatch, capsys, "tasks", "overlap", f"--train={learned}", f"--eval={evaluated}",
        f"--out={out}", "--module_import=t0repro.tasks.demo",
    )  # fmt: skip
    assert code == 0, errors
    assert "1 of 4 rows (25.0%) share text with training." in printed and "'w2x0 w2x1" in printed
    task = evaluated.replace("_all", "_ask")
    assert overlap.read_overlap(out) == {task: [2]}

    import numpy as np

    from t0repro.evaluation.rank import rank_classification
    from t0repro.evaluation.task_scores import TaskScores

    example, choice = np.divmod(np.arange(8), 2)
    scores = TaskScores(
        task=task, step=1, input_index=example, choice_index=choice,
        is_correct=choice == 0, weight=np.ones(8), target_length=np.ones(8, np.int64),
        # Right for all examples but the third.
        score=np.array([0, -1, 0, -1, -1, 0, 0, -1], np.float64), inputs=None,
    )  # fmt: skip
    result = rank_classification(scores)
    assert result.accuracy == 75.0
    assert accuracies_without([result], overlap.read_overlap(out)) == {task: 100.0}
    assert accuracies_without([result], {}) == {}


def test_files_and_mixtures_that_are_wrong_are_named(mixtures, tmp_path):
    (tmp_path / "other.json").write_text("[]")
    with pytest.raises(UserError, match="not a file of `t0repro tasks overlap`"):
        overlap.read_overlap(tmp_path / "other.json")
    learned, evaluated = mixtures([{"text": "a"}], [{"text": "b"}])
    with pytest.raises(UserError, match="no mixture 'no_such_mixture'"):
        overlap.find_overlap("no_such_mixture", evaluated)
    with pytest.raises(UserError, match="No rows .* are available"):
        overlap.find_overlap(learned, evaluated, split="test")
