"""Every command that writes, with a file system that fails it: a clear end, nothing half, and on.

Faults are injected below the product, at the system's calls: a rename or a sync that fails, a
folder or a file that may not be made, a write beyond the kernel's limit for a file's size. Each
command runs undisturbed first, which says how often it makes the call; then the call fails the
first time and the last. `tests/hardlife` does the same with real file systems.
"""

import builtins
import contextlib
import errno
import json
import os
import re
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from t0repro import locks
from t0repro.cli import app
from t0repro.cli.gate import gate
from t0repro.files import write_atomically
from t0repro.reports.write import write_files

from .converters.released_servers import serving as serving_checkpoints
from .jobs.trainings import save_checkpoints
from .reports.suites import small_suite
from .tasks import p3_server
from .tasks.test_p3 import TASK, write_task
from .tiny_models import run_config

# Faults ------------------------------------------------------------------------------------------


class Faults:
    """Counts a kind of call below a folder, and makes one of them fail."""

    def __init__(self, folder: Path, kind: str, fail_at: int | None):
        self.folder, self.kind, self.fail_at, self.count = folder, kind, fail_at, 0

    def _meets(self, path) -> bool:
        if isinstance(path, int):
            path = os.readlink(f"/proc/self/fd/{path}")
        if not os.path.abspath(os.fsdecode(path)).startswith(str(self.folder)):
            return False
        self.count += 1
        return self.count - 1 == self.fail_at

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Puts itself in front of the system's calls."""
        number = NUMBERS[self.kind]

        def failing(original, takes_part=lambda *_, **__: True, named=True):
            def call(path, *arguments, **keywords):
                if takes_part(path, *arguments, **keywords) and self._meets(path):
                    # As the system does: an error of a descriptor names no file.
                    names = [os.fspath(path)] if named else []
                    if original in (os_replace, os_rename):
                        names += [None, os.fspath(arguments[0])]
                    raise OSError(number, os.strerror(number), *names)
                return original(path, *arguments, **keywords)

            return call

        os_replace, os_rename = os.replace, os.rename
        if self.kind.startswith("rename"):
            patch.setattr(os, "replace", failing(os_replace))
            patch.setattr(os, "rename", failing(os_rename))
        elif self.kind.startswith("sync"):
            patch.setattr(os, "fsync", failing(os.fsync, named=False))
        elif self.kind == "no new folder":
            patch.setattr(os, "mkdir", failing(os.mkdir, lambda path, *_: not Path(path).exists()))
        elif self.kind == "no new file":

            def writes(path, mode="r", *_, **__):
                if isinstance(mode, int):
                    return bool(mode & (os.O_WRONLY | os.O_RDWR))
                return not isinstance(path, int) and mode[0] in "wax"

            opened = failing(builtins.open, writes)
            patch.setattr(builtins, "open", opened)
            patch.setattr("io.open", opened)
            patch.setattr(os, "open", failing(os.open, writes))


NUMBERS = {
    "rename across file systems": errno.EXDEV,
    "sync on a full disk": errno.ENOSPC,
    "no new folder": errno.EROFS,
    "no new file": errno.EROFS,
}


@contextlib.contextmanager
def small_files(size: int):
    """The kernel refuses to let a file of this process grow beyond a size, in C++ too."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


# Commands ----------------------------------------------------------------------------------------


def command(*arguments) -> Callable[[Path], None]:
    """A `t0repro` command line; OUT stands for the folder."""

    def act(out: Path) -> None:
        sys.argv = ["t0repro", *(str(each).replace("OUT", str(out)) for each in arguments)]
        app.main()

    return act


@pytest.fixture(scope="module", autouse=True)
def without_syncs():
    """Syncs do nothing here, unless they fail: they would take most of the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    """The jobs by name; what they read is made once."""
    root = tmp_path_factory.mktemp("inputs")
    suite = small_suite(root / "run" / "validation_eval")
    (root / "train").mkdir()
    rows = [{"split": "train", "step": step, "loss": 4.0 / step} for step in range(1, 9)]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (root / "train" / "metrics.jsonl").write_text(lines)
    save_checkpoints(root / "model", 3)
    served = root / "served"
    t5x = served / "pretrained_models" / "t5x" / "t5_1_1_lm100k_small" / "checkpoint_1100000"
    t5x.mkdir(parents=True)
    (t5x / "checkpoint").write_bytes(b"tree" * 999)
    write_task(served / "data" / TASK, twin=False)
    # --force: the last sync may fail when the destination is there, and whole.
    convert = ("convert", root / "model", "OUT", "--force", "--to")
    with serving_checkpoints(served) as bucket, p3_server.serving(served) as hub:
        yield {
            "report make": command(
                "report", "make", suite.folder, "--out", "OUT", "--resamples", "100"
            ),
            "compare": command("compare", suite.folder, suite.folder, "--out", "OUT"),
            "plot": command("plot", root / "train", "--out", "OUT"),
            "convert to mtf": command(*convert, "mtf"),
            "convert to hf": command(*convert, "hf", "--no-slots"),
            "checkpoint fetch": lambda out: fetch_checkpoint(bucket.url, out),
            "tasks fetch-p3": lambda out: fetch_task(hub.url, out),
            "cache": cache,
            "precompile": precompile,
            "score_eval": score_eval,
            "rank-eval": rank_eval,
            "infer": infer,
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


def cache(out: Path) -> None:
    from t0repro.tasks.prompt_cache.folders import locked, put_in_place
    from t0repro.tasks.prompt_cache.records import RecordFile

    with locked(out) as staging:
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
    from t0repro.runs.precompile import Program, write_t5x_files

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
    from t0repro.evaluation.journal import DIGEST, Journal

    with locks.folder_lock(out, "rank evaluation"):
        digests = np.array([b"%16d" % number for number in range(300)], DIGEST)
        with contextlib.closing(Journal(out / ".journal" / "scores")) as journal:
            missing = np.isnan(journal.look_up(digests)[0])
            journal.add(digests[missing], np.arange(300.0)[missing])
        scores = journal.look_up(digests)[0]
        assert (scores == np.arange(300.0)).all()
        write_files({"scores.csv": "".join(f"{score}\n" for score in scores)}, out)


def infer(out: Path) -> None:
    from t0repro.runs.text_modes import write_lines

    write_lines(out / "answers", range(4000))


def train_records(out: Path) -> None:
    from t0repro.training.metrics import JsonLines
    from t0repro.training.model_dir import held_for_training

    with held_for_training(out, "jax", run_config(out, 2)):
        with contextlib.closing(JsonLines(out / "metrics.jsonl", start_step=0)) as lines:
            for step in range(1, 101):
                lines.write({"split": "train", "step": step, "loss": 0.5})


def mesh_records(out: Path) -> None:
    from t0repro.mesh.hooks import MetricsFile

    metrics = MetricsFile(str(out / "metrics.jsonl"))
    metrics.drop_training_after(0)
    for step in range(1, 101):
        metrics.append({"split": "train", "step": step, "loss": 0.5})


def aux(out: Path) -> None:
    from t0repro.jobs.journal import Journal, Point

    with locks.folder_lock(out, "auxiliary jobs"):
        journal = Journal(out)
        for step in range(1, 41):
            point = Point(step, "m")
            if point not in journal.progress:
                journal.add("seen", point)
            if not journal.progress[point].is_final:
                journal.add("succeeded", point, metric=("accuracy", 0.5))


def vertex(out: Path) -> None:
    from t0repro.cloud.results import _copy

    data = b"event" * 800
    for name in ("report.json", "events.out.tfevents.1"):
        blob = SimpleNamespace(
            size=len(data), download_as_bytes=lambda start=0, end=None: data[start:]
        )
        _copy(blob, out / name)


# The attack --------------------------------------------------------------------------------------

LINES = ("train (JAX)", "train (Mesh TensorFlow)", "aux", "vertex status")
"""Their files grow: what an interrupted run leaves is a beginning, and not hidden."""
JOBS = (
    *("report make", "compare", "plot", "convert to mtf", "convert to hf", "checkpoint fetch"),
    *("tasks fetch-p3", "cache", "precompile", "score_eval", "rank-eval", "infer", *LINES),
)


@pytest.fixture(scope="module")
def whole(jobs, tmp_path_factory):
    """The files that each job leaves when nothing fails, and how often it makes each call."""
    found = {}

    def of(name: str) -> dict[str, bytes]:
        if name not in found:
            out = tmp_path_factory.mktemp("whole") / "out"
            assert act(jobs[name], out) == 0
            found[name] = visible_files(out)
        return found[name]

    return of


def act(job: Callable[[Path], None], out: Path) -> int:
    """The exit code of a job, run as every command is."""
    try:
        with gate("t0repro"):
            job(out)
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def visible_files(folder: Path) -> dict[str, bytes]:
    """Every file but those in hidden places; without what differs from run to run."""
    varying = rb"202\d-\d\d-\d\dT?[\d:.+ ]*|out\d+"
    paths = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
    shown = {name: path for name, path in paths.items() if not re.search(r"(^|/)\.", name)}
    return {name: re.sub(varying, b"", path.read_bytes()) for name, path in shown.items()}


def check(name: str, code: int, out: Path, expected: dict[str, bytes], said: str) -> None:
    """A command that failed says so in one message, and nothing half has a final name."""
    assert code == 2 and "Traceback" not in said, said
    assert re.search(r"to do: \S", said) and re.search(rf"where: {out.parent}", said), said
    for file, content in visible_files(out).items():
        if name in LINES and file != "report.json":
            assert expected[file].startswith(content[: content.rfind(b"\n") + 1]), file
        elif file in VARYING:
            assert abs(len(content) - len(expected[file])) < 200, file
        else:
            assert content == expected[file], file


VARYING = ("report.json", "report.html", "report.md")
KINDS = (*NUMBERS, "a write beyond the limit")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", JOBS)
def test_a_fault_ends_a_command_clearly_leaves_nothing_half_and_the_next_run_succeeds(
    name, kind, jobs, whole, tmp_path, capsys, monkeypatch, record_property
):
    monkeypatch.setenv("T0REPRO_CHECKPOINT_HUB", "1")
    monkeypatch.setenv("COLUMNS", "200")
    expected, job = whole(name), jobs[name]
    met = 0
    for number, moment in enumerate(moments(job, kind, tmp_path)):
        out = tmp_path / f"out{number}"
        capsys.readouterr()
        with monkeypatch.context() as patch:
            if kind in NUMBERS:
                Faults(tmp_path, kind, moment).install(patch)
                code = act(job, out)
            else:
                with small_files(moment):
                    code = act(job, out)
        check(name, code, out, expected, capsys.readouterr().err)
        assert act(job, out) == 0, capsys.readouterr().err
        assert visible_files(out).keys() == expected.keys()
        met += 1
    record_property("faults", met)


def moments(job: Callable[[Path], None], kind: str, folder: Path) -> list[int]:
    """When a fault comes: at the first and the last call; at two sizes of files."""
    if kind not in NUMBERS:
        return [0, 400]
    counter = Faults(folder, kind, None)
    with pytest.MonkeyPatch.context() as patch:
        counter.install(patch)
        assert act(job, folder / "counted") == 0
    return sorted({0, counter.count - 1}) if counter.count else []
