"""`t0repro rank-eval`: evaluates a mixture with one checkpoint and writes a report."""

from __future__ import annotations

import contextlib
import enum
import functools
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from t0repro.cli.options import (
    DType,
    Label,
    ModulesOrT0,
    ProcessOptions,
    Resamples,
    Title,
    Trackers,
    TrainMixtures,
    modules_or_t0,
    tracked_evaluation,
    with_groups,
)
from t0repro.cli.results import echo
from t0repro.cli.spelling import output
from t0repro.words import counted

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from t0repro.evaluation.evaluation_folder import EvaluationSettings
    from t0repro.reports.report import Report
    from t0repro.runs.rank_eval import Outcome


class Extra(enum.Enum):
    """Definitions of a score that can be reported beside T0's."""

    calibrated = "calibrated"


_Checkpoint = Annotated[
    str, typer.Option(help="A checkpoint in any format that t0repro convert reads.")
]
_Mixture = Annotated[str, typer.Option(help="A mixture, or a task.")]
_Out = Annotated[Path, typer.Option(callback=output, help="Folder for scores and report.")]
_Split = Annotated[str, typer.Option(help="The split of every task.")]
_Modes = Annotated[
    Literal["rank", "rank,generate", "generate"],
    typer.Option(help="rank answer choices; generate decodes the tasks that have none."),
]
_Step = Annotated[
    int | None, typer.Option(help="Step of the checkpoint.", show_default="the latest")
]
_Data = Annotated[
    Path | None,
    typer.Option(help="Folder of the datasets.", show_default="T0REPRO_DATA_DIR"),
]
_CacheDir = Annotated[Path | None, typer.Option(help="Read the tasks from this SeqIO cache.")]
_AtHand = Annotated[
    bool, typer.Option("--at_hand", help="Leave out tasks whose rows are missing, and list them.")
]
_Limit = Annotated[
    int | None, typer.Option(min=1, help="Evaluate a random sample of this many inputs per task.")
]
_InputsLength = Annotated[int, typer.Option(min=1, help="Maximum tokens of an input.")]
_TargetsLength = Annotated[
    int, typer.Option(min=1, help="Maximum tokens of a choice, or of decoded text.")
]
_TokensPerBatch = Annotated[
    int | None,
    typer.Option(
        min=1, help="Input tokens per batch of a device.", show_default="what suits the device"
    ),
]
_ModelParallelism = Annotated[
    int, typer.Option(min=1, help="Devices that shard each layer; the rest shard the rows.")
]
_Activation = Annotated[
    DType | None,
    typer.Option(help="Type of activations.", show_default="float32 on CPU, else bfloat16"),
]
_Normalize = Annotated[
    Literal["none", "target_length"],
    typer.Option(
        help="target_length also reports scores divided by the choice's number of tokens; T0's"
        " definition does not divide."
    ),
]
_DryRun = Annotated[
    bool,
    typer.Option("--dry_run", help="Only check the tasks and their split. Nothing is written."),
]
_Format = Annotated[
    Literal["lm-eval"] | None,
    typer.Option(
        "--format", help="Also write lm-evaluation-harness's results and samples, to OUT/lm_eval."
    ),
]
_Also = Annotated[
    list[Extra] | None,
    typer.Option(help="Also report contextual calibration (Zhao et al. 2021)."),
]


@with_groups
def rank_eval(
    checkpoint: _Checkpoint,
    mixture: _Mixture,
    out: _Out,
    processes: ProcessOptions,
    module_import: ModulesOrT0 = None,
    split: _Split = "validation",
    modes: _Modes = "rank",
    step: _Step = None,
    data: _Data = None,
    cache_dir: _CacheDir = None,
    at_hand: _AtHand = False,
    limit: _Limit = None,
    # T0's own lengths.
    inputs_length: _InputsLength = 1024,
    targets_length: _TargetsLength = 256,
    tokens_per_batch: _TokensPerBatch = None,
    model_parallelism: _ModelParallelism = 1,
    activation: _Activation = None,
    normalize: _Normalize = "none",
    also: _Also = None,
    also_format: _Format = None,
    label: Label = "jax",
    title: Title = "Rank evaluation",
    train_mixture: TrainMixtures = None,
    resamples: Resamples = 4000,
    tracker: Trackers = None,
    dry_run: _DryRun = False,
) -> None:
    """Score every answer choice of a mixture, rank them, and write a report.

    If it is interrupted, starting it again continues where it stopped. T0's definition of a score
    always comes first: the sum of the log-likelihoods of a choice's tokens, EOS included.

    Example: t0repro rank-eval --checkpoint runs/demo/model --mixture demo_eval_score_eval
    --module_import t0repro.tasks.demo --out runs/demo/rank_eval
    """
    echo("importing JAX, and the tasks with SeqIO ...", err=True)
    # Tasks look for the variable when their rows are read.
    if data is not None:
        os.environ["T0REPRO_DATA_DIR"] = str(data)
    from t0repro.evaluation.evaluation_folder import EvaluationSettings

    with processes.joined():
        from t0repro.partitioning.processes import is_first

        # Only now that the processes have joined: the default activation asks JAX for its backend.
        settings = EvaluationSettings(
            split=split,
            limit=limit,
            lengths={"inputs": inputs_length, "targets": targets_length},
            activation=activation or _default_activation(),
            tokens_per_batch=tokens_per_batch,
            use_cached=cache_dir is not None,
            calibrated=bool(also),
            modes=tuple(modes.split(",")),
            at_hand=at_hand,
        )
        extras = [normalize, *(extra.value for extra in also or ())]
        # This registers the tasks, so it comes before the mixture is looked up.
        modules = modules_or_t0(module_import)
        write = _writer(modules, train_mixture or (), label, title, resamples, extras)
        _add_cache(cache_dir)
        if dry_run:
            _check(mixture, settings)
            return
        tracked = tracked_evaluation(tracker, out, checkpoint, mixture, settings)
        # Of several processes, one speaks to the trackers.
        with tracked if is_first() else contextlib.nullcontext():
            _evaluate(
                checkpoint, step, model_parallelism, mixture, out, settings, write, also_format
            )


def _writer(
    modules: Sequence[str],
    mixtures: Sequence[str],
    label: str,
    title: str,
    resamples: int,
    extras: Sequence[str],
) -> Callable[..., tuple[Report, list[Path]]]:
    """Registers the modules' tasks; returns `write_results` for a report with these options."""
    from t0repro.reports.prompts import load_prompts, training_tasks
    from t0repro.runs.rank_eval import write_results

    return functools.partial(
        write_results,
        prompts=load_prompts(modules, into_seqio=True),
        trained=training_tasks(mixtures),
        label=label,
        title=title,
        resamples=resamples,
        extras=[name for name in extras if name != "none"],
    )


def _evaluate(
    checkpoint: str,
    step: int | None,
    model_parallelism: int,
    mixture: str,
    out: Path,
    settings: EvaluationSettings,
    write: Callable[..., tuple[Report, list[Path]]],
    also_format: str | None,
) -> None:
    from t0repro.evaluation.opened import open_checkpoint
    from t0repro.locks import folder_lock
    from t0repro.partitioning.processes import held_by_first, is_first, output_folder
    from t0repro.progress import working
    from t0repro.reports.render import print_page
    from t0repro.reports.report_page import brief_page
    from t0repro.runs.rank_eval import rank_eval as evaluate

    # The report reads what the evaluation wrote, so one lock has to cover both.
    fix = "Wait for it to end, or choose another --out."
    with held_by_first(lambda: folder_lock(out, "rank evaluation", fix=fix)):
        out = output_folder(out, resumed=True)
        with working(f"reading {checkpoint}"):
            opened = open_checkpoint(checkpoint, step, settings.activation, model_parallelism)
        outcome = evaluate(opened, mixture, out, settings)
        report, paths = write(outcome, opened.step, out)
        # Of several processes, one writes.
        if also_format is not None and is_first():
            from t0repro.lm_eval.results import export_results

            folder = out / "lm_eval"
            paths.append(export_results(outcome.folder, opened.step, settings.split, folder))
    # In brief: everything is in the files.
    print_page(brief_page(report))
    _print_speed(outcome)
    if report.provenance.scores_sha256:
        typer.echo(f"SHA-256 of the scores: {report.provenance.scores_sha256}")
    for path in paths:
        echo(f"wrote {path}")


def _check(mixture: str, settings: EvaluationSettings) -> None:
    """Checks what is to be evaluated; the checkpoint may not be there yet."""
    from t0repro.evaluation.selection import select_tasks

    cached, at_hand = settings.use_cached, settings.at_hand
    selected = select_tasks(
        mixture, settings.split, settings.modes, use_cached=cached, at_hand=at_hand
    )
    count = counted(len(selected.ranked) + len(selected.generated), "task")
    typer.echo(f"{count} of {mixture} with the split {settings.split!r}")


def _default_activation() -> DType:
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
            f" {counted(outcome.shapes, 'batch shape')}."
        )
    if outcome.decoded:
        typer.echo(
            f"Decoded {counted(outcome.decoded, 'input')} in {outcome.decoding_seconds:.1f} s"
            f" ({outcome.decoded / outcome.decoding_seconds:.1f}/s)."
        )
