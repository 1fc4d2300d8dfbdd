"""Jobs that are killed, but need no bytes-for-bytes continuation of what they were doing.

An evaluation starts over; Mesh TensorFlow's training continues from its last checkpoint with other
batches; Beam writes a task's records in any order. What each leaves in the end is the same all the
same, and what a dead run left is never mistaken for more than it is.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import tensorflow as tf

from t0repro.config.t5x.gin_files import T5xInputs, parse
from t0repro.config.t5x.run import read_infer_run
from t0repro.converters.finding import find_checkpoint
from t0repro.converters.sources import load_any
from t0repro.errors import UserError

from ..runs.tiny_gin import SIZES, save_checkpoint
from .jobs import LAST_STEP, ROOT, T0REPRO, Job, Result, visible_files

MIXTURE = "demo_eval_score_eval"
TASK = "demo_synthetic_imdb_Reviewer_Sentiment_Feeling"
LINES = 64
_COMMAND = str(ROOT / ".venv" / "bin" / "t5_mesh_transformer")


def evaluation_job(mode: str, trained: Path) -> Job:
    """t5_mesh_transformer --backend=jax in a mode, in a copy of a trained run's folder."""
    result = {"score_eval": _outputs, "infer": _answers, "perplexity_eval": _metrics}[mode]

    def command(folder: Path) -> list[str]:
        if not (folder / "questions").exists():
            shutil.rmtree(folder, ignore_errors=True)
            begin_evaluation(trained, folder)
        return evaluation_command(mode, str(folder))

    def dead_check(folder: Path, whole: Result) -> None:
        assert result(folder).items() <= whole.items()

    return Job(mode, command, result, dead_check, first=0.6)


def begin_evaluation(trained: Path, folder: Path) -> None:
    """Makes a folder what an evaluation of a trained run begins with."""
    shutil.copytree(trained, folder, ignore=shutil.ignore_patterns("metrics.jsonl", "ev*"))
    words = ("red", "blue", "a long way home")
    lines = [f"{number} : the {words[number % 3]} ?" for number in range(LINES)]
    (folder / "questions").write_text("\n".join(lines) + "\n")


def evaluation_command(mode: str, model_dir: str) -> list[str]:
    """t5_mesh_transformer --backend=jax in a mode."""
    params = [
        f"MIXTURE_NAME = '{MIXTURE if mode == 'score_eval' else TASK}'",
        "run.dataset_split = 'validation'",
        f"run.eval_checkpoint_step = {LAST_STEP}",
        "run.batch_size = ('sequences_per_batch', 8)",
        "run.sequence_length = {'inputs': 64, 'targets': 16}",
    ]
    if mode != "infer":
        params.append("mesh_eval_dataset_fn.use_cached = False")
    else:
        params += [
            f"input_filename = '{model_dir}/questions'",
            f"output_filename = '{model_dir}/answers'",
            "Bitransformer.decode.max_decode_length = 24",
        ]
    return [
        _COMMAND, "--backend=jax", f"--model_dir={model_dir}",
        "--module_import=t0repro.tasks.demo", f"--gin_file={model_dir}/operative_config.gin",
        f"--gin_file={mode}.gin", *(f"--gin_param={param}" for param in params),
    ]  # fmt: skip


def _outputs(folder: Path) -> Result:
    """score_eval's files of each task: whole or not there."""
    found = (folder / "validation_eval").glob("*_*")
    return {path.name: path.read_bytes() for path in found if not path.name.startswith((".", "ev"))}


def _answers(folder: Path) -> Result:
    """What infer wrote."""
    return {path.name: path.read_bytes() for path in folder.glob(f"answers-{LAST_STEP}")}


def _metrics(folder: Path) -> Result:
    """The rows of each task: one, whether or not a dead run had written it before."""
    metrics = folder / "metrics.jsonl"
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    rows = [json.loads(line) for line in lines]
    tasks = {row["task"] for row in rows}
    of_task = {task: [row for row in rows if row["task"] == task] for task in tasks}
    return {task: json.dumps(found).encode() for task, found in of_task.items()}


T5X_MODEL = "t5x/examples/t5/t5_1_1/tiny.gin"


def t5x_command(mode: str, checkpoint: object, out: object) -> list[str]:
    """t0repro infer or eval, T5X's run modes, with the tiny model."""
    bindings = [
        *SIZES,
        "DROPOUT_RATE = 0.0",
        f"MIXTURE_OR_TASK_NAME = '{TASK}'",
        "MIXTURE_OR_TASK_SPLIT = 'validation'",
        "TASK_FEATURE_LENGTHS = {'inputs': 64, 'targets': 8}",
        f"CHECKPOINT_PATH = '{checkpoint}'",
        f"{mode.upper()}_OUTPUT_DIR = '{out}'",
        "utils.DatasetConfig.batch_size = 4",
    ]
    if mode == "infer":  # in chunks of four examples
        bindings += ["infer.mode = 'score'", "infer.checkpoint_period = 1"]
    return [
        *(*T0REPRO, mode, "--module_import=t0repro.tasks.demo"),
        *(f"--gin_file={file}" for file in (T5X_MODEL, f"t5x/configs/runs/{mode}.gin")),
        *(f"--gin.{binding.replace(' = ', '=', 1)}" for binding in bindings),
    ]


def write_t5x_checkpoint(folder: Path) -> Path:
    """A checkpoint of the tiny model of `t5x_command`."""
    files = [T5X_MODEL, "t5x/configs/runs/infer.gin"]
    unused = [f"{name} = 'x'" for name in ("MIXTURE_OR_TASK_NAME", "CHECKPOINT_PATH")]
    lengths = "TASK_FEATURE_LENGTHS = {'inputs': 64, 'targets': 8}"
    others = [*SIZES, "DROPOUT_RATE = 0.0", "INFER_OUTPUT_DIR = 'x'", lengths]
    inputs = T5xInputs("infer", files, [*others, *unused])
    return save_checkpoint(folder, read_infer_run(parse(inputs)), 7)


def t5x_infer_job(root: Path) -> Job:
    """t0repro infer; its checkpoint is made here."""
    checkpoint = root / "checkpoint_7"
    if not checkpoint.exists():
        write_t5x_checkpoint(root)

    def command(folder: Path) -> list[str]:
        return t5x_command("infer", checkpoint, folder)

    def result(folder: Path) -> Result:
        found = folder.glob(f"{TASK}-*")
        return {path.name: path.read_bytes().replace(bytes(folder), b"") for path in found}

    def dead_check(folder: Path, whole: Result) -> None:
        assert result(folder).items() <= whole.items()

    return Job("infer (T5X)", command, result, dead_check, first=0.6)


def write_losses(folder: Path) -> Path:
    """A training run's metrics, of which a page takes a while to draw."""
    folder.mkdir()
    rows = [{"split": "train", "step": step, "loss": 4.0 / step} for step in range(1, 50_000)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def plot_job(trained: Path) -> Job:
    """t0repro plot of a training run's losses."""

    def command(folder: Path) -> list[str]:
        return [*T0REPRO, "plot", str(trained), "--out", str(folder)]

    def dead_check(folder: Path, whole: Result) -> None:
        assert visible_files(folder).items() <= whole.items()

    return Job("plot", command, visible_files, dead_check, first=0.3)


def mesh_train_job(like: Job) -> Job:
    """The training of a job of `train_job` on Mesh TensorFlow."""

    def command(folder: Path) -> list[str]:
        return [part.replace("=jax", "=mtf") for part in like.command(folder)]

    def result(folder: Path) -> Result:
        tree = load_any(str(folder))
        assert int(tree["state/step"]) == LAST_STEP
        assert all(np.isfinite(array).all() for array in tree.values())
        return {name: f"{array.shape} {array.dtype}".encode() for name, array in tree.items()}

    def dead_check(folder: Path, whole: Result) -> None:
        try:
            latest = find_checkpoint(folder)
        except UserError:  # it has saved none yet
            return
        tree = load_any(str(folder))  # which checks the sums of what it reads
        assert int(tree["state/step"]) == latest.step

    return Job("train on mtf", command, result, dead_check, first=0.5, environment=like.environment)


def beam_cache_job() -> Job:
    """scripts/cache.sh: SeqIO's own command, which writes with Beam."""

    def environment(folder: Path) -> dict[str, str]:
        return {"CACHE_DIR": str(folder), "TASKS": "demo_synthetic_imdb_.*", "PROCESSES": "1"}

    def dead_check(folder: Path, whole: Result) -> None:
        for marker in folder.glob("*/COMPLETED"):
            found = _records(marker.parent)
            assert found and found.items() <= whole.items(), marker

    def result(folder: Path) -> Result:
        tasks = [marker.parent for marker in sorted(folder.glob("*/COMPLETED"))]
        assert len(tasks) == len([path for path in folder.iterdir() if path.name.startswith("d")])
        return {name: data for task in tasks for name, data in _records(task).items()}

    def command(folder: Path) -> list[str]:
        return ["bash", "scripts/cache.sh"]

    return Job("Beam cache", command, result, dead_check, first=0.3, environment=environment)


def _records(task: Path) -> Result:
    """The records of each split of a cached task, sorted, for Beam writes them in any order.

    Nor is the order of an example's features fixed: it is that of a process's hash table.
    """
    splits: dict[str, list[bytes]] = {}
    for path in task.glob("*.tfrecord-*"):
        records = (
            tf.train.Example.FromString(record).SerializeToString(deterministic=True)
            for record in tf.data.TFRecordDataset(str(path)).as_numpy_iterator()
        )
        splits.setdefault(f"{task.name}/{path.name.partition('.')[0]}", []).extend(records)
    return {name: b"\n".join(sorted(records)) for name, records in splits.items()}
