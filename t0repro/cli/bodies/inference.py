"""`t0repro eval` and `infer`, once their gin files are parsed."""

from __future__ import annotations

import dataclasses
from typing import TypeVar

import typer

from t0repro.cli.bodies.registration import register
from t0repro.cli.t5x_options import T5xOptions, check_restored
from t0repro.config.data import PIECES_OR_BYTES
from t0repro.config.run import EvalRun, InferenceRun, InferRun
from t0repro.config.t5x.gin_files import Parsed
from t0repro.config.t5x.run import read_eval_run, read_infer_run
from t0repro.data.eval_examples import why_evaluation_needs_seqio, why_reading_needs_seqio
from t0repro.evaluation.evaluator import FOLDER
from t0repro.partitioning.processes import enter_in_first, output_folder
from t0repro.runs import batch_infer
from t0repro.runs.description import describe_inference, is_of_a_run
from t0repro.runs.evaluate_checkpoints import evaluate_checkpoints
from t0repro.runs.preflight import check_inference
from t0repro.storage import check_folder, input_path, lock_folder, output_path

Plan = TypeVar("Plan", bound=InferenceRun)


def evaluate(parsed: Parsed, options: T5xOptions, *, watch: bool, until: int | None) -> None:
    """Evaluates the checkpoints that the gin files name; with --dry_run, only checks.

    Raises:
      UserError: If a check fails.
    """
    plan = read_eval_run(parsed)
    _check_addresses(plan)
    # Only after the gin files have been checked, because importing tasks takes seconds.
    register(parsed, options, [plan.data], lambda: _why_not_alone(plan))
    if options.dry_run:
        check_inference(plan, typer.echo)
        return
    # Not EVAL_OUTPUT_DIR itself, which a training run may have locked.
    results = output_path(plan.output_dir) / FOLDER
    fix = "Wait for it to end, or bind another EVAL_OUTPUT_DIR."
    with enter_in_first(lambda: lock_folder(results, "evaluation", fix=fix)):
        describes = not is_of_a_run(plan.output_dir)
        plan = _separate_output(plan)
        evaluate_checkpoints(
            plan,
            watch=watch,
            until=until,
            describe=lambda: describe_inference(plan, parsed.gin_text) if describes else None,
        )


def infer(parsed: Parsed, options: T5xOptions) -> None:
    """Writes the predictions or scores that the gin files ask for; with --dry_run, only checks.

    Raises:
      UserError: If a check fails.
    """
    plan = read_infer_run(parsed)
    _check_addresses(plan)
    register(parsed, options, [plan.data], lambda: _why_not_alone(plan))
    if options.dry_run:
        check_inference(plan, typer.echo)
        batch_infer.check_outputs(
            dataclasses.replace(plan, output_dir=str(input_path(plan.output_dir)))
        )
        return
    # Several shards may run at the same time in one folder.
    shard = output_path(plan.output_dir) / f".shard-{plan.shard_id:05}-of-{plan.num_shards:05}"
    fix = "Wait for it to end, or bind another INFER_OUTPUT_DIR."
    with enter_in_first(lambda: lock_folder(shard, "inference", fix=fix)):
        describes = not is_of_a_run(plan.output_dir)
        plan = _separate_output(plan)
        batch_infer.infer(
            plan, lambda: describe_inference(plan, parsed.gin_text) if describes else None
        )


def _why_not_alone(plan: InferenceRun) -> str | None:
    """What in a run needs SeqIO and TensorFlow, its tasks being described."""
    if isinstance(plan, InferRun) and plan.files is not None:
        return "infer reads files of examples"
    if plan.user_model is not None:
        return "the model is a class of yours"
    if plan.data.converter == "pass_through":
        return "tasks give the model's features"
    vocabularies = (plan.input_vocabulary, plan.output_vocabulary)
    if not all(isinstance(each, PIECES_OR_BYTES) for each in vocabularies):
        return "a vocabulary of the model is neither of pieces nor of bytes"
    data = plan.data
    why = why_evaluation_needs_seqio if isinstance(plan, EvalRun) else why_reading_needs_seqio
    return why(data.mixture_or_task_name, data.split, use_cached=data.use_cached)


def _check_addresses(plan: InferenceRun) -> None:
    """Refuses addresses that cannot be opened, before tasks are imported."""
    check_folder(plan.output_dir, plan.provenance.get("output_dir", "output_dir"))
    check_restored(plan.restore, plan.provenance, "restore")


def _separate_output(plan: Plan) -> Plan:
    """Keeps only the first process's results if there are several processes."""
    # A copy of the existing results, so that all processes skip the same finished work.
    folder = output_folder(plan.output_dir, resumed=True)
    return dataclasses.replace(plan, output_dir=str(folder))
