"""Modes eval, score_eval and perplexity_eval, and T5X's eval: checkpoints by their tasks' metrics.

eval generates texts; score_eval computes the targets' log-likelihoods. The output files are in Mesh
TensorFlow's format (see task_output). Next to them are the facts that a report needs about the
evaluation: a record of each task, and provenance.json.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence

from t0repro.config.configuration import Configuration
from t0repro.config.run import MeshEvalRun
from t0repro.errors import UserError
from t0repro.evaluation.evaluation_facts import jax_device, write_facts
from t0repro.evaluation.opened import Checkpoint
from t0repro.evaluation.reading import Chunk
from t0repro.evaluation.result_lines import print_results
from t0repro.event_files import event_writer
from t0repro.partitioning.processes import is_first, output_folder
from t0repro.runs.checkpoint_choice import choose_checkpoints, generate_texts, load_checkpoints
from t0repro.runs.task_writer import (
    Outputs,
    TaskBuffers,
    TaskWriter,
    evaluation_folder,
    generated,
    scored,
)
from t0repro.runs.text_modes import ScoreFiles
from t0repro.storage import output_path
from t0repro.training.metrics import MetricLog


def evaluate(configuration: Configuration[MeshEvalRun]) -> None:
    """Evaluates all tasks at each chosen checkpoint; writes results, event files and metrics.jsonl.

    Raises:
      UserError: If no evaluation dataset is bound.
    """
    checkpoints = choose_checkpoints(configuration.run)
    configuration = _separate_output(configuration)
    config = configuration.run
    buffers = _task_buffers(config)
    for checkpoint in load_checkpoints(configuration, checkpoints):
        rounded_by: dict[str, None] = {}  # a set in order
        evaluated = _evaluate(configuration, checkpoint, buffers, rounded_by.setdefault)
        if config.output_eval_examples:
            device = jax_device(rounded_by)
            write_facts(evaluation_folder(config), checkpoint, [*evaluated], device)
        print_results(evaluated, checkpoint.step, evaluation_folder(config))


def _separate_output(configuration: Configuration[MeshEvalRun]) -> Configuration[MeshEvalRun]:
    """With several processes, keeps only the first one's results."""
    if is_first():
        return configuration
    run, folder = configuration.run, str(output_folder(configuration.run.model_dir))
    scores = None if run.scores_filename is None else f"{folder}/scores"
    # No eval_summary_dir, so that event files go below the other model_dir as well.
    run = dataclasses.replace(run, model_dir=folder, eval_summary_dir=None, scores_filename=scores)
    inputs = dataclasses.replace(configuration.inputs, model_dir=folder)
    return dataclasses.replace(configuration, run_or_refusal=run, inputs=inputs)


def _task_buffers(config: MeshEvalRun) -> TaskBuffers:
    if config.eval_data is None:
        raise UserError(
            f"Mode {config.mode!r} needs run.eval_dataset_fn.",
            where=config.provenance.get("mode"),
            fix=f"Add --gin_file={config.mode}.gin.",
        )
    return TaskBuffers(config)


def _evaluate(
    configuration: Configuration[MeshEvalRun],
    checkpoint: Checkpoint,
    buffers: TaskBuffers,
    note_rounding: Callable[[str], object],
) -> dict[str, Mapping[str, float]]:
    """Evaluates all tasks at one checkpoint; returns the metrics of each."""
    config = configuration.run
    assert config.eval_data is not None
    ranks = config.mode == "score_eval"
    evaluated: dict[str, Mapping[str, float]] = {}
    writer = event_writer(evaluation_folder(config))
    # No start_step: it would drop the training run's lines in the same file.
    metrics = MetricLog(output_path(config.model_dir), writers=[writer])
    lengths = buffers.lengths
    with (
        TaskWriter(config, checkpoint, buffers.judges) as tasks,
        ScoreFiles(configuration)
        if ranks and config.scores_filename is not None
        else contextlib.nullcontext() as files,
    ):
        for chunks in buffers:
            if ranks:
                outputs = scored(checkpoint, chunks, lengths, note_rounding)
            else:
                outputs = _texts(configuration, checkpoint, chunks, lengths["inputs"])
            for result in tasks.add(chunks, outputs):
                split = config.eval_data.split
                metrics.write(split, result.step, result.metrics, task=result.task)
                evaluated[result.task] = result.metrics
            if files is not None:
                for chunk, output in zip(chunks, outputs, strict=True):
                    files.add(output.values, (example["targets"] for example in chunk.examples))
            del chunks, outputs  # free this window's memory before the next one is read
        if files is not None:
            files.commit()
    metrics.close()
    return evaluated


def _texts(
    configuration: Configuration[MeshEvalRun],
    checkpoint: Checkpoint,
    chunks: Sequence[Chunk],
    inputs_length: int,
) -> list[Outputs]:
    inputs = [example["inputs"] for chunk in chunks for example in chunk.examples]
    started = time.monotonic()
    texts = generate_texts(configuration, checkpoint, inputs, inputs_length)
    return generated(chunks, texts, time.monotonic() - started)
