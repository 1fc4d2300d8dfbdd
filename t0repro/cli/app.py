"""The command `t0repro`.

Command modules import heavy packages inside their functions, so that --help answers at once.
"""

from __future__ import annotations

import functools
import importlib.metadata
import sys
from typing import Annotated, Any

import typer

from t0repro.cli import (
    checkpoint,
    encode,
    jobs,
    parity,
    previews,
    rank_eval,
    report,
    run_modes,
    tasks,
    vertex,
)
from t0repro.cli.gate import gate, use_huge_pages_where_faster
from t0repro.cli.options import AsJson
from t0repro.cli.results import print_json
from t0repro.cli.spelling import canonical, check_inputs, show_canonical, with_t5x_overrides
from t0repro.errors import t5x_command
from t0repro.progress import working

app = typer.Typer(
    name="t0repro",
    help="The T0 recipe on Mesh TensorFlow and JAX, and T5X's gin files: checkpoints, reports and"
    " comparisons. To run T0's own training and evaluation commands, use t5_mesh_transformer.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,  # `gate` prints errors instead
    # Options may have dashes, as Typer makes them, or underscores, as t5's flags have them.
    context_settings={"token_normalize_func": canonical},
    epilog="Example: t0repro doctor",
)


@app.command()
def doctor(as_json: AsJson = False) -> None:
    """Check versions, devices, Mesh TensorFlow, extras and data; exit 1 if something is broken.

    Example: t0repro doctor --json
    """
    from t0repro import doctor as checks

    with working("checking JAX, and Mesh TensorFlow by a training step"):
        diagnosis = checks.diagnose()
    if as_json:
        print_json(diagnosis.to_json())
    else:
        typer.echo(diagnosis.to_text())
    if diagnosis.broken or not diagnosis.works:
        raise typer.Exit(1)


# In the order in which `--help` lists them.
app.command()(previews.explain)
app.command()(run_modes.train)
# It passes on options that it does not define to the command that --run_mode names.
app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(
    run_modes.run
)
# The words after the two dashes are the command to start.
app.command(context_settings={"allow_extra_args": True})(jobs.launch)
app.command()(tasks.cache)
app.command()(checkpoint.convert)
app.command()(parity.parity)
app.command()(previews.precompile)
app.command("rank-eval")(rank_eval.rank_eval)
app.command()(report.compare)
app.command()(report.replay)
app.command()(report.runs)
app.command()(report.plot)
app.command("eval")(run_modes.evaluate)
app.command()(run_modes.infer)
app.command()(encode.encode)
checkpoints = typer.Typer(
    name="checkpoint",
    help="Inspect, compare and verify checkpoints; download released ones.",
    no_args_is_help=True,
    epilog="Example: t0repro checkpoint inspect runs/demo/model",
)
checkpoints.command()(checkpoint.inspect)
checkpoints.command()(checkpoint.diff)
checkpoints.command()(checkpoint.verify)
checkpoints.command()(checkpoint.released)
checkpoints.command()(checkpoint.fetch)
checkpoints.command()(checkpoint.plan)
app.add_typer(checkpoint.adapters)
app.add_typer(checkpoints)
app.add_typer(jobs.app)
app.add_typer(report.app)
app.add_typer(tasks.app)
app.add_typer(vertex.app)

# What to print after Ctrl-C for commands that keep finished work; all others start over.
_HOW_TO_CONTINUE = {
    "train": "Start the same command again: training continues from the latest checkpoint.",
    "cache": "Start the same command again: tasks that are cached already are kept.",
    "convert": "Start the same command again: tensors that are written already are kept.",
    "rank-eval": "Start the same command again: pairs that are scored already are kept.",
    "eval": "Start the same command again: checkpoints that are evaluated already are skipped.",
    "infer": "Start the same command again: chunks that are written already are kept.",
    "encode": "Start the same command again: texts that are encoded already are kept.",
    "checkpoint": "Start the same command again: files that are downloaded already are kept.",
    "aux": "Start the same command again: what is done already is kept.",
    "vertex": "A submitted job continues: `t0repro vertex status` shows and records it.",
    "tasks": "Start the same command again: files that are downloaded already are kept.",
}

# A closed pipe (`| head`) interrupts the work of these commands.
_LONG_WORK = frozenset(
    (
        *("train", "run", "launch", "cache", "convert", "rank-eval", "eval", "infer", "encode"),
        *("aux", "parity"),
    )
)

# These compute for long, unless one of these options is given.
_COMPUTE = frozenset(("train", "run", "rank-eval", "eval", "infer", "encode"))
_ONLY_LOOK = frozenset(("--help", "--dry_run", "--dry-run"))

# Those whose flags are T5X's.
_T5X_MODES = frozenset(("train", "eval", "infer", "precompile", "run"))


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
    # Keyed by the first word: a group's commands all continue in the same way.
    settings.how_to_continue = _HOW_TO_CONTINUE.get(
        context.invoked_subcommand or "", settings.how_to_continue
    )
    # Messages then name T5X's flags instead of t5_mesh_transformer's.
    if context.invoked_subcommand in _T5X_MODES:
        context.with_resource(t5x_command())
    works = context.invoked_subcommand in _LONG_WORK
    # A pipe that `train --help | head` closes interrupts no work.
    settings.long_work = works and "--help" not in sys.argv


@functools.cache
def command() -> Any:
    """The commands as Typer builds them from their functions, whose signatures it reads each time.

    Their help shows the names that t5's flags have.
    """
    built = typer.main.get_command(app)
    show_canonical(built)
    check_inputs(built)
    return built


def main() -> None:
    """Runs the command line in sys.argv and exits."""
    # First of all, since it may start this process again.
    if _COMPUTE.intersection(sys.argv[1:2]) and not _ONLY_LOOK.intersection(sys.argv):
        use_huge_pages_where_faster(sys.argv[2:])
    with gate("t0repro") as settings:
        command()(args=with_t5x_overrides(sys.argv[1:]), obj=settings)
