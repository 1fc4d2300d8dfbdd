"""`t0repro reproduce`: from nothing to the report, on a hub of this machine."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import t0repro.tasks
from t0repro.adapters import ia3
from t0repro.cli.bodies.reproduce import Asked, run
from t0repro.converters import released
from t0repro.converters.convert import convert
from t0repro.errors import UserError
from t0repro.runs.reproduction import SPLIT
from t0repro.tasks.catalog import catalog, features_of

from ..evaluation.small_model import CONFIG, VOCABULARY, save_adapter, save_model

datasets = pytest.importorskip("datasets", reason="needs the reference tier")

UNITS = {"MB": 1e6, "GB": 1e9}
NAME, ROWS = "bigscience/T0_3B", 6
DEMO_VOCABULARY = Path(t0repro.tasks.__path__[0]) / "demo" / "sentencepiece.model"
# One prompt of each way in which rows are found: the hub calls ANLI's only subset `default`,
# SuperGLUE was renamed and has several, and Story Cloze is not on the hub.
FEW = """
from t0repro.tasks import t0
from t0repro.tasks.registration import add_mixture
add_mixture("few_score_eval", {
    "anli_GPT_3_style_r1_score_eval": 1,
    "super_glue_cb_GPT_3_style_score_eval": 1,
    "story_cloze_2016_Answer_Given_options_score_eval": 1,
})
"""
# The catalog's entry gets the small model's shape, the mixture a few prompts, and a minute is a
# moment. A number of folders after the command's own are evaluated without interruption.
DRIVER = f"""
import contextlib, dataclasses, os, sys
from pathlib import Path
from t0repro.cli import app, options
from t0repro.converters import released
from t0repro.runs import reproduction

small = released.find({NAME!r})
shape = released.ModelShape(**{{**vars(small.shape), **eval(os.environ["SHAPE"])}})
released.catalog()[{NAME!r}] = dataclasses.replace(small, shape=shape)
options.DEFAULT_MODULE, reproduction.MIXTURE = "few", "few_score_eval"
reproduction.make_plan.__defaults__ = (0.1,)
alone = os.environ.get("ALONE")
with contextlib.suppress(SystemExit) if alone else contextlib.nullcontext():
    app.main()
if alone:
    from t0repro.cli.bodies import rank_eval
    from t0repro.cli.rank_eval_options import (
        ComputationOptions, EvaluationOptions, ResultOptions, TaskOptions
    )
    print("ALONE")
    rank_eval.run(
        EvaluationOptions(os.environ["CHECKPOINT"], "few_score_eval", Path(alone)),
        TaskOptions(["few"], {SPLIT!r}, skip_missing=True),
        ResultOptions(), ComputationOptions(), options.ReportHead(resamples=100),
    )
"""


def value_of(feature, number: int):
    """A value of a feature, another for each row."""
    if feature.get("_type") == "ClassLabel":
        return number % len(feature["names"])
    if feature["dtype"].startswith("int"):
        return 0
    return f"the quick brown fox {number}"


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """The address of a hub with a small T0 and rows of two held-out datasets."""
    folder = tmp_path_factory.mktemp("hub")
    save_model(folder / "jax")
    convert(folder / "jax", folder / NAME, "hf", vocabulary=DEMO_VOCABULARY)
    # The branch of a repository with one subset calls it `default`.
    for dataset, subset, split in (("anli", None, "dev_r1"), ("super_glue", "cb", SPLIT)):
        features = features_of(dataset, subset)
        rows = [
            {name: value_of(feature, number) for name, feature in features.items()}
            for number in range(ROWS)
        ]
        place = folder / catalog()[dataset, subset].hub.repository / (subset or "default") / split
        place.mkdir(parents=True)
        datasets.Dataset.from_list(rows).to_parquet(str(place / "0000.parquet"))
    server = subprocess.Popen(
        [sys.executable, Path(__file__).parents[1] / "tasks" / "hub_server.py", folder],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert server.stdout is not None
    yield folder, server.stdout.readline().strip()
    server.terminate()
    server.communicate()


@pytest.fixture
def start(hub, tmp_path):
    """Starts the command in a process that knows no hub but the local one."""
    (tmp_path / "few.py").write_text(FEW)
    shape = {**vars(CONFIG.shape), "vocab_size": VOCABULARY}
    environment = {
        **os.environ,
        "HF_ENDPOINT": hub[1],
        "HF_HOME": str(tmp_path / "huggingface"),
        "XDG_CACHE_HOME": str(tmp_path),
        "HF_HUB_DISABLE_XET": "1",
        "PYTHONPATH": str(tmp_path),
        "SHAPE": repr(shape),
    }
    for variable in ("T0REPRO_DATA_DIR", "T0REPRO_VOCAB", "T0REPRO_DATA_HUB"):
        environment.pop(variable, None)

    def begin(*words: str, **more: str) -> subprocess.Popen:
        return subprocess.Popen(
            [sys.executable, "-P", "-c", DRIVER, "reproduce", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            env={**environment, **more},
        )

    return begin


def test_one_command_from_nothing_to_the_report_which_a_kill_does_not_change(start, tmp_path):
    out = tmp_path / "out"
    words = (NAME, "--out", str(out), "--limit", str(ROWS))
    killed = start(*words, "--yes", "--devices", "8xNVIDIA H100")
    while not any(out.glob("scores/*/pairs.bin")):
        assert killed.poll() is None, killed.communicate()[0][-4000:]
        time.sleep(0.02)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    process = start(*words, ALONE=str(tmp_path / "alone"), CHECKPOINT=str(out / "checkpoint"))
    printed, _ = process.communicate(timeout=900)
    assert process.returncode == 0, printed[-4000:]
    assert "Continuing what was agreed to before" in printed
    killed, alone = re.findall(r"SHA-256 of the scores: (\w+)", printed)
    assert killed == alone and len(killed) == 64

    plan = json.loads((out / "plan.json").read_text())["plan"]
    files = json.loads((out / "checkpoint" / "fetched.json").read_text())["files"].values()
    assert plan["weights"] == sum(file["bytes"] for file in files)
    rows = {row["dataset"]: row for row in plan["rows"]}
    parquet = (tmp_path / "huggingface").rglob("*.parquet")
    downloaded = [path.resolve().stat().st_size for path in parquet]
    assert sorted(downloaded) == sorted(filter(None, (row["to_fetch"] for row in rows.values())))
    assert rows["story_cloze/2016"]["to_fetch"] is None
    assert "cs.rochester.edu" in rows["story_cloze/2016"]["how"]
    # Pairs: each of a prompt's inputs with each of its choices, as planned.
    scored = json.loads((out / "report.json").read_text())
    assert [dataset["dataset"] for dataset in scored["datasets"]] == ["anli/r1", "super_glue/cb"]
    assert {figure["dataset"] for figure in scored["published"]} == {"anli", "super_glue/cb"}
    memory = re.search(r"memory: planned (\S+) (\S+), took (\S+) (\S+)\.", printed)
    assert memory, printed[-1000:]
    planned, took = (float(memory[at]) * UNITS[memory[at + 1]] for at in (1, 3))
    assert planned == pytest.approx(took, rel=0.15)
    names = {path.name for path in (out / "share").iterdir()}
    assert names == {"data", ".eval_results", "model_card.md"}


@pytest.mark.parametrize(("name", "checkpoint"), [(NAME, "runs/mine"), (None, None)])
def test_exactly_one_checkpoint_is_asked_for(name, checkpoint):
    with pytest.raises(UserError, match="Name one checkpoint"):
        Asked(name, checkpoint, (), None)


def test_an_adapter_of_another_size_is_refused_before_the_checkpoint_is_fetched(tmp_path):
    base = save_model(tmp_path / "base")
    adapter = save_adapter(tmp_path / "adapter", ia3(), base, CONFIG.shape)
    asked = Asked(NAME, None, (str(adapter),), None)
    with pytest.raises(UserError, match="of another adapter, or for another model"):
        run(asked, tmp_path / "out", devices=None, yes=True, dry_run=True)


def test_another_vocabulary_than_the_checkpoints_is_refused_before_the_plan(tmp_path, monkeypatch):
    base = save_model(tmp_path / "base", vocabulary=128)
    monkeypatch.setenv("T0REPRO_VOCAB", str(DEMO_VOCABULARY))
    monkeypatch.setattr("t0repro.cli.bodies.reproduce.make_plan", None)
    asked = Asked(None, str(base), (), None)
    with pytest.raises(UserError, match="the model's embedding 128 rows"):
        run(asked, tmp_path / "out", devices=None, yes=True, dry_run=True)


def test_a_released_checkpoint_without_a_known_vocabulary_is_refused_before_it_is_fetched(
    tmp_path, monkeypatch
):
    monkeypatch.delenv("T0REPRO_VOCAB", raising=False)
    llama = next(name for name, each in released.catalog().items() if each.family == "Pile-T5")
    with pytest.raises(UserError, match="T0REPRO_VOCAB"):
        run(Asked(llama, None, (), None), tmp_path / "out", devices=None, yes=True, dry_run=True)
    assert not (tmp_path / "out").exists()


def test_the_memory_of_the_process_that_started_it_does_not_count():
    child = "from t0repro.runs.reproduction import peak_memory; print(peak_memory())"
    parent = (
        "import subprocess, sys; held = b'1' * (1 << 30);"
        f" subprocess.run([sys.executable, '-P', '-c', {child!r}], check=True)"
    )
    command = [sys.executable, "-P", "-c", parent]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert 1e8 < int(printed) < 0.9e9
