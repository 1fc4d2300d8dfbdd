"""Options for a run's gin files and overrides, named as in `t5_mesh_transformer` and T5X."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from t0repro.cli.spelling import canonical
from t0repro.cloud.arguments import check_not_export

if TYPE_CHECKING:
    from t0repro.config.mtf.parser import MeshInputs
    from t0repro.config.t5x.gin_files import T5xInputs

Mode = TypeVar("Mode", bound=enum.StrEnum)

GinFiles = Annotated[list[str] | None, typer.Option("--gin_file", help="A gin file; repeatable.")]
GinParams = Annotated[
    list[str] | None,
    typer.Option("--gin_param", help="An override of a gin file's value; repeatable."),
]
GinFolders = Annotated[
    list[str] | None,
    typer.Option("--gin_location_prefix", help="A folder to look for gin files in; repeatable."),
]
GinImportAllowlist = Annotated[
    list[str] | None,
    typer.Option(
        "--gin_import_allowlist",
        help="Modules that gin files may import, joined by commas; repeatable. All by default.",
    ),
]


def allowlist_of(values: Sequence[str] | None) -> tuple[str, ...] | None:
    """The modules that `--gin_import_allowlist` names; None if it is not given."""
    # Not the same as an empty list, which allows no import at all.
    if values is None:
        return None
    names = (name.strip() for value in values for name in value.split(","))
    return tuple(name for name in names if name)


def mesh_inputs(
    files: Sequence[str] | None,
    params: Sequence[str] | None,
    folders: Sequence[str] | None,
    modules: Sequence[str] | None,
    *,
    allowlist: tuple[str, ...] | None = None,
    model_dir: str = "",
) -> MeshInputs:
    """What a command line says about Mesh TensorFlow's gin files."""
    from t0repro.config.mtf.parser import MeshInputs

    return MeshInputs(
        model_dir=model_dir,
        gin_files=files or (),
        gin_params=params or (),
        location_prefixes=folders or (),
        module_imports=modules or (),
        import_allowlist=allowlist,
    )


def t5x_inputs(
    run_mode: str,
    files: Sequence[str] | None,
    bindings: Sequence[str] | None,
    search_paths: str,
    allowlist: tuple[str, ...] | None = None,
) -> T5xInputs:
    """What a command line says about T5X's gin files."""
    from t0repro.config.t5x.gin_files import T5xInputs

    folders = tuple(search_paths.split(","))
    return T5xInputs(run_mode, tuple(files or ()), tuple(bindings or ()), folders, allowlist)


class RunMode(enum.StrEnum):
    """The T5X run modes whose gin files this project reads."""

    TRAIN = "train"
    EVAL = "eval"
    INFER = "infer"
    PRECOMPILE = "precompile"


def run_mode_of(modes: type[Mode]) -> Callable[[str], Mode]:
    """A reader of `--run_mode` for the modes of an enumeration, which says why export is none."""

    def named(name: str) -> Mode:
        check_not_export(name)
        # Either spelling of what has a dash in it, as of options.
        found = next((mode for mode in modes if canonical(mode) == canonical(name)), None)
        if found is None:
            raise typer.BadParameter(f"{name!r} is not one of {', '.join(modes)}.")
        return found

    return named


RunModes = Annotated[
    RunMode | None,
    typer.Option(
        "--run_mode",
        parser=run_mode_of(RunMode),
        metavar="MODE",
        help="Read the gin files as T5X does in this run mode: train, eval, infer or precompile.",
    ),
]
# The option behind --gin.NAME=VALUE, which `cli.spelling` rewrites: Click knows no such names.
GinBindings = Annotated[
    list[str] | None,
    typer.Option(
        "--gin_bindings",
        help="An override in a T5X run, also written --gin.NAME=VALUE; repeatable.",
    ),
]
GinSearchPaths = Annotated[
    str,
    typer.Option(
        "--gin_search_paths",
        help="Folders to look for a T5X run's gin files in, separated by commas.",
    ),
]
