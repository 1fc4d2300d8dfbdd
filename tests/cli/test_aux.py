"""`t0repro aux`: from the command line, by itself."""

import json
import subprocess
import sys

import pytest

from ..helpers import commands
from ..helpers.own_lines import foreign_lines
from ..jobs.trainings import curve, make_evaluator, save_checkpoints
from .commands import run


def aux(*arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    done = commands.run("t0repro", "aux", *arguments)
    assert done.returncode == 0 or not check, done.stderr + done.stdout
    return done


@pytest.fixture
def finished(tmp_path):
    model_dir = tmp_path / "model"
    save_checkpoints(model_dir, 3, 6)
    target = f"--auxiliary_job_build_target_path={' '.join(make_evaluator(tmp_path))}"
    flags = ("--auxiliary_job_mixtures=a, b", target, "--once", "--poll_seconds=0.1")
    done = aux(f"--model_dir={model_dir}", *flags)
    assert foreign_lines(done.stderr) == []
    return model_dir


def test_its_status_is_a_table_a_curve_and_json(finished):
    table = aux("status", str(finished)).stdout
    assert "succeeded" in table and "accuracy 0.8571" in table and "▁█" in table
    rows = json.loads(aux("status", str(finished), "--json").stdout)
    assert [(row["step"], row["mixture"], row["state"]) for row in rows] == [
        (3, "a", "succeeded"), (3, "b", "succeeded"), (6, "a", "succeeded"), (6, "b", "succeeded"),
    ]  # fmt: skip
    assert curve(finished / "inference_eval" / "a") == [(3, 0.75), (6, 0.8571)]


def test_it_ends_when_the_run_has_finished_and_says_until_then_what_it_waits_for(tmp_path):
    model_dir = tmp_path / "model"
    save_checkpoints(model_dir, 3)
    state = {
        **{"state": "running", "reason": None, "first_step": 0, "step": 3, "last_step": 6},
        **{"loss": 1.5, "target_tokens": 9, "examples": 3, "steps_per_second": 1.0},
        **{"target_tokens_per_second": 3.0, "seconds_left": 3.0, "started": "", "updated": ""},
        **{"host": "elsewhere", "process": 1},
    }
    (model_dir / "run_state.json").write_text(json.dumps(state))
    target = f"--auxiliary_job_build_target_path={' '.join(make_evaluator(tmp_path))}"
    flags = ("--auxiliary_job_mixtures=a", target, "--poll_seconds=0.1")
    command = [sys.executable, "-P", "-m", "t0repro.cli", "aux", f"--model_dir={model_dir}", *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        waiting = f"waiting for a new checkpoint in {model_dir}: its training run is at step 3 of 6"
        lines = iter(process.stdout)
        log = model_dir / "auxiliary" / "a" / "step_3"
        assert any(f"waiting for the end of step 3, a (log: {log}" in line for line in lines)
        assert any(waiting in line for line in lines)
        save_checkpoints(model_dir, 6)
        finished = state | {"state": "finished", "step": 6}
        (model_dir / "run_state.json").write_text(json.dumps(finished))
        assert list(lines)[-1] == "2 of 2 jobs succeeded\n"
    assert process.returncode == 0
    # A finished run with nothing left to do ends at once, without --once.
    assert aux(f"--model_dir={model_dir}", *flags).stdout.endswith("2 of 2 jobs succeeded\n")


def test_a_job_given_up_is_exit_code_1(tmp_path):
    save_checkpoints(tmp_path / "model", 3)
    done = aux(
        f"--model_dir={tmp_path / 'model'}",
        *("--auxiliary_job_mixtures=a", "--auxiliary_job_build_target_path=false", "--once"),
        *("--max_failures=1", "--poll_seconds=0.1"),
        check=False,
    )
    assert done.returncode == 1 and "given up after 1 failure" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "There is no folder to watch"),
        (["--model_dir=x"], "There are no mixtures"),
        (
            [
                *("--model_dir=gs://bucket/run", "--auxiliary_job_mixtures=a"),
                "--auxiliary_job_build_target_path=true",
            ],
            "gs://bucket/run cannot be ",
        ),
        (["status", "/nowhere"], "There are no auxiliary jobs here"),
        (
            ["--model_dir=x", "--auxiliary_job_mixtures=a", "--replace_gin_file=True"],
            "there is no gin file for it",
        ),
        (
            [
                *("--model_dir=x", "--auxiliary_job_mixtures=a", "--launcher=k8s"),
                "--auxiliary_job_build_target_path=true",
            ],
            "need a Job manifest",
        ),
        (
            [
                *("--model_dir=x", "--auxiliary_job_mixtures=a", "--launcher=condor"),
                "--auxiliary_job_build_target_path=true",
            ],
            "There is no launcher condor",
        ),
    ],
)
def test_mistakes_are_exit_code_2_and_a_sentence(arguments, complaint):
    done = aux(*arguments, check=False)
    assert done.returncode == 2 and complaint in done.stderr
    assert "Traceback" not in done.stderr


def test_the_pages_list_of_flags_and_its_script_spell_them_in_two_ways(
    monkeypatch, capsys, tmp_path
):
    """The list has auxiliary_job_build_target, and the script auxiliary_job_build_target_path."""
    said = [
        run(
            monkeypatch, capsys, "aux", f"--model_dir={tmp_path}", "--once",
            f"--{mixtures}=a_mixture", f"--{target}=true",
        )
        for mixtures, target in (
            ("auxiliary_job_mixtures", "auxiliary_job_build_target_path"),
            ("auxiliary_mixtures", "auxiliary_job_build_target"),
        )
    ]  # fmt: skip
    # They got as far as to look for checkpoints.
    assert said[0] == said[1] and "The directory holds no checkpoint." in said[0][2], said
    assert not (tmp_path / "auxiliary").exists()


def test_a_folder_that_does_not_exist_has_no_checkpoints_now_and_is_not_made(tmp_path):
    missing = tmp_path / "modle"
    save_checkpoints(tmp_path / "model", 3)
    flags = ("--auxiliary_job_mixtures=a", "--auxiliary_job_build_target_path=true", "--once")
    done = aux(f"--model_dir={missing}", *flags, check=False)
    assert done.returncode == 2
    assert "There is no such file or folder." in done.stderr
    assert f"Nearest: {tmp_path / 'model'}." in done.stderr
    assert not missing.exists()


def test_a_jobs_command_that_is_no_program_is_an_error_before_the_first_job(tmp_path):
    save_checkpoints(tmp_path / "model", 3)
    target = "--auxiliary_job_build_target_path=rankeval --limit 3"
    flags = ("--auxiliary_job_mixtures=a", target, "--once")
    done = aux(f"--model_dir={tmp_path / 'model'}", *flags, check=False)
    assert done.returncode == 2 and "there is no program rankeval" in done.stderr
    assert not (tmp_path / "model" / "auxiliary").exists()


def test_its_messages_name_its_own_option_for_the_folders_of_gin_files(tmp_path):
    (tmp_path / "model").mkdir()
    flags = ("--auxiliary_job_mixtures=a", "--auxiliary_job_gin_file=nope.gin", "--once")
    done = aux(f"--model_dir={tmp_path / 'model'}", *flags, check=False)
    assert done.returncode == 2 and "There is no gin file nope.gin" in done.stderr
    assert "--gin_search_paths" in done.stderr and "--gin_location_prefix" not in done.stderr


def test_a_misspelt_option_of_a_group_gets_the_nearest_ones(tmp_path):
    done = aux(f"--model_dir={tmp_path}", "--auxiliary_job_mixture=a", check=False)
    assert (
        "No such option: --auxiliary_job_mixture. Nearest: --auxiliary_job_mixtures" in done.stderr
    )


def test_one_of_this_packages_gin_files_is_to_be_included_in_a_file_of_ones_own(tmp_path):
    (tmp_path / "model").mkdir()
    file = "t5x/configs/runs/eval.gin"
    flags = ("--auxiliary_job_mixtures=a", f"--auxiliary_job_gin_file={file}", "--once")
    done = aux(f"--model_dir={tmp_path / 'model'}", *flags, check=False)
    assert done.returncode == 2
    assert f"Write a file that has include '{file}' and then the line: CHECK" in done.stderr
