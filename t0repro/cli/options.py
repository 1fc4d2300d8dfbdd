"""Options that several commands share, alone or in groups that are dataclasses."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import enum
import functools
import inspect
import json
import typing
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeVar

import typer

from t0repro.cli.spelling import canonical, source
from t0repro.cloud.spec import check_not_export
from t0repro.cloud.tracker import TrackedRun, TrackerName, tracked
from t0repro.errors import UserError
from t0repro.words import without_passwords

if TYPE_CHECKING:
    from t0repro.config.mtf.parser import MeshInputs
    from t0repro.config.run_config import RunConfig
    from t0repro.config.t5x.gin_files import T5xInputs


DEFAULT_MODULE = "t0repro.tasks.t0"

Modules = Annotated[
    list[str] | None,
    typer.Option("--module_import", help="A module that registers tasks; repeatable."),
]
ModulesOrT0 = Annotated[
    list[str] | None,
    typer.Option(
        "--module_import",
        help="A module that registers tasks; repeatable.",
        show_default=DEFAULT_MODULE,
    ),
]
Templates = Annotated[
    list[Path] | None,
    typer.Option(
        help="A file of your own prompts, in promptsource's YAML format; repeatable. Then no module"
        " is imported by default."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Resamples = Annotated[
    int, typer.Option(help="Number of bootstrap weightings for the intervals.", min=100)
]
BootstrapSeed = Annotated[int, typer.Option(help="Seed of the random weightings.")]
DType = Literal["float32", "bfloat16"]


def modules_or_t0(
    modules: Sequence[str] | None, templates: Sequence[Path] | None = None
) -> list[str]:
    """The modules that were named; T0's own if neither modules nor prompts were."""
    # With your own prompts, T0's tasks are not needed.
    return list(modules or ([] if templates else [DEFAULT_MODULE]))


# ---- Options for a run's gin files and overrides, named as in `t5_mesh_transformer` and T5X ------


GIN = "Gin files and data"  # the heading in help
Mode = TypeVar("Mode", bound=enum.StrEnum)

GinFiles = Annotated[
    list[str] | None,
    typer.Option(
        "--gin_file", callback=source, rich_help_panel=GIN, help="A gin file; repeatable."
    ),
]
GinParams = Annotated[
    list[str] | None,
    typer.Option(
        "--gin_param", rich_help_panel=GIN, help="An override of a gin file's value; repeatable."
    ),
]
GinFolders = Annotated[
    list[str] | None,
    typer.Option(
        "--gin_location_prefix",
        callback=source,
        rich_help_panel=GIN,
        help="Folders to look for gin files in, separated by commas; repeatable.",
    ),
]
GinImportAllowlist = Annotated[
    list[str] | None,
    typer.Option(
        "--gin_import_allowlist",
        rich_help_panel=GIN,
        help="Modules that gin files may import, separated by commas; repeatable. Default: all.",
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
        return self.skip_all_gin_unknowns or _listed(self.additional_deprecated_gin_references)


def allowlist_of(values: Sequence[str] | None) -> tuple[str, ...] | None:
    """The modules that `--gin_import_allowlist` names; None if it is not given."""
    # An empty list differs: it allows no import at all.
    return None if values is None else tuple(_listed(values))


def _listed(values: Sequence[str] | None) -> list[str]:
    """The names of an option that is repeatable and takes several, separated by commas."""
    names = (name.strip() for value in values or () for name in value.split(","))
    return [name for name in names if name]


def gin_folders(words: Sequence[str] | None) -> list[str]:
    """The folders of `GinFolders`: t5's flag has them all in one word."""
    return [folder for word in words or () for folder in word.split(",")]


def mesh_inputs(
    files: Sequence[str] | None,
    params: Sequence[str] | None,
    folders: Sequence[str] | None,
    modules: Sequence[str] | None,
    *,
    skipped: SkippedNames,
    allowlist: tuple[str, ...] | None = None,
    model_dir: str = "",
) -> MeshInputs:
    """The options of a command line for Mesh TensorFlow's gin files."""
    from t0repro.config.mtf.parser import MeshInputs

    return MeshInputs(
        model_dir=model_dir,
        gin_files=files or (),
        gin_params=params or (),
        location_prefixes=gin_folders(folders),
        module_imports=modules or (),
        skip_unknown=skipped.skip_unknown,
        import_allowlist=allowlist,
    )


def t5x_inputs(
    run_mode: str,
    files: Sequence[str] | None,
    bindings: Sequence[str] | None,
    search_paths: str,
    allowlist: tuple[str, ...] | None = None,
) -> T5xInputs:
    """The options of a command line for T5X's gin files."""
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
# `cli.spelling` rewrites --gin.NAME=VALUE to this option, because Click has no such names.
GinBindings = Annotated[
    list[str] | None,
    typer.Option(
        "--gin_bindings",
        rich_help_panel=GIN,
        help="An override in a T5X run, also written --gin.NAME=VALUE; repeatable.",
    ),
]
GinSearchPaths = Annotated[
    str,
    typer.Option(
        "--gin_search_paths",
        callback=source,
        rich_help_panel=GIN,
        help="Folders to look for a T5X run's gin files in, separated by commas.",
    ),
]


# ---- The flags by which a command becomes one process of several; T5X's, for all commands --------


@dataclasses.dataclass(frozen=True)
class ProcessOptions:
    """T5X's flags for several processes; without them the environment decides."""

    HEADING: ClassVar = "Several processes"

    multiprocess_gpu: Annotated[
        bool,
        typer.Option(
            "--multiprocess_gpu",
            help="Join a multi-process run; JAX detects what you omit.",
        ),
    ] = False
    coordinator_address: Annotated[
        str | None,
        typer.Option(help="The address of process 0 for the others.", metavar="HOST:PORT"),
    ] = None
    process_count: Annotated[int | None, typer.Option(help="Number of processes.")] = None
    process_index: Annotated[int | None, typer.Option(help="This process's number, from 0.")] = None
    # JAX's own default, 300 s, applies if it is not given.
    initialization_timeout: Annotated[
        int | None,
        typer.Option(min=1, help="Seconds to wait for the other processes.", show_default="300"),
    ] = None

    def __post_init__(self) -> None:
        """Refuses flags that do not fit together before any gin file is read.

        Raises:
          UserError: if the flags do not say where the first process is.
        """
        incomplete = self.coordinator_address is None or self.process_index is None
        if (self.process_count or 1) > 1 and incomplete and not self.multiprocess_gpu:
            raise UserError(
                f"--process_count={self.process_count} needs --coordinator_address and"
                " --process_index.",
                where="--process_count",
                fix="Give all three; or add --multiprocess_gpu where JAX can detect the cluster.",
            )

    def joined(self) -> contextlib.AbstractContextManager[None]:
        """A context in which this process belongs to the run that flags or environment describe."""
        from t0repro.partitioning import processes

        return processes.joined(
            processes.Asked(
                self.coordinator_address,
                self.process_count,
                self.process_index,
                self.initialization_timeout,
                detect=self.multiprocess_gpu,
            )
        )


# ---- `--tracker` of the commands that train or evaluate: what a tracker receives about each ------


TRACKER_HELP = (
    "Send metrics, settings and files to this tracker too; repeatable. Needs the extra of its name."
)
Trackers = Annotated[list[TrackerName] | None, typer.Option("--tracker", help=TRACKER_HELP)]

_OF_TRAINING = (
    "config.gin",
    "operative_config.gin",
    "model-info.txt",
    "commands/command*",
    "run_state.json",
)
_OF_EVALUATION = ("report.*", "*_eval/operative_config.gin", "*_eval/provenance.json")


def tracked_training(
    names: Sequence[TrackerName] | None, model_dir: Path, config: RunConfig | None
) -> contextlib.AbstractContextManager[None]:
    """Tracks what the block writes into model_dir; the settings are the configuration's."""
    settings: dict[str, Any] = json.loads(without_passwords(config.to_json())) if config else {}
    # Leave out each value's origin: it is longer than the value, and the gin files have it.
    settings.pop("provenance", None)
    return tracked(names or (), TrackedRun(model_dir, settings, _OF_TRAINING))


def tracked_evaluation(
    names: Sequence[TrackerName] | None, out: Path, checkpoint: str, mixture: str, settings: Any
) -> contextlib.AbstractContextManager[None]:
    """Tracks what the block writes into an evaluation's folder; `settings` is a dataclass."""
    about = {
        "checkpoint": without_passwords(checkpoint),
        "mixture": mixture,
        **dataclasses.asdict(settings),
    }
    return tracked(names or (), TrackedRun(out, about, _OF_EVALUATION))


# ---- The head of an evaluation's report ----------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class ReportHead:
    """How a report names its run, and which prompts count as trained on."""

    HEADING: ClassVar = "The report"

    label: Annotated[str, typer.Option(help="Name of the run in the report.")] = "jax"
    title: Annotated[str, typer.Option(help="Heading of the report.")] = "Rank evaluation"
    train_mixture: Annotated[
        list[str] | None,
        typer.Option(
            help="A mixture that was trained on: its prompts do not count as held out; repeatable."
        ),
    ] = None
    resamples: Resamples = 4000


# ---- Groups of options that several commands share, each defined once as a dataclass -------------

# A command takes such a dataclass as a parameter; `with_groups` gives the command an option for
# each field, in the parameter's place, and hands it the filled dataclass. A group's `HEADING`, if
# it has one, stands above its options in the help.


def with_groups(command: Callable[..., Any]) -> Callable[..., Any]:
    """A command that Typer can read: parameters that are dataclasses become their fields.

    The dataclasses' fields must have defaults, and the annotations that Typer takes.
    """
    types = typing.get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {
        name: type_ for name, type_ in types.items() if dataclasses.is_dataclass(type_)
    }

    @functools.wraps(command)
    def wrapped(**values: Any) -> Any:
        for name, group in groups.items():
            fields = [field.name for field in dataclasses.fields(group)]
            values[name] = group(**{field: values.pop(field) for field in fields})
        return command(**values)

    parameters = [
        parameter
        for name, given in inspect.signature(command).parameters.items()
        for parameter in (
            _options(groups[name]) if name in groups else [given.replace(annotation=types[name])]
        )
    ]
    # Typer takes the order from one and the types from the other.
    wrapped.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportAttributeAccessIssue]
    wrapped.__annotations__ = {each.name: each.annotation for each in parameters}
    return wrapped


def _options(group: Any) -> Iterator[inspect.Parameter]:
    types = typing.get_type_hints(group, include_extras=True)
    for field in dataclasses.fields(group):
        # The heading is that of the class that declares the field, not of one that inherits it.
        (owner,) = [
            each for each in group.__mro__ if field.name in vars(each).get("__annotations__", ())
        ]
        # Copied, because in a command without the group the same option has no heading.
        option = copy.copy(types[field.name].__metadata__[0])
        option.rich_help_panel = vars(owner).get("HEADING", option.rich_help_panel)
        yield inspect.Parameter(
            field.name,
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
            default=field.default,
            annotation=Annotated[types[field.name].__origin__, option],
        )
