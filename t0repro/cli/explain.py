"""`t0repro explain`: shows every value of a run with the place that set it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from t0repro.cli.gin_options import (
    GinBindings,
    GinFiles,
    GinFolders,
    GinParams,
    GinSearchPaths,
    RunModes,
)
from t0repro.cli.options import AsJson, Modules


def explain(
    gin_file: GinFiles = None,
    gin_param: GinParams = None,
    gin_location_prefix: GinFolders = None,
    module_import: Modules = None,
    model_dir: Annotated[str, typer.Option("--model_dir", help="The run's model_dir.")] = "",
    as_json: AsJson = False,
    run_mode: RunModes = None,
    gin_bindings: GinBindings = None,
    gin_search_paths: GinSearchPaths = ".",
) -> None:
    """Show every value that gin files and overrides set, with the file and line that set it.

    The files are Mesh TensorFlow's or, with --run_mode, T5X's.

    Example:
      t0repro explain --module_import t0repro.tasks.demo --gin_file dataset.gin
        --gin_file demo/t5.1.1.demo.gin --gin_param "MIXTURE_NAME = 'demo_train'"
        --gin_param "run.train_steps = 100" --gin_param "utils.run.mesh_shape = []"
      t0repro explain --run_mode train --gin_file t5x/examples/t5/t5_1_1/small.gin
        --gin_file t5x/configs/runs/pretrain.gin --gin.MODEL_DIR="'runs/c4'"
        --gin.MIXTURE_OR_TASK_NAME="'c4_v220_span_corruption'" --gin.TRAIN_STEPS=10000
        --gin.TASK_FEATURE_LENGTHS="{'inputs': 512, 'targets': 114}" --gin.DROPOUT_RATE=0.0
    """
    if run_mode:
        _explain_t5x(run_mode, gin_file or (), gin_bindings or (), gin_search_paths, as_json)
        return
    from t0repro.config.explain import render
    from t0repro.config.mtf.dialect import load
    from t0repro.config.mtf.parser import GinInputs

    inputs = GinInputs(
        model_dir=model_dir,
        gin_files=gin_file or (),
        gin_params=gin_param or (),
        location_prefixes=gin_location_prefix or (),
        module_imports=module_import or (),
    )
    config = load(inputs).run
    typer.echo(config.to_json() if as_json else render(config))


def _explain_t5x(
    run_mode: str, files: Sequence[str], bindings: Sequence[str], search_paths: str, as_json: bool
) -> None:
    import json

    from t0repro.config.explain import in_columns
    from t0repro.config.t5x.gin_files import GinInputs, parse

    parsed = parse(
        GinInputs(run_mode, tuple(files), tuple(bindings), tuple(search_paths.split(",")))
    )
    if as_json:
        values = {item.name: {"value": item.value, "place": item.place} for item in parsed.values}
        typer.echo(json.dumps({"values": values, "imports": parsed.imports}, indent=2))
        return
    typer.echo(in_columns([(item.name, item.value, item.place) for item in parsed.values]))
    for module in parsed.imports:
        typer.echo(f"imports {module}")
    for warning in parsed.warnings:
        typer.echo(f"warning: {warning}", err=True)
