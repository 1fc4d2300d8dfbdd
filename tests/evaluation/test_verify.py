"""`t0repro report verify` notices what was changed, however well the change is covered up."""

import contextlib
import dataclasses
import json
import os
import shutil
import warnings

import numpy as np
import pytest
from typer.testing import CliRunner

from t0repro.cli.report import app
from t0repro.errors import UserError
from t0repro.evaluation import evaluation_facts, records
from t0repro.evaluation.evaluation_folder import EvaluationSettings
from t0repro.evaluation.opened import open_checkpoint
from t0repro.evaluation.reading import TaskReader
from t0repro.progress import heard_by
from t0repro.reports import make_report as making
from t0repro.reports import score_tables
from t0repro.reports.make_report import ReportOptions
from t0repro.reports.report import load_report
from t0repro.reports.report_files import write_report
from t0repro.reports.run import Run
from t0repro.reports.statistics import Bootstrap
from t0repro.runs import rank_eval, rank_report
from t0repro.runs import verify as runs_verify
from t0repro.runs.verified_cells import choose_cells
from t0repro.runs.verified_figures import options_of
from t0repro.runs.verify import detection_probability, not_verified, verify

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
    options = ReportOptions("Demo", Bootstrap(100))
    rank_report.write_results(outcome, [7], out, prompts, options, label="jax")
    return out


@pytest.fixture
def copied(reported, tmp_path):
    """The same, to be tampered with."""
    return shutil.copytree(reported, tmp_path / "copy")


def found(out, prompts, sample=ALL, **options):
    with heard_by(lambda text: None):
        return list(verify(out, prompts, sample=sample, **options))


def test_a_report_of_tasks_that_nobody_registered_asks_for_their_module(
    copied, prompts, monkeypatch
):
    monkeypatch.setattr(runs_verify, "registered_tasks", list)
    fix = "add --module_import, or set T0REPRO_TEMPLATES"
    with pytest.raises(UserError, match=f"not registered: demo_(.|\n)*{fix}"):
        found(copied, prompts)


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


def test_another_spelling_of_the_checkpoints_path_is_no_difference(copied, prompts):
    report = load_report(copied)
    whole, other = report.provenance.checkpoint, os.path.relpath(report.provenance.checkpoint)

    def respelled(config):
        changed = dataclasses.replace(
            report.provenance, checkpoint=other, operative_config=config.replace(whole, other)
        )
        write_report(dataclasses.replace(report, provenance=changed), copied)
        return differing(copied, prompts, sample=1)

    config = report.provenance.operative_config
    assert whole in config and not respelled(config)
    # Another setting is one, and only its line is shown.
    (only,) = respelled(config.replace("rank_eval.limit = ", "rank_eval.limit = 1"))
    assert only.what == "provenance" and only.details.count("rank_eval.") == 2
    assert "operative_config, line" in only.details and "limit = 1" in only.details


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
    assert len(changed) == len(records.read_records(reported / "validation_eval", 7))
    assert all("another line than the rows give" in each.details for each in changed)


def test_the_command_exits_with_1_where_something_differs(copied):
    command = ["verify", str(copied), "--sample=2", "--module_import=t0repro.tasks.demo"]
    run = CliRunner().invoke(app, command, catch_exceptions=False)
    assert run.exit_code == 0 and "DIFFERS" not in run.output
    assert run.output.count("to the last bit") == 2
    assert "detected with a probability of 2% if 1% were, 10% if 5% were, 19% if 10%" in run.output
    last = run.output.partition("Not verified:\n")[2].splitlines()
    assert [line.strip() for line in last] == not_verified(copied)
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
        record = records.read_records(folder, 7)[task]
        record["files"][path.name] = records.file_digest(path)
        records.write_record(folder, record)
    facts = json.loads((folder / "provenance.json").read_text())
    facts["scores_sha256"] = evaluation_facts.scores_sha256(folder, records.read_records(folder, 7))
    (folder / "provenance.json").write_text(json.dumps(facts))
    options = dataclasses.replace(options_of(load_report(out)), title="Demo")
    write_report(making.make_report(Run("jax", folder, 7), prompts, options), out)
    score_tables.write_tables(folder, 7, prompts, out)


def test_covered_up_scores_are_noticed_as_often_as_is_said(copied, prompts):
    folder = copied / "validation_eval"
    tasks = sorted(records.read_records(folder, 7))
    changed = {task: {1, 7} for task in tasks[: len(tasks) // 2]}
    cover_up(copied, changed, prompts)
    differ = differing(copied, prompts)
    # Nothing but the cells shows it, and exactly the changed ones do.
    assert all(each.is_cell for each in differ), differ
    assert len(differ) == sum(map(len, changed.values()))
    share = len(differ) / (12 * len(tasks))
    for cells in (1, 5, 20):
        draws = (choose_cells(records.read_records(folder, 7), cells, seed) for seed in range(600))
        caught = [
            any(changed.get(task, set()) & {cell for cell in own} for task, own in drawn.items())
            for drawn in draws
        ]
        # Four standard errors of 600 draws; without repetition it is noticed a little more often.
        assert np.mean(caught) >= detection_probability(share, cells) - 4 * np.sqrt(0.25 / 600)


def leaves_of(value, place=()):
    """Places in a JSON value; of lists and of mappings with free names, the first entry alone."""
    yield place
    if isinstance(value, dict):
        for name in value:
            yield from leaves_of(value[name], (*place, name))
    elif isinstance(value, list) and value:
        yield from leaves_of(value[0], (*place, 0))


def altered(value):
    """Another value of the same type; lists and mappings lose their first entry."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 3
    if isinstance(value, str):
        return f"{value} forged"
    if isinstance(value, list):
        return value[1:]
    if isinstance(value, dict):
        return dict(list(value.items())[1:])
    return "forged"


def tampered(content, place):
    """A copy of a report's content with the value at a place altered."""
    content = json.loads(json.dumps(content))
    if not place:
        return {}
    *above, last = place
    holder = content
    for name in above:
        holder = holder[name]
    holder[last] = altered(holder[last])
    return content


def is_named(place, unverified):
    """Whether `not_verified` names a field, or one that it is part of."""
    names = [name for name in place if isinstance(name, str)]
    dotted = {".".join(names[:count]) for count in range(1, len(names) + 1)}
    words = {word.strip(".:,") for line in unverified for word in line.split()}
    return bool(dotted & words)


def is_noticed(out, prompts):
    """Whether anything but the examples, which need the checkpoint, differs or is refused."""
    try:
        for each in verify(out, prompts, sample=1):
            if each.what == "checkpoint":
                return not each.agrees
            if not each.agrees:
                return True
    except UserError:
        return True
    return False


@pytest.mark.slow
def test_every_field_of_a_report_is_verified_or_named_as_not_verified(reported, copied, prompts):
    """Each field is changed, and the pages are rendered again from the changed report."""
    content = json.loads((reported / "report.json").read_text())
    places = [place for place in leaves_of(content) if tampered(content, place) != content]
    unverified = not_verified(reported)
    checked = [place for place in places if not is_named(place, unverified)]
    assert len(checked) > 48 and len(places) > 100
    silent = []
    for place in checked:
        path = copied / "report.json"
        path.write_text(json.dumps(tampered(content, place)))
        with contextlib.suppress(UserError):
            write_report(load_report(path), copied)
        if not is_noticed(copied, prompts):
            silent.append(place)
    assert not silent, silent


def remove_record(out):
    next((out / "validation_eval/results").iterdir()).unlink()


def flip_all_answers(out):
    """Of a task whose record is removed, so that nothing holds its scores to anything."""
    record = next((out / "validation_eval/results").iterdir())
    task = record.name.removesuffix("_7.json")
    record.unlink()
    path = out / "validation_eval" / f"{task}_7_predictions"
    scores = [float(line) for line in path.read_text().splitlines()]
    path.write_text("".join(f"{min(scores) - score}\n" for score in scores))


def forget_dropped_rows(out):
    record = next(iter(records.read_records(out / "validation_eval", 7).values()))
    records.write_record(out / "validation_eval", {**record, "dropped_rows": [0]})


def empty(name):
    return lambda out: (out / name).write_bytes(b"")


def cut(name):
    return lambda out: (out / name).write_bytes((out / name).read_bytes()[:-40])


def swap_scores(out):
    path = out / "scores.csv"
    header, first, second, *rest = path.read_text().splitlines()
    a, b = first.split(","), second.split(",")
    a[6], b[6] = b[6], a[6]
    path.write_text("\n".join((header, ",".join(a), ",".join(b), *rest)) + "\n")


def forge_facts(out):
    path = out / "validation_eval/provenance.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"device": "another"}))


@pytest.mark.parametrize(
    "forge",
    [
        remove_record, flip_all_answers, forget_dropped_rows, swap_scores, forge_facts,
        *map(empty, ("report.md", "report.html", "scores.csv", "scores.parquet")),
        *map(cut, ("report.md", "report.html", "scores.csv", "scores.parquet")),
    ],
)  # fmt: skip
def test_a_file_of_a_report_that_was_changed_differs(copied, prompts, forge):
    forge(copied)
    assert is_noticed(copied, prompts)


def test_every_file_of_a_reports_folder_is_verified_or_named(copied, prompts):
    for name in ("report.html", "scores.csv"):
        (copied / name).unlink()
    *_, files, missing = not_verified(copied)
    assert missing == "Not in the folder: report.html, scores.csv."
    assert files == (
        "Files: EVENTS, metrics.jsonl, scores, validation_eval/operative_config.gin,"
        " validation_eval/provenance.json.".replace("EVENTS", next(copied.glob("events.*")).name)
    )
