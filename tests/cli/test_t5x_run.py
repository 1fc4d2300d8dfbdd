"""`t0repro eval` and `t0repro infer` as a user calls them."""

import json
import re
import shutil
import subprocess
import sys

import pytest

from t0repro.adapters import ia3
from t0repro.config.t5x.run import read_eval_run
from t0repro.storage import lock_folder
from t0repro.tasks.demo.datasets import VOCABULARY

from ..evaluation.small_model import save_adapter
from ..helpers import commands
from ..helpers.own_lines import foreign_lines
from ..runs.tiny_gin import MODEL, SIZES, parsed, save_checkpoint

EVAL_MACROS = ("MIXTURE_OR_TASK_NAME", "CHECKPOINT_PATH", "EVAL_OUTPUT_DIR")
TASK = "demo_synthetic_glue_mrpc_want_to_know_score_eval"


def words(mode):
    """The command's arguments, without macros."""
    files = [f"--gin_file={MODEL}", f"--gin_file=t5x/configs/runs/{mode}.gin"]
    bindings = [f"--gin_bindings={binding}" for binding in SIZES]
    tasks = "--gin.MIXTURE_OR_TASK_MODULE='t0repro.tasks.demo'"
    return [mode, *files, "--gin.DROPOUT_RATE=0.0", *bindings, tasks]


def run(mode, *arguments):
    done = commands.run("t0repro", *words(mode), *arguments)
    return done.returncode, done.stdout, done.stderr


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A checkpoint of the tiny model."""
    bindings = [f"{name} = 'x'" for name in EVAL_MACROS]
    return save_checkpoint(
        tmp_path_factory.mktemp("model"), read_eval_run(parsed("eval", "eval", *bindings)), 3
    )


def macros(checkpoint, output, task=TASK):
    return [
        f"--gin.MIXTURE_OR_TASK_NAME='{task}'",
        f"--gin.CHECKPOINT_PATH='{checkpoint}'",
        f"--gin.EVAL_OUTPUT_DIR='{output}'",
        "--gin.MIXTURE_OR_TASK_SPLIT='validation'",
    ]


def test_a_dry_run_checks_and_writes_nothing_and_a_run_evaluates(checkpoint, tmp_path):
    output = tmp_path / "out"
    made = read_eval_run(parsed("eval", "eval", *(f"{name} = 'x'" for name in EVAL_MACROS)))
    adapter = save_adapter(tmp_path / "adapter", ia3(), checkpoint, made.model.shape)
    code, shown, _ = run(
        "eval", *macros(checkpoint, output), f"--adapter={adapter.parent}", "--dry_run"
    )
    lines = shown.splitlines()
    assert code == 0 and not output.exists()
    assert f"examples: 1 task of {TASK} with the split 'validation'" in lines
    assert "examples: not cached: rendered from rows" in lines
    assert f"checkpoints: {adapter} (jax): " in lines[-1]
    assert "match; initialized: none; not used: none" in lines[-1]
    code, shown, said = run(
        "eval", *macros(checkpoint, output), "--gin.seqio.Evaluator.num_examples=4"
    )
    assert code == 0 and foreign_lines(said) == [], said
    metrics = (output / "inference_eval" / f"{TASK}-metrics.jsonl").read_text()
    assert json.loads(metrics)["step"] == 3 and "accuracy" in shown
    assert_described(output)


def assert_described(output):
    """The folder has the configuration, and the model without slots."""
    assert "MIXTURE_OR_TASK_NAME = " in (output / "config.gin").read_text()
    info = (output / "model-info.txt").read_text()
    assert "Total number of parameters: 26720" in info and "param_states" not in info


def test_an_evaluation_into_a_training_runs_folder_keeps_the_runs_configuration(
    checkpoint, tmp_path
):
    shutil.copytree(checkpoint, tmp_path / checkpoint.name)
    (tmp_path / "config.gin").write_text("# of the training\n")
    code, _, said = run("eval", *macros(tmp_path, tmp_path), "--gin.seqio.Evaluator.num_examples=4")
    assert code == 0 and "is a training run's; its config.gin and model-info.txt stay" in said
    assert (tmp_path / "config.gin").read_text() == "# of the training\n"
    assert (tmp_path / "inference_eval" / f"{TASK}-metrics.jsonl").is_file()
    assert not (tmp_path / "model-info.txt").exists()


def macros_of(mode, checkpoint, output):
    """Both modes' macros are the same except for the folder's and the lengths."""
    lines = [line.replace("EVAL_O", f"{mode.upper()}_O") for line in macros(checkpoint, output)]
    lengths = ["--gin.TASK_FEATURE_LENGTHS={'inputs': 64, 'targets': 8}"]
    return lines + (lengths if mode == "infer" else [])


@pytest.mark.parametrize("mode", ["eval", "infer"])
@pytest.mark.parametrize("spoiled", ["split", "checkpoint"])
def test_a_refused_run_leaves_no_folder(checkpoint, tmp_path, mode, spoiled):
    path = checkpoint if spoiled == "split" else tmp_path / "absent"
    lines = macros_of(mode, path, tmp_path / "out")
    if spoiled == "split":
        lines += ["--gin.MIXTURE_OR_TASK_SPLIT='tset'"]
    code, _, said = run(mode, *lines)
    assert code == 2 and ("'tset'" in said or "absent" in said), said
    assert "WARNING:absl" not in said and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("mode", "held", "what"),
    [
        ("eval", "inference_eval", "evaluation"),
        ("infer", ".shard-00000-of-00001", "inference"),
    ],
)
def test_a_second_run_into_one_folder_is_refused(checkpoint, tmp_path, mode, held, what):
    with lock_folder(tmp_path / "out" / held, what):
        code, _, said = run(mode, *macros_of(mode, checkpoint, tmp_path / "out"))
    assert code == 2 and f"Another run holds this folder for {what}" in said
    assert f"another {mode.upper()}_OUTPUT_DIR" in said


def test_a_dry_run_reports_all_that_is_wrong_at_once(checkpoint, tmp_path):
    code, _, said = run(
        "eval",
        *macros(checkpoint, tmp_path / "out"),
        "--gin.network.T5Config.emb_dim=16",
        "--gin.MIXTURE_OR_TASK_SPLIT='test'",
        "--dry_run",
    )
    assert code == 2 and not (tmp_path / "out").exists()
    assert "No task of" in said and "Choose one of validation" in said
    assert "The checkpoint does not fit the model: of another shape" in said
    assert re.search(r"It has [^;]* d_model \d+, [^;]*; the model [^;]* d_model 16, ", said)


def test_skip_missing_leaves_out_the_tasks_of_a_mixture_whose_rows_are_not_here(
    checkpoint, tmp_path, monkeypatch
):
    rows = tmp_path / "rows" / "super_glue" / "rte" / "validation.jsonl"
    rows.parent.mkdir(parents=True)
    row = {"premise": "It rained.", "hypothesis": "It was wet.", "idx": 0, "label": 0}
    rows.write_text(json.dumps(row) + "\n")
    monkeypatch.setenv("T0REPRO_DATA_DIR", str(tmp_path / "rows"))
    monkeypatch.setenv("T0REPRO_VOCAB", str(VOCABULARY))
    dry = [
        *macros(checkpoint, tmp_path / "out", "t0_eval_score_eval"),
        "--gin.MIXTURE_OR_TASK_MODULE='t0repro.tasks.t0'",
        "--dry_run",
    ]
    code, _, said = run("eval", *dry)
    assert code == 2 and "The rows of anli" in said
    for more in ([], [f"--tfds_data_dir={tmp_path}"]):  # described tasks, and SeqIO's
        code, shown, said = run("eval", *dry, "--skip_missing", *more)
        assert code == 0, said
        assert "10 tasks of t0_eval_score_eval with the split 'validation'" in shown


def test_an_evaluation_looks_for_caches_in_the_folders_of_the_command_line(tmp_path, monkeypatch):
    import seqio

    from t0repro.cli.bodies.registration import register
    from t0repro.cli.t5x_options import T5xOptions

    folders = [str(tmp_path / name) for name in "abc"]
    monkeypatch.setattr(seqio.utils, "_GLOBAL_CACHE_DIRECTORIES", [])
    made = parsed("eval", "eval", *(f"{name} = 'x'" for name in EVAL_MACROS))
    register(made, T5xOptions(cache_dir=[",".join(folders[:2]), folders[2]]), [], lambda: "it")
    assert seqio.get_global_cache_dirs() == folders


def test_infer_takes_the_shard_from_the_command_line(checkpoint, tmp_path):
    code, _, said = run(
        "infer",
        *[each for each in macros(checkpoint, "") if "EVAL_OUTPUT" not in each],
        f"--gin.INFER_OUTPUT_DIR='{tmp_path}'",
        "--gin.TASK_FEATURE_LENGTHS={'inputs': 96, 'targets': 6}",
        "--gin.infer.mode='score'",
        "--gin.infer.num_shards=8",
        "--shard_id=3",
    )
    assert code == 0 and foreign_lines(said) == [], said
    assert (tmp_path / f"{TASK}-score.jsonl-00003-of-00008.COMPLETED").exists()
    assert not (tmp_path / "config.gin").exists()  # the first shard writes it


@pytest.mark.parametrize("mode", ["eval", "infer"])
def test_a_misspelled_macro_is_named_before_anything_heavy_is_imported(mode):
    command = [sys.executable, "-P", "-X", "importtime", "-m", "t0repro.cli", *words(mode)]
    command += ["--gin.MIXTURE_OR_TASK_NAM='a'", "--dry_run"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and "'MIXTURE_OR_TASK_NAM' may be meant" in done.stderr
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "typer" in imported and not imported & {"tensorflow", "jax", "seqio"}
