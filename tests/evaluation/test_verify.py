"""`t0repro report verify` notices what was changed, however well the change is covered up."""

import dataclasses
import json
import shutil
import warnings

import numpy as np
import pytest
from typer.testing import CliRunner

from t0repro.cli.report import app
from t0repro.errors import UserError
from t0repro.evaluation import evaluation_facts, outputs
from t0repro.evaluation.evaluation_folder import EvaluationSettings
from t0repro.evaluation.opened import open_checkpoint
from t0repro.evaluation.reading import TaskReader
from t0repro.progress import heard_by
from t0repro.reports import make_report as making
from t0repro.reports.make_report import write_report
from t0repro.reports.report import load_report
from t0repro.reports.run import Run
from t0repro.runs import rank_eval
from t0repro.runs import verify as runs_verify
from t0repro.runs.verify import chosen_cells, detection_probability, options_of, verify

SETTINGS = EvaluationSettings(lengths={"inputs": 128, "targets": 32}, limit=12)
ALL = 10_000


@pytest.fixture(scope="module")
def reported(model_dir, prompts, tmp_path_factory):
    """A folder with an evaluation and its report."""
    out = tmp_path_factory.mktemp("reported")
    checkpoint = open_checkpoint(str(model_dir), None, SETTINGS.activation)
    with heard_by(lambda text: None), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        outcome = rank_eval.rank_eval(checkpoint, "demo_eval_score_eval", out, SETTINGS)
    rank_eval.write_results(
        outcome, 7, out, prompts, (), label="jax", title="Demo", resamples=100, extras=()
    )
    return out


@pytest.fixture
def copied(reported, tmp_path):
    """The same, to be tampered with."""
    return shutil.copytree(reported, tmp_path / "copy")


def found(out, prompts, sample=ALL, **options):
    with heard_by(lambda text: None):
        return list(verify(out, prompts, sample=sample, **options))


def differing(out, prompts, **options):
    return [each for each in found(out, prompts, **options) if not each.agrees]


def test_an_evaluation_of_a_cache_that_is_not_here_asks_for_it(reported, prompts, monkeypatch):
    real = runs_verify.read_records

    def of_a_cache(*args):
        return {
            name: {**record, "key": {**record["key"], "data": {"cache": "a digest"}}}
            for name, record in real(*args).items()
        }

    monkeypatch.setattr(runs_verify, "read_records", of_a_cache)
    with pytest.raises(UserError, match="no cache here has it") as error:
        found(reported, prompts)
    assert "--cache_dir" in error.value.fix


def test_a_report_agrees_and_every_score_to_the_last_bit(reported, prompts):
    def files():
        there = [path for path in reported.parent.rglob("*") if path.is_file()]
        return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in there}

    before = files()
    findings = found(reported, prompts)
    assert files() == before
    assert all(each.agrees for each in findings), findings
    cells = [each for each in findings if each.is_cell]
    assert len(cells) == sum(
        len(p.task) > 0 and p.examples for d in load_report(reported).datasets for p in d.prompts
    )
    assert {each.details for each in cells} == {"to the last bit"}


def test_a_changed_figure_is_named(copied, prompts):
    path = copied / "report.json"
    content = json.loads(path.read_text())
    content["datasets"][0]["prompts"][1]["accuracy"] += 0.1
    path.write_text(json.dumps(content))
    what = {each.what: each.details for each in differing(copied, prompts, sample=1)}
    (figures,) = (details for name, details in what.items() if "figures" in name)
    assert "datasets[0].prompts[1].accuracy is" in figures
    # The page shows the figure as it was.
    assert "report.html" in what


def test_a_changed_page_is_noticed(copied, prompts):
    page = copied / "report.html"
    page.write_text(page.read_text().replace("Demo", "Demo!", 1))
    assert [each.what for each in differing(copied, prompts, sample=1)] == ["report.html"]


def test_a_changed_template_is_noticed(reported, prompts):
    task = next(iter(load_report(reported).datasets)).prompts[0].task
    other = {**prompts, task: dataclasses.replace(prompts[task], prompt="Other {{text}}")}
    (only, *rest) = differing(reported, other, sample=1)
    assert task in (only.details + "".join(each.details for each in rest))


def test_a_changed_row_is_noticed(reported, prompts, monkeypatch):
    examples = TaskReader.examples

    def one_changed(self):
        for number, example in enumerate(examples(self)):
            text = b"another" if number == 3 else example["inputs_pretokenized"]
            yield {**example, "inputs_pretokenized": text}

    monkeypatch.setattr(TaskReader, "examples", one_changed)
    changed = differing(reported, prompts)
    assert len(changed) == len(outputs.read_records(reported / "validation_eval", 7))
    assert all("another line than the rows give" in each.details for each in changed)


def test_the_command_exits_with_1_where_something_differs(copied):
    command = ["verify", str(copied), "--sample=2", "--module_import=t0repro.tasks.demo"]
    run = CliRunner().invoke(app, command, catch_exceptions=False)
    assert run.exit_code == 0 and "DIFFERS" not in run.output
    assert run.output.count("to the last bit") == 2
    assert "detected with a probability of 2% if 1% were, 10% if 5% were, 19% if 10%" in run.output
    (copied / "report.md").write_text("# Another")
    run = CliRunner().invoke(app, command, catch_exceptions=False)
    assert run.exit_code == 1 and "DIFFERS  report.md" in run.output


def cover_up(out, changed, prompts):
    """Changes scores of some examples of a task, and all records and figures to match."""
    folder = out / "validation_eval"
    for task, examples in changed.items():
        path = folder / f"{task}_7_predictions"
        scores = path.read_text().splitlines()
        choices = len(scores) // 12
        for example in examples:
            for line in range(example * choices, (example + 1) * choices):
                scores[line] = str(np.float32(float(scores[line]) - 0.001))
        path.write_text("".join(f"{score}\n" for score in scores))
        record = outputs.read_records(folder, 7)[task]
        record["files"][path.name] = outputs.file_digest(path)
        outputs.write_record(folder, record)
    facts = json.loads((folder / "provenance.json").read_text())
    facts["scores_sha256"] = evaluation_facts.scores_sha256(folder, outputs.read_records(folder, 7))
    (folder / "provenance.json").write_text(json.dumps(facts))
    options = dataclasses.replace(options_of(load_report(out)), title="Demo")
    write_report(making.make_report(Run("jax", folder, 7), prompts, options), out)


def test_covered_up_scores_are_noticed_as_often_as_is_said(copied, prompts):
    folder = copied / "validation_eval"
    tasks = sorted(outputs.read_records(folder, 7))
    changed = {task: {1, 7} for task in tasks[: len(tasks) // 2]}
    cover_up(copied, changed, prompts)
    differ = differing(copied, prompts)
    # Nothing but the cells shows it, and exactly the changed ones do.
    assert all(each.is_cell for each in differ), differ
    assert len(differ) == sum(map(len, changed.values()))
    share = len(differ) / (12 * len(tasks))
    for cells in (1, 5, 20):
        draws = (chosen_cells(outputs.read_records(folder, 7), cells, seed) for seed in range(600))
        caught = [
            any(changed.get(task, set()) & {cell for cell in own} for task, own in drawn.items())
            for drawn in draws
        ]
        # Four standard errors of 600 draws; without repetition it is noticed a little more often.
        assert np.mean(caught) >= detection_probability(share, cells) - 4 * np.sqrt(0.25 / 600)
