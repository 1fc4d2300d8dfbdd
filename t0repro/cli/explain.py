"""`t0repro explain`: every value of a run with the place that set it."""

from __future__ import annotations

import dataclasses
import re
from typing import Annotated

import typer

from t0repro import storage
from t0repro.cli.gin_options import Demo, GinOptions, RunMode, RunModes, SkippedNames
from t0repro.cli.groups import expand_groups
from t0repro.cli.options import AsJson, LogOptions, Modules
from t0repro.cli.paths import source
from t0repro.cli.results import echo, print_json
from t0repro.cli.spelling import T5X_NAMES
from t0repro.config.gin.folders import mesh_folders, shipped_files
from t0repro.config.gin.imports import list_imports
from t0repro.config.run import Run, TrainRun
from t0repro.config.settings import Dialect
from t0repro.config.t5x.arguments import PROGRAMS
from t0repro.config.t5x.gin_files import Parsed, T5xInputs, parse
from t0repro.config.t5x.layout import list_differences
from t0repro.config.t5x.run import read_run, read_train_run
from t0repro.config.table import align_columns, render
from t0repro.config.translation import translate
from t0repro.errors import UserError
from t0repro.tasks.registry import DEMO_MODULE
from t0repro.words import shown_as

# What runs write into their folders: Mesh TensorFlow's, and T5X's of any run mode.
_FILES_OF_RUNS = ("operative_config.gin", "config.gin")


@expand_groups
def explain(
    logs: LogOptions,
    skipped: SkippedNames,
    gin: GinOptions,
    module_import: Modules = None,
    demo: Demo = False,
    model_dir: Annotated[
        str,
        typer.Option(
            callback=source,
            help="The run's model_dir; without --gin_file, its own gin file is read.",
        ),
    ] = "",
    as_json: AsJson = False,
    run_mode: RunModes = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry_run", help="Only list what the files would import; import nothing."),
    ] = False,
    dialect: Annotated[
        Dialect | None,
        typer.Option(
            "--as", help="Translate a training run to the dialect of Mesh TensorFlow or T5X."
        ),
    ] = None,
) -> None:
    r"""Show every value that gin files and overrides set, with the file and line that set it.

    The files are Mesh TensorFlow's or, with --run_mode, T5X's.

    Example:
      t0repro explain --module_import t0repro.tasks.demo \
        --gin_file dataset.gin --gin_file demo/t5.1.1.demo.gin \
        --gin_param "MIXTURE_NAME = 'demo_train'" \
        --gin_param "run.train_steps = 100" \
        --gin_param "utils.run.mesh_shape = []"
      t0repro explain --run_mode train \
        --gin_file t5x/examples/t5/t5_1_1/small.gin \
        --gin_file t5x/configs/runs/pretrain.gin --gin.MODEL_DIR="'runs/c4'" \
        --gin.MIXTURE_OR_TASK_NAME="'c4_v220_span_corruption'" \
        --gin.TRAIN_STEPS=10000 \
        --gin.TASK_FEATURE_LENGTHS="{'inputs': 512, 'targets': 114}" \
        --gin.DROPOUT_RATE=0.0
      t0repro explain --model_dir runs/a --module_import my_tasks
    """
    del logs  # its options take effect as soon as they are parsed
    if demo:
        gin, module_import = gin.with_demo(), [DEMO_MODULE, *(module_import or ())]
    if model_dir and not gin.gin_file:
        files, run_mode = _files_of_run(model_dir, run_mode, has_params=bool(gin.gin_param))
        gin = dataclasses.replace(gin, gin_file=files)
    if not (gin.gin_file or gin.gin_param or run_mode):
        raise UserError(
            "There is nothing to explain.",
            where="--gin_file",
            fix="Name the run's gin files, or its folder: --model_dir.",
        )
    if dry_run:
        # The listing must not run anyone's code, so it returns before anything is imported.
        _list_imports(run_mode, gin, as_json=as_json)
        return
    if run_mode:
        _explain_t5x(gin.t5x_inputs(run_mode), as_json=as_json, dialect=dialect)
        return
    if gin.import_t5x():
        raise UserError(
            "This gin file is T5X's, and without --run_mode it is read as Mesh TensorFlow's.",
            where="--run_mode",
            fix="For T5X's files, add --run_mode=train, eval, infer or precompile.",
        )
    echo("reading gin files ...", err=True)
    # Of Mesh TensorFlow's dialect only, because they import NumPy.
    from t0repro.cli.mesh_inputs import mesh_inputs
    from t0repro.config.mtf.dialect import load

    config = load(mesh_inputs(gin, module_import, skipped, model_dir)).run
    # Printed as bindings of a dialect, so that they can be pasted into a file.
    if dialect:
        _show_translation(config, dialect)
        return
    echo(config.to_json() if as_json else render(config))


def _files_of_run(
    model_dir: str, run_mode: RunMode | None, *, has_params: bool
) -> tuple[list[str], RunMode | None]:
    """The gin file that a run has written into its model_dir, and the run mode that reads it.

    Args:
      model_dir: The folder, or its address.
      run_mode: The one that is asked for.
      has_params: Whether overrides are given, which may describe a run without files.

    Raises:
      UserError: If there is no such file, and nothing else to explain.
    """
    names = _FILES_OF_RUNS[1:] if run_mode else _FILES_OF_RUNS
    for name in names:
        path = storage.join(model_dir, name)
        if storage.is_file(path):
            is_t5x = name == _FILES_OF_RUNS[-1]
            return [path], _mode_of(path) if is_t5x and run_mode is None else run_mode
    if storage.is_file(model_dir):
        raise UserError(
            "This is a file, not a folder.",
            where=f"--model_dir={model_dir}",
            fix=f"Give the run's model_dir, or name it as a gin file: --gin_file={model_dir}.",
        )
    if has_params:
        return [], run_mode
    raise UserError(
        f"This folder has no gin file of a run: no {' and no '.join(names)}."
        if storage.exists(model_dir)
        else "There is no such folder.",
        where=f"--model_dir={model_dir}",
        fix="Give the run's model_dir, or its files: --gin_file.",
    )


def _mode_of(path: str) -> RunMode:
    """The run mode whose function a run's config.gin configures; training unless another is."""
    text = storage.place(path).read_text(encoding="utf-8")
    for mode in RunMode:
        if re.search(rf"^(\w+\.)*{PROGRAMS[mode]}\.\w+ =", text, re.MULTILINE):
            return mode
    return RunMode.TRAIN


def _show_translation(config: Run, dialect: Dialect) -> None:
    """Prints a training run as a gin file of a dialect; on stderr, what that cannot express."""
    if not isinstance(config, TrainRun):
        raise UserError(
            f"Only a training run has a counterpart in the other dialect, and not {config.mode!r}.",
            where=config.provenance.get("mode"),
            fix="Bind run.mode = 'train'.",
        )
    translation = translate(config, dialect)
    for line in (*translation.header, "", *translation.bindings):
        echo(line)
    for line in translation.missing:
        echo(f"not expressed: {line}", err=True)


def _list_imports(run_mode: str | None, gin: GinOptions, *, as_json: bool) -> None:
    """Prints each module that the files would import, the line, and whether it is allowed."""
    if run_mode:
        # This package's files come last, in the order in which a run searches.
        folders = [*(gin.folders or ["."]), str(shipped_files())]
    else:
        folders = mesh_folders(gin.folders)
    found = list_imports(gin.gin_file or (), gin.gin_param or (), folders, gin.allowlist)
    if as_json:
        print_json(found)
    elif found:
        words = {True: "allowed", False: "refused by --gin_import_allowlist"}
        echo(align_columns([(line.module, words[line.allowed], line.place) for line in found]))
    else:
        echo("These files import nothing.")


def _explain_t5x(inputs: T5xInputs, *, as_json: bool, dialect: Dialect | None) -> None:
    if dialect and inputs.run_mode != "train":
        raise UserError(
            "Only a training run can be translated to another dialect, not a run of"
            f" {inputs.run_mode}.",
            where="--as",
            fix="Leave out --as, or give --run_mode=train.",
        )
    with shown_as(T5X_NAMES):
        parsed = parse(inputs)
        if not dialect:
            _show_values(parsed, as_json=as_json)
            return
        config = read_train_run(parsed)
    # Not within the block, which would give another dialect's bindings T5X's names.
    _show_translation(config, dialect)


def _show_values(parsed: Parsed, *, as_json: bool) -> None:
    # Values come first, because they explain a refusal.
    if as_json:
        values = {item.name: {"value": item.value, "place": item.place} for item in parsed.values}
        print_json({"values": values, "imports": parsed.imports})
        read_run(parsed)
        return
    echo(align_columns([(item.name, item.value, item.place) for item in parsed.values]))
    for module in parsed.imports:
        echo(f"imports {module}")
    for warning in (*parsed.warnings, *list_differences(parsed.program)):
        echo(f"warning: {warning}", err=True)
    read_run(parsed)
