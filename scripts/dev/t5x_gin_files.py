"""Runs each gin file of T5X and writes docs/evidence/t5x_gin_files.md.

    .venv/bin/python scripts/dev/t5x_gin_files.py T5X_CHECKOUT [T5X_ON_VERTEX_AI_CHECKOUT]

Each file is read as a user would run it: a part without a run gets pretrain.gin, one without a
model gets small.gin, and macros that nothing sets get a value. `explain` reads the files as they
are. `--dry_run` also imports the tasks and checks them, but with a task of this script's own and,
in training, without a checkpoint, because the files name data in Google's buckets.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from t0repro import compat
from t0repro.cli.app import command
from t0repro.cli.gate import ErrorHandling, find_user_error

ROOT = Path(__file__).parents[2]
OUT = ROOT / "docs/evidence/t5x_gin_files.md"
VOCABULARY = ROOT / "tasks/demo/sentencepiece.model"
LENGTHS = "{'inputs': 64, 'targets': 16}"
# Values of the macros that T5X's files leave to the user.
MACROS = {
    "MODEL_DIR": "'runs/mine'",
    "EVAL_OUTPUT_DIR": "'runs/mine_eval'",
    "INFER_OUTPUT_DIR": "'runs/mine_infer'",
    "CHECKPOINT_PATH": "'runs/theirs'",
    "INITIAL_CHECKPOINT_PATH": "'runs/theirs'",
    "MIXTURE_OR_TASK_NAME": "'my_task'",
    "TASK_FEATURE_LENGTHS": LENGTHS,
    "FEATURE_LENGTHS": LENGTHS,
    "TRAIN_STEPS": "2_000_000",
    "DROPOUT_RATE": "0.1",
    "VOCAB_SIZE": "32128",
    "TF_EXAMPLE_FILE_PATHS": "['examples.jsonl']",
    "TF_EXAMPLE_FILE_TYPE": "'jsonl'",
}
# The function that a run file configures -> the run mode.
MODES = {
    "train": "train",
    "evaluate": "eval",
    "infer": "infer",
    "precompile": "precompile",
    "save": "export",
}
CONFIGURED = re.compile(rf"^\w+\.({'|'.join(MODES)})(:|\.model = )", re.MULTILINE)
INCLUDED = re.compile(r"""^include\s+['"](.+?)['"]""", re.MULTILINE)
SPLITS = ("train", "validation", "test", "validation_matched", "validation_mismatched")
NO_CHECKPOINT = "ready, except for its checkpoint"
# Part of a refusal -> why it is correct.
ITSELF = "T5X itself cannot run them:"
REASONS = {
    "no run mode 'export'": "They export a SavedModel, which t0repro does not write.",
    "t5x.contrib.moe": "Mixtures of experts are other models than the T5 family.",
    "pretrain_deterministic": f"{ITSELF} they include a file that is not published.",
    "evaluate lacks partitioner": f"{ITSELF} `evaluate` has no default for `partitioner`.",
    "defines 'partitioning'": f"{ITSELF} it binds a module that it does not import.",
    "named 'scan_layers'": f"{ITSELF} it imports the network without scanned layers.",
    "'get_vocabulary'": "It is Mesh TensorFlow's operative configuration, T5X's test data.",
    "flaxformer": "They need flaxformer, a package of other networks, and its own gin files.",
}


def closure(file: Path, folders: Sequence[Path]) -> str:
    """The text of a file and of all files that it includes; missing ones are left out."""
    text = file.read_text()
    for name in INCLUDED.findall(text):
        found = next((folder / name for folder in folders if (folder / name).is_file()), None)
        if found is not None:
            text += closure(found, folders)
    return text


def files_of_run(file: Path, text: str) -> tuple[str, list[str]]:
    """The run mode of a file, and the files that complete it to a run."""
    found = CONFIGURED.search(text)
    model = "MODEL = " in text
    files = [str(file)]
    family = "contrib/gpu/t5" if "contrib/gpu" in str(file) else "examples/t5"
    if "scalable_t5" in str(file):
        family = "examples/scalable_t5"
    # A file that changes some values of a run comes after the run's file.
    is_last = not model or file.name == "local_tiny.gin"
    if found is None or file.name == "local_tiny.gin":
        files.insert(0 if is_last else 1, "t5x/configs/runs/pretrain.gin")
    if not model:
        files.insert(0, f"t5x/{family}/t5_1_1/small.gin")
    return MODES[found[1]] if found else "train", files


def said(*arguments: str) -> tuple[str, str]:
    """The output of a `t0repro` command in this process, and its error in a line; "" for none."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(io.StringIO()):
        try:
            command()(args=list(arguments), obj=ErrorHandling(), standalone_mode=False)
        except Exception as error:
            mistake = find_user_error(error) or f"{type(error).__name__}: {error}"
            return printed.getvalue(), " ".join(mistake.partition("\n  where:")[0].split())
    return printed.getvalue(), ""


def with_macros(mode: str, arguments: list[str]) -> list[str]:
    """Arguments with a value for each macro that the run needs and nothing sets."""
    _, error = said("explain", f"--run_mode={mode}", *arguments)
    missing = re.match(r"Macros without a value: .*", error)
    names = [name for name in MACROS if missing and re.search(rf"\b{name}\b", missing[0])]
    if not names:
        return arguments
    # Further ones may be missing below a macro that has a value now.
    more = [f"--gin_bindings={name} = {MACROS[name]}" for name in names]
    return with_macros(mode, [*arguments, *more])


def on_own_task(mode: str, values: dict[str, dict[str, str]], folder: Path) -> list[str]:
    """Bindings that replace files in Google's buckets by local ones."""
    bytes_ = any(name.endswith("ByteVocabulary.extra_ids") for name in values)
    task = "'listed_bytes'" if bytes_ else "'listed'"
    replaced = {
        "SentencePieceVocabulary.sentencepiece_model_file": f"'{VOCABULARY}'",
        "SentencePieceVocabulary.extra_ids": "100",
        "DatasetConfig.use_cached": "False",
        "DatasetConfig.module": "None",
        "create_task_from_tfexample_file.paths": f"['{folder}/examples.jsonl']",
    }
    if mode == "train":
        replaced["RestoreCheckpointConfig.path"] = "[]"
    found = []
    for name, item in values.items():
        if name.endswith("DatasetConfig.mixture_or_task_name") and "@" not in item["value"]:
            found.append(f"{name} = {task}")
        found += [f"{name} = {new}" for ending, new in replaced.items() if name.endswith(ending)]
    return [f"--gin_bindings={binding}" for binding in found]


def outcomes(checkout: Path, vertex: Path | None) -> Iterator[tuple[str, str, str, str]]:
    """The name, run mode, and outcome under `explain` and `--dry_run` of each file."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # The images of the Vertex samples contain the T5X checkout as `t5x`, beside the samples'
        # files.
        (folder / "t5x").symlink_to(checkout.resolve())
        (folder / "examples.jsonl").write_text('{"inputs": "a", "targets": "b"}\n')
        folders = [checkout, folder]
        for root in filter(None, (checkout, vertex)):
            for file in sorted(root.rglob("*.gin")):
                shown = str(file.relative_to(root))
                mode, files = files_of_run(file, closure(file, folders))
                if mode == "export":
                    _, error = said("run", "--run_mode=export")
                    yield shown, mode, error, error
                    continue
                arguments = [f"--gin_search_paths={','.join(map(str, folders))}"]
                arguments += [f"--gin_file={each}" for each in files]
                arguments = with_macros(mode, arguments)
                printed, error = said("explain", f"--run_mode={mode}", "--json", *arguments)
                if error:
                    yield shown, mode, error, error
                    continue
                values = json.loads(printed)["values"]
                more = [*on_own_task(mode, values, folder), "--dry_run"]
                if mode == "precompile":
                    more.append("--run_mode=precompile")
                _, error_of_run = said(mode, *arguments, *more)
                if error_of_run.startswith("There is no such file or folder."):
                    error_of_run = NO_CHECKPOINT
                yield shown, mode, "", error_of_run


def _no_examples(split: str, shuffle_files: bool, seed: int | None = None) -> Any:
    """A dataset without examples: a dry run checks the split and the features, and reads none."""
    del split, shuffle_files, seed
    import tensorflow as tf

    none = tf.zeros((0, 1), tf.int32)
    return tf.data.Dataset.from_tensor_slices({"inputs": none, "targets": none})


def _no_metric(targets: Sequence[str], predictions: Sequence[str]) -> dict[str, float]:
    """A dry run evaluates nothing."""
    del targets, predictions
    return {}


def add_tasks() -> None:
    """Registers the tasks that stand for all others: in T5's form, encoded as text and as bytes."""
    compat.install()
    import seqio

    text = seqio.SentencePieceVocabulary(str(VOCABULARY), extra_ids=100)
    for name, vocabulary in (("listed", text), ("listed_bytes", seqio.ByteVocabulary())):
        seqio.TaskRegistry.add(
            name,
            source=seqio.FunctionDataSource(_no_examples, splits=SPLITS),
            preprocessors=[],
            output_features={
                feature: seqio.Feature(vocabulary) for feature in ("inputs", "targets")
            },
            # An evaluation reads only tasks with a metric.
            metric_fns=[_no_metric],
        )


def table(rows: Sequence[tuple[str, str, str, str]]) -> str:
    """The page: the counts, then a line for each file."""
    counted = Counter(
        (not explain, dry_run in ("", NO_CHECKPOINT)) for _, _, explain, dry_run in rows
    )
    lines = [
        "# What t0repro does with each gin file of T5X",
        "",
        "Names only: the files are T5X's (google-research/t5x at cc342d4) and those of its samples"
        " for Vertex AI\n(`configs/`). `scripts/dev/t5x_gin_files.py` writes this page; its header"
        " says how each file is run. [T5X's gin\nfiles](../t5x.md) says what is supported and what"
        " is refused.",
        "",
        f"Of {len(rows)} files, `explain` reads {counted[True, True] + counted[True, False]} and"
        f" `--dry_run` accepts {counted[True, True]}. The others are refused with their line:",
        "",
        *_reasons([explain for *_, explain, _ in rows if explain]),
        "",
        "| file | mode | `explain` | `--dry_run` |",
        "|---|---|---|---|",
    ]
    for name, mode, explain, dry_run in rows:
        cells = (f"`{name}`", mode, explain or "runs", "the same" if explain else dry_run or "runs")
        lines.append(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |")
    return "\n".join(lines) + "\n"


def _reasons(refusals: Sequence[str]) -> Iterator[str]:
    """A table of why files are refused, with the number of files for each reason."""
    yield from ("| files | why they are refused |", "|---|---|")
    for part, why in REASONS.items():
        yield f"| {sum(part in refusal for refusal in refusals)} | {why} |"


def main() -> None:
    """Reads all files of the checkouts and writes the page."""
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    checkout, *rest = map(Path, sys.argv[1:])
    vertex = rest[0] if rest else None
    # These folders have the modules that the files import besides T5X.
    for path in (vertex and vertex / "tasks", *checkout.rglob("dummy_wikipedia_config")):
        sys.path.append(str(path))
    add_tasks()
    OUT.write_text(table(list(outcomes(checkout, vertex))))


if __name__ == "__main__":
    main()
