"""Dry-runs public files that people wrote against T5, T5X and SeqIO: writes docs/resurrection.md.

    .venv/bin/python scripts/resurrection.py CHECKOUTS T5X_CHECKOUT [REPOSITORY ...]

CHECKOUTS holds a checkout of each repository of scripts/resurrection.csv at its commit, in
OWNER/NAME. The list was frozen before the first run, and nobody's file is changed. Each file runs
in a process of its own, in the folder and with the arguments that its repository's scripts give:

- A gin file of T5X's dialect runs under `explain` and then with `--dry_run`.
- A gin file of Mesh TensorFlow's dialect runs under `explain`, which refuses what the JAX stack
  does not support; `t5_mesh_transformer` has no dry run.
- A module of tasks is imported.

What is in somebody's bucket has a stand-in: a mixture of one task, T5's vocabulary, and in training
no checkpoint. With names of repositories, only their files run again.
"""

from __future__ import annotations

import csv
import dataclasses
import faulthandler
import importlib
import json
import multiprocessing
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import t5x_gin_files as t5x

LIST = Path(__file__).with_suffix(".csv")
OUTCOMES = LIST.with_name("resurrection_outcomes.csv")
PAGE = t5x.ROOT / "docs/resurrection.md"
LIMIT = 600  # seconds for one file; long, since this may run beside other work
Values = dict[str, dict[str, str]]
# Nothing is downloaded, so that libraries need not try for minutes.
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "NO_GCE_CHECK": "true"}
# Values of macros that these repositories leave to the user, besides T5X's own.
MACROS = {
    "BATCH_SIZE": "128",
    "CLASS_LABELS": "['positive', 'negative']",
    "EVAL_PERIOD": "1000",
    "JSON_WRITE_N_RESULTS": "20",
    "LEARNING_RATE": "0.001",
    "LEARNING_RATE_SCHEDULE": "'constant'",
    "PROMPT_FILE": "'prompt.npy'",
    "SAVE_PERIOD": "1000",
    "SAVING_PERIOD": "1000",
    "TASK_TSV_DATA_DIR": "'rows'",
    "WARMUP_STEPS": "1000",
}


@dataclasses.dataclass(frozen=True)
class File:
    """A line of the list.

    Attributes:
      repository: OWNER/NAME at GitHub.
      commit: The commit that was run.
      kind: train, eval or infer (T5X's modes), mtf (Mesh TensorFlow's gin files), or tasks.
      file: Its path in the repository.
      folder: The folder in which the repository's scripts start it.
      imports: The folder that they put on PYTHONPATH, from the repository's root; "" for none.
      arguments: Their gin files and bindings; of a module, its name.
    """

    repository: str
    commit: str
    kind: str
    file: str
    folder: str
    imports: str
    arguments: str


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a file is run: the checkout of its repository and one of T5X's."""

    checkout: Path
    t5x_checkout: Path


def _enter(file: File, place: Place) -> tuple[Path, ...]:
    """Enters the file's folder; returns the folders in which gin looks for files."""
    folder = place.checkout / file.folder
    os.chdir(folder)
    imports = place.checkout / file.imports
    sys.path[:0] = [str(folder), str(imports)]
    return (folder, place.checkout, imports, place.checkout.parent, place.t5x_checkout)


def explain(file: File, place: Place) -> tuple[str, list[str], Values]:
    """What `explain` says of a gin file: its error, the whole command line, all values."""
    folders = _enter(file, place)
    arguments = shlex.split(file.arguments)
    if file.kind == "mtf":
        _, error = t5x.said("explain", *arguments, "--gin_param=MIXTURE_NAME = 'listed'")
        return error, arguments, {}
    arguments = [re.sub(r"^--gin\.([^=]+)=", r"--gin_bindings=\1 = ", each) for each in arguments]
    arguments.append(f"--gin_search_paths={','.join(map(str, folders))}")
    arguments = t5x.with_macros(file.kind, arguments)
    printed, error = t5x.said("explain", f"--run_mode={file.kind}", "--json", *arguments)
    return error, arguments, {} if error else json.loads(printed)["values"]


def dry_run(file: File, place: Place, arguments: list[str], values: Values) -> str:
    """The error of a dry run in T5X's dialect, with stand-ins for what is in buckets."""
    _enter(file, place)
    with tempfile.TemporaryDirectory() as name:
        stand_ins = t5x.on_own_task(file.kind, values, Path(name))
        _, error = t5x.said(file.kind, *arguments, *stand_ins, "--dry_run")
    return "" if error.startswith("There is no checkpoint") else error


def import_tasks(file: File, place: Place) -> tuple[str, str]:
    """The error of importing a module, or what it registers."""
    import seqio

    _enter(file, place)
    registries = (seqio.TaskRegistry, seqio.MixtureRegistry)
    before = [set(registry.names()) for registry in registries]
    try:
        importlib.import_module(file.arguments)
    except BaseException as error:  # a module may do anything, exit included
        return " ".join(f"{type(error).__name__}: {error}".split()), ""
    tasks, mixtures = (
        len(set(now.names()) - old) for now, old in zip(registries, before, strict=True)
    )
    return "", f"{tasks} tasks, {mixtures} mixtures"


def _child(sent: Connection, trace: Path, run: Callable[..., Any], arguments: tuple) -> None:
    with trace.open("w") as stream:
        faulthandler.dump_traceback_later(LIMIT, exit=True, file=stream)
        # What their code prints is not part of the outcome.
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        sent.send(run(*arguments))
        os._exit(0)


def in_own_process(run: Callable[..., Any], *arguments: Any) -> Any:
    """A function's result from a process that leaves no task and no binding; else why not."""
    received, sent = multiprocessing.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as name:
        trace = Path(name) / "trace"
        # Forked, so that it need not import again what this process has imported.
        process = multiprocessing.get_context("fork").Process(
            target=_child, args=(sent, trace, run, arguments)
        )
        process.start()
        sent.close()
        try:
            return received.recv()
        except EOFError:
            lines = [line.strip() for line in trace.read_text().splitlines() if "File" in line]
            return f"nothing after {LIMIT} s: {lines[0] if lines else 'it ended itself'}", "", {}
        finally:
            process.join()


def run_all(files: Sequence[File], places: Mapping[str, Place]) -> Iterator[tuple[File, str, str]]:
    """Each file, how far it comes, and the line that refuses it or what it registers."""
    os.environ.update(OFFLINE)
    t5x.MACROS.update(MACROS)
    accepted = []
    # For what it imports: the processes below are forks of this one.
    small = ("t5x/examples/t5/t5_1_1/small.gin", "t5x/configs/runs/pretrain.gin")
    t5x.with_macros("train", [f"--gin_file={name}" for name in small])
    importlib.import_module("t0repro.config.t5x.run")
    # First what needs no TensorFlow, which takes most of the time.
    for file in [file for file in files if file.kind in ("train", "eval", "infer")]:
        error, arguments, values = in_own_process(explain, file, places[file.repository])
        if error:
            yield file, "refused", error
        else:
            accepted.append((file, arguments, values))
    t5x.add_tasks()
    for module in ("t5.data.mixtures", "t0repro.model.t5", "t0repro.runs.preflight"):
        importlib.import_module(module)
    for file, arguments, values in accepted:
        answer = in_own_process(dry_run, file, places[file.repository], arguments, values)
        error = answer if isinstance(answer, str) else answer[0]
        yield file, "explained" if error else "runs", error
    for file in files:
        if file.kind in ("mtf", "tasks"):
            run = import_tasks if file.kind == "tasks" else explain
            error, note, *_ = in_own_process(run, file, places[file.repository])
            yield (
                file,
                "refused" if error else "runs",
                error or (str(note) if run is import_tasks else ""),
            )


def main() -> None:
    """Runs the list and writes the outcomes."""
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    checkouts, t5x_checkout = map(Path.resolve, map(Path, sys.argv[1:3]))
    with LIST.open() as stream:
        files = [File(**row) for row in csv.DictReader(stream)]
    rows = {}
    if OUTCOMES.exists():
        with OUTCOMES.open() as stream:
            rows = {(row["repository"], row["file"]): row for row in csv.DictReader(stream)}
    again = [file for file in files if not sys.argv[3:] or file.repository in sys.argv[3:]]
    with tempfile.TemporaryDirectory() as name:
        places = {}
        for file in again:
            # A package is imported by its folder's name, so a dash there is an underscore.
            link = Path(name) / file.repository.replace("-", "_")
            if not link.is_symlink():
                link.parent.mkdir(exist_ok=True)
                link.symlink_to(checkouts / file.repository)
            places[file.repository] = Place(link, t5x_checkout)
        for file, reached, line in run_all(again, places):
            line = line.replace(f"{name}/", "").replace(f"{t5x_checkout}/", "")
            row = {"repository": file.repository, "commit": file.commit, "kind": file.kind}
            row |= {"file": file.file, "outcome": reached, "line": line}
            print(*row.values(), sep="\t", flush=True)
            rows[file.repository, file.file] = row
            # After each file, so that an interrupted run keeps what it has.
            listed = [rows[key] for one in files if (key := (one.repository, one.file)) in rows]
            with OUTCOMES.open("w", newline="") as stream:
                writer = csv.DictWriter(stream, row, lineterminator="\n")
                writer.writeheader()
                writer.writerows(listed)


if __name__ == "__main__":
    main()
