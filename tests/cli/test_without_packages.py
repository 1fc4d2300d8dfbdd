"""`t5_mesh_transformer --backend=jax` on caches imports no TensorFlow, and trains the same bits."""

import json
import subprocess
import sys

import numpy as np
import pytest

from t0repro.converters import sources

from ..tasks.prompt_caches import make

pytestmark = pytest.mark.mtf

TASK = "demo_synthetic_glue_mrpc_paraphrase"
PACKAGES = ("tensorflow", "mesh_tensorflow", "t5", "seqio", "clu")
# Targets shorter than some answers: Mesh TensorFlow then ends full rows in EOS.
PARAMS = (
    f"MIXTURE_NAME = '{TASK}'",
    "mesh_train_dataset_fn.use_cached = True",
    "mesh_train_dataset_fn.seed = 3",
    "run.train_steps = 4",
    "run.save_checkpoints_steps = 2",
    "run.batch_size = ('sequences_per_batch', 4)",
    "run.sequence_length = {'inputs': 64, 'targets': 5}",
    "utils.run.mesh_shape = []",
    "num_layers = 1",
    "d_model = 32",
    "d_ff = 32",
    "num_heads = 2",
    "d_kv = 16",
)


def trained(folder, cache, *more) -> tuple[list[str], list[dict]]:
    """Which of the packages a training run imported, and the lines of its metrics.jsonl."""
    files = ("dataset.gin", "demo/t5.1.1.demo.gin", "learning_rate_schedules/constant_0_001.gin")
    arguments = [
        "--backend=jax",
        f"--model_dir={folder}",
        "--module_import=t0repro.tasks.demo",
        f"--additional_task_cache_dirs={cache}",
        *(f"--gin_file={file}" for file in files),
        *(f"--gin_param={param}" for param in PARAMS),
        *more,
    ]
    code = (
        "import json, sys; from t0repro.cli.t5_mesh_transformer import console_entry_point\n"
        "try: console_entry_point()\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        f"print(json.dumps([name for name in {PACKAGES} if name in sys.modules]))"
    )
    ran = subprocess.run(
        [sys.executable, "-P", "-c", code, *arguments],
        capture_output=True,
        text=True,
        cwd=folder.parent,
    )
    assert ran.returncode == 0, ran.stderr
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return json.loads(ran.stdout.splitlines()[-1]), lines


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The same run without the packages, and with them, which a user's own module asks for."""
    import t0repro.tasks.demo  # noqa: F401

    folder = tmp_path_factory.mktemp("runs")
    make(folder / "cache", TASK, min_shards=1)
    (folder / "users_own.py").touch()
    alone = trained(folder / "alone", folder / "cache")
    theirs = trained(folder / "theirs", folder / "cache", "--module_import=users_own")
    return folder, alone, theirs


def test_a_run_on_caches_imports_none_of_the_packages(runs):
    _, (imported, _), (theirs, _) = runs
    assert imported == [] and set(PACKAGES) - {"clu"} <= set(theirs)


def test_losses_and_checkpoints_are_those_of_a_run_with_the_packages(runs):
    folder, (_, ours), (_, theirs) = runs
    losses = [[(line["step"], line["loss"]) for line in lines] for lines in (ours, theirs)]
    assert losses[0] == losses[1] and len(losses[0]) == 4
    for step in (2, 4):
        ours, theirs = (
            sources.load_any(folder / name / f"checkpoint_{step}") for name in ("alone", "theirs")
        )
        assert ours.keys() == theirs.keys()
        for name in ours:
            np.testing.assert_array_equal(np.asarray(ours[name]), np.asarray(theirs[name]))


def test_the_operative_config_and_the_position_are_the_same_files(runs):
    folder, *_ = runs
    for name in ("operative_config.gin", "checkpoint_4/data/position.json"):
        texts = [(folder / run / name).read_text() for run in ("alone", "theirs")]
        assert texts[0] == texts[1]


def test_a_run_without_the_packages_goes_on_after_one_with_them(runs):
    folder, *_ = runs
    more = "--gin_param=run.train_steps = 6"
    _, ours = trained(folder / "theirs", folder / "cache", more)
    _, alone = trained(folder / "alone", folder / "cache", more)
    assert [line["loss"] for line in ours] == [line["loss"] for line in alone]
    assert ours[-1]["step"] == 6
