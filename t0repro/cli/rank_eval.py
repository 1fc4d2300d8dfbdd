"""`t0repro rank-eval`: evaluates a mixture with one checkpoint and writes a report."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import typer

from t0repro.buckets import check_readable
from t0repro.cli.options import (
    AsJson,
    DType,
    ModulesOrT0,
    ProcessOptions,
    ReportHead,
    Trackers,
    modules_or_t0,
    tracked_evaluation,
    with_groups,
)
from t0repro.cli.results import echo, for_people, print_json
from t0repro.cli.spelling import output, source
from t0repro.cloud.tracker import check_trackers
from t0repro.files import check_folder
from t0repro.words import counted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from t0repro.evaluation.evaluation_folder import EvaluationSettings
    from t0repro.evaluation.opened import Checkpoint
    from t0repro.reports.report import Report
    from t0repro.reports.run import PromptInfo
    from t0repro.runs.rank_eval import Outcome


class Extra(enum.Enum):
    """Definitions of a score that can be reported in addition to T0's."""

    calibrated = "calibrated"


_Checkpoint = Annotated[
    str,
    typer.Option(callback=source, help="A checkpoint in any format that t0repro convert reads."),
]
_Mixture = Annotated[str, typer.Option(help="A mixture, or a task.")]
_Out = Annotated[Path, typer.Option(callback=output, help="Folder for scores and report.")]
_Modes = Annotated[
    Literal["rank", "rank,generate", "generate"],
    typer.Option(help="rank answer choices; generate decodes the tasks that have none."),
]
_Step = Annotated[
    int | None, typer.Option(help="Step of the checkpoint.", show_default="the latest")
]
_Adapters = Annotated[
    list[str] | None,
    typer.Option(
        metavar="[LABEL=]DIR",
        help="Evaluate the checkpoint with this adapter, ours or a folder of PEFT's; repeatable."
        " The results of each are in OUT/LABEL, a comparison of several in OUT.",
        show_default="the checkpoint alone",
    ),
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
    typer.Option(
        "--dry_run", help="Only check: tasks, split, checkpoint, folder. Nothing is written."
    ),
]
_AddStep = Annotated[
    bool,
    typer.Option(
        "--add_step", help="OUT may hold this evaluation of other steps, for `report history`."
    ),
]
_Force = Annotated[bool, typer.Option("--force", help="Remove another evaluation that OUT holds.")]
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


@dataclasses.dataclass(frozen=True)
class TaskOptions:
    """Which rows of which tasks are evaluated."""

    HEADING: ClassVar = "Tasks and rows"

    module_import: ModulesOrT0 = None
    split: Annotated[str, typer.Option(help="The split of every task.")] = "validation"
    data: Annotated[
        Path | None,
        typer.Option(help="Folder of the datasets.", show_default="T0REPRO_DATA_DIR"),
    ] = None
    cache_dir: Annotated[
        Path | None, typer.Option(help="Read the tasks from this SeqIO cache.")
    ] = None
    at_hand: Annotated[
        bool,
        typer.Option("--at_hand", help="Leave out tasks whose rows are missing, and list them."),
    ] = False
    # By a hash of the input's number, so that prompts over the same rows get the same inputs.
    limit: Annotated[
        int | None,
        typer.Option(min=1, help="Evaluate a random sample of this many inputs per task."),
    ] = None
    # T0's own lengths.
    inputs_length: Annotated[int, typer.Option(min=1, help="Maximum tokens of an input.")] = 1024
    targets_length: Annotated[
        int, typer.Option(min=1, help="Maximum tokens of a choice, or of decoded text.")
    ] = 256


@dataclasses.dataclass(frozen=True)
class ComputationOptions:
    """How scores are computed."""

    HEADING: ClassVar = "Computation"

    # Counted per device, so that no batch depends on the number of devices.
    tokens_per_batch: Annotated[
        int | None,
        typer.Option(
            min=1, help="Input tokens per batch of a device.", show_default="what suits the device"
        ),
    ] = None
    model_parallelism: Annotated[
        int, typer.Option(min=1, help="Devices that shard each layer; the rest shard the rows.")
    ] = 1
    activation: Annotated[
        DType | None,
        typer.Option(help="Type of activations.", show_default="float32 on CPU, else bfloat16"),
    ] = None


@with_groups
def rank_eval(
    checkpoint: _Checkpoint,
    mixture: _Mixture,
    out: _Out,
    tasks: TaskOptions,
    computation: ComputationOptions,
    head: ReportHead,
    processes: ProcessOptions,
    step: _Step = None,
    adapter: _Adapters = None,
    modes: _Modes = "rank",
    normalize: _Normalize = "none",
    also: _Also = None,
    also_format: _Format = None,
    add_step: _AddStep = False,
    force: _Force = False,
    tracker: Trackers = None,
    dry_run: _DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Score every answer choice of a mixture, rank them, and write a report.

    If it is interrupted, starting it again continues where it stopped. T0's definition of a score
    always comes first: the sum of the log-likelihoods of a choice's tokens, EOS included.

    Example: t0repro rank-eval --checkpoint runs/demo/model --mixture demo_eval_score_eval
    --module_import t0repro.tasks.demo --out runs/demo/rank_eval
    """
    echo("importing JAX and the tasks ...", err=True)
    adapters = _labelled(adapter or ())
    # Tasks read the variable when they read their rows.
    if tasks.data is not None:
        os.environ["T0REPRO_DATA_DIR"] = str(tasks.data)
    from t0repro.evaluation.evaluation_folder import EvaluationSettings, check_settings

    with processes.joined():
        from t0repro.cli.report import compare
        from t0repro.files import folder_lock
        from t0repro.partitioning.processes import held_by_first, is_first, output_folder

        # Only now that the processes have joined: the default activation asks JAX for its backend.
        settings = EvaluationSettings(
            split=tasks.split,
            limit=tasks.limit,
            lengths={"inputs": tasks.inputs_length, "targets": tasks.targets_length},
            activation=computation.activation or _default_activation(),
            tokens_per_batch=computation.tokens_per_batch,
            use_cached=tasks.cache_dir is not None,
            calibrated=bool(also),
            modes=tuple(modes.split(",")),
            at_hand=tasks.at_hand,
        )
        extras = [normalize, *(extra.value for extra in also or ())]
        prompts = _prompts(tasks, mixture, settings)
        write = _writer(prompts, head, extras)
        check_folder(out, "--out")
        check_trackers(tracker)
        if dry_run:
            opens = functools.partial(
                _check_checkpoint, checkpoint, step, computation.model_parallelism, adapters
            )
            with for_people(as_json):
                _check(mixture, settings, opens)
            for label in adapters or ("",):
                check_settings(out / label, mixture, settings, add_step=add_step, force=force)
            return
        evaluate = functools.partial(_evaluate, add_step=add_step, force=force)
        track = functools.partial(tracked_evaluation, tracker)
        # The reports read what the evaluations wrote, so one lock has to cover all.
        fix = "Wait for it to end, or choose another --out."
        with held_by_first(lambda: folder_lock(out, "rank evaluation", fix=fix)):
            out = output_folder(out, resumed=True)
            parallel = computation.model_parallelism
            reports = {}
            for label, opened in _opened(checkpoint, step, settings.activation, parallel, adapters):
                named = functools.partial(write, label=label or head.label)
                with for_people(as_json):
                    report = evaluate(
                        opened, mixture, out / label, settings, named, also_format, track
                    )
                reports[label] = json.loads(report.to_json())
        # It takes the folder's lock itself.
        if len(adapters) > 1 and is_first():
            folders = [f"{label}={out / label / f'{tasks.split}_eval'}" for label in adapters]
            with for_people(as_json):
                compare(folders, out=out, module_import=modules_or_t0(tasks.module_import))
        if as_json and is_first():
            print_json(reports if adapters else reports[""])


def _labelled(adapters: Sequence[str]) -> dict[str, str]:
    """Label of each adapter, by default its folder's name -> its path.

    Raises:
      UserError: If two adapters have the same label, or a label cannot name a folder.
    """
    from t0repro.errors import UserError
    from t0repro.reports.run import split_label

    found: dict[str, str] = {}
    for label, path in map(split_label, adapters):
        label = Path(path).name if label is None else label
        # Results are in OUT/LABEL.
        if label in found or label in ("", "..") or label != Path(label).name:
            wrong = "Two adapters have" if label in found else "No folder can have"
            raise UserError(
                f"{wrong} the label {label!r}.",
                where="--adapter",
                fix="Name each: --adapter first=DIR --adapter second=DIR.",
            )
        check_readable(path, "--adapter")
        found[label] = path
    return found


def _opened(
    path: str,
    step: int | None,
    activation: DType,
    model_parallelism: int,
    adapters: Mapping[str, str],
) -> Iterator[tuple[str, Checkpoint]]:
    """Each adapter's label and checkpoint, over one base; without adapters, "" and the base."""
    from t0repro.evaluation.opened import (
        adapter_at,
        check_adapter_fits,
        open_checkpoint,
        with_adapter,
    )
    from t0repro.progress import working

    # Refuse a wrong adapter before the base is read, and one that does not fit before any scores.
    own = {label: adapter_at(adapter) for label, adapter in adapters.items()}
    with working(f"reading {path}"):
        base = open_checkpoint(path, step, activation, model_parallelism)
    if not own:
        yield "", base
    for adapter in own.values():
        check_adapter_fits(base, adapter)
    for label, adapter in own.items():
        yield label, with_adapter(base, adapter)


def _writer(
    prompts: Mapping[str, PromptInfo], head: ReportHead, extras: Sequence[str]
) -> Callable[..., tuple[Report, list[Path]]]:
    """`write_results` for a report with these options."""
    from t0repro.reports.run import training_tasks
    from t0repro.runs.rank_eval import write_results

    return functools.partial(
        write_results,
        prompts=prompts,
        trained=training_tasks(head.train_mixture or ()),
        title=head.title,
        resamples=head.resamples,
        extras=[name for name in extras if name != "none"],
    )


def _evaluate(
    opened: Checkpoint,
    mixture: str,
    out: Path,
    settings: EvaluationSettings,
    write: Callable[..., tuple[Report, list[Path]]],
    also_format: str | None,
    track: Callable[..., contextlib.AbstractContextManager[None]],
    *,
    add_step: bool,
    force: bool,
) -> Report:
    from t0repro.partitioning.processes import is_first
    from t0repro.reports.page import print_page
    from t0repro.reports.report_page import brief_page
    from t0repro.runs.rank_eval import rank_eval as evaluate

    # With several processes, only one writes and reports to the trackers.
    tracked = track(out, opened.path, mixture, settings)
    with tracked if is_first() else contextlib.nullcontext():
        outcome = evaluate(opened, mixture, out, settings, add_step=add_step, force=force)
        report, paths = write(outcome, opened.step, out)
        if also_format is not None and is_first():
            from t0repro.lm_eval.files import export_results

            folder = out / "lm_eval"
            paths.append(export_results(outcome.folder, opened.step, settings.split, folder))
    # A short form, because the files contain everything.
    print_page(brief_page(report))
    _print_speed(outcome)
    if report.provenance.scores_sha256:
        typer.echo(f"SHA-256 of the scores: {report.provenance.scores_sha256}")
    for path in paths:
        echo(f"wrote {path}")
    return report


def _check_checkpoint(
    path: str, step: int | None, model_parallelism: int, adapters: Mapping[str, str]
) -> Checkpoint:
    from t0repro.evaluation.opened import check_checkpoint

    return check_checkpoint(path, step, model_parallelism, adapters.values())


def _check(
    mixture: str, settings: EvaluationSettings, checkpoint: Callable[[], Checkpoint]
) -> None:
    """Checks what is to be evaluated; the checkpoint only if it must be there already."""
    from t0repro.evaluation.selection import check_vocabulary, select_tasks
    from t0repro.runs.preflight import NO_CHECKPOINT_YET

    cached, at_hand = settings.use_cached, settings.at_hand
    selected = select_tasks(
        mixture, settings.split, settings.modes, use_cached=cached, at_hand=at_hand
    )
    names = (*selected.ranked, *selected.generated)
    typer.echo(f"{counted(len(names), 'task')} of {mixture} with the split {settings.split!r}")
    if NO_CHECKPOINT_YET in os.environ:
        return
    check_vocabulary(names, checkpoint())
    typer.echo("the checkpoint's names, shapes and vocabulary fit")


def _default_activation() -> DType:
    import jax

    return "float32" if jax.default_backend() == "cpu" else "bfloat16"


def _prompts(
    tasks: TaskOptions, mixture: str, settings: EvaluationSettings
) -> Mapping[str, PromptInfo]:
    """Registers the tasks, with SeqIO only if it is needed, and their cache; task -> prompt."""
    from t0repro import compat
    from t0repro.errors import needs_reference_tier
    from t0repro.evaluation.selection import why_not_alone
    from t0repro.reports.run import load_prompts
    from t0repro.tasks.task import add_cache_dirs

    modules = modules_or_t0(tasks.module_import)
    folders = [] if tasks.cache_dir is None else [tasks.cache_dir]
    prompts = load_prompts(modules)
    add_cache_dirs(folders, "--cache_dir")
    cached = settings.use_cached
    # Only if it must be, because importing TensorFlow and SeqIO takes seconds.
    if why := why_not_alone(mixture, settings.split, settings.modes, use_cached=cached):
        if not compat.is_installed():
            raise needs_reference_tier(why)
        prompts = load_prompts(modules, into_seqio=True)
        add_cache_dirs(folders, "--cache_dir")
    return prompts


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
