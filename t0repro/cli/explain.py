"""`t0repro explain`: every value of a run with the place that set it."""

from __future__ import annotations

from typing import Annotated

import typer

from t0repro.cli.gin_options import GinFiles, GinFolders, GinParams, Modules


def explain(
    gin_file: GinFiles = None,
    gin_param: GinParams = None,
    gin_location_prefix: GinFolders = None,
    module_import: Modules = None,
    model_dir: Annotated[str, typer.Option("--model_dir", help="The run's model_dir.")] = "",
    json: Annotated[bool, typer.Option("--json", help="Print the RunConfig as JSON.")] = False,
) -> None:
    """Shows what gin files and overrides amount to, and which file and line set each value.

    Example:
      t0repro explain --module_import t0repro.tasks.demo --gin_file dataset.gin
        --gin_file demo/t5.1.1.demo.gin --gin_param "MIXTURE_NAME = 'demo_train'"
        --gin_param "run.train_steps = 100" --gin_param "utils.run.mesh_shape = []"
    """
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
    typer.echo(config.to_json() if json else render(config))
