"""Modes eval and score_eval: evaluate checkpoints with the metrics of their tasks.

eval generates texts; score_eval computes the targets' log-likelihoods.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from t0repro.config.configuration import Configuration
from t0repro.config.run_config import RunConfig
from t0repro.data.batches import EvalTask
from t0repro.errors import UserError
from t0repro.runs.loaded_model import generated_texts, loaded
from t0repro.runs.score import save_scores

if TYPE_CHECKING:
    from t0repro.evaluation.opened import Checkpoint
    from t0repro.evaluation.score_eval import Outputs


def evaluate(configuration: Configuration) -> None:
    """Evaluates all tasks at each chosen checkpoint; writes results, event files and metrics.jsonl.

    Raises:
      UserError: If no evaluation dataset is bound.
    """
    from t0repro.evaluation import score_eval
    from t0repro.evaluation.checkpoint_choice import chosen_checkpoints
    from t0repro.evaluation.closing import print_results
    from t0repro.event_files import event_writer
    from t0repro.training.metrics import MetricsManager

    config = configuration.run
    tasks = _tasks(config)
    assert config.eval_data is not None
    folder = score_eval.evaluation_folder(config)
    output_of = _scores if config.mode == "score_eval" else _texts
    for checkpoint in loaded(configuration, chosen_checkpoints(config)):
        outputs = output_of(configuration, checkpoint, tasks)
        results = score_eval.write_results(config, tasks, checkpoint, outputs)
        metrics = MetricsManager(config.model_dir, writers=[event_writer(folder)])
        for result in results:
            metrics.write(config.eval_data.split, result.step, result.metrics, task=result.task)
        metrics.close()
        print_results({result.task: result.metrics for result in results}, checkpoint.step, folder)
        if config.mode == "score_eval" and config.scores_filename is not None:
            save_scores(
                configuration,
                [score for output in outputs for score in output.values],
                [example["targets"] for task in tasks for example in task.examples],
            )


def _tasks(config: RunConfig) -> list[EvalTask]:
    from t0repro.data.batches import eval_tasks

    if config.eval_data is None:
        raise UserError(
            f"Mode {config.mode!r} needs run.eval_dataset_fn.",
            where=config.provenance.get("mode"),
            fix=f"Add --gin_file={config.mode}.gin.",
        )
    return list(eval_tasks(config.eval_data, config.sequence_length))


def _scores(
    configuration: Configuration, checkpoint: Checkpoint, tasks: Sequence[EvalTask]
) -> list[Outputs]:
    from t0repro.evaluation import score_eval

    config = configuration.run
    lengths = config.sequence_length or score_eval.longest(tasks)
    tokens = config.batch_size * max(lengths.values())
    return score_eval.scored(checkpoint, tasks, lengths, tokens)


def _texts(
    configuration: Configuration, checkpoint: Checkpoint, tasks: Sequence[EvalTask]
) -> list[Outputs]:
    from t0repro.evaluation import score_eval

    lengths = configuration.run.sequence_length or score_eval.longest(tasks)
    inputs = [example["inputs"] for task in tasks for example in task.examples]
    started = time.monotonic()
    texts = generated_texts(configuration, checkpoint, inputs, lengths["inputs"])
    return score_eval.generated(tasks, texts, time.monotonic() - started)
