"""`t0repro rank-eval`: evaluates a mixture with one checkpoint and writes a report."""

from __future__ import annotations

import enum
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from t0repro.words import counted

if TYPE_CHECKING:
    from t0repro.config.run_config import DType
    from t0repro.evaluation.rank_eval import Outcome


class Modes(enum.Enum):
    """What is done with a mixture's tasks: answers are ranked, other tasks are decoded."""

    rank = "rank"
    both = "rank,generate"
    generate = "generate"


class Activation(enum.Enum):
    """Types of activations."""

    float32 = "float32"
    bfloat16 = "bfloat16"


class Normalization(enum.Enum):
    """What a score may be divided by."""

    none = "none"
    target_length = "target_length"


class Extra(enum.Enum):
    """Definitions of a score that can be reported beside T0's."""

    calibrated = "calibrated"


def rank_eval(
    checkpoint: Annotated[
        str, typer.Option(help="A checkpoint of any format that t0repro convert reads.")
    ],
    mixture: Annotated[str, typer.Option(help="A mixture, or a task, that ranks answers.")],
    out: Annotated[Path, typer.Option(help="Folder for scores and report.")],
    module_import: Annotated[
        list[str] | None, typer.Option(help="A module that registers the tasks; repeatable.")
    ] = None,
    split: Annotated[str, typer.Option(help="Split of every task.")] = "validation",
    modes: Annotated[
        Modes, typer.Option(help="generate decodes the tasks that have no answer choices.")
    ] = Modes.rank,
    step: Annotated[int | None, typer.Option(help="Step of the checkpoint; the latest.")] = None,
    data: Annotated[
        Path | None, typer.Option(help="Folder of the datasets; T0REPRO_DATA_DIR by default.")
    ] = None,
    cache_dir: Annotated[
        Path | None, typer.Option(help="Read the tasks from this SeqIO cache.")
    ] = None,
    at_hand: Annotated[
        bool, typer.Option("--at-hand", help="Leave out tasks whose rows are not here, and say so.")
    ] = False,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Evaluate a sample: the most inputs of a task.")
    ] = None,
    inputs_length: Annotated[int, typer.Option(min=1, help="Tokens of an input.")] = 1024,
    targets_length: Annotated[
        int, typer.Option(min=1, help="Tokens of a choice, or of what is decoded.")
    ] = 256,
    tokens_per_batch: Annotated[
        int | None, typer.Option(min=1, help="Input tokens of a batch; what suits the device.")
    ] = None,
    activation: Annotated[
        Activation | None, typer.Option(help="Type of activations; float32 on CPU by default.")
    ] = None,
    normalize: Annotated[
        Normalization, typer.Option(help="target_length is reported beside T0's definition, none.")
    ] = Normalization.none,
    also: Annotated[
        list[Extra] | None,
        typer.Option(help="Contextual calibration, reported beside T0's definition."),
    ] = None,
    label: Annotated[str, typer.Option(help="What to call the run.")] = "jax",
    title: Annotated[str, typer.Option(help="Heading of the report.")] = "Rank evaluation",
    train_mixture: Annotated[
        list[str] | None,
        typer.Option(help="What was trained on: its prompts are not held out; repeatable."),
    ] = None,
    resamples: Annotated[int, typer.Option(help="Bootstrap resamples.", min=100)] = 1000,
) -> None:
    """Score every answer choice of a mixture, rank them, and write a report.

    Killed and started again, it goes on where it was. T0's definition is always the one reported
    first: the sum of log-likelihoods of a choice's tokens, EOS included.

    Example: t0repro rank-eval --checkpoint runs/demo/model --mixture demo_eval_score_eval
    --module_import t0repro.tasks.demo --out runs/demo/rank_eval
    """
    extras = [each.value for each in also or ()]
    if normalize is not Normalization.none:
        extras.insert(0, normalize.value)
    if data is not None:
        os.environ["T0REPRO_DATA_DIR"] = str(data)

    from t0repro.evaluation.evaluation_folder import Settings
    from t0repro.evaluation.opened import open_checkpoint
    from t0repro.evaluation.rank_eval import rank_eval as evaluate
    from t0repro.locks import folder_lock
    from t0repro.reports.prompts import load_prompts, training_tasks
    from t0repro.reports.report_page import brief_page
    from t0repro.reports.results import write_results
    from t0repro.reports.terminal import print_page

    prompts = load_prompts(module_import or (), into_seqio=True)
    trained = training_tasks(train_mixture or ())
    _add_cache(cache_dir)
    settings = Settings(
        split=split,
        limit=limit,
        lengths={"inputs": inputs_length, "targets": targets_length},
        activation=activation.value if activation else _usual_activation(),
        tokens_per_batch=tokens_per_batch,
        use_cached=cache_dir is not None,
        calibrated="calibrated" in extras,
        modes=tuple(modes.value.split(",")),
        at_hand=at_hand,
    )
    # The report reads what the evaluation wrote, so one lock has to cover both.
    with folder_lock(out, "rank evaluation", fix="Wait for it to end, or choose another --out."):
        opened = open_checkpoint(checkpoint, step, settings.activation)
        outcome = evaluate(opened, mixture, out, settings)
        report, paths = write_results(
            outcome,
            opened.step,
            out,
            prompts,
            trained,
            label=label,
            title=title,
            resamples=resamples,
            extras=extras,
        )
    print_page(brief_page(report))
    _print_speed(outcome)
    for path in paths:
        typer.echo(f"wrote {path}")


def _usual_activation() -> DType:
    import jax

    return "float32" if jax.default_backend() == "cpu" else "bfloat16"


def _add_cache(folder: Path | None) -> None:
    if folder is not None:
        import seqio

        seqio.add_global_cache_dirs([str(folder)])


def _print_speed(outcome: Outcome) -> None:
    if outcome.scored:
        typer.echo(
            f"Scored {counted(outcome.scored, 'pair')} in {outcome.seconds:.1f} s"
            f" ({outcome.scored / outcome.seconds:.1f}/s), {100 * outcome.padding:.1f}% padding,"
            f" {counted(outcome.shapes, 'shape')}."
        )
    if outcome.decoded:
        typer.echo(
            f"Decoded {counted(outcome.decoded, 'input')} in {outcome.decoding_seconds:.1f} s"
            f" ({outcome.decoded / outcome.decoding_seconds:.1f}/s)."
        )
