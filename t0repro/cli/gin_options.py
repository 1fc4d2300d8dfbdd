"""The options by which a command takes a run's gin, as `t5_mesh_transformer` does."""

from typing import Annotated

import typer

GinFiles = Annotated[list[str] | None, typer.Option("--gin_file", help="A gin file; repeatable.")]
GinParams = Annotated[
    list[str] | None, typer.Option("--gin_param", help="An override; repeatable.")
]
GinFolders = Annotated[
    list[str] | None,
    typer.Option("--gin_location_prefix", help="A folder to find gin files in; repeatable."),
]
Modules = Annotated[
    list[str] | None,
    typer.Option("--module_import", help="A module that registers tasks; repeatable."),
]
