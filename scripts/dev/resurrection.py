"""Dry-runs public files that people wrote against T5, T5X and SeqIO; writes the page of outcomes.

    .venv/bin/python scripts/dev/resurrection.py CHECKOUTS T5X_CHECKOUT [REPOSITORY ...]
    .venv/bin/python scripts/dev/resurrection.py        # the page alone, from the outcomes

CHECKOUTS holds a checkout of each repository of scripts/dev/resurrection.csv at its commit, in
OWNER/NAME. The list was frozen before the first run, and nobody's file is changed. Each file runs
in a process of its own, in the folder and with the arguments that its repository's scripts give:

- A gin file of T5X's dialect runs under `explain` and then with `--dry_run`.
- A gin file of Mesh TensorFlow's dialect runs under `explain`, which refuses what the JAX stack
  does not support; `t5_mesh_transformer` has no dry run.
- A module of tasks is imported.

Whatever an author keeps in a bucket is replaced: a mixture by one with a single task, a vocabulary
by T5's. Training starts without a checkpoint. If repositories are named, only their files run.
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
import resource
import shlex
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import t5x_gin_files as t5x

LIST = Path(__file__).with_suffix(".csv")
OUTCOMES = LIST.with_name("resurrection_outcomes.csv")
PAGE = t5x.ROOT / "docs/evidence/resurrection.md"
# Limits for one file, in seconds: processor time, which does not depend on the machine's load, and
# wall-clock time.
LIMIT, WAITING = 300, 3000
# Tried by hand, since a program for images needs more than these runs install.
MAXDIFFUSION = """\
Five modules of AI-Hypercomputer/maxdiffusion (`7cfb880`: `generate_flux`,
`generate_flux_multi_res`, `checkpointing.flux_checkpointer`, `pipelines.flux.flux_pipeline` and
`pipelines.ltx_video.ltx_video_pipeline`) import it from transformers, which no longer has it.
With that import taken from t0repro, all five import beside transformers 5.23, and those that
encode prompts give PyTorch's outputs within 1.3e-6 (a T5 1.1 of two layers with random weights,
padded rows, with and without a mask). transformers' other Flax classes (`FlaxCLIPTextModel`,
`FlaxPreTrainedModel`), `torchax` (which does not import beside PyTorch 2.13) and
`ltx_video.utils.torch_utils` were placeholders; no image was generated."""
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
KINDS = {
    "train": "training runs",
    "eval": "evaluations",
    "infer": "inferences",
    "mtf": "gin files of Mesh TensorFlow's dialect",
    "tasks": "modules of tasks",
}
UNKNOWN = "Not supported here."
# Part of a refusal -> why. The first that is found counts.
CLASSES = {
    r"module 't0\.seqio_tasks'|_Deferred object> has no attribute add": UNKNOWN,
    r"No module named '?t5x": "Their own code imports T5X, which is not installed here.",
    r"flaxformer": t5x.REASONS["flaxformer"],
    r"No module named": "Their own code imports a package that is not installed here.",
    r"t5x\.contrib\.moe": t5x.REASONS["t5x.contrib.moe"],
    r"module t5x\.(examples|myt5|data)\.": "They need what only their own copy of T5X has.",
    r"OfflineModeIsEnabled|couldn't connect|Max retries|DNSError|resolve host": (
        "Their own code needs the network when it is imported; the test had none."
    ),
    r"network\.Transformer": "They bind a network of their own, not one of T5X's.",
    r"nothing to evaluate|'listed' has a split|has no metric": (
        "The stand-in for their mixture is too simple."
    ),
    r"^[\w.]+ has no \w+\.$": "They name a function that their own module no longer has.",
    r"rsqrt_no_ramp_down": "They name a schedule that today's Mesh TensorFlow lacks.",
    r"duplicate provider": "They register a task under a name that t5 has already registered.",
    r"configures `infer`": "Their page runs an evaluation's gin file with T5X's infer.py.",
    r"KeyError: '[A-Z_]+'": "Their own code needs an environment variable that only they know.",
    r"/home/|third_party/py|nlp/nlx": "They include a file by its path on their own machine.",
    r"FileNotFoundError|no gin file": "A file that they read is not in their repository.",
    r"TFDS name must contain a version": "SeqIO itself refuses them: TFDS names need a version.",
    r"cannot import name|unexpected keyword argument|has no attribute|positional args": (
        "Their own code uses what today's JAX, TensorFlow, t5 or SeqIO no longer has."
    ),
}
HEAD = """# Public code, run unmodified

Names and outcomes only; the files are their authors'. `scripts/dev/resurrection.py` runs them and
writes this page.

**{runs} of {done} files run** ({kinds}). The list has {listed} files of {repositories} public
repositories; it was committed before any of them was counted.

- A gin file of T5X's dialect runs if `explain` reads it and `--dry_run` accepts it: every
  value, the user's own modules, tasks and vocabularies, lengths, the batch. A gin file of Mesh
  TensorFlow's dialect runs if `explain` reads it for the JAX stack. A module of tasks runs if
  it imports and registers.
- No file was changed. Each ran in the folder and with the arguments that its repository's
  scripts or page give (`scripts/dev/resurrection.csv`).
- There was no network, so whatever an author keeps in a bucket was replaced: a mixture by one
  with a single task, a vocabulary by T5's. Training runs started without a checkpoint. This
  page therefore counts configurations and code that are accepted, not reproduced results.
- Installed besides this project, as their users would: frozendict, jsonlines, pysimdjson,
  note-seq, librosa, mir_eval, cached_property, pycountry, prettytable, nest_asyncio, chex, toolz,
  tensorflow_io, all at today's versions, and checkouts of multilingual-t5, byt5 and flaxformer on
  PYTHONPATH.
  `GCP_BUCKET` was set, as improved-t5 asks. T5X was not installed.
- The list: every gin file that is a run's entry point, outside copies of T5X's own folders, and
  every module that registers tasks or mixtures, outside tests; at most ten of a kind in a
  repository, at even distances in alphabetical order. Entry points of hyper-task-descriptions,
  prompt-tuning, mt3 and unified-io-2 were found by reading their scripts. One file (of nb-t5x)
  had been tried by hand before. After the commit, the working folder of two rows (the modules
  of ViT5 and SciFive) was changed, because the first one had been wrong, and the quotation marks
  of xtreme-up's bindings, which a shell had removed. Its checkout is called xtreme_up, too.

To repeat it, check out each repository at its commit in `CHECKOUTS/OWNER/NAME`, and T5X:

```text
export T0REPRO_VOCAB=/path/sentencepiece.model
.venv/bin/python scripts/dev/resurrection.py CHECKOUTS T5X_CHECKOUT
```

## Why files are refused
"""


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
    return "" if error.startswith("There is no such file or folder") else error


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
        faulthandler.register(signal.SIGXCPU, file=stream, chain=True)
        resource.setrlimit(resource.RLIMIT_CPU, (LIMIT, LIMIT + 1))
        faulthandler.dump_traceback_later(WAITING, exit=True, file=stream)
        # What their code prints is not part of the outcome.
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        sent.send(run(*arguments))
        os._exit(0)


def in_own_process(
    run: Callable[[File, Place], tuple[str, str]], *arguments: Any
) -> tuple[str, str]:
    """A function's result, or its error, from a fork of this process: no task or binding stays."""
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
            return "refused", f"nothing after {LIMIT} s: {lines[0] if lines else 'it ended itself'}"
        finally:
            process.join()


def run(file: File, place: Place) -> tuple[str, str]:
    """How far a file gets, and the message that refuses it or the names that it registers."""
    if file.kind == "tasks":
        error, registered = import_tasks(file, place)
        return ("refused", error) if error else ("runs", registered)
    error, arguments, values = explain(file, place)
    if error or file.kind == "mtf":
        return ("refused" if error else "runs"), error
    error = dry_run(file, place, arguments, values)
    return ("explained" if error else "runs"), error


def prepare() -> None:
    """Imports what the files need: their processes are forks of this one."""
    os.environ.update(OFFLINE)
    t5x.MACROS.update(MACROS)
    small = ("t5x/examples/t5/t5_1_1/small.gin", "t5x/configs/runs/pretrain.gin")
    t5x.with_macros("train", [f"--gin_file={name}" for name in small])
    t5x.add_tasks()
    for module in ("t5.data.mixtures", "t0repro.model.t5", "t0repro.runs.preflight"):
        importlib.import_module(module)


def classify(line: str) -> str:
    """The class of a refusal, by its text."""
    return next((name for part, name in CLASSES.items() if re.search(part, line)), UNKNOWN)


def page(rows: Sequence[dict[str, str]]) -> str:
    """The page: the counts, then a line for each repository, each class and each refused file."""
    with LIST.open() as stream:
        listed = list(csv.DictReader(stream))
    ran = [row for row in rows if row["outcome"] == "runs"]
    refused = [row for row in rows if row["outcome"] != "runs"]
    classes = Counter(classify(row["line"]) for row in refused)
    lines = [
        HEAD.format(
            runs=len(ran),
            done=len(rows),
            listed=len(listed),
            repositories=len({row["repository"] for row in listed}),
            kinds=", ".join(
                f"{sum(row['kind'] == kind for row in ran)} of"
                f" {sum(row['kind'] == kind for row in rows)} {what}"
                for kind, what in KINDS.items()
            ),
        ),
        *("| files | why they are refused |", "|---|---|"),
        *(f"| {number} | {name} |" for name, number in classes.most_common()),
        "\n## By repository\n",
        *("| repository | commit | files | run | refused |", "|---|---|---|---|---|"),
    ]
    for name in dict.fromkeys(row["repository"] for row in listed):
        here = [row for row in rows if row["repository"] == name]
        why = Counter(classify(row["line"]) for row in refused if row["repository"] == name)
        shown = "; ".join(f"{number}: {each}" for each, number in why.most_common())
        runs = sum(row["outcome"] == "runs" for row in here)
        commit = next(row["commit"] for row in listed if row["repository"] == name)
        lines.append(f"| {name} | `{commit[:7]}` | {len(here)} | {runs} | {shown} |")
    lines += ["\n## Programs that need FlaxT5EncoderModel\n", MAXDIFFUSION]
    lines += ["\n## Each refusal\n", "| file | kind | what it says |", "|---|---|---|"]
    for row in refused:
        said = row["line"].replace("|", "/").replace("<", "&lt;")
        lines.append(f"| {row['repository']}: `{row['file']}` | {row['kind']} | {said} |")
    return "\n".join(lines) + "\n"


def write_page() -> None:
    """Writes the page from the file of outcomes."""
    with OUTCOMES.open() as stream:
        PAGE.write_text(page(list(csv.DictReader(stream))))


def main() -> None:
    """Runs the list and writes the outcomes and the page."""
    if len(sys.argv) == 1:
        write_page()
        return
    if len(sys.argv) == 2:
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
        prepare()
        for file in again:
            reached, line = in_own_process(run, file, places[file.repository])
            line = line.replace(f"{name}/", "").replace(f"{t5x_checkout}/", "")
            line = re.sub(r" object at 0x\w+", "", line)
            line = line.replace(f"{t5x.ROOT}/", "").replace(f"{checkouts}/", "")
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
    write_page()


if __name__ == "__main__":
    main()
