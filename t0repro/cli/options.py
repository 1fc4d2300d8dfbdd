"""Options that several commands share, alone or in groups that are dataclasses."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import typer

from t0repro.cli.commands import More
from t0repro.cloud.trackers.follower import track
from t0repro.cloud.trackers.table import TrackerName
from t0repro.cloud.trackers.tracker import TrackedRun
from t0repro.errors import UserError
from t0repro.words import remove_passwords

if TYPE_CHECKING:
    from t0repro.config.run import Run
    from t0repro.reports.make_report import ReportOptions
    from t0repro.reports.prompts import PromptInfo


DEFAULT_MODULE = "t0repro.tasks.t0"

_MODULES_HELP = "Modules that register tasks, separated by commas; repeatable."
Modules = Annotated[
    list[str] | None,
    typer.Option("--module_import", help=_MODULES_HELP),
]
ModulesOrT0 = Annotated[
    list[str] | None,
    typer.Option(
        "--module_import",
        help=_MODULES_HELP,
        show_default=DEFAULT_MODULE,
    ),
]
Templates = Annotated[
    list[Path] | None,
    typer.Option(
        help="A file of your own prompts, in promptsource's YAML format; repeatable. Then no module"
        " is imported by default. T0REPRO_TEMPLATES names further files."
    ),
]
SkipMissing = Annotated[
    bool,
    typer.Option(
        "--skip_missing", help="Leave out tasks whose rows or caches are missing, and list them."
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


# ---- How much is printed ------------------------------------------------------------------------


_STANDARD_ERROR = "Accepted for T5X's commands: the log always goes to standard error."
_THRESHOLDS = ("debug", "info", "warning", "error", "fatal")


def _print_log(level: int | None) -> int | None:
    """Prints records up to absl's level: -1 warnings, 0 information, 1 and above everything."""
    if level is not None:
        from absl import logging

        # absl's own handler, which prefixes each line with level, time, file and line.
        logging.use_absl_handler()
        logging.set_verbosity(level)
    return level


def _threshold(name: str | None) -> str | None:
    """Takes the name of a level, as absl does."""
    if name is not None and name.lower() not in _THRESHOLDS:
        raise typer.BadParameter(f"{name!r} is not one of {', '.join(_THRESHOLDS)}.")
    return name


@dataclasses.dataclass(frozen=True)
class LogOptions:
    """How much of the libraries' log is printed."""

    verbosity: Annotated[
        int | None,
        typer.Option(
            "-v",
            "--verbosity",
            "--v",
            callback=_print_log,
            metavar="LEVEL",
            help="Print the log of all libraries: -1 warnings, 0 information, 1 everything.",
            show_default="only what matters to a user",
        ),
    ] = None
    # The log always goes to standard error, so these have no effect.
    alsologtostderr: Annotated[
        bool, typer.Option("--alsologtostderr", hidden=True, help=_STANDARD_ERROR)
    ] = False
    logtostderr: Annotated[
        bool, typer.Option("--logtostderr", hidden=True, help=_STANDARD_ERROR)
    ] = False
    stderrthreshold: Annotated[
        str | None, typer.Option(hidden=True, callback=_threshold, help=_STANDARD_ERROR)
    ] = None


# ---- What computes attention ---------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class AttentionOptions:
    """What computes large attention, if not what suits the device."""

    HEADING: ClassVar = More("Attention")

    # Left out of comparisons: it changes no processes.
    attention: Annotated[
        Literal["full", "blocks", "kernel"] | None,
        typer.Option(
            help="Compute attention by full matrices, by blocks of queries, or by the device's"
            " kernel without comparing it first.",
            show_default="a kernel that agrees with full matrices, or blocks",
        ),
    ] = dataclasses.field(default=None, compare=False)

    def __post_init__(self) -> None:
        """Sets the variable that t0repro.model.attention and the processes started here read."""
        if self.attention is not None:
            os.environ["T0REPRO_ATTENTION"] = self.attention


# ---- The flags by which a command becomes one process of several; T5X's, for all commands --------


@dataclasses.dataclass(frozen=True)
class ProcessOptions(AttentionOptions):
    """T5X's flags for several processes; without them the environment decides."""

    HEADING: ClassVar = More("Several processes")

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
        super().__post_init__()
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
        from t0repro.partitioning import joining

        return joining.join_processes(
            joining.ProcessFlags(
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


def track_training(
    names: Sequence[TrackerName] | None, model_dir: Path, config: Run | None
) -> contextlib.AbstractContextManager[None]:
    """Tracks what the block writes into model_dir; the settings are the configuration's."""
    settings: dict[str, Any] = json.loads(remove_passwords(config.to_json())) if config else {}
    # Leave out each value's origin: it is longer than the value, and the gin files have it.
    settings.pop("provenance", None)
    return track(names or (), TrackedRun(model_dir, settings, _OF_TRAINING))


def track_evaluation(
    names: Sequence[TrackerName] | None, out: Path, checkpoint: str, mixture: str, settings: Any
) -> contextlib.AbstractContextManager[None]:
    """Tracks what the block writes into an evaluation's folder; `settings` is a dataclass."""
    about = {
        "checkpoint": remove_passwords(checkpoint),
        "mixture": mixture,
        **dataclasses.asdict(settings),
    }
    return track(names or (), TrackedRun(out, about, _OF_EVALUATION))


# ---- The head of an evaluation's report ----------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class ReportHead:
    """How a report names its run, and which prompts count as trained on."""

    HEADING: ClassVar = "The report"

    label: Annotated[
        str | None,
        typer.Option(help="Name of the run in the report.", show_default="the checkpoint's name"),
    ] = None
    title: Annotated[str, typer.Option(help="Heading of the report.")] = "Rank evaluation"
    train_mixture: Annotated[
        list[str] | None,
        typer.Option(
            help="A mixture that was trained on: its prompts do not count as held out; repeatable."
        ),
    ] = None
    resamples: Resamples = 4000

    def report_options(
        self,
        prompts: Mapping[str, PromptInfo],
        datasets: Iterable[str] = (),
        seed: int = 0,
        **more: Any,
    ) -> ReportOptions:
        """The options of the report.

        Args:
          prompts: task name -> its prompt.
          datasets: labels of datasets that were trained on besides the mixtures'; no module need
            register their tasks.
          seed: of the intervals.
          **more: further options.
        """
        from t0repro.reports.make_report import ReportOptions
        from t0repro.reports.prompts import training_datasets, training_tasks
        from t0repro.reports.statistics import Bootstrap

        trained = training_tasks(self.train_mixture or ())
        return ReportOptions(
            title=self.title,
            bootstrap=Bootstrap(replicates=self.resamples, seed=seed),
            # None if nothing was named: then it is unknown which datasets are held out.
            training_datasets=training_datasets(trained, prompts) | set(datasets) or None,
            training_tasks=trained,
            **more,
        )
