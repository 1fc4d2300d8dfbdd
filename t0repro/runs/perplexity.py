"""Mode perplexity_eval."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import jax
import numpy as np

from t0repro.config.configuration import Configuration
from t0repro.config.run import MeshEvalRun
from t0repro.data.batches import perplexity_batches
from t0repro.evaluation.result_lines import print_results
from t0repro.event_files import event_writer
from t0repro.model.t5 import T5
from t0repro.partitioning.devices import count_data_shards, pad_rows, use_devices_of
from t0repro.progress import count_progress
from t0repro.runs.checkpoint_choice import choose_checkpoints, load_checkpoints
from t0repro.storage import output_path
from t0repro.training.metrics import MetricLog
from t0repro.training.token_losses import evaluation_metrics, evaluation_sums, loss_denominator


def evaluate_perplexity(configuration: Configuration[MeshEvalRun]) -> None:
    """Writes each task's metrics at each chosen checkpoint, and prints them.

    They go to metrics.jsonl and event files.
    """
    config = configuration.run
    steps = config.perplexity_eval_steps
    split = config.eval_data.split if config.eval_data else "eval"
    datasets = perplexity_batches(config)
    for checkpoint in load_checkpoints(configuration, choose_checkpoints(config)):
        params, model, step = checkpoint.params, checkpoint.model, checkpoint.step
        evaluated = {}
        for task, batches in datasets:
            evaluated[task] = values = perplexity_metrics(params, model, batches, steps)
            # Mesh TensorFlow's folder name, which contains the requested number of examples.
            name = f"{task}_{split}_{config.batch_size * steps}"
            name += f"_{config.eval_dir_suffix}" if config.eval_dir_suffix is not None else ""
            events = event_writer(output_path(config.model_dir) / f"eval_{name}")
            metrics = MetricLog(output_path(config.model_dir))
            metrics.write(split, step, values, task=task)
            metrics.close()
            events.write_scalars(step, values)
            events.close()
        print_results(evaluated, step, config.model_dir)


def perplexity_metrics(
    params: dict, model: T5, batches: Sequence[Mapping[str, np.ndarray]], steps: int
) -> dict[str, float]:
    """Teacher-forced metrics of a task over batches, under Mesh TensorFlow's names:

        neg_log_perplexity   mean log-probability of a target token, natural log
        token_accuracy       fraction of target tokens that are the most likely token
        sequence_accuracy    fraction of rows whose target tokens are all the most likely ones
        mean_label           mean id of the target tokens: a checksum of the data
        num_eval_tokens      number of target tokens
        max_targets_length   number of target tokens of the longest row
        loss                 the training loss without z_loss, mean over batches

    Args:
      params: the model's parameters.
      model: the model.
      batches: int32 arrays [batch, length] by feature, all of one shape.
      steps: number of batches that Mesh TensorFlow averages the loss over; those beyond `batches`
        are empty and add nothing to it.

    Source: mesh_tensorflow.transformer.utils.tpu_estimator_model_fn, simple_metrics.
    """
    totals: dict[str, float] = {}
    longest = 0
    with count_progress(len(batches), "evaluating", "batch", "evaluated", "batches") as advance:
        for batch in batches:
            rows = count_data_shards(params)
            parts = {name: pad_rows(x, rows) for name, x in batch.items()}
            denominator = loss_denominator(model.config, batch)
            with use_devices_of(params):
                sums = jax.device_get(_sums(model, params, parts, denominator))
            for name, value in sums.items():
                # In float64: a float32 sum stops counting tokens one by one at 2**24.
                totals[name] = totals.get(name, 0.0) + float(value)
            longest = max(longest, int((batch["targets"] > 0).sum(axis=-1).max(initial=0)))
            advance(1)
    zeros = dict.fromkeys(
        ("loss", "cross_entropy", "correct_tokens", "correct_rows", "tokens", "rows", "labels"), 0.0
    )
    totals = {**zeros, **totals, "batches": float(steps)}
    return {
        **evaluation_metrics(totals),
        "mean_label": totals["labels"] / max(totals["tokens"], 1.0),
        "max_targets_length": float(longest),
    }


@functools.partial(jax.jit, static_argnums=(0, 3))
def _sums(
    model: T5, params: dict, batch: dict[str, jax.Array], denominator: float
) -> dict[str, jax.Array]:
    return evaluation_sums(model, params, batch, denominator=denominator)
