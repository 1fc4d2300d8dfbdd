"""`t0repro explain` of T5X's gin files, as a user calls it."""

import json
import re
import resource
import subprocess
import sys

import pytest

from t0repro.cli import explain as module
from t0repro.cli.app import command
from t0repro.cli.gate import ErrorHandling
from t0repro.errors import UserError

from ..helpers import commands

FILES = [
    "--gin_file",
    "t5x/examples/t5/t5_1_1/small.gin",
    "--gin_file=t5x/configs/runs/pretrain.gin",
]
MACROS = [
    "--gin.MODEL_DIR='runs/a'",
    "--gin.MIXTURE_OR_TASK_NAME='a_task'",
    "--gin.TRAIN_STEPS=10",
    "--gin.TASK_FEATURE_LENGTHS={'inputs': 8, 'targets': 8}",
    "--gin.DROPOUT_RATE=0.0",
]


def explain(*arguments: str) -> subprocess.CompletedProcess:
    return commands.run("t0repro", "explain", "--run_mode", "train", *FILES, *arguments)


def test_each_value_stands_beside_its_place():
    done = explain(*MACROS)
    assert (done.returncode, done.stderr) == (0, "")
    lines = {line.split()[0]: line for line in done.stdout.splitlines()}
    steps = lines["train_script.train.total_steps"]
    assert " 10 " in steps and "--gin.TRAIN_STEPS=10 " in steps
    period = lines["train_script.train.eval_period"]
    assert " 1000 " in period and "  t5x/configs/runs/pretrain.gin:" in period


def test_a_translation_has_the_names_of_its_own_dialect():
    seed = "--gin_bindings=train/utils.DatasetConfig.seed = 3"
    done = explain(*MACROS, seed, "--as=mtf")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "utils.run.sequence_length = {'inputs': 8, 'targets': 8}" in lines
    assert {"mesh_train_dataset_fn.seed = 3", "utils.run.init_checkpoint = None"} <= {*lines}
    assert "DatasetConfig" not in done.stdout


def test_t5x_files_without_a_run_mode_are_named_as_such():
    for macros in ([], MACROS):
        done = commands.run("t0repro", "explain", *FILES, *macros)
        assert done.returncode == 2
        assert "This gin file is T5X's" in done.stderr and "add --run_mode=train" in done.stderr


def test_json_has_every_value_and_what_the_files_import(tmp_path):
    (tmp_path / "mine.gin").write_text("import t5.data.mixtures\n")
    folder = f"--gin_search_paths=nowhere,{tmp_path}"
    done = explain(*MACROS, "--gin_file=mine.gin", folder, "--json")
    shown = json.loads(done.stdout)
    assert shown["imports"] == ["t5.data.mixtures"]
    assert shown["values"]["MODEL/network.T5Config.emb_dim"]["value"] == "512"


@pytest.mark.parametrize(
    "command",
    [["explain", "--run_mode=train"], ["train", "--dry_run"], ["precompile", "--run_mode=train"]],
)
def test_a_misspelled_macro_is_answered_before_anything_heavy_is_imported(command):
    # Python itself says what it imports; that is on stderr too.
    module = [sys.executable, "-P", "-X", "importtime", "-m", "t0repro.cli", *command]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [*module, *FILES, *MACROS[1:], "--gin.MODEL_DRI='runs/a'"], capture_output=True, text=True
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 2 and done.stdout == ""
    assert "MODEL_DIR" in done.stderr and "'MODEL_DRI' may be meant" in done.stderr
    imported = set(re.findall(r"^import time:.*\| +([\w.]+)$", done.stderr, re.MULTILINE))
    assert "t0repro.config.t5x.gin_files" in imported
    assert not imported & {"jax", "flax", "tensorflow", "seqio", "t5", "numpy"}
    # Of processor time, which other work on the machine does not lengthen much.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 2


def test_hardware_random_numbers_are_told_by_name_and_line():
    done = explain(*MACROS, "--gin.USE_HARDWARE_RNG=True")
    assert done.returncode == 0
    assert "pretrain.gin:" in done.stderr and "use_hardware_rng = True: JAX's" in done.stderr


def test_a_flag_without_a_value_says_how_to_write_it():
    done = explain(*MACROS, "--gin.BATCH_SIZE")
    assert done.returncode == 2 and "--gin.BATCH_SIZE=VALUE" in done.stderr


def test_a_dry_run_lists_imports_and_needs_no_macro(tmp_path):
    (tmp_path / "mine.gin").write_text("import no_such_module\n")
    folder = f"--gin_search_paths={tmp_path}"
    done = explain("--gin_file=mine.gin", folder, "--dry_run", "--gin_import_allowlist=t5.data")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1].split() == [
        "no_such_module", "refused", "by", "--gin_import_allowlist", f"{tmp_path}/mine.gin:1",
    ]  # fmt: skip


def test_folders_of_mesh_tensorflows_gin_files_may_be_in_one_word(tmp_path):
    (tmp_path / "mine.gin").write_text("import no_such_module\n")
    folders = f"--gin_location_prefix=nowhere,{tmp_path}"
    done = commands.run("t0repro", "explain", "--gin_file=mine.gin", folders, "--dry_run")
    assert f"{tmp_path}/mine.gin:1" in done.stdout
    done = commands.run("t0repro", "explain", "--gin_file=mine.gin", folders)
    assert "There is no gin file" not in done.stderr


def test_escape_sequences_in_a_value_are_shown_and_not_sent():
    done = explain(*MACROS[1:], "--gin.MODEL_DIR='\x1b]0;title\x07 \x9b2J'")
    assert done.returncode == 0 and not set("\x1b\x07\x9b") & set(done.stdout + done.stderr)


def test_a_folder_of_the_users_called_models_hides_no_gin_file_of_t5(tmp_path):
    (tmp_path / "models").mkdir()
    (tmp_path / "mine.gin").write_text("include 'models/t5.1.1.base.gin'\nd_ff = 77\n")
    done = commands.run(
        "t0repro", "explain", "--module_import=t0repro.tasks.demo", "--gin_file=dataset.gin",
        "--gin_file=mine.gin", "--gin_param=MIXTURE_NAME = 'demo_train'",
        "--gin_param=run.train_steps = 1", "--gin_param=utils.run.mesh_shape = []", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "mine.gin:2" in done.stdout and "models/t5.1.1.base.gin" in done.stdout


def test_a_model_dir_alone_is_explained_by_the_file_that_its_run_wrote(tmp_path):
    lines = [
        "include 'demo/t5.1.1.demo.gin'", "include 'dataset.gin'", "MIXTURE_NAME = 'demo_train'",
        "run.train_steps = 1", "utils.run.mesh_shape = []",
    ]  # fmt: skip
    explain_run = ("t0repro", "explain", "--model_dir", tmp_path)
    done = commands.run(*explain_run)
    assert done.returncode == 2 and "no operative_config.gin and no config.gin" in done.stderr
    (tmp_path / "operative_config.gin").write_text("\n".join(lines))
    done = commands.run(*explain_run, "--module_import=t0repro.tasks.demo")
    assert f"{tmp_path}/operative_config.gin:4" in done.stdout, done.stderr
    done = commands.run(*explain_run, "--run_mode=train")
    assert done.returncode == 2 and "no config.gin." in done.stderr


def test_the_file_of_an_evaluation_is_explained_in_its_run_mode(tmp_path):
    bindings = ["seqio.Evaluator.num_examples = 12", "eval_script.evaluate.output_dir = 'o'"]
    (tmp_path / "config.gin").write_text("\n".join(bindings))
    assert module._files_of_run(str(tmp_path), None, has_params=False) == (
        [str(tmp_path / "config.gin")],
        module.RunMode.EVAL,
    )
    (tmp_path / "config.gin").write_text("train_script.train.total_steps = 1")
    assert module._files_of_run(str(tmp_path), None, has_params=False)[1] is module.RunMode.TRAIN
    with pytest.raises(UserError, match="no such folder"):
        module._files_of_run(str(tmp_path / "none"), None, has_params=False)
    with pytest.raises(UserError, match=r"(?s)a file, not a folder.*--gin_file=.*config\.gin"):
        module._files_of_run(str(tmp_path / "config.gin"), None, has_params=True)


def test_nothing_to_explain_asks_for_files_or_the_runs_folder():
    with pytest.raises(UserError, match="gin files, or its folder: --model_dir"):
        command()(args=["explain"], obj=ErrorHandling(), standalone_mode=False)
