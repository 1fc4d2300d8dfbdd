"""`t0repro rank-eval`, once its options are parsed and its processes have joined."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import jax
import typer

from t0repro import compat
from t0repro.cli.compare import compare
from t0repro.cli.options import ReportHead, modules_or_t0, track_evaluation
from t0repro.cli.rank_eval_options import (
    ComputationOptions,
    EvaluationOptions,
    ResultOptions,
    TaskOptions,
)
from t0repro.cli.results import echo, print_for_people, print_json
from t0repro.cloud.trackers.table import check_trackers
from t0repro.converters import finding
from t0repro.errors import UserError, needs_reference_tier
from t0repro.evaluation.evaluation_folder import EvaluationSettings, check_settings
from t0repro.evaluation.opened import (
    Checkpoint,
    attach_adapter,
    check_adapter_fits,
    check_checkpoint,
    open_adapter_at,
    open_checkpoint,
)
from t0repro.evaluation.selection import check_vocabulary, select_tasks, why_not_alone
from t0repro.lm_eval.results import export_results
from t0repro.model.cpu_attention import describe_processor
from t0repro.partitioning.processes import (
    broadcast_from_first,
    enter_in_first,
    is_first,
    output_folder,
)
from t0repro.progress import say, working
from t0repro.reports.page_terminal import print_page
from t0repro.reports.prompts import PromptInfo, load_prompts
from t0repro.reports.provenance import checkpoint_name
from t0repro.reports.report import Report
from t0repro.reports.report_page import brief_page
from t0repro.reports.run import split_label
from t0repro.runs.checkpoint_checks import NO_CHECKPOINT_YET
from t0repro.runs.rank_eval import Outcome, rank_eval, reasons_in_words
from t0repro.runs.rank_report import write_results
from t0repro.storage import check_folder, check_readable, lock_folder
from t0repro.tasks.registry import add_cache_dirs
from t0repro.words import counted


def run(
    asked: EvaluationOptions,
    tasks: TaskOptions,
    results: ResultOptions,
    computation: ComputationOptions,
    head: ReportHead,
) -> None:
    """Evaluates a mixture with a checkpoint, alone or with each adapter; or only checks.

    Raises:
      UserError: If a check fails.
    """
    adapters = paths_by_label(asked.adapter or ())
    steps = _steps(asked.checkpoint, asked.step)
    if adapters and len(steps) > 1:
        raise UserError(
            f"An adapter has one base, and --step={','.join(asked.step or ())} names {len(steps)}.",
            where="--step, --adapter",
            fix="Give one step, or leave --adapter out.",
        )
    if results.force and results.add_step:
        raise UserError(
            "--force removes what OUT holds, and --add_step keeps it.",
            where="--force, --add_step",
            fix="Leave one of them out.",
        )
    add_step = results.add_step or len(steps) > 1
    settings = _settings(asked, tasks, results, computation)
    extras = [] if results.normalize == "none" else [results.normalize]
    extras += ["calibrated"] * results.calibrated
    prompts = _prompts(tasks, asked.mixture, settings)
    options = head.report_options(prompts, extras=extras)
    check_folder(asked.out, "--out")
    check_trackers(results.tracker)
    parallel = computation.model_parallelism
    if asked.dry_run:
        with print_for_people(asked.as_json):
            _check(asked, settings, steps, adapters, parallel)
        for label in adapters or ("",):
            folder, force = asked.out / label, results.force
            check_settings(folder, asked.mixture, settings, add_step=add_step, force=force)
        return
    # The reports read what the evaluations wrote, so one lock has to cover all.
    fix = "Wait for it to end, or choose another --out."
    with enter_in_first(lambda: lock_folder(asked.out, "rank evaluation", fix=fix)):
        out = output_folder(asked.out, resumed=True)
        reports, path = {}, asked.checkpoint

        def open_step(step: int | None) -> Checkpoint:
            with working(f"reading {path}" if step is None else f"reading step {step} of {path}"):
                return open_checkpoint(path, step, settings.activation, parallel)

        for label, checkpoints in _open_checkpoints(open_step, steps, adapters):
            name = label or head.label or checkpoint_name(path)
            write = functools.partial(write_results, prompts=prompts, options=options, label=name)
            with print_for_people(asked.as_json):
                reports[label] = _evaluate(
                    checkpoints,
                    adapters.get(label, path),
                    asked.mixture,
                    out / label,
                    settings,
                    write,
                    results,
                    add_step=add_step,
                )
    # It takes the folder's lock itself.
    if len(adapters) > 1 and is_first():
        folders = [f"{label}={out / label / f'{tasks.split}_eval'}" for label in adapters]
        with print_for_people(asked.as_json):
            compare(folders, out=out, module_import=modules_or_t0(tasks.module_import))
    if asked.as_json and is_first():
        print_json(reports if adapters else reports[""])


def _settings(
    asked: EvaluationOptions,
    tasks: TaskOptions,
    results: ResultOptions,
    computation: ComputationOptions,
) -> EvaluationSettings:
    """What is computed; the activations' type is the backend's unless it is asked for."""
    # Processes have joined by now, so JAX may be asked for its backend.
    on_cpu = jax.default_backend() == "cpu"
    if on_cpu and not computation.activation and "amx_bf16" in describe_processor():
        # docs/evidence/rank_evaluation.md, "bfloat16 on a CPU".
        say("On a CPU like this, with AMX, --activation bfloat16 took half of float32's time.")
    return EvaluationSettings(
        split=tasks.split,
        limit=tasks.limit,
        lengths={"inputs": computation.inputs_length, "targets": computation.targets_length},
        activation=computation.activation or ("float32" if on_cpu else "bfloat16"),
        tokens_per_batch=computation.tokens_per_batch,
        use_cached=tasks.cache_dir is not None,
        calibrated=results.calibrated,
        modes=tuple(asked.modes.split(",")),
        skip_missing=tasks.skip_missing,
    )


def paths_by_label(adapters: Sequence[str]) -> dict[str, str]:
    """Label of each adapter, by default its folder's name -> its path.

    Raises:
      UserError: If two adapters have the same label, or a label cannot name a folder.
    """
    paths: dict[str, str] = {}
    for label, path in map(split_label, adapters):
        label = Path(path).name if label is None else label
        # Results are in OUT/LABEL.
        if label in paths or label in ("", "..") or label != Path(label).name:
            wrong = "Two adapters have" if label in paths else "No folder can have"
            raise UserError(
                f"{wrong} the label {label!r}.",
                where="--adapter",
                fix="Name each: --adapter first=DIR --adapter second=DIR.",
            )
        check_readable(path, "--adapter")
        paths[label] = path
    return paths


def _steps(path: str, step: Sequence[str] | None) -> Sequence[int | None]:
    """The steps that --step names, ascending; None is the latest.

    Raises:
      UserError: If it names none, or there is no checkpoint.
    """
    if not step:
        return [None]
    if list(step) == ["all"]:
        # By the time another process looks, there may be a newer one.
        found = broadcast_from_first(lambda: [ref.step for ref in finding.list_checkpoints(path)])
        there = {number for number in found if number is not None}
        # A checkpoint's own path, or that of a format without steps.
        steps = sorted(there) or [finding.find_checkpoint(path).step]
        if len(steps) == 1 and steps != [None]:
            say(f"note: --step=all: {path} has one checkpoint, of step {steps[0]}")
        return steps
    try:
        numbers = sorted({int(number) for each in step for number in each.split(",")})
    except ValueError as error:
        raise UserError(
            f"{','.join(step)!r} is not a step.",
            where="--step",
            fix="Give a number, several (100,200), or all; the latest needs no --step.",
        ) from error
    # Now: the first step's scores would otherwise come hours before the news that the last is none.
    for number in numbers:
        finding.find_checkpoint(path, number)
    return numbers


def _open_checkpoints(
    open_step: Callable[[int | None], Checkpoint],
    steps: Sequence[int | None],
    adapters: Mapping[str, str],
) -> Iterator[tuple[str, Iterator[Checkpoint]]]:
    """Labels with their checkpoints: an adapter's, over one base, or "" with those of the steps."""
    if not adapters:
        yield "", map(open_step, steps)
        return
    # Refuse a wrong adapter before the base is read, and one that does not fit before any scores.
    own = {label: open_adapter_at(adapter) for label, adapter in adapters.items()}
    (base,) = map(open_step, steps)
    for adapter in own.values():
        check_adapter_fits(base, adapter)
    for label, adapter in own.items():
        yield label, iter([attach_adapter(base, adapter)])


def _evaluate(
    checkpoints: Iterator[Checkpoint],
    path: str,
    mixture: str,
    out: Path,
    settings: EvaluationSettings,
    write: Callable[..., tuple[Report, list[Path]]],
    results: ResultOptions,
    *,
    add_step: bool,
) -> Report:
    """Evaluates a checkpoint, or that of each step, and writes one report."""
    outcomes: dict[int, Outcome] = {}
    # With several processes, only one writes and reports to the trackers.
    tracked = track_evaluation(results.tracker, out, path, mixture, settings)
    with tracked if is_first() else contextlib.nullcontext():
        for checkpoint in checkpoints:
            # Only at first: it would remove this evaluation's earlier steps.
            force = results.force and not outcomes
            outcomes[checkpoint.step] = rank_eval(
                checkpoint, mixture, out, settings, add_step=add_step, force=force
            )
            _print_speed(outcomes[checkpoint.step])
            del checkpoint  # before the next one is read
        *_, (step, outcome) = outcomes.items()
        report, paths = write(outcome, list(outcomes), out)
        if results.also_format is not None and is_first():
            folder = out / "lm_eval"
            paths.append(export_results(outcome.folder, step, settings.split, folder))
    # A short form, because the files contain everything.
    print_page(brief_page(report))
    if report.provenance.scores_sha256:
        typer.echo(f"SHA-256 of the scores: {report.provenance.scores_sha256}")
    for written in paths:
        echo(f"wrote {written}")
    return report


def _check(
    asked: EvaluationOptions,
    settings: EvaluationSettings,
    steps: Sequence[int | None],
    adapters: Mapping[str, str],
    parallel: int,
) -> None:
    """Checks what is to be evaluated; the checkpoints only if they must be there already."""
    selected = select_tasks(asked.mixture, settings)
    tasks = counted(len(selected.names), "task")
    typer.echo(f"{tasks} of {asked.mixture} with the split {settings.split!r}")
    if selected.left_out:
        typer.echo(f"Left out: {reasons_in_words(selected.left_out)}.")
    if NO_CHECKPOINT_YET in os.environ:
        return
    for step in steps:
        opened = check_checkpoint(asked.checkpoint, step, parallel, adapters.values())
        check_vocabulary(selected.names, opened)
    whose = "the checkpoint's" if len(steps) == 1 else f"{len(steps)} checkpoints'"
    typer.echo(f"{whose} names, shapes and vocabulary fit")


def _prompts(
    tasks: TaskOptions, mixture: str, settings: EvaluationSettings
) -> Mapping[str, PromptInfo]:
    """Registers the tasks, with SeqIO only if it is needed, and their cache; task -> prompt."""
    modules = modules_or_t0(tasks.module_import)
    folders = [] if tasks.cache_dir is None else [tasks.cache_dir]
    prompts = load_prompts(modules)
    add_cache_dirs(folders, "--cache_dir")
    # Only if it must be, because importing TensorFlow and SeqIO takes seconds.
    if why := why_not_alone(mixture, settings):
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
            f" {counted(outcome.programs, 'program')}."
        )
    if outcome.decoded:
        typer.echo(
            f"Decoded {counted(outcome.decoded, 'input')} in {outcome.decoding_seconds:.1f} s"
            f" ({outcome.decoded / outcome.decoding_seconds:.1f}/s)."
        )
