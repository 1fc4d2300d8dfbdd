"""Every command that writes, as functions that write into a folder: what the fault tests attack.

A command is run whole where that is cheap. Where it computes for long, what it writes with stands
for it.
"""

import contextlib
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from t0repro.cli import app
from t0repro.cli.gate import gate
from t0repro.reports.report_files import write_files
from t0repro.storage import lock_folder, write_atomically

from ..converters.released_servers import serving as serving_checkpoints
from ..jobs.trainings import save_checkpoints
from ..reports.suites import small_suite
from ..runs.tiny_gin import parsed
from ..tasks import p3_server
from ..tasks.test_p3 import TASK, write_task
from .tiny_models import run_config

Job = Callable[[Path], None]

WRITERS = {
    # Which write with the function that convert calls.
    "adapters merge": ("convert to mtf", "convert to hf"),
    "adapters unmerge": ("convert to mtf", "convert to hf"),
    "aux": ("aux",),
    "browse": ("tasks overlap",),  # which writes its file with the same function
    "cache": ("cache",),
    "checkpoint fetch": ("checkpoint fetch",),
    "compare": ("compare",),
    "convert": ("convert to mtf", "convert to hf"),
    "encode": ("encode",),
    "eval": ("eval",),
    "infer": ("infer",),
    "parity": ("parity",),
    "plot": ("plot",),
    "precompile": ("precompile",),
    "rank-eval": ("rank-eval",),
    "report history": ("plot",),  # which writes its pages with the same function
    "report make": ("report make",),
    "reproduce": ("checkpoint fetch", "rank-eval"),
    "report share": ("tasks overlap",),  # which writes its file with the same function
    "run": ("train (JAX)", "eval", "infer", "precompile"),  # whichever mode it is given
    "t5_mesh_transformer": (
        *("train (JAX)", "train (Mesh TensorFlow)"),
        *("score_eval", "infer (Mesh TensorFlow)", "aux"),
    ),
    "tasks export": ("tasks export",),
    "tasks overlap": ("tasks overlap",),
    "tasks fetch-p3": ("tasks fetch-p3",),
    "train": ("train (JAX)",),
    "vertex status": ("vertex status",),
}
"""The commands that write on this machine, and the jobs that stand for each."""
WRITES_NOTHING = frozenset(
    (
        *("aux status", "checkpoint diff", "checkpoint inspect", "checkpoint plan"),
        *("checkpoint released", "checkpoint verify", "doctor", "explain", "launch", "replay"),
        *("report verify", "runs", "tasks check", "tasks ls", "tasks show"),
        *("vertex cancel", "vertex compare", "vertex logs", "vertex submit"),  # on the cloud
    )
)
"""All the others; what doctor tries out is in a temporary folder."""
JOBS = tuple(sorted({job for jobs in WRITERS.values() for job in jobs}))
LINES = ("train (JAX)", "train (Mesh TensorFlow)", "aux", "vertex status")
"""Their files grow: what an interrupted run leaves is a beginning, and not hidden."""


def act(job: Job, out: Path) -> int:
    """The exit code of a job, run as every command is."""
    try:
        with gate("t0repro"):
            job(out)
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def command(*arguments: str, **folders: Path) -> Job:
    """A `t0repro` command line; OUT stands for the folder, other names for those given."""

    def run(out: Path) -> None:
        words = list(arguments)
        for name, folder in {**folders, "OUT": out}.items():
            words = [re.sub(rf"\b{name}\b", str(folder), word) for word in words]
        sys.argv = ["t0repro", *words]
        app.main()

    return run


def make_inputs(root: Path) -> dict[str, Path]:
    """What the commands read, by the name that stands for it in a command line."""
    suite = small_suite(root / "run" / "validation_eval")
    (root / "train").mkdir()
    rows = [{"split": "train", "step": step, "loss": 4.0 / step} for step in range(1, 9)]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (root / "train" / "metrics.jsonl").write_text(lines)
    save_checkpoints(root / "model", 3)
    (root / "rows.jsonl").write_text("[5, 9, 1]\n[7, 1]\n" * 20)
    return {
        "SUITE": suite.folder,
        "TRAIN": root / "train",
        "MODEL": root / "model",
        "ROWS": root / "rows.jsonl",
    }


@contextlib.contextmanager
def writers(root: Path, inputs: dict[str, Path]) -> Iterator[dict[str, Job]]:
    """The jobs by name; what they fetch is made once, below `root`."""
    t5x = root / "pretrained_models" / "t5x" / "t5_1_1_lm100k_small" / "checkpoint_1100000"
    t5x.mkdir(parents=True)
    (t5x / "checkpoint").write_bytes(b"tree" * 999)
    write_task(root / "data" / TASK, twin=False)

    def whole(line: str) -> Job:
        return command(*line.split(), **inputs)

    with serving_checkpoints(root) as bucket, p3_server.serving(root) as hub:
        yield {
            "report make": whole("report make SUITE --out OUT --resamples 100"),
            "compare": whole("compare SUITE SUITE --out OUT"),
            "plot": whole("plot TRAIN --out OUT"),
            # --force: the last sync may fail when the destination is there, and whole.
            "convert to mtf": whole("convert MODEL OUT --force --to mtf"),
            "convert to hf": whole("convert MODEL OUT --force --to hf --no-slots"),
            "checkpoint fetch": lambda out: fetch_checkpoint(bucket.url, out),
            "tasks export": export,
            "tasks overlap": lambda out: write_atomically(out / "overlap.json", "{}" * 999),
            "tasks fetch-p3": lambda out: fetch_task(hub.url, out),
            "cache": cache,
            "precompile": precompile,
            "encode": encode(whole("encode --checkpoint MODEL --texts ROWS --out OUT/x.npz")),
            "score_eval": score_eval,
            "rank-eval": rank_eval,
            "parity": parity,
            "eval": evaluate,
            "infer": infer,
            "infer (Mesh TensorFlow)": mesh_infer,
            "train (JAX)": train_records,
            "train (Mesh TensorFlow)": mesh_records,
            "aux": aux,
            "vertex status": vertex,
        }


# Where a command computes for long, what it writes with stands for it.


def fetch_checkpoint(url: str, out: Path) -> None:
    from t0repro.converters import released

    released.fetch(released.find("t5_1_1_lm100k_small"), out, base_url=url, delays=(0.01,))


def fetch_task(url: str, out: Path) -> None:
    from t0repro.hub_files import HubRepository
    from t0repro.tasks import p3

    p3.fetch([TASK], out, HubRepository(url, p3.REPOSITORY, p3.REVISION, (0.01,)))


def export(out: Path) -> None:
    import t0repro.tasks.demo  # noqa: F401
    from t0repro.lm_eval.files import export_tasks

    # The last sync may fail when the folder is there, and whole.
    if not (out.is_dir() and any(out.iterdir())):
        export_tasks(
            ["demo_synthetic_rotten_tomatoes_Writer_Expressed_Sentiment"],
            "validation",
            out,
            "suite",
        )


def encode(job: Job) -> Job:
    def run(out: Path) -> None:
        # The last sync may fail when the file is there, and whole.
        if not (out / "x.npz").exists():
            job(out)

    return run


def cache(out: Path) -> None:
    from t0repro.tasks.prompt_cache.folders import lock_cache, put_in_place
    from t0repro.tasks.prompt_cache.records import RecordFile

    with lock_cache(out) as staging:
        staged = staging / "task"
        staged.mkdir()
        file = RecordFile(staged / "train.tfrecord-00000-of-00001")
        try:
            for _ in range(300):
                file.write(b"record" * 50)
            file.close()
        finally:
            file.abandon()
        write_atomically(staged / "info.train.json", json.dumps({"num_shards": 1}))
        write_atomically(staged / "stats.train.json", "{}")
        if not (out / "task").exists():
            put_in_place(staged, out / "task", ["train"])


def precompile(out: Path) -> None:
    from t0repro.runs.precompile import write_t5x_files
    from t0repro.runs.programs import Program

    modules = (b"before" * 999, b"after" * 999)
    program = cast("Program", SimpleNamespace(modules=modules))
    mesh = SimpleNamespace(mesh=SimpleNamespace(device_ids=np.arange(4)))
    write_t5x_files(out, program, cast("Any", mesh))


def score_eval(out: Path) -> None:
    from t0repro.evaluation.task_output import LineFile

    file = LineFile(out / "task_3_predictions")
    try:
        file.write(range(4000))
        file.commit()
    finally:
        file.discard()


def rank_eval(out: Path) -> None:
    from t0repro.evaluation.score_journal import DIGEST, ScoreJournal

    with lock_folder(out, "rank evaluation"):
        digests = np.array([b"%16d" % number for number in range(300)], DIGEST)
        with contextlib.closing(ScoreJournal(out / ".journal" / "scores")) as journal:
            missing = np.isnan(journal.look_up(digests)[0])
            journal.add(digests[missing], np.arange(300.0)[missing])
        scores = journal.look_up(digests)[0]
        assert (scores == np.arange(300.0)).all()
        write_files({"scores.csv": "".join(f"{score}\n" for score in scores)}, out)


def parity(out: Path) -> None:
    from t0repro.parity.mesh_jobs import save_batches
    from t0repro.reports.page import Page, Section
    from t0repro.reports.report_files import write_page

    with lock_folder(out, "a comparison of the stacks"):
        batch = {"inputs": np.arange(400).reshape(4, 100)}
        save_batches(out / "mesh_tensorflow" / "batches.npz", [batch, batch])
        write_page("parity", Page("Compared", (Section("Outcome", ("agree",)),)), {}, out)


EXAMPLES = [{"inputs_pretokenized": b"a question", "targets": np.arange(3)}] * 50


def t5x_plan(mode: str, out: Path, *bindings: str) -> Any:
    """What T5X's run files of a mode say with a tiny model."""
    from t0repro.config.t5x.run import read_eval_run, read_infer_run

    make = {"eval": read_eval_run, "infer": read_infer_run}[mode]
    lengths = "TASK_FEATURE_LENGTHS = {'inputs': 8, 'targets': 8}"
    names = ("MIXTURE_OR_TASK_NAME = 'task'", "CHECKPOINT_PATH = 'model/checkpoint_3'", lengths)
    folder = f"{mode.upper()}_OUTPUT_DIR = '{out}'"
    return make(parsed(mode, mode, *names, folder, *bindings))


def evaluate(out: Path) -> None:
    """The files of SeqIO's logger, and the record that the checkpoint is evaluated."""
    import seqio

    from t0repro.converters.tensors import CheckpointRef
    from t0repro.runs.evaluate_checkpoints import EvaluatedCheckpoints

    with lock_folder(out / "inference_eval", "evaluation"):
        record = EvaluatedCheckpoints(t5x_plan("eval", out))
        ref = CheckpointRef("jax", "model/checkpoint_3", 3)
        if record.has(ref, "its identity"):
            return
        logger = seqio.JSONLogger(str(out / "inference_eval"))
        logger("task", 3, {"accuracy": seqio.metrics.Scalar(50.0)}, None, None, None)
        record.add(ref, "its identity")


def infer(out: Path) -> None:
    """T5X's: chunks, which become one file."""
    from t0repro.runs import batch_infer

    class Task(batch_infer._TaskJob):
        def _examples(self, skip):
            return iter([(each, each) for each in EXAMPLES[skip:]])

    plan = t5x_plan("infer", out, "infer.mode = 'score'", "infer.checkpoint_period = 2")
    scores = SimpleNamespace(score=lambda numbered: [(number, 0.5) for number, _ in numbered])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch_infer, "make_functions", lambda *_, **__: scores)
        patch.setattr(batch_infer, "make_generating_model", lambda *_: None)
        with lock_folder(out / ".shard-00000-of-00001", "inference"):
            features = {"targets": SimpleNamespace(vocabulary=None)}
            named = SimpleNamespace(name="task", output_features=features)
            job = Task(plan, named, "model/checkpoint_3", "its identity")
            if not job.is_completed():
                job.run(cast("Any", SimpleNamespace(digest="x", model=None, params=None)))


def mesh_infer(out: Path) -> None:
    """That of Mesh TensorFlow's dialect."""
    from t0repro.runs.text_files import write_lines

    write_lines(out / "answers", range(4000))


def train_records(out: Path) -> None:
    from t0repro.training.metrics import JsonLines
    from t0repro.training.model_dir import lock_for_training

    with lock_for_training(out, "jax", run_config(out, 2)) as check:
        check(None)()
        with contextlib.closing(JsonLines(out / "metrics.jsonl", start_step=0)) as lines:
            for step in range(1, 101):
                lines.write({"split": "train", "step": step, "loss": 0.5})


def mesh_records(out: Path) -> None:
    from t0repro.mtf.metrics_file import MetricsFile
    from t0repro.training.model_dir import lock_for_training

    with lock_for_training(out, "mtf", None):
        metrics = MetricsFile(str(out / "metrics.jsonl"))
        metrics.drop_training_after(0)
        for step in range(1, 101):
            metrics.append({"split": "train", "step": step, "loss": 0.5})


def aux(out: Path) -> None:
    from t0repro.jobs.journal import JobJournal, Point

    with lock_folder(out / "auxiliary", "auxiliary jobs"):
        journal = JobJournal(out / "auxiliary")
        for step in range(1, 41):
            point = Point(step, "m")
            if point not in journal.progress:
                journal.add("seen", point)
            if not journal.progress[point].is_final:
                journal.add("succeeded", point, metric=("accuracy", 0.5))


def vertex(out: Path) -> None:
    from t0repro.cloud.vertex.results import _copy

    data = b"event" * 800
    for name in ("report.json", "events.out.tfevents.1"):
        blob = SimpleNamespace(
            size=len(data), download_as_bytes=lambda start=0, end=None: data[start:]
        )
        _copy(blob, out / name)
