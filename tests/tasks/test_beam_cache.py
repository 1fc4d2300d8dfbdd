"""The cache's plan run by Beam gives the bytes that local workers write."""

import subprocess
import sys

import pytest

from t0repro.errors import UserError

from .prompt_caches import files, make
from .test_prompt_cache import rte

IN_PROCESS = ["--runner=FnApiRunner"]
TASKS = ("demo_synthetic_glue_mrpc_*", "demo_synthetic_openbookqa_*")


@pytest.fixture(scope="module", autouse=True)
def registered():
    """The demo's tasks."""
    import t0repro.tasks.demo  # noqa: F401 - registers


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    """A cache that a local worker wrote."""
    folder = tmp_path_factory.mktemp("local")
    summary = make(folder, *TASKS)
    return files(folder), summary


def test_beam_in_this_process_writes_the_same_bytes(tmp_path, local):
    wanted, told = local
    summary = make(tmp_path, *TASKS, beam_options=IN_PROCESS)
    assert files(tmp_path) == wanted and len(wanted) > 50
    assert summary.cached and sorted(summary.cached) == sorted(told.cached)
    assert (summary.examples, summary.dropped) == (told.examples, told.dropped)


def test_a_mistake_in_the_rows_is_told_as_by_local_workers(tmp_path):
    rows = rte(tmp_path / "rows", "beam_broken_rows")
    rows.write_text(rows.read_text() + "{ no JSON\n")
    said = []
    for options in (None, IN_PROCESS):
        with pytest.raises(UserError) as mistake:
            make(tmp_path / "cache", "beam_broken_rows", beam_options=options)
        said.append(str(mistake.value))
    assert said[0] == said[1] and "validation.jsonl" in said[0]
    assert not files(tmp_path / "cache"), "nothing unfinished is left"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--runner=FnApiRuner"], "Unexpected pipeline runner: FnApiRuner"),
        ([*IN_PROCESS, "--direct_running_mode=multi"], "direct_running_mode: invalid choice"),
    ],
)
def test_options_that_beam_refuses_are_a_users_mistake(tmp_path, options, message, capfd):
    with pytest.raises(UserError, match=message):
        make(tmp_path / "cache", TASKS[0], beam_options=options)
    assert not (tmp_path / "cache").exists()
    assert "usage:" not in capfd.readouterr().err


@pytest.mark.slow  # Beam starts two more processes
def test_beams_multi_process_runner_writes_the_same_bytes(tmp_path, local):
    options = "--runner=FnApiRunner,--direct_running_mode=multi_processing,--direct_num_workers=2"
    done = subprocess.run(
        [
            *(sys.executable, "-P", "-m", "t0repro.cli", "cache"),
            "--module_import=t0repro.tasks.demo",
            f"--tasks={','.join(TASKS)}",
            f"--output_cache_dir={tmp_path}",
            f"--beam_options={options}",
        ],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert files(tmp_path) == local[0]
