"""Modes eval and score_eval: judge a checkpoint by its tasks' metrics.

eval generates texts; score_eval ranks targets by their log-likelihoods.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from t0repro.config.configuration import Configuration
from t0repro.config.run_config import RunConfig
from t0repro.data.batches import EvalTask
from t0repro.errors import UserError
from t0repro.runs.loaded_model import LoadedModel, generated_texts, loaded
from t0repro.runs.score import save_scores


def evaluate(configuration: Configuration) -> None:
    """Judges the tasks at each chosen checkpoint."""
    from t0repro.evaluation import score_eval
    from t0repro.evaluation.checkpoint_choice import chosen_checkpoints
    from t0repro.event_files import event_writer
    from t0repro.training.metrics import MetricsManager

    config = configuration.run
    tasks = _tasks(config)
    lengths = config.sequence_length or score_eval.longest(tasks)
    output_of = _scorer if config.mode == "score_eval" else _generator
    folder = score_eval.evaluation_folder(config)
    for model in loaded(configuration, chosen_checkpoints(config)):
        output = output_of(configuration, model, lengths)
        results = []
        metrics = MetricsManager(config.model_dir, writers=[event_writer(folder)])
        for result in score_eval.evaluate(config, tasks, model.step, output):
            results.append(result)
            assert config.eval_data is not None
            metrics.write(config.eval_data.split, result.step, result.metrics, task=result.task)
        metrics.close()
        if config.mode == "score_eval" and config.scores_filename is not None:
            save_scores(
                configuration,
                [score for result in results for score in result.scores],
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


def _scorer(
    configuration: Configuration, loaded_model: LoadedModel, lengths: Mapping[str, int]
) -> Callable[..., Any]:
    from t0repro.evaluation.engine import score_examples

    tokens = configuration.run.batch_size * max(lengths.values())
    return functools.partial(
        score_examples, loaded_model.params, loaded_model.model, tokens_per_batch=tokens
    )


def _generator(
    configuration: Configuration, loaded_model: LoadedModel, lengths: Mapping[str, int]
) -> Callable[..., list[str]]:
    def generate(examples: Sequence[Mapping[str, Any]], unused: Mapping[str, int]) -> list[str]:
        del unused
        inputs = [example["inputs"] for example in examples]
        return generated_texts(configuration, loaded_model, inputs, lengths["inputs"])

    return generate
