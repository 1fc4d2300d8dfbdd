"""`t0repro rank-eval` as a command."""

import csv
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
import types

import pytest

from t0repro.cli.bodies.rank_eval import run
from t0repro.cli.rank_eval_options import ResultOptions
from t0repro.errors import UserError
from t0repro.evaluation.records import read_records
from t0repro.model import cpu_attention
from t0repro.progress import heard_by
from t0repro.reports import load_report
from t0repro.reports.history import read_history
from t0repro.runs.verify import verify
from t0repro.storage import lock_folder

from ..cli.commands import run as in_process
from ..helpers import commands
from .rank_evaluations import MIXTURE, SETTINGS, evaluate, facts_of
from .small_model import save_model

pytestmark = [pytest.mark.always, pytest.mark.usefixtures("prompts")]

COMMAND = "from t0repro.cli.app import main; main()"
LIGHT = """
import sys
from t0repro.cli.app import main

try:
    main()
finally:
    heavy = {"tensorflow", "seqio", "t5", "clu", "mesh_tensorflow"} & set(sys.modules)
    assert not heavy, sorted(heavy)
"""


def test_the_command_ranks_prompted_tasks_without_tensorflow_to_the_same_bits(
    evaluated, model_dir, tmp_path
):
    """`evaluated` has SeqIO's tasks with t5's metrics."""
    options = {"checkpoint": model_dir, "mixture": MIXTURE, "out": tmp_path, "limit": 3}
    options |= {"inputs_length": 128, "targets_length": 32}
    command = [sys.executable, "-P", "-c", LIGHT, "rank-eval"]
    command += ["--module_import=t0repro.tasks.demo"]
    command += [f"--{name}={value}" for name, value in options.items()]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    folder, other = evaluated[1].folder, tmp_path / "validation_eval"
    files = sorted(path.name for path in folder.glob("*_score_eval_*"))
    assert len(files) == 3 * 9
    for name in files:
        assert (other / name).read_bytes() == (folder / name).read_bytes(), name
    lines = [
        (path / "metrics.jsonl").read_text().splitlines() for path in (tmp_path, folder.parent)
    ]
    assert sorted(lines[0]) == sorted(lines[1])
    records = [read_records(path, 7) for path in (folder, other)]
    for name in records[0]:
        varying = ("seconds", "checksum")
        ours, theirs = (
            {k: v for k, v in found[name].items() if k not in varying} for found in records
        )
        assert ours == theirs, name


def words(model_dir, out, *arguments):
    return [
        *("rank-eval", f"--checkpoint={model_dir}", f"--mixture={MIXTURE}", f"--out={out}"),
        *("--module-import=t0repro.tasks.demo", "--inputs-length=128", "--targets-length=32"),
        *arguments,
    ]


def start(model_dir, out, *arguments):
    return subprocess.Popen(
        [sys.executable, "-c", COMMAND, *words(model_dir, out, *arguments)],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_the_command_goes_on_after_a_kill_and_writes_a_report(model_dir, tmp_path):
    arguments = ("--limit=12", "--tokens-per-batch=512", "--train-mixture=demo_train")
    killed = start(model_dir, tmp_path, *arguments)
    deadline = time.monotonic() + 120
    while not any(p.stat().st_size for p in tmp_path.glob("scores/*/pairs.bin")):
        assert killed.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    more = ("--calibrated", "--tracker=tensorboard", *arguments)
    done = commands.run("t0repro", *words(model_dir, tmp_path, *more))
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    (tracked,) = json.loads((tmp_path / "tracking.json").read_text()).values()
    assert len(tracked["evaluated"]) == 9
    report = load_report(tmp_path)
    assert report.provenance.checkpoint_hash and report.provenance.data_revision
    # The killed run's scores, the restarted one's and those of a run in one go are the same bits.
    settings = dataclasses.replace(SETTINGS, limit=12, tokens_per_batch=512)
    whole = evaluate(model_dir, tmp_path / "in_one_go", settings)
    assert report.provenance.scores_sha256 == facts_of(whole)["scores_sha256"]
    assert f"SHA-256 of the scores: {facts_of(whole)['scores_sha256']}" in output
    assert {group.group for group in report.groups} == {"held_out_prompts", "held_out_datasets"}
    assert len(report.tasks) == 9 and all(cost.pairs for cost in report.tasks)
    rows = list(csv.DictReader((tmp_path / "scores.csv").read_text().splitlines()))
    assert len(rows) == sum(cost.pairs for cost in report.tasks)
    import pyarrow.parquet

    table = pyarrow.parquet.read_table(tmp_path / "scores.parquet").to_pylist()
    assert [row["score"] for row in table] == [float(row["score"]) for row in rows]
    predicted = {(row["task"], row["example"]) for row in table if row["predicted"]}
    assert len(predicted) == sum(p.examples for d in report.datasets for p in d.prompts)


def test_all_steps_give_one_report_with_accuracy_by_step_after_a_kill_too(tmp_path, prompts):
    model_dir = save_model(save_model(tmp_path / "model"), seed=1, step=8)
    out, arguments = tmp_path / "out", ("--step=all", "--limit=3")
    killed = start(model_dir, out, *arguments)
    deadline = time.monotonic() + 240
    while not (out / "scores" / "step_8.json").exists():
        assert killed.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    assert not (out / "report.json").exists()
    done = commands.run("t0repro", *words(model_dir, out, *arguments))
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    assert "Finished already: 9 of 9 tasks, with" in output
    assert "Mean accuracy over prompts" in output
    report = load_report(out)
    assert report.provenance.step == 8 and report.history.steps == (7, 8)
    assert report.history == read_history(out / "validation_eval", prompts)
    html, markdown = ((out / f"report.{kind}").read_text() for kind in ("html", "md"))
    assert 'aria-label="Accuracy by step"' in html
    assert "| dataset | chance | 7 | 8 |" in markdown
    with heard_by(lambda text: None):
        assert not [found for found in verify(out, prompts, sample=1) if not found.agrees]
    for steps, said in (
        ("--step=7,8", "names 2"),
        ("--step=7 --step=8", "--step=7,8 names 2"),
        ("--step=7-8", "'7-8' is not a step"),
    ):
        asked = words(model_dir, out, *steps.split(), "--adapter=x", "--dry_run")
        assert said in commands.run("t0repro", *asked).stderr


def test_a_step_without_a_checkpoint_is_refused_before_another_is_scored(
    model_dir, tmp_path, monkeypatch, capsys
):
    asked = words(model_dir, tmp_path / "out", "--step=7,9")
    code, _, printed = in_process(monkeypatch, capsys, *asked)
    assert code == 2 and "no checkpoint of step 9; it has step 7" in printed
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("flags", "arguments", "said"),
    [
        ("avx512f amx_bf16 amx_tile", (), True),
        ("avx512f amx_bf16 amx_tile", ("--activation=float32",), False),
        ("avx512f avx512_bf16", (), False),
    ],
)
def test_on_a_cpu_with_amx_the_start_says_what_bfloat16_saves(
    model_dir, tmp_path, monkeypatch, capsys, flags, arguments, said
):
    processors = tmp_path / "cpuinfo"
    processors.write_text(f"processor : 0\nmodel name : A Xeon\nflags : fpu {flags}\n")
    monkeypatch.setattr(cpu_attention, "_PROCESSORS", processors)
    asked = words(model_dir, tmp_path / "out", "--dry_run", *arguments)
    code, _, printed = in_process(monkeypatch, capsys, *asked)
    assert not code and ("--activation bfloat16 took half" in printed) == said


def test_all_steps_of_a_folder_with_one_checkpoint_are_said_to_be_one(
    model_dir, tmp_path, monkeypatch, capsys
):
    asked = words(model_dir, tmp_path / "out", "--dry_run", "--step=all")
    code, _, printed = in_process(monkeypatch, capsys, *asked)
    assert not code and "has one checkpoint, of step 7" in printed


def test_a_second_run_into_the_same_folder_is_refused_at_once(model_dir, tmp_path):
    with lock_folder(tmp_path, "rank evaluation"):
        second = commands.run("t0repro", *words(model_dir, tmp_path, "--limit=1"))
    output = second.stderr
    assert second.returncode == 2, output
    assert "Another run holds this folder for rank evaluation" in output
    assert "choose another --out" in output and not (tmp_path / "metrics.jsonl").exists()


def test_force_and_add_step_contradict_each_other():
    asked = types.SimpleNamespace(adapter=None, checkpoint="c", step=None)
    options = ResultOptions(force=True, add_step=True)
    with pytest.raises(UserError, match="removes what OUT holds, and --add_step keeps it"):
        run(asked, None, options, None, None)
