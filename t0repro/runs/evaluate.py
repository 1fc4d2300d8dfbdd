"""Modes eval and score_eval: evaluate checkpoints with the metrics of their tasks.

eval generates texts; score_eval computes the targets' log-likelihoods.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from t0repro.config.configuration import Configuration
from t0repro.config.run_config import RunConfig
from t0repro.errors import UserError
from t0repro.runs.loaded_model import generated_texts, loaded
from t0repro.runs.score import ScoreFiles

if TYPE_CHECKING:
    from t0repro.evaluation.opened import Checkpoint
    from t0repro.evaluation.reading import Part
    from t0repro.evaluation.score_eval import Outputs, TaskWindows


def evaluate(configuration: Configuration) -> None:
    """Evaluates all tasks at each chosen checkpoint; writes results, event files and metrics.jsonl.

    Raises:
      UserError: If no evaluation dataset is bound.
    """
    from t0repro.evaluation import score_eval
    from t0repro.evaluation.checkpoint_choice import chosen_checkpoints
    from t0repro.evaluation.closing import print_results
    from t0repro.evaluation.evaluation_facts import jax_device, write_facts

    checkpoints = chosen_checkpoints(configuration.run)
    configuration = _with_own_output(configuration)
    config = configuration.run
    windows = _windows(config)
    for checkpoint in loaded(configuration, checkpoints):
        evaluated = _evaluate(configuration, checkpoint, windows)
        if config.output_eval_examples:
            write_facts(
                score_eval.evaluation_folder(config), checkpoint, [*evaluated], jax_device()
            )
        print_results(evaluated, checkpoint.step, score_eval.evaluation_folder(config))


def _with_own_output(configuration: Configuration) -> Configuration:
    """Of several processes, only the first one's results are kept."""
    from t0repro.partitioning.processes import is_first, output_folder

    if is_first():
        return configuration
    run, folder = configuration.run, str(output_folder(configuration.run.model_dir))
    scores = None if run.scores_filename is None else f"{folder}/scores"
    # No eval_summary_dir, so that event files go below the other model_dir as well.
    run = dataclasses.replace(run, model_dir=folder, eval_summary_dir=None, scores_filename=scores)
    inputs = dataclasses.replace(configuration.inputs, model_dir=folder)
    return dataclasses.replace(configuration, run_or_refusal=run, inputs=inputs)


def _windows(config: RunConfig) -> TaskWindows:
    from t0repro.evaluation.score_eval import TaskWindows

    if config.eval_data is None:
        raise UserError(
            f"Mode {config.mode!r} needs run.eval_dataset_fn.",
            where=config.provenance.get("mode"),
            fix=f"Add --gin_file={config.mode}.gin.",
        )
    return TaskWindows(config)


def _evaluate(
    configuration: Configuration, checkpoint: Checkpoint, windows: TaskWindows
) -> dict[str, Mapping[str, float]]:
    """Evaluates all tasks at one checkpoint; returns the metrics of each."""
    from t0repro.evaluation import score_eval
    from t0repro.event_files import event_writer
    from t0repro.training.metrics import MetricLog

    config = configuration.run
    assert config.eval_data is not None
    output_of = _scores if config.mode == "score_eval" else _texts
    saves_scores = config.mode == "score_eval" and config.scores_filename is not None
    evaluated: dict[str, Mapping[str, float]] = {}
    writer = event_writer(score_eval.evaluation_folder(config))
    # Without a start_step, which would drop lines of the training in the same file.
    metrics = MetricLog(config.model_dir, writers=[writer])
    lengths = windows.lengths
    with (
        score_eval.TaskWriter(config, checkpoint, windows.judges) as tasks,
        ScoreFiles(configuration) if saves_scores else contextlib.nullcontext() as files,
    ):
        for parts in windows:
            outputs = output_of(configuration, checkpoint, parts, lengths)
            for result in tasks.add(parts, outputs):
                split = config.eval_data.split
                metrics.write(split, result.step, result.metrics, task=result.task)
                evaluated[result.task] = result.metrics
            if files is not None:
                for part, output in zip(parts, outputs, strict=True):
                    files.add(output.values, (example["targets"] for example in part.examples))
            del parts, outputs  # free this window's memory before the next one is read
        if files is not None:
            files.commit()
    metrics.close()
    return evaluated


def _scores(
    configuration: Configuration,
    checkpoint: Checkpoint,
    parts: Sequence[Part],
    lengths: Mapping[str, int],
) -> list[Outputs]:
    from t0repro.evaluation import score_eval

    # The engine counts tokens, a run sequences: as many tokens as a batch of full rows has.
    tokens = configuration.run.batch_size * max(lengths.values())
    return score_eval.scored(checkpoint, parts, lengths, tokens)


def _texts(
    configuration: Configuration,
    checkpoint: Checkpoint,
    parts: Sequence[Part],
    lengths: Mapping[str, int],
) -> list[Outputs]:
    from t0repro.evaluation import score_eval

    inputs = [example["inputs"] for part in parts for example in part.examples]
    started = time.monotonic()
    texts = generated_texts(configuration, checkpoint, inputs, lengths["inputs"])
    return score_eval.generated(parts, texts, time.monotonic() - started)
