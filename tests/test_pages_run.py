"""The commands of the pages run, in their order, in a clean folder, as a reader would run them.

`SKIPPED` lists what does not run here, with the reason, and `TINY` what is made smaller. A model of
two layers, the demo's rows and a few made-up ones stand for what a page says that its reader has:
local gin files of T5X's names come before the package's.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from t0repro.adapters import ia3
from t0repro.converters.convert import convert
from t0repro.evaluation.opened import open_checkpoint
from t0repro.tasks.demo.datasets import VOCABULARY

from .evaluation.small_model import save_adapter
from .helpers.docs_commands import ROOT, commands, failures, pages

INDEX = "installs packages from an index"
HUB = "downloads from a hub"
REAL = "takes real datasets and hours"
CLOUD = "takes an account of Google Cloud"
ACCELERATOR = "takes an accelerator and a model of billions of parameters"
SUITE = "runs this suite of tests itself"
EXTRA = "takes an extra that CI does not install"

# (page, pattern) -> why a command that matches is not run.
SKIPPED: dict[tuple[str, str], str] = {
    ("", r"^((EXTRAS|TIER)=\S+ )*bash scripts/setup\.sh"): INDEX,
    ("tiers.md", r"^pip install \."): INDEX,
    ("", r"^T0REPRO_DATA_DIR=DIR "): REAL,
    ("README.md", r"^bash scripts/quickstart\.sh"): "quickstart.md, which has it too, runs it",
    ("", r"^T0REPRO_CHECKPOINT_HUB=1 "): HUB,
    ("", r"bash scripts/test\.sh|bash \.ci/run|-m pytest|scripts/dev/mutation\.py"): SUITE,
    ("", r"^gcloud |^docker |google\.cloud"): CLOUD,
    ("vertex.md", r"t0repro vertex (?!submit .*--dry_run)"): CLOUD,
    ("scaling.md", r"scripts/bench/vertex_cost\.py"): EXTRA,
    ("cache.md", r"gs://BUCKET"): CLOUD,
    ("README.md", r"gs://bucket"): CLOUD,
    ("README.md", r"^git clone"): "the tests' own checkout stands for the clone",
    ("adapters.md", r"t0_3b_t_few|t_few_eval"): REAL,
    ("benchmarks.md", r"scripts/bench"): ACCELERATOR,
    ("howto_figure4.md", r"t0repro reproduce"): HUB,
    ("tasks.md", r"tasks fetch-p3|cache_dirs=runs/p3"): HUB,
    ("trackers.md", r"--tracker"): EXTRA,
    ("any_model.md", r"^lm_eval run|t0repro\.lm_eval run|lm-eval|t0repro compare"): EXTRA,
    ("any_model.md", r"^python scripts/demo/decoder_only\.py"): EXTRA,
    ("any_model.md", r"^T0REPRO_VOCAB="): REAL,
    ("any_model.md", r"^source "): "the environment is the one that runs the tests",
    ("auxiliary_jobs.md", r"base_wmt14enfr_train"): REAL,
}

DEMO = (
    "--module_import=t0repro.tasks.demo --gin_file=dataset.gin --gin_file=small.gin"
    """ --gin_param="MIXTURE_NAME = 'demo_train'" --gin_param="run.train_steps = 2" """
    """--gin_param="run.batch_size = ('tokens_per_batch', 256)" --model_dir=runs/rest"""
    """ --gin_param="run.sequence_length = {'inputs': 64, 'targets': 16}" --backend=jax"""
    """ --gin_param="pack_dataset.use_custom_ops = False" """
    """--gin_param="utils.run.mesh_shape = []" """
)
# (page, pattern, what is run in its place): smaller, or what stands for a placeholder.
TINY: list[tuple[str, str, str]] = [
    (
        "adapters.md",
        r"my_eval --module_import my_tasks",
        "demo_eval_score_eval --module_import t0repro.tasks.demo",
    ),
    ("", r"TRAIN_STEPS=1\d+", "TRAIN_STEPS=2"),
    ("", r"bash scripts/train\.sh", "TRAIN_STEPS=2 bash scripts/train.sh"),
    # On the embedded demo: its reader has no rows.
    (
        "",
        r"bash scripts/quickstart\.sh",
        "env -u T0REPRO_DATA_DIR -u T0REPRO_VOCAB TRAIN_STEPS=2 bash scripts/quickstart.sh",
    ),
    ("", r"TRAIN_STEPS=1000 (.*) TRAIN_STEPS=2 bash", r"TRAIN_STEPS=4 \1 bash"),
    ("", r"bash scripts/rank_eval\.sh", "NUM_EVAL_EXAMPLES=8 bash scripts/rank_eval.sh"),
    ("", r"--topology v\S+", "--topology cpu-8"),
    ("", r"--limit \d+", "--limit 4"),
    ("", r"rank-eval (.*)--out", r"rank-eval \1--limit 4 --out"),
    ("", r"--limit 4 (.*)--limit 4", r"\1--limit 4"),
    ("", r"^t5_mesh_transformer (.*) \.\.\.", rf"t5_mesh_transformer {DEMO} \1"),
    ("", r"--checkpoint (C|CHECKPOINT)\b", "--checkpoint runs/demo/model"),
    ("any_model.md", r"/path/to/datasets", "rows"),
    (
        "auxiliary_jobs.md",
        r"aux --model_dir runs/c4 .*",
        "aux --model_dir runs/demo/model --auxiliary_job_mixtures demo_eval_score_eval --once"
        " --auxiliary_job_build_target_path 'rank-eval --module_import t0repro.tasks.demo"
        " --limit 4'",
    ),
    ("auxiliary_jobs.md", r"status runs/c4 --watch", "status runs/demo/model"),
    ("cache.md", r"/shared/cache", "runs/shared_cache"),
    ("cache.md", r"=\.\.\.$", "=rows"),
    ("checkpoints.md", r" PATH( \[--json\])?", " runs/demo/model --json"),
    ("checkpoints.md", r"verify runs/demo/model --json", "verify runs/demo/model"),
    ("checkpoints.md", r"diff A B \[--tol 1e-6\]", "diff runs/demo/model runs/t0_3b_hf --tol 1e-6"),
    ("evaluation.md", r"MODEL_DIR/validation_eval", "runs/demo/model/validation_eval"),
    ("compare.md", r"runs/mtf/", "runs/a/"),
    # The evaluation of evaluation.md, whose reader has it.
    (
        "compare.md",
        r"t0repro report verify",
        "t0repro rank-eval --checkpoint runs/demo/model --mixture demo_eval_score_eval"
        " --module_import t0repro.tasks.demo --limit 4 --out runs/demo/rank_eval"
        " && t0repro report verify",
    ),
    ("compare.md", r"runs/jax/", "runs/b/"),
    ("compare.md", r"--step 200 --step 400", "--step 2 --step 4"),
    ("compare.md", r"runs/seed[01]", "runs/a"),
    ("compare.md", r"runs/seed2|runs/other\d", "runs/b"),
    # Where the folder's model of 4 steps is, training continues from it.
    ("from_t0.md", r"TRAIN_STEPS=2", "MODEL_GIN=small.gin TRAIN_STEPS=6 TOKENS_PER_BATCH=256"),
    ("howto_checkpoint.md", r"MODEL_GIN=\S+", "MODEL_GIN=small.gin"),
    ("howto_checkpoint.md", r"=my_data", "=rows"),
    ("howto_encode.md", r"t5_encoder\b", "runs/demo/model"),
    ("howto_encode.md", r"prompts\.txt", "texts.txt"),
    ("howto_t0_3b.md", r"models/t5\.1\.1\.xl\.gin", "small.gin"),
    ("howto_t0_3b.md", r"runs/lm100k/model\.ckpt-1100000", "runs/demo/mtf/model.ckpt-4"),
    ("howto_t0_3b.md", r"1112200", "6"),
    ("howto_t0_3b.md", r"1048576|= 1024$", "1024"),
    ("howto_t0_3b.md", r"'inputs': 1024, 'targets': 256", "'inputs': 64, 'targets': 16"),
    ("howto_t0_3b.md", r"per_replica = 1024", "per_replica = 64"),
    ("parity.md", r'= 20"', '= 2"'),
    ("parity.md", r"--steps 20", "--steps 2"),
    ("scaling.md", r"train \.\.\. (.*)HOST:PORT (.*)$", r"train --help"),
    # Only libtpu knows a slice's memory, which --suggest takes.
    ("what_fits.md", r" --suggest", ""),
    (
        "t5x_slots.md",
        r"^t0repro convert",
        "t0repro convert runs/demo/mtf imported_by_t5x --to t5x --t5x_importer_slots"
        " && t0repro convert",
    ),
    ("tasks.md", r"(t0repro rank-eval .*) \.\.\.", r"\1 --checkpoint runs/demo/model --out runs/e"),
    ("tasks.md", r"(t0repro train --skip_missing) \.\.\..*", r"\1 --help"),
    ("tasks.md", r"(t0repro cache .*) \.\.\.", r"\1 --output_cache_dir runs/available"),
]

# These take seconds; the others are slow.
QUICK = ("any_model.md", "gin.md", "scaling.md", "vertex.md")


def pages_with_commands() -> list[Path]:
    """The pages that have commands."""
    return [page for page in pages() if commands(page)]


def reason(page: Path, command: str) -> str | None:
    """Why a command of a page is not run; None if it is."""
    joined = command.replace("\\\n", " ")
    for (name, pattern), why in SKIPPED.items():
        if name in ("", page.name) and re.search(pattern, joined):
            return why
    return None


def tiny(page: Path, command: str) -> str:
    """A command with tiny settings, and with what stands for its placeholders."""
    command = re.sub(r"\s*\\\n\s*", " ", command)
    for name, pattern, instead in TINY:
        if name in ("", page.name):
            command = re.sub(pattern, instead, command, flags=re.M)
    return command


# ---- What the pages say that their reader has ----------------------------------------------------

SMALL_GIN = """include 'demo/t5.1.1.demo.gin'
d_model = 16
d_ff = 16
num_layers = 1
num_heads = 2
d_kv = 8
"""
T5X_SMALL = """include 't5x/examples/t5/t5_1_1/tiny.gin'
from __gin__ import dynamic_registration
import seqio
from t5x.examples.t5 import network
network.T5Config.vocab_size = 1408
seqio.SentencePieceVocabulary.sentencepiece_model_file = 'sentencepiece.model'
seqio.SentencePieceVocabulary.extra_ids = 100
"""
MY_TASKS = """import t0repro.tasks.demo
from t0repro.tasks.texts import add_text_task
for name in ("my_task", "c4_v220_span_corruption"):
    add_text_task(name, {"train": "texts.txt", "validation": "texts.txt"})
"""
MY_TRAIN = """include 't5x/examples/t5/t5_1_1/small.gin'
include 't5x/configs/runs/pretrain.gin'
import my_tasks
MIXTURE_OR_TASK_NAME = 'my_task'
TASK_FEATURE_LENGTHS = {'inputs': 64, 'targets': 16}
DROPOUT_RATE = 0.1
USE_CACHED_TASKS = False
"""
ROWS_OF = {
    "super_glue/rte": {"premise": "It rained.", "hypothesis": "Rain fell.", "idx": 0, "label": 1},
    "rotten_tomatoes/default": {"text": "A quiet, lovely film.", "label": 1},
    "my_reviews/default": {"text": "A quiet, lovely film.", "label": 1},
}

ANLI = {"uid": "0", "premise": "It rained.", "hypothesis": "Rain fell.", "label": 0, "reason": ""}
MINE = """dataset: super_glue
subset: rte
templates:
  5b1c9f7e-0000-0000-0000-000000000003: !Template
    name: mine
    jinja: "{{premise}} So {{hypothesis}} ||| {{answer_choices[label]}}"
    answer_choices: yes ||| no
"""


def a_readers_folder(folder: Path) -> None:
    """The repository's scripts, a vocabulary, a few rows, gin files and tasks of the reader's."""
    for name in ("tasks", "docker", ".venv"):
        if (ROOT / name).exists():
            (folder / name).symlink_to(ROOT / name)
    shutil.copytree(ROOT / "scripts", folder / "scripts")
    # The environment is the one that runs the tests; quickstart.sh would install it again.
    (folder / "scripts" / "setup.sh").write_text("")
    shutil.copy(VOCABULARY, folder / "sentencepiece.model")
    for dataset, row in ROWS_OF.items():
        for split in ("train", "validation"):
            file = folder / "rows" / dataset / f"{split}.jsonl"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text((json.dumps(row) + "\n") * 4)
    for split in ("train_r1", "dev_r1", "test_r1"):
        file = folder / "rows" / "anli" / "default" / f"{split}.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(ANLI) + "\n")
    (folder / "small.gin").write_text(SMALL_GIN)
    small = folder / "t5x" / "examples" / "t5" / "t5_1_1" / "small.gin"
    small.parent.mkdir(parents=True)
    small.write_text(T5X_SMALL)
    (folder / "texts.txt").write_text("It rained all day and the river rose.\n" * 50)
    (folder / "my_tasks.py").write_text(MY_TASKS)
    (folder / "stranger.gin").write_text("import my_tasks\n")
    (folder / "mine.yaml").write_text(MINE)
    (folder / "my_train.gin").write_text(MY_TRAIN)
    guide = (ROOT / "docs" / "howto_data.md").read_text()
    (prompts,) = re.findall(r"```yaml\n(.*?)```", guide, re.S)
    (folder / "my_prompts.yaml").write_text(prompts)


def environment(**more: str) -> dict[str, str]:
    """The tests' own environment with this Python's programs first, and no dataset."""
    dropped = {name for name in os.environ if name.startswith("T0REPRO_")}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    kept = {name: value for name, value in os.environ.items() if name not in dropped}
    return {**kept, "PATH": path, **more}


def _train_the_demo(folder: Path) -> None:
    """`runs/demo` as scripts/train.sh and rank_eval.sh leave it, of a tiny model and 4 steps."""
    a_readers_folder(folder)
    script = """set -e
    t0repro cache --module_import t0repro.tasks.demo --mixture demo_train,demo_eval_score_eval \
      --output_cache_dir runs/demo/cache --min_shards 1
    MODEL_GIN=small.gin TRAIN_STEPS=4 TOKENS_PER_BATCH=256 bash scripts/train.sh --backend=jax \
      --gin_param="run.save_checkpoints_steps = 2"
    NUM_EVAL_EXAMPLES=8 EVAL_STEP="'all'" bash scripts/rank_eval.sh --backend=jax
    t0repro convert runs/demo/model runs/demo/mtf --to mtf
    t0repro convert runs/demo/model runs/t0_3b_hf --to hf --vocab sentencepiece.model
    """
    done = subprocess.run(
        ["bash", "-c", script], cwd=folder, env=environment(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


# Pages whose reader has trained the demo.
WITH_THE_DEMO = (
    "adapters.md", "auxiliary_jobs.md", "checkpoints.md", "compare.md", "evaluation.md",
    "from_t0.md", "howto_checkpoint.md", "howto_encode.md", "howto_t0_3b.md", "runs.md",
    "t5x_slots.md", "tasks.md",
)  # fmt: skip


def _adapters_of_the_demo(folder: Path) -> None:
    """Adapters of ours and of PEFT's, on the demo's model in both formats."""
    base = folder / "runs" / "t0_3b"
    shutil.copytree(folder / "runs" / "demo" / "model", base)
    shutil.copytree(folder / "runs" / "t0_3b_hf", folder / "t0_hf")
    shape = open_checkpoint(str(base), None, "float32").model.config.shape
    adapter = save_adapter(folder / "runs" / "my_adapter", ia3(), base, shape)
    convert(adapter, folder / "their_peft", "peft", base=folder / "t0_hf")


ROWS = {"T0REPRO_DATA_DIR": "rows", "T0REPRO_VOCAB": "sentencepiece.model"}


def as_parameter(page: Path) -> Any:
    """A page's test, marked as slow unless it takes seconds."""
    marks = [] if page.name in QUICK else [pytest.mark.slow]
    return pytest.param(page, marks=marks, id=page.name)


@pytest.mark.parametrize("page", [as_parameter(page) for page in pages_with_commands()])
def test_every_command_of_a_page_succeeds_in_a_clean_folder(page, once, tmp_path):
    a_readers_folder(tmp_path)
    if page.name in WITH_THE_DEMO:
        trained = once("the_demo_that_pages_have", _train_the_demo)
        shutil.copytree(trained / "runs", tmp_path / "runs")
        for name in ("a", "b"):
            shutil.copytree(trained / "runs" / "demo" / "model", tmp_path / "runs" / name)
    if page.name == "adapters.md":
        _adapters_of_the_demo(tmp_path)
    failed = list(_failures(page, tmp_path))
    assert not failed, "\n\n".join(failed)


def _failures(page: Path, folder: Path) -> Iterator[str]:
    run = [tiny(page, each) for each in commands(page) if reason(page, each) is None]
    yield from failures(page.name, run, folder, environment(**ROWS))


def test_every_reason_and_every_replacement_is_of_some_command():
    every = [(page, each) for page in pages_with_commands() for each in commands(page)]
    assert every
    for name, pattern in SKIPPED:
        assert any(
            name in ("", page.name) and re.search(pattern, each.replace("\\\n", " "))
            for page, each in every
        ), (name, pattern)
    run = [each for page, each in every if reason(page, each) is None]
    assert len(run) > len(every) / 2


def test_a_command_that_fails_is_reported(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# A page\n\n    t0repro doctr\n")
    a_readers_folder(tmp_path)
    (failure,) = _failures(page, tmp_path)
    assert "exit code 2" in failure and "doctr" in failure
