"""`t0repro train` as a user calls it: a run on the demo's tasks, what it leaves, and refusals."""

import json
import subprocess
import sys

import pytest

from t0repro.config.t5x.run import read_eval_run
from t0repro.converters.convert import convert
from t0repro.evaluation.opened import open_checkpoint
from t0repro.tasks.demo.datasets import VOCABULARY

from ..helpers import commands
from ..helpers.own_lines import foreign_lines
from ..runs.tiny_gin import MODEL, SIZES, parsed, save_checkpoint
from ..tasks.prompt_caches import make

TASK = "demo_synthetic_glue_mrpc_paraphrase"
RANKED = "demo_synthetic_glue_mrpc_want_to_know_score_eval"
RUN = (
    "INITIAL_CHECKPOINT_PATH = []",
    f"MIXTURE_OR_TASK_NAME = '{TASK}'",
    "TASK_FEATURE_LENGTHS = {'inputs': 64, 'targets': 16}",
    "USE_CACHED_TASKS = False",
    "DROPOUT_RATE = 0.1",
    "BATCH_SIZE = 8",
    "RANDOM_SEED = 42",
    "train/utils.DatasetConfig.seed = 42",
    "utils.SaveCheckpointConfig.save_dataset = True",
    "utils.SaveCheckpointConfig.period = 2",
    "train_script.train.eval_period = 2",
    f"infer_eval/utils.DatasetConfig.mixture_or_task_name = '{RANKED}'",
    "EVALUATOR_NUM_EXAMPLES = 4",
)


def call(module, *arguments):
    done = commands.run(module, *arguments)
    return done.returncode, done.stdout, done.stderr


def train(model_dir, steps, *arguments):
    bindings = (*SIZES, *RUN, f"MODEL_DIR = '{model_dir}'", f"TRAIN_STEPS = {steps}")
    files = [f"--gin_file={MODEL}", "--gin_file=t5x/configs/runs/finetune.gin"]
    overrides = [f"--gin_bindings={binding}" for binding in bindings]
    modules = ["--module_import=t0repro.tasks.demo"]
    return call("t0repro.train", *files, *overrides, *modules, *arguments)


def shown_config(folder):
    """The text "config" in a folder of TensorBoard's files."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
    from tensorboard.util.tensor_util import make_ndarray

    for path in folder.glob("events.out.*"):
        for event in EventFileLoader(str(path)).Load():
            for value in event.summary.value:
                if value.tag == "config":
                    return make_ndarray(value.tensor).item().decode()
    return ""


def test_a_run_goes_on_where_it_was_and_leaves_what_t5x_leaves(tmp_path):
    code, shown, said = train(tmp_path, 3, "--dry_run")
    assert code == 0 and TASK in shown and not any(tmp_path.iterdir()), said
    code, _, said = train(tmp_path, 2)
    assert code == 0, said
    assert "note: the tasks are not cached" in said and foreign_lines(said) == []
    code, _, said = train(tmp_path, 3, "--tracker=tensorboard")
    assert code == 0 and "step 2 of" in said, said
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if row["split"] == "train"] == [2, 3]
    assert sorted(path.name for path in tmp_path.glob("checkpoint_*")) == [
        "checkpoint_0",
        "checkpoint_2",
        "checkpoint_3",
    ]
    assert "MODEL_DIR = " in (tmp_path / "config.gin").read_text()
    info = (tmp_path / "model-info.txt").read_text()
    assert "Total number of parameters: 26720" in info
    assert "shape (embed=8, mlp=16)" in info and "partition spec (None, 'model')" in info
    assert "param_states/decoder/logits_dense/kernel/v" in info
    assert "MODEL_DIR = " in shown_config(tmp_path / "train")
    ranked = (tmp_path / "inference_eval" / f"{RANKED}-metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in ranked] == [2, 3]
    assert all(0 <= json.loads(line)["accuracy"] <= 100 for line in ranked)
    assert json.loads((tmp_path / "tracking.json").read_text())["tensorboard"]["trained"] == 3


UNCLOSED = "--auxiliary_job_build_target_path=eval '"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--final_auxiliary_job_steps=100"], "There are no mixtures for the auxiliary job"),
        (["--auxiliary_job_mixtures=m", "--final_auxiliary_job_steps=100"], "takes no steps"),
        (["--auxiliary_job_mixtures=m"], "--replace_gin_file"),
        (["--auxiliary_job_mixtures=m", "--launcher=nope"], "There is no launcher nope"),
        # The jobs have the option too, as their command shows.
        (["--skip_missing", "--auxiliary_job_mixtures=m", UNCLOSED], "=eval ' --skip_missing"),
    ],
)
def test_a_dry_run_checks_the_auxiliary_jobs_as_the_run_does(tmp_path, flags, said):
    if "--launcher=nope" in flags:
        flags = [*flags, "--auxiliary_job_build_target_path=true"]
    for more in (["--dry_run"], []):
        code, _, error = train(tmp_path / "run", 1, *flags, *more)
        assert code == 2 and said in error, error
    assert not (tmp_path / "run").exists()


def test_with_skip_missing_only_what_is_trained_on_stops_a_training(tmp_path, monkeypatch):
    rows = tmp_path / "super_glue" / "rte" / "train.jsonl"
    rows.parent.mkdir(parents=True)
    row = {"premise": "It rained.", "hypothesis": "It was wet.", "idx": 0, "label": 0}
    rows.write_text(json.dumps(row) + "\n")
    monkeypatch.setenv("T0REPRO_DATA_DIR", str(tmp_path))
    monkeypatch.setenv("T0REPRO_VOCAB", str(VOCABULARY))
    task = "super_glue_rte_GPT_3_style"

    def dry_run(*more):
        return train(
            tmp_path / "run", 1, "--module_import=t0repro.tasks.t0", "--dry_run", *more,
            f"--gin.MIXTURE_OR_TASK_NAME='{task}'",
            f"--gin.infer_eval/utils.DatasetConfig.mixture_or_task_name='{task}_score_eval'",
        )  # fmt: skip

    code, _, said = dry_run()
    assert code == 2 and "The rows of super_glue/rte, split 'validation'" in said
    code, shown, said = dry_run("--skip_missing")
    assert code == 0, said
    assert f"split 'validation' is left out of {task}_score_eval (rows not available)" in said
    assert f"infer_eval: left out: no task of {task}_score_eval has a split 'validation'" in shown


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        (f"--gin.MIXTURE_OR_TASK_NAME='{TASK[:-1]}'", f"Nearest: '{TASK}'"),
        ("--module_import=my_taks", "There is no module 'my_taks'."),
    ],
)
def test_a_misspelt_name_is_refused_before_tensorflow_is_imported(tmp_path, argument, message):
    code, _, said = train(tmp_path, 1, argument)
    assert code == 2 and message in said, said
    assert "TensorFlow" not in said


def test_one_of_several_processes_has_to_be_told_where_the_first_is(tmp_path):
    # Before any gin file is read: the one named here does not exist.
    code, _, said = train(tmp_path, 3, "--process_count=2", "--gin_file=absent.gin")
    assert code == 2 and "--process_count" in said and "absent" not in said


def test_a_gin_file_has_an_adapter_trained_on_a_base_and_resumed(tmp_path):
    macros = [f"{name} = 'x'" for name in ("MIXTURE_OR_TASK_NAME", "CHECKPOINT_PATH")]
    plan = read_eval_run(parsed("eval", "eval", *macros, "EVAL_OUTPUT_DIR = 'x'"))
    base = save_checkpoint(tmp_path / "base", plan, 3)
    (tmp_path / "lora.gin").write_text(
        "from __gin__ import dynamic_registration\n"
        "import __main__ as train_script\n"
        "from t0repro import adapters\n"
        "train_script.train.adapter = @adapters.lora()\n"
        "adapters.lora.rank = 4\n"
    )
    options = [f"--gin_file={tmp_path}/lora.gin"]
    options += [f"--gin_bindings=INITIAL_CHECKPOINT_PATH = '{base}'"]
    for steps in (2, 4):
        code, _, said = train(tmp_path / "run", steps, *options)
        assert code == 0, said
    assert "960 parameters of an adapter beside 26,720 frozen parameters" in said
    assert f"start: step 2 of {tmp_path}/run/checkpoint_2" in said
    note = json.loads((tmp_path / "run/checkpoint_4/adapter.json").read_text())
    assert note["base"] == str(base) and note["adapter"]["rank"] == 4
    # Beside the run's own gin files, its checkpoints are read with their base, or merged with it.
    convert(tmp_path / "run", tmp_path / "merged", "mtf")
    first, adapted, merged = (
        open_checkpoint(str(path), None, "float32")
        for path in (base, tmp_path / "run", tmp_path / "merged")
    )
    assert adapted.step == merged.step == 4
    assert len({first.digest, adapted.digest, merged.digest}) == 3
    wrong = "--gin_bindings=adapters.lora.targets = 'encoder/query'"
    code, _, said = train(tmp_path / "wrong", 2, *options, wrong)
    assert code == 2 and "matches no kernel" in said and "encoder/query" in said


COUNTED = """
import sys

import pytest
from t0repro.cli.app import main

try:
    main()
finally:
    heavy = {"tensorflow", "seqio", "t5", "clu", "mesh_tensorflow"} & set(sys.modules)
    print("heavy:", *sorted(heavy))
"""
CACHED = (
    f"MIXTURE_OR_TASK_NAME = '{TASK}'",
    "TASK_FEATURE_LENGTHS = {'inputs': 64, 'targets': 16}",
    "DROPOUT_RATE = 0.1",
    "BATCH_SIZE = 8",
    "RANDOM_SEED = 42",
    "train/utils.DatasetConfig.seed = 42",
    "train_eval/utils.DatasetConfig.split = 'train'",
    "train_script.train.eval_period = 2",
    "train_script.train.eval_steps = 2",
    "TRAIN_STEPS = 2",
)


def train_cached(model_dir, cache, *bindings):
    """A pretraining on cached tasks: exit code, output and the lines of metrics.jsonl."""
    bindings = (*SIZES, *CACHED, f"MODEL_DIR = '{model_dir}'", *bindings)
    command = [sys.executable, "-P", "-c", COUNTED, "train", f"--gin_file={MODEL}"]
    command += ["--gin_file=t5x/configs/runs/pretrain.gin"]
    command += [f"--gin_bindings={binding}" for binding in bindings]
    command += ["--module_import=t0repro.tasks.demo", f"--seqio_additional_cache_dirs={cache}"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (model_dir / "metrics.jsonl").read_text().splitlines()]
    numbers = [
        {name: x for name, x in row.items() if not name.startswith("timing/")} for row in rows
    ]
    return done, sorted(numbers, key=lambda row: (row["step"], row["split"]))


def test_cached_tasks_are_trained_on_without_tensorflow_to_the_same_bits(tmp_path):
    from t0repro.tasks.modules import load_tasks

    load_tasks(["t0repro.tasks.demo"], into_seqio=False)
    make(tmp_path / "cache", TASK)
    light, ours = train_cached(tmp_path / "light", tmp_path / "cache")
    assert light.stdout.endswith("heavy:\n") and foreign_lines(light.stderr) == []
    # A checkpoint of the data's place is SeqIO's pipeline's.
    saved = "utils.SaveCheckpointConfig.save_dataset = True"
    heavy, theirs = train_cached(tmp_path / "heavy", tmp_path / "cache", saved)
    assert "seqio" in heavy.stdout
    assert [row["step"] for row in ours if row["split"] == f"training_eval/{TASK}"] == [2]
    assert ours == theirs


T_FEW = """
from __gin__ import dynamic_registration
import t0repro.tasks.demo
from t0repro.config import choices
include 't5x/configs/runs/t_few.gin'
TASK_FEATURE_LENGTHS = {'inputs': 64, 'targets': 16}
BATCH_SIZE = 4
choices.ChoiceLoss.choices = 2
"""


def test_t_fews_recipe_trains_ia3_with_losses_over_choices(tmp_path):
    macros = [f"{name} = 'x'" for name in ("MIXTURE_OR_TASK_NAME", "CHECKPOINT_PATH")]
    plan = read_eval_run(parsed("eval", "eval", *macros, "EVAL_OUTPUT_DIR = 'x'"))
    base = save_checkpoint(tmp_path / "base", plan, 3)
    (tmp_path / "recipe.gin").write_text(T_FEW)

    def run(task, *arguments):
        bindings = [*SIZES, f"INITIAL_CHECKPOINT_PATH = '{base}'", "TRAIN_STEPS = 2"]
        bindings += [f"MODEL_DIR = '{tmp_path}/run'", f"MIXTURE_OR_TASK_NAME = '{task}'"]
        files = [f"--gin_file={MODEL}", f"--gin_file={tmp_path}/recipe.gin"]
        overrides = [f"--gin_bindings={binding}" for binding in bindings]
        return call("t0repro.train", *files, *overrides, *arguments)

    code, out, said = run(TASK, "--dry_run")
    assert code == 0, out + said
    assert not (tmp_path / "run").exists()
    code, _, said = run(TASK)
    assert code == 0, said
    assert "of an adapter beside" in said and "TensorFlow" not in said
    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if "unlikelihood_loss" in row]
    for row in rows:
        parts = [row[f"{name}_loss"] for name in ("cross_ent", "length_normalized", "unlikelihood")]
        assert sum(parts) == pytest.approx(row["loss"], rel=1e-5)
    assert rows
    code, _, said = run("demo_synthetic_ag_news_classify", "--dry_run")
    assert code == 2 and "4 answer choices, and a row has room for 2" in said
    code, _, said = run("absent")
    assert code == 2 and "absent" in said
