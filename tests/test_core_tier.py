"""The core tier does its part of T0's job where no package beyond its lock can be imported."""

import json
import os
import subprocess
import sys

import pytest

from t0repro.tasks.registration import load_tasks

from .locks import beyond_the_core, hide_all_but_the_core
from .runs.tiny_gin import MODEL, SIZES
from .tasks.prompt_caches import make

TASKS = "--module_import=t0repro.tasks.demo"
BINDINGS = (
    *SIZES,
    "MIXTURE_OR_TASK_NAME = 'demo_train'",
    "TASK_FEATURE_LENGTHS = {'inputs': 64, 'targets': 16}",
    "DROPOUT_RATE = 0.0",
    "BATCH_SIZE = 8",
    "TRAIN_STEPS = 2",
    "train_eval/utils.DatasetConfig.split = 'train'",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a cache, and the sitecustomize that hides what is not the core's."""
    folder = tmp_path_factory.mktemp("core")
    load_tasks(["t0repro.tasks.demo"], into_seqio=False)
    make(folder / "cache", mixtures=("demo_train",))
    hide_all_but_the_core(folder)
    return folder


def run(folder, *arguments, module="t0repro.cli") -> str:
    command = [sys.executable, "-P", "-m", module, *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": str(folder)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def trained(folder):
    files = [f"--gin_file={MODEL}", "--gin_file=t5x/configs/runs/pretrain.gin"]
    bindings = [f"--gin_bindings={each}" for each in (*BINDINGS, f"MODEL_DIR = '{folder}/run'")]
    run(folder, "train", *files, *bindings, TASKS, f"--seqio_additional_cache_dirs={folder}/cache")
    return folder / "run"


def test_what_is_hidden_cannot_be_imported_and_the_core_can(folder):
    of_reference = {"tensorflow", "tensorflow_text", "mesh_tensorflow", "t5", "seqio"}
    assert of_reference <= beyond_the_core()
    code = "import importlib.util as u, sys; print(*(bool(u.find_spec(n)) for n in sys.argv[1:]))"
    names = [*sorted(of_reference), "jax", "promptsource", "t0repro"]
    (folder / "found.py").write_text(code)
    found = run(folder, *names, module="found").split()
    assert found == ["False"] * len(of_reference) + ["True"] * 3


def test_doctor_names_the_core_tier(folder):
    found = json.loads(run(folder, "doctor", "--json"))
    assert found["tier"] == "core" and found["works"]


def test_it_trains_on_a_cache(trained):
    rows = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    assert max(row["step"] for row in rows) == 2


def test_it_ranks_and_reports(folder, trained):
    sizes = ["--limit=2", "--inputs_length=64", "--targets_length=16"]
    mixture = "--mixture=demo_eval_score_eval"
    out = f"--out={folder}/evaluated"
    run(folder, "rank-eval", f"--checkpoint={trained}", mixture, out, TASKS, *sizes)
    run(
        folder,
        "report",
        "make",
        folder / "evaluated" / "validation_eval",
        f"--out={folder}/report",
        TASKS,
    )
    report = json.loads((folder / "report" / "report.json").read_text())
    assert len(report["datasets"]) == 5


@pytest.mark.parametrize("to", ["mtf", "hf", "t5x"])
def test_it_converts(folder, trained, to):
    run(folder, "convert", trained, folder / to, "--to", to)
    run(folder, "checkpoint", "diff", trained, folder / to)
