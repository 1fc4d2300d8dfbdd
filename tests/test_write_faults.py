"""Every command that writes, with a file system that fails it: a clear end, nothing half, and on.

Faults are injected below the product, at the system's calls: a rename or a sync that fails, a
folder or a file that may not be made, a write beyond the kernel's limit for a file's size. Each
command runs undisturbed first, which says how often it makes the call; then the call fails the
first time and the last. `tests/hardlife` does the same with real file systems.
"""

import builtins
import contextlib
import errno
import itertools
import os
import re
import resource
import time
from pathlib import Path

import filelock
import pytest

from t0repro.storage import lock_folder, locks

from .cli.test_addresses import options
from .helpers.writers import (
    JOBS,
    LINES,
    WRITERS,
    WRITES_NOTHING,
    act,
    command,
    make_inputs,
    writers,
)
from .runs.tiny_gin import SIZES
from .tasks.test_p3 import TASK

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


@pytest.fixture(scope="module", autouse=True)
def without_syncs():
    """Syncs do nothing here, unless they fail: they would take most of the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


# The attack --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """What the commands read."""
    return make_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def jobs(inputs, tmp_path_factory):
    """The jobs by name."""
    with writers(tmp_path_factory.mktemp("served"), inputs) as made:
        yield made


@pytest.fixture(scope="module")
def whole(jobs, tmp_path_factory):
    """The files that each job leaves when nothing fails, and how often it makes each call."""
    found = {}

    def of(name: str) -> tuple[dict[str, bytes], dict[str, int]]:
        if name not in found:
            folder = tmp_path_factory.mktemp("whole")
            counters = {kind: Faults(folder, kind, None) for kind in NUMBERS}
            with pytest.MonkeyPatch.context() as patch:
                for counter in counters.values():
                    counter.install(patch)
                assert act(jobs[name], folder / "out") == 0
            counts = {kind: counter.count for kind, counter in counters.items()}
            found[name] = visible_files(folder / "out"), counts
        return found[name]

    return of


def visible_files(folder: Path) -> dict[str, bytes]:
    """Every file but hidden and temporary ones; without what differs from run to run."""
    varying = rb"202\d-\d\d-\d\dT?[\d:.+ ]*|out\d+"
    paths = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
    shown = {name: path for name, path in paths.items() if not re.search(r"(^|/)(\.|tmp-)", name)}
    return {
        name: re.sub(varying, b"", path.read_bytes().replace(bytes(folder), b""))
        for name, path in shown.items()
    }


def check(name: str, code: int, out: Path, expected: dict[str, bytes], said: str) -> None:
    """A command that failed says so in one message, and nothing half has a final name."""
    assert code == 2 and "Traceback" not in said, said
    assert re.search(r"fix: \S", said) and re.search(rf"where: {out.parent}", said), said
    for file, content in visible_files(out).items():
        if name in LINES and file != "report.json":
            assert expected[file].startswith(content[: content.rfind(b"\n") + 1]), file
        else:
            check_same(file, content, expected)


def check_same(file: str, content: bytes, expected: dict[str, bytes]) -> None:
    if file in VARYING:
        assert abs(len(content) - len(expected[file])) < 200, file
    else:
        assert content == expected[file], file


def test_every_command_is_known_to_write_or_not():
    named = {" ".join(words) for words, _ in options() if words} | {"t5_mesh_transformer"}
    assert named == WRITERS.keys() | WRITES_NOTHING and not WRITERS.keys() & WRITES_NOTHING


QUIET = {
    "checkpoint diff": "checkpoint diff MODEL MODEL",
    "checkpoint inspect": "checkpoint inspect MODEL",
    "checkpoint plan": "checkpoint plan t5_1_1_lm100k_small --to OUT",
    "checkpoint released": "checkpoint released",
    "checkpoint verify": "checkpoint verify MODEL",
    "compare": "compare SUITE SUITE",
    "launch": "launch --to slurm --dry_run -- true",
    "plot": "plot TRAIN",
    "report history": "report history SUITE",
    "tasks ls": "tasks ls --module_import t0repro.tasks.demo",
}
"""Command lines that only show something."""


@pytest.mark.parametrize("name", QUIET)
def test_a_command_that_only_shows_something_writes_nothing(name, inputs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folders = {folder.parent for folder in inputs.values()} | {tmp_path}
    attempts = []
    with monkeypatch.context() as patch:
        for kind in ("no new file", "no new folder"):
            for folder in folders:
                attempts.append(Faults(folder, kind, None))
                attempts[-1].install(patch)
        code = act(command(*QUIET[name].split(), **inputs), tmp_path / "out")
    assert code == 0 and sum(each.count for each in attempts) == 0
    assert not any(tmp_path.iterdir())


VARYING = ("report.json", "report.html", "report.md")
KINDS = (*NUMBERS, "a write beyond the limit")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", JOBS)
def test_a_fault_ends_a_command_clearly_leaves_nothing_half_and_the_next_run_succeeds(
    name, kind, jobs, whole, tmp_path, capsys, monkeypatch, record_property
):
    monkeypatch.setenv("T0REPRO_CHECKPOINT_HUB", "1")
    monkeypatch.setenv("COLUMNS", "200")
    (expected, counts), job = whole(name), jobs[name]
    met = 0
    for number, moment in enumerate(moments(kind, counts)):
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


def moments(kind: str, counts: dict[str, int]) -> list[int]:
    """When a fault comes: at the first and the last call; at two sizes of files."""
    if kind not in NUMBERS:
        return [0, 400]
    return sorted({0, counts[kind] - 1}) if counts[kind] else []


# Clocks and locks --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", JOBS)
def test_a_clock_that_jumps_changes_nothing(name, jobs, whole, tmp_path, monkeypatch):
    monkeypatch.setenv("T0REPRO_CHECKPOINT_HUB", "1")
    expected, _ = whole(name)
    days = itertools.cycle([0, 1, -1, 500, -500])
    now, now_ns = time.time, time.time_ns
    monkeypatch.setattr(time, "time", lambda: now() + 86400 * next(days))
    monkeypatch.setattr(time, "time_ns", lambda: now_ns() + 86400 * 10**9 * next(days))
    for _ in range(2):  # the second finds what the first left
        assert act(jobs[name], tmp_path / "out0") == 0
    found = visible_files(tmp_path / "out0")
    assert found.keys() == expected.keys()
    for file, content in found.items():
        check_same(file, content, expected)


T5X = (
    *("--gin_file=t5x/examples/t5/t5_1_1/tiny.gin", "--gin.DROPOUT_RATE=0.0"),
    *("--gin.MIXTURE_OR_TASK_NAME='demo_train'", "--module_import=t0repro.tasks.demo"),
    "--gin.TASK_FEATURE_LENGTHS={'inputs': 8, 'targets': 8}",
    *(f"--gin.{size.replace(' = ', '=')}" for size in SIZES),
)
MESH = (
    *("--gin_file=dataset.gin", "--gin_file=demo/t5.1.1.demo.gin"),
    *("--gin_param=MIXTURE_NAME = 'demo_train'", "--gin_param=dropout_rate = 0.0"),
    *("--gin_param=run.train_steps = 1", "--module_import=t0repro.tasks.demo"),
    "--gin_param=run.sequence_length = {'inputs': 64, 'targets': 16}",
    "--gin_param=run.batch_size = ('tokens_per_batch', 512)",
)
HELD = {
    "aux": (
        *("aux", "--model_dir=OUT", "--auxiliary_job_mixtures=m", "--once"),
        "--auxiliary_job_build_target_path=true",
    ),
    "cache": (
        *("cache", "--output_cache_dir=OUT", "--module_import=t0repro.tasks.demo"),
        "--tasks=demo_synthetic_imdb_*",
    ),
    "checkpoint fetch": ("checkpoint", "fetch", "t5_1_1_lm100k_small", "--to=OUT"),
    "compare": ("compare", "SUITE", "SUITE", "--out=OUT"),
    "convert": ("convert", "MODEL", "OUT", "--to=hf"),
    "encode": ("encode", "--checkpoint=MODEL", "--texts=ROWS", "--out=OUT/x.npz"),
    "eval": (
        *("eval", *T5X, "--gin_file=t5x/configs/runs/eval.gin", "--gin.EVAL_OUTPUT_DIR='OUT'"),
        "--gin.CHECKPOINT_PATH='MODEL/checkpoint_3'",
    ),
    "infer": (
        *("infer", *T5X, "--gin_file=t5x/configs/runs/infer.gin", "--gin.INFER_OUTPUT_DIR='OUT'"),
        "--gin.CHECKPOINT_PATH='MODEL/checkpoint_3'",
    ),
    "parity": ("parity", *MESH, "--out=OUT"),
    "plot": ("plot", "TRAIN", "--out=OUT"),
    "rank-eval": (
        *("rank-eval", "--checkpoint=MODEL", "--mixture=demo_eval_score_eval", "--out=OUT"),
        "--module_import=t0repro.tasks.demo",
    ),
    "report history": ("report", "history", "SUITE", "--out=OUT"),
    "report make": ("report", "make", "SUITE", "--out=OUT", "--resamples=100"),
    "report share": ("report", "share", "SUITE", "--model=owner/name", "--out=OUT"),
    "reproduce": ("reproduce", "--checkpoint=MODEL", "--out=OUT", "--yes"),
    "tasks fetch-p3": ("tasks", "fetch-p3", f"--tasks={TASK}", "--to=OUT"),
    "train": (
        *("train", *T5X, "--gin_file=t5x/configs/runs/pretrain.gin", "--gin.MODEL_DIR='OUT'"),
        *("--gin.TRAIN_STEPS=1", "--gin.USE_CACHED_TASKS=False", "--gin.BATCH_SIZE=8"),
    ),
}
"""Command lines that find their folder held."""
FOLDERS = {
    "aux": "auxiliary",
    "encode": ".x.npz.partial",
    "eval": "inference_eval",
    "infer": ".shard-00000-of-00001",
}
UNLOCKED = {
    *("adapters merge", "adapters unmerge"),
    *("precompile", "run", "t5_mesh_transformer", "vertex status"),
    *("browse", "tasks export", "tasks overlap"),
}
"""What writes single files, or one new folder; what four of them start is above."""


def test_every_command_that_writes_is_known_to_hold_its_folder_or_not():
    assert WRITERS.keys() == HELD.keys() | UNLOCKED


@pytest.mark.parametrize("name", HELD)
def test_a_command_whose_folder_is_held_is_refused_at_once_and_writes_nothing(
    name, inputs, tmp_path, capsys, monkeypatch
):
    monkeypatch.setenv("T0REPRO_CHECKPOINT_HUB", "1")
    monkeypatch.setenv("COLUMNS", "200")
    out = tmp_path / "out"
    with lock_folder(out / FOLDERS.get(name, ""), "a run of mine"):
        before = sorted(out.rglob("*"))
        code = act(command(*HELD[name], **inputs), out)
        said = capsys.readouterr().err
        assert sorted(out.rglob("*")) == before
    assert code == 2, said
    assert f"holds this folder for a run of mine (process {os.getpid()} on " in said
    assert re.search(r"fix: \S", said) and f"where: {out}" in said


LOCKED = [name for name in JOBS if name not in (*UNLOCKED, "score_eval", "infer (Mesh TensorFlow)")]


@pytest.mark.parametrize("name", LOCKED)
def test_what_a_dead_machine_left_locked_under_another_date_is_taken_over(
    name, jobs, whole, tmp_path, capsys, monkeypatch
):
    monkeypatch.setenv("T0REPRO_CHECKPOINT_HUB", "1")
    monkeypatch.setattr(locks, "_LEASE_SECONDS", 0.1)
    (expected, _), out = whole(name), tmp_path / "out0"
    folder = out / FOLDERS.get(name, "")
    folder.mkdir(parents=True)
    with monkeypatch.context() as patch:
        patch.setattr("filelock._marker.host_name", lambda: "elsewhere")
        lease = filelock.SoftFileLease(folder / locks.LEASE_FILE, lease_duration=0.1)
        with lease:
            marker = (folder / locks.LEASE_FILE).read_bytes()
    for file, content in ((locks.LEASE_FILE, marker), (locks.COMMAND_FILE, b"x\ny\n")):
        (folder / file).write_bytes(content)
        os.utime(folder / file, times=(time.time() + 500 * 86400,) * 2)
    capsys.readouterr()
    assert act(jobs[name], out) == 0
    assert "waiting up to" in capsys.readouterr().err
    found = visible_files(out)
    assert found.keys() == expected.keys()
    for file, content in found.items():
        check_same(file, content, expected)
