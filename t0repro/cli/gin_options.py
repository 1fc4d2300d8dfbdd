"""Options for a run's gin files and overrides, named as in `t5_mesh_transformer` or in T5X."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Sequence
from typing import Annotated, ClassVar, Self, TypeVar

import typer

from t0repro.cli.paths import source
from t0repro.cli.spelling import canonical
from t0repro.cloud.vertex.command_line import check_not_export
from t0repro.config.gin.folders import shipped_files
from t0repro.config.gin.imports import list_imports
from t0repro.config.t5x.gin_files import T5xInputs
from t0repro.errors import UserError

GIN = "Gin files and data"  # the heading in help
Mode = TypeVar("Mode", bound=enum.StrEnum)

GinFiles = Annotated[
    list[str] | None,
    typer.Option(
        "--gin_file", callback=source, rich_help_panel=GIN, help="A gin file; repeatable."
    ),
]
# `cli.spelling` rewrites --gin.NAME=VALUE to --gin_bindings, because Click has no such names.
GinParams = Annotated[
    list[str] | None,
    typer.Option(
        "--gin_param",
        "--gin_bindings",
        rich_help_panel=GIN,
        help="An override, as 'NAME = VALUE'; also written --gin.NAME=VALUE; repeatable.",
    ),
]


@dataclasses.dataclass(frozen=True)
class SkippedNames:
    """The flags of t5_mesh_transformer for gin files with configurables that no longer exist."""

    HEADING: ClassVar = GIN

    skip_all_gin_unknowns: Annotated[
        bool,
        typer.Option(
            "--skip_all_gin_unknowns", help="Ignore bindings of configurables that do not exist."
        ),
    ] = False
    additional_deprecated_gin_references: Annotated[
        list[str] | None,
        typer.Option(
            help="Configurables whose bindings are ignored, separated by commas; repeatable."
        ),
    ] = None

    @property
    def skip_unknown(self) -> bool | list[str]:
        """As in `MeshInputs`."""
        return self.skip_all_gin_unknowns or listed(self.additional_deprecated_gin_references)


Demo = Annotated[
    bool,
    typer.Option("--demo", help="Take the small model and the tasks of the demo."),
]
_DEMO_FILES = (
    *("dataset.gin", "demo/t5.1.1.demo.gin"),
    "learning_rate_schedules/constant_0_001.gin",
)
_DEMO_PARAMS = (
    "MIXTURE_NAME = 'demo_train'",
    "run.train_steps = 20",
    "run.batch_size = ('tokens_per_batch', 1024)",
    "run.sequence_length = {'inputs': 128, 'targets': 16}",
    "pack_dataset.use_custom_ops = False",
    "utils.run.mesh_shape = []",
    "dropout_rate = 0.0",
)


@dataclasses.dataclass(frozen=True)
class GinOptions:
    """A run's gin files and overrides."""

    HEADING: ClassVar = GIN

    gin_file: GinFiles = None
    gin_param: GinParams = None
    gin_search_paths: Annotated[
        list[str] | None,
        typer.Option(
            "--gin_search_paths",
            "--gin_location_prefix",
            callback=source,
            help="Folders to look for gin files in, separated by commas; repeatable.",
        ),
    ] = None
    gin_import_allowlist: Annotated[
        list[str] | None,
        typer.Option(
            help="Modules that gin files may import, separated by commas; repeatable. Default: all."
        ),
    ] = None

    @property
    def folders(self) -> list[str]:
        """Where to look for gin files."""
        return folders_of(self.gin_search_paths)

    @property
    def allowlist(self) -> tuple[str, ...] | None:
        """The modules that gin files may import; None for all."""
        return allowlist_of(self.gin_import_allowlist)

    def with_demo(self) -> Self:
        """The demo's gin files and overrides, and after them those of the command line."""
        files, params = self.gin_file or (), self.gin_param or ()
        return dataclasses.replace(
            self, gin_file=[*_DEMO_FILES, *files], gin_param=[*_DEMO_PARAMS, *params]
        )

    def t5x_inputs(
        self, run_mode: str, *, first: Sequence[str] = (), last: Sequence[str] = ()
    ) -> T5xInputs:
        """The options as T5X's; of two bindings of one name, the later wins.

        Args:
          run_mode: T5X's name of the run mode.
          first: bindings before those of the command line.
          last: bindings after them.
        """
        bindings = (*first, *(self.gin_param or ()), *last)
        folders = tuple(self.folders) or (".",)
        return T5xInputs(run_mode, tuple(self.gin_file or ()), bindings, folders, self.allowlist)

    def import_t5x(self) -> bool:
        """Whether a gin file imports T5X or its script, as all of T5X's do."""
        folders = [*(self.folders or ["."]), str(shipped_files())]
        try:
            # Listed and not parsed, because parsing would fail in the wrong dialect.
            lines = list_imports(self.gin_file or (), (), folders, None)
        except UserError:  # one of Mesh TensorFlow's is not found there
            return False
        return any(line.module.partition(".")[0] in ("t5x", "__main__") for line in lines)


def allowlist_of(values: Sequence[str] | None) -> tuple[str, ...] | None:
    """The modules that `--gin_import_allowlist` names; None if it is not given."""
    # An empty list differs: it allows no import at all.
    return None if values is None else tuple(listed(values))


def listed(values: Sequence[str] | None) -> list[str]:
    """The names of an option that is repeatable and takes several, separated by commas."""
    names = (name.strip() for value in values or () for name in value.split(","))
    return [name for name in names if name]


def folders_of(words: Sequence[str] | None) -> list[str]:
    """The folders of an option: flags of t5's and T5X's commands have them all in one word."""
    return [folder for word in words or () for folder in word.split(",") if folder]


class RunMode(enum.StrEnum):
    """The T5X run modes whose gin files this project reads."""

    TRAIN = "train"
    EVAL = "eval"
    INFER = "infer"
    PRECOMPILE = "precompile"


def run_mode_of(modes: type[Mode]) -> Callable[[str], Mode]:
    """The parser of `--run_mode` for an enumeration's modes; it says why there is no export."""

    def named(name: str) -> Mode:
        check_not_export(name)
        # Both spellings of a name with a dash are accepted, as for options.
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
