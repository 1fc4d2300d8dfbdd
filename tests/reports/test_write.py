import json
import os
import resource
import stat

import pytest
from typer.testing import CliRunner

from t0repro.cli.compare import compare
from t0repro.cli.report import app
from t0repro.errors import UserError
from t0repro.reports.report_files import write_files
from t0repro.storage import lock_folder

from .test_comparison import write_run


@pytest.fixture
def largest_file():
    """Sets how many bytes a file may have: a write beyond that fails as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_full_disk_names_the_file_and_leaves_the_earlier_files(tmp_path, largest_file):
    write_files({"a.json": "old", "a.html": "old"}, tmp_path)
    before = contents(tmp_path)
    largest_file(1000)
    with pytest.raises(UserError, match="a.html cannot be written: File too large") as found:
        write_files({"a.json": "new", "a.html": "new" * 1000}, tmp_path)
    largest_file(resource.RLIM_INFINITY)
    assert found.value.where == str(tmp_path / "a.html")
    assert contents(tmp_path) == before


def test_report_make_on_a_full_disk_is_one_message_and_no_half_report(tmp_path, largest_file):
    folder = write_run(tmp_path / "validation_eval", 5)
    arguments = ["make", str(folder), "--out", str(tmp_path / "out"), "--resamples", "100"]
    largest_file(30_000)  # report.json and report.md are smaller, report.html is larger
    run = CliRunner().invoke(app, arguments)
    largest_file(resource.RLIM_INFINITY)
    assert isinstance(run.exception, UserError)
    assert "report.html cannot be written" in str(run.exception)
    assert not (tmp_path / "out").exists()
    assert CliRunner().invoke(app, arguments, catch_exceptions=False).exit_code == 0
    assert (tmp_path / "out" / "report.html").stat().st_size > 30_000


def test_a_folder_that_cannot_be_made_or_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file" / "out", "/proc/nowhere/out"):
        with pytest.raises(UserError, match="out cannot be written") as found:
            write_files({"a.json": ""}, out)
        assert str(out) in found.value.where


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_folder_is_named(tmp_path):
    tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
    with pytest.raises(UserError, match="a.json cannot be written: Permission denied"):
        write_files({"a.json": ""}, tmp_path)
    tmp_path.chmod(stat.S_IRWXU)


def test_a_folder_that_vanishes_while_it_is_written_is_named(tmp_path, monkeypatch):
    out = tmp_path / "out"
    replace = os.replace

    def vanish(source, target):
        replace(source, target)
        if str(target).endswith("a.json") and ".tmp" not in str(target):
            out.rename(tmp_path / "elsewhere")

    monkeypatch.setattr(os, "replace", vanish)
    with pytest.raises(UserError, match="a.md cannot be written: No such file"):
        write_files({"a.json": "x", "a.md": "y"}, out)


def test_a_report_and_a_comparison_are_printed_as_json(tmp_path):
    folder, out = write_run(tmp_path / "validation_eval", 5), tmp_path / "out"
    few = ["--resamples", "100", "--json", "--out", str(out)]
    run = CliRunner().invoke(app, ["make", str(folder), *few])
    assert json.loads(run.stdout) == json.loads((out / "report.json").read_text())
    run = CliRunner().invoke(_alone(compare), [str(folder), str(folder), *few])
    assert json.loads(run.stdout) == json.loads((out / "compare.json").read_text())


@pytest.mark.parametrize("command", ["make", "history", "compare"])
def test_a_folder_that_another_run_holds_is_refused(tmp_path, command):
    folder, out = write_run(tmp_path / "validation_eval", 5), tmp_path / "out"
    arguments = {
        "make": (app, ["make", str(folder), "--resamples", "100"]),
        "history": (app, ["history", str(folder)]),
        "compare": (_alone(compare), [str(folder), str(folder), "--resamples", "100"]),
    }[command]
    with lock_folder(out, "evaluating"):
        run = CliRunner().invoke(arguments[0], [*arguments[1], "--out", str(out)])
        assert isinstance(run.exception, UserError)
        assert "Another run holds this folder for evaluating" in str(run.exception)
        assert not list(out.glob("*.html"))


def _alone(function):
    import typer

    command = typer.Typer()
    command.command()(function)
    return command
