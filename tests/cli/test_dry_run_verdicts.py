"""A dry run accepts and refuses what the run does: wrong command lines of each mode that has one.

Each line is a right one with one thing wrong: a flag or a binding, and a value of a kind that
cannot be right there. Both verdicts come before anything costly, so a line takes seconds.
"""

import dataclasses
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from t0repro.config.t5x.run import read_eval_run

from ..helpers import commands
from ..runs.tiny_gin import MODEL, SIZES, parsed, save_checkpoint

TASK = "demo_synthetic_glue_mrpc_want_to_know_score_eval"
PATHS = ("absent", "file", "foo://x/y")
COUNTS = ("0", "-1", "2.5", "'x'", "10**24")
NAMES = ("'absent'", "''", "3")
# Where no folder can be made.
PLACES = ("'file'", "'file/below'", "'foo://x'", "3", "None")

LENGTHS = (
    "{'inputs': 0, 'targets': 8}", "{'inputs': -1, 'targets': 8}", "{'inputs': 64}", "{}", "'x'",
    "{'inputs': 64, 'targets': 8, 'other': 3}", "{'inputs': 1.5, 'targets': 8}",
)  # fmt: skip
_DATA = "utils.DatasetConfig"
_RESTORE = "utils.RestoreCheckpointConfig"
_ROWS = "partitioning.PjitPartitioner"
_OF_T5X = {
    "MIXTURE_OR_TASK_NAME": NAMES,
    "TASK_FEATURE_LENGTHS": LENGTHS,
    "USE_CACHED_TASKS": ("True", "'x'"),
    "DROPOUT_RATE": ("-1", "1.5", "'x'"),
    "NOT_A_MACRO": ("1",),
    "network.T5Config.vocab_size": ("1280", "0", "'x'"),
    "network.T5Config.num_heads": ("0", "-3"),
    "network.T5Config.num_encoder_layers": ("-1", "1.5"),
    "network.T5Config.dtype": ("'int7'", "3"),
    "network.T5Config.mlp_activations": ("('nope',)",),
    "seqio.SentencePieceVocabulary.extra_ids": ("7", "'x'"),
    "seqio.SentencePieceVocabulary.sentencepiece_model_file": ("'absent.model'", "'file'"),
    f"{_ROWS}.num_partitions": ("0", "'x'"),
    f"{_ROWS}.logical_axis_rules": ("[('batch', 'nonsense')]", "3"),
    f"{_RESTORE}.path": ("'absent'", "'file'", "'foo://a/b'", "3"),
    "utils.NoSuchThing.value": ("1",),
}
BINDINGS = {
    "train": {
        **_OF_T5X,
        "MODEL_DIR": PLACES,
        "BATCH_SIZE": COUNTS,
        "TRAIN_STEPS": ("-1", "'x'", "10**24"),
        "RANDOM_SEED": ("'x'", "2.5"),
        "EVAL_PERIOD": ("'x'",),
        f"train/{_DATA}.split": ("'dev'", "3"),
        f"train/{_DATA}.num_shards": ("3", "0"),
        f"train_eval/{_DATA}.mixture_or_task_name": ("'absent'",),
        f"infer_eval/{_DATA}.mixture_or_task_name": ("'absent'",),
        "trainer.Trainer.num_microbatches": ("3", "-1"),
        "utils.SaveCheckpointConfig.period": ("'x'", "-1"),
        "utils.create_learning_rate_scheduler.factors": ("'nope'",),
        "train_script.train.model": ("None",),
        "train_script.train.train_dataset_cfg": ("None",),
        "train_script.train.nonsense": ("3",),
    },
    "eval": {
        **_OF_T5X,
        "EVAL_OUTPUT_DIR": PLACES,
        "MIXTURE_OR_TASK_SPLIT": ("'dev'", "3"),
        f"{_DATA}.batch_size": ("0", "'x'"),
        "seqio.Evaluator.num_examples": ("-1", "'x'"),
        "seqio.Evaluator.logger_cls": ("3",),
        "eval_script.evaluate.model": ("None",),
    },
    "infer": {
        **_OF_T5X,
        "INFER_OUTPUT_DIR": PLACES,
        "MIXTURE_OR_TASK_SPLIT": ("'dev'", "3"),
        f"{_DATA}.batch_size": ("0", "'x'"),
        "infer_script.infer.mode": ("'nope'",),
        "infer_script.infer.num_shards": ("0", "'x'"),
        "infer_script.infer.checkpoint_period": ("-1", "'x'"),
    },
}
_MODULES = {
    "module_import": ("absent_module", "broken"),
    "process_count": ("2",),
    "unknown": ("1",),
}
_FILES = {
    "gin_file": ("absent.gin", "broken.gin", "foo://x/y"),
    "gin_bindings": ("nonsense", "a.b.c = 1"),
    "seqio_additional_cache_dirs": ("foo://x",),
    "tfds_data_dir": ("foo://x",),
    **_MODULES,
}
FLAGS = {
    "train": {
        **_FILES,
        "final_auxiliary_job_steps": ("100",),
        "auxiliary_job_mixtures": ("m",),
        "auxiliary_job_gin_file": ("absent.gin",),
        "launcher": ("nope",),
        "max_parallel": ("0",),
        "tracker": ("nope", "wandb"),
        "name": ("a:b",),
        "machines": ("absent.yaml",),
    },
    "eval": {**_FILES, "adapter": PATHS, "until": ("-1",)},
    "infer": {**_FILES, "adapter": PATHS, "shard_id": ("9", "-1")},
    "rank-eval": {
        **_MODULES,
        "checkpoint": (*PATHS, "."),
        "mixture": ("absent", "", "demo_train"),
        "split": ("dev",),
        "step": ("77", "-1"),
        "adapter": PATHS,
        "out": ("file", "file/below", "foo://x"),
        "modes": ("nope", ""),
        "normalize": ("nope",),
        "also": ("nope",),
        "format": ("nope",),
        "tracker": ("nope", "wandb"),
        "limit": ("0", "x"),
        "inputs_length": ("0",),
        "tokens_per_batch": ("0",),
        "model_parallelism": ("0",),
        "activation": ("int7",),
        "data": ("foo://x",),
        "cache_dir": ("absent", "file", "foo://x"),
        "train_mixture": ("absent",),
        "resamples": ("0",),
    },
    "convert": {
        "to": ("nope", "peft"),
        "from": ("mtf", "hf", "nope"),
        "step": ("77",),
        "base": ("absent",),
        "gin_file": ("absent.gin", "broken.gin"),
        "dtype": ("int7",),
        "layout": ("nope",),
        "vocab_size": ("0", "-1"),
        "mtf_norm_names": ("nope",),
        "unknown": ("1",),
    },
    "launch": {
        "to": ("nope", "k8s"),
        "processes": ("0", "x"),
        "machines": ("absent.yaml",),
        "platform": ("nope",),
        "cell": ("nope",),
        "name": ("",),
        "unknown": ("1",),
    },
}
POSITIONAL = {
    "convert": [
        ("absent", "out"), ("file", "out"), (".", "out"), ("model",),
        ("model", "file"), ("model", "file/below"), ("model", "foo://x"),
    ],
    "launch": [()],
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Line:
    """A command line with one thing wrong."""

    command: str
    flags: tuple[str, ...] = ()
    positional: tuple[str, ...] | None = None

    def __str__(self) -> str:
        return " ".join((self.command, *self.flags, *(self.positional or ())))


def lines() -> Iterator[Line]:
    """All of them, in a fixed order."""
    for command, flags in FLAGS.items():
        for name, values in flags.items():
            yield from (Line(command, (f"--{name}={value}",)) for value in values)
    for command, bindings in BINDINGS.items():
        for name, values in bindings.items():
            yield from (Line(command, (f"--gin_bindings={name} = {x}",)) for x in values)
    for command, every in POSITIONAL.items():
        yield from (Line(command, positional=each) for each in every)


def right(command: str) -> tuple[list[str], list[str]]:
    """The flags and the positional arguments of a right command line."""
    if command == "rank-eval":
        return ["--checkpoint=model", f"--mixture={TASK}", "--module_import=t0repro.tasks.demo",
                "--limit=2", "--resamples=100", "--out=out"], []  # fmt: skip
    if command == "convert":
        return ["--to=mtf"], ["model", "out"]
    if command == "launch":
        return ["--to=slurm"], ["--", "true"]
    bindings = [*SIZES, "DROPOUT_RATE = 0.0"]
    if command == "train":
        bindings += [
            "INITIAL_CHECKPOINT_PATH = []", "MIXTURE_OR_TASK_NAME = 'demo_train'",
            "TASK_FEATURE_LENGTHS = {'inputs': 64, 'targets': 16}", "USE_CACHED_TASKS = False",
            "BATCH_SIZE = 8", "TRAIN_STEPS = 1", "RANDOM_SEED = 1", "MODEL_DIR = 'out'",
            f"infer_eval/{_DATA}.mixture_or_task_name = '{TASK}'", "EVALUATOR_NUM_EXAMPLES = 2",
        ]  # fmt: skip
    else:
        bindings += [
            f"MIXTURE_OR_TASK_NAME = '{TASK}'", "MIXTURE_OR_TASK_SPLIT = 'validation'",
            "CHECKPOINT_PATH = 'model'", f"{command.upper()}_OUTPUT_DIR = 'out'",
            "TASK_FEATURE_LENGTHS = {'inputs': 64, 'targets': 8}",
        ]  # fmt: skip
    run_file = {"train": "finetune"}.get(command, command)
    files = [MODEL, f"t5x/configs/runs/{run_file}.gin"]
    return [
        *(f"--gin_file={name}" for name in files),
        *(f"--gin_bindings={binding}" for binding in bindings),
        "--module_import=t0repro.tasks.demo",
    ], []


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What right command lines read, and wrong ones name."""
    folder = tmp_path_factory.mktemp("verdicts")
    macros = ("MIXTURE_OR_TASK_NAME = 'x'", "CHECKPOINT_PATH = 'x'", "EVAL_OUTPUT_DIR = 'x'")
    save_checkpoint(folder / "model", read_eval_run(parsed("eval", "eval", *macros)), 3)
    (folder / "file").write_text("x")
    (folder / "broken.gin").write_text("a = = 3\n")
    (folder / "broken.py").write_text("import no_such_module_of_anyone\n")
    for tool in ("sbatch", "kubectl"):
        (folder / tool).write_text("#!/bin/sh\ncat > /dev/null\necho 17\n")
        (folder / tool).chmod(0o755)
    return folder


def verdict(line: Line, folder: Path, *more: str) -> tuple[int, str]:
    """The exit code of a command line, and what it said."""
    flags, positional = right(line.command)
    own = positional if line.positional is None else line.positional
    env = {**os.environ, "T0REPRO_DATA_DIR": "", "PATH": f"{folder}:{os.environ['PATH']}"}
    words = [line.command, *flags, *line.flags, *more, *own]
    done = commands.run("t0repro", *words, cwd=folder, env=env)
    return done.returncode, done.stderr


def check(line: Line, folder: Path) -> str | None:
    """Why a dry run's verdict is not the run's, or neither refuses; None if all is well."""
    before = {path for path in folder.rglob("*") if path.name != "__pycache__"}
    flag = "--dry-run" if line.command == "convert" else "--dry_run"
    code, said = verdict(line, folder, flag)
    written = {path for path in folder.rglob("*") if "__pycache__" not in path.parts} - before
    if code == 0:
        return f"{line}: the dry run accepts it"
    if written:
        return f"{line}: the dry run wrote {sorted(map(str, written))}"
    real, shown = verdict(line, folder)
    return None if real == code else f"{line}: {code} and {real}:\n{said[-500:]}\n{shown[-500:]}"


def test_lines_of_every_command_are_refused_by_the_dry_run_and_by_the_run(folder):
    """One of each command's; the others are slow."""
    found = list(lines())
    assert {line.command for line in found} == FLAGS.keys()
    draw = random.Random(3)
    drawn = [draw.choice([x for x in found if x.command == command]) for command in FLAGS]
    assert [why for line in drawn if (why := check(line, folder))] == []


@pytest.mark.slow
def test_200_wrong_command_lines_are_refused_by_the_dry_run_and_by_the_run(folder):
    assert [why for line in lines() if (why := check(line, folder))] == []
