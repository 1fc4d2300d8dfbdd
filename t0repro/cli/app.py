"""The command `t0repro`; a command's module is imported when the command line names it."""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import signal
import sys
from typing import Annotated, Any

import typer

from t0repro.cli.commands import HELP, App, Group, Loaded, load, show_canonical
from t0repro.cli.gate import gate, use_huge_pages_where_faster
from t0repro.cli.spelling import T5X_NAMES, canonical, translate_t5x_overrides
from t0repro.training.preemption import resumable
from t0repro.words import shown_as


@dataclasses.dataclass(frozen=True)
class Entry:
    """A command, and what is known of it before its module is imported.

    Attributes:
      place: `MODULE:NAME` of its function or `App`, in this package.
      summary: One line for the list of commands; "" leaves the command out of it.
      keeps: What a command that is started again after Ctrl-C keeps; "" if it starts over.
      is_long: Whether a closed pipe (`| head`) interrupts its work.
      is_t5x: Whether its flags are T5X's, so that messages name those.
      settings: More for Click.
    """

    place: str
    summary: str
    keeps: str = ""
    is_long: bool = False
    is_t5x: bool = False
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)


_DOWNLOADS = "files that are downloaded already are kept"
# By the headings of the help.
_COMMANDS = {
    "Data": {
        "tasks": Entry("tasks:app", "List, show and check prompted tasks.", _DOWNLOADS),
        "browse": Entry("browse:browse", "See, edit and score prompts in a browser."),
        "cache": Entry(
            "cache:cache",
            "Cache prompted tasks in SeqIO's format.",
            "tasks that are cached already are kept",
            is_long=True,
        ),
    },
    "Train": {
        "train": Entry(
            "run_modes:train",
            "Train what T5X's gin files describe.",
            "training continues from the latest checkpoint",
            is_long=True,
            is_t5x=True,
        ),
        "replay": Entry("training_runs:replay", "Recompute an update that went NaN or Inf."),
        "adapters": Entry("adapters:app", "Merge adapters into their base, and get it back."),
    },
    "Evaluate": {
        "rank-eval": Entry(
            "rank_eval:rank_eval",
            "Rank the answer choices of a mixture; write a report.",
            "pairs that are scored already are kept",
            is_long=True,
        ),
        "reproduce": Entry(
            "reproduce:reproduce",
            "Evaluate a released checkpoint as T0 was: Figure 4.",
            "files, rows and scores that are here already are kept",
            is_long=True,
        ),
        "eval": Entry(
            "run_modes:evaluate",
            "Compute the metrics of SeqIO tasks, as in T5X.",
            "checkpoints that are evaluated already are skipped",
            is_long=True,
            is_t5x=True,
        ),
        "infer": Entry(
            "run_modes:infer",
            "Write predictions or scores, as in T5X.",
            "chunks that are written already are kept",
            is_long=True,
            is_t5x=True,
        ),
        "encode": Entry(
            "encode:encode",
            "Write a T5 encoder's outputs for the lines of a file.",
            "texts that are encoded already are kept",
            is_long=True,
        ),
        "report": Entry("report:app", "Write and read reports of rank evaluations."),
        "compare": Entry("compare:compare", "Compare runs: losses, scores or accuracies."),
    },
    "Checkpoints": {
        "convert": Entry(
            "convert:convert",
            "Convert between Mesh TensorFlow, T5X, JAX and HF.",
            "tensors that are written already are kept",
            is_long=True,
        ),
        "checkpoint": Entry(
            "checkpoint:app", "Inspect, compare, verify and download checkpoints.", _DOWNLOADS
        ),
    },
    "Inspect": {
        "explain": Entry("explain:explain", "Show every value of a run and where it was set."),
        "precompile": Entry(
            "precompile:precompile", "Tell whether a run fits, and how fast it is.", is_t5x=True
        ),
        "parity": Entry("parity:parity", "Compare both stacks, tensor by tensor.", is_long=True),
        "runs": Entry("training_runs:runs", "List training runs: state, step, loss, speed."),
        "plot": Entry("training_runs:plot", "Draw a metric of several training runs."),
        "doctor": Entry("doctor:doctor", "Check what is installed, devices and data."),
    },
    "Scale": {
        "launch": Entry(
            "launch:launch",
            "Start a command as several processes on a cluster.",
            is_long=True,
            # From its first word on, the command to start, two dashes or not.
            settings={
                "context_settings": {"allow_extra_args": True, "allow_interspersed_args": False}
            },
        ),
        "aux": Entry(
            "aux_jobs:app",
            "Evaluate or fine-tune every checkpoint of a run.",
            "what is done already is kept",
            is_long=True,
            is_t5x=True,
        ),
        "vertex": Entry("vertex:app", "Submit and follow jobs on Vertex AI."),
        # It passes on options that it does not define to the command that --run_mode names.
        "run": Entry(
            "run_modes:run",
            "",
            is_long=True,
            is_t5x=True,
            settings={
                "context_settings": {"allow_extra_args": True, "ignore_unknown_options": True}
            },
        ),
    },
}
_ENTRIES = {name: entry for group in _COMMANDS.values() for name, entry in group.items()}

# These compute for long, unless one of these options is given.
_COMPUTE = frozenset(("train", "run", "rank-eval", "reproduce", "eval", "infer", "encode"))
_ONLY_LOOK = frozenset(("--help", "-h", "--dry_run", "--dry-run"))


class LazyGroup(Group):
    """The commands of `_COMMANDS`, each imported when it is named."""

    def __init__(self, **settings: Any):
        super().__init__(**{**settings, "commands": Loaded(_load, _ENTRIES)})

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Lists the commands under their headings, without importing them."""
        del ctx
        for heading, entries in _COMMANDS.items():
            with formatter.section(heading):
                listed = {name: entry.summary for name, entry in entries.items() if entry.summary}
                # One column for all headings.
                formatter.write_dl([(f"{name:10}", summary) for name, summary in listed.items()])


def _load(name: str) -> Any:
    entry = _ENTRIES[name]
    return load(name, f"t0repro.cli.{entry.place}", **entry.settings)


app = App(
    "t0repro",
    help="The T0 recipe on Mesh TensorFlow and JAX, and T5X's gin files. T0's own commands for"
    " training and evaluation are t5_mesh_transformer's.\n\nCommands and options may be written"
    " with _ or -: --dry_run is --dry-run.",
    cls=LazyGroup,
    no_args_is_help=True,
    context_settings={
        "token_normalize_func": canonical,
        "help_option_names": HELP,
    },
    example="t0repro doctor",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"t0repro {importlib.metadata.version('t0repro')}")
        raise typer.Exit()


@app.callback()
def _global_options(
    context: typer.Context,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
    version: Annotated[
        bool,
        typer.Option(
            # Eager, so that --version works without a command.
            "--version",
            callback=_print_version,
            is_eager=True,
            help="Print the version.",
        ),
    ] = False,
) -> None:
    del version
    settings = context.obj
    settings.debug = debug
    entry = _ENTRIES[context.invoked_subcommand or "run"]
    if entry.keeps:
        settings.how_to_continue = f"Start the same command again: {entry.keeps}."
    if context.invoked_subcommand == "vertex":
        settings.how_to_continue = (
            "A submitted job continues: `t0repro vertex status` shows and records it."
        )
    # Messages then name T5X's flags instead of t5_mesh_transformer's.
    if entry.is_t5x:
        context.with_resource(shown_as(T5X_NAMES))
    if context.invoked_subcommand == "train":
        context.with_resource(resumable())
    if context.invoked_subcommand == "cache":  # ends its workers, as Ctrl-C does
        context.with_resource(resumable(128 + signal.SIGTERM))
    # A pipe that `train --help | head` closes interrupts no work.
    settings.long_work = entry.is_long and not {"-h", "--help"}.intersection(sys.argv)


@functools.cache
def command() -> Any:
    """The command line as Click runs it."""
    built = typer.main.get_command(app)
    for parameter in built.params:  # Typer adds those for completion last
        show_canonical(parameter)
    return built


def main() -> None:
    """Runs the command line in sys.argv and exits."""
    with gate("t0repro") as settings:
        # First of all, since it may start this process again.
        if _COMPUTE.intersection(sys.argv[1:2]) and not _ONLY_LOOK.intersection(sys.argv):
            use_huge_pages_where_faster(sys.argv[2:])
        arguments = translate_t5x_overrides(sys.argv[1:])
        command()(args=arguments, prog_name="t0repro", obj=settings)
