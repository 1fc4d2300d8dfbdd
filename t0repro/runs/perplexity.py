"""Mode perplexity_eval: teacher-forced metrics for each task."""

from __future__ import annotations

from t0repro.config.configuration import Configuration
from t0repro.runs.checkpoint_choice import chosen_checkpoints, loaded


def evaluate_perplexity(configuration: Configuration) -> None:
    """Writes each task's metrics at each chosen checkpoint, to metrics.jsonl and event files."""
    from t0repro.data.eval_data import perplexity_batches
    from t0repro.evaluation import perplexity
    from t0repro.event_files import event_writer
    from t0repro.training.metrics import MetricLog

    config = configuration.run
    steps = config.perplexity_eval_steps
    data = config.eval_data or config.plan.train_data
    split = data.split if data else "eval"
    datasets = perplexity_batches(config)
    for checkpoint in loaded(configuration, chosen_checkpoints(config)):
        params, model, step = checkpoint.params, checkpoint.model, checkpoint.step
        for task, batches in datasets:
            values = perplexity.evaluate_perplexity(params, model, batches, steps)
            # Mesh TensorFlow's folder name, which holds the number of examples asked for.
            name = f"{task}_{split}_{config.batch_size * steps}"
            name += f"_{config.eval_dir_suffix}" if config.eval_dir_suffix is not None else ""
            events = event_writer(f"{config.model_dir}/eval_{name}")
            metrics = MetricLog(config.model_dir)
            metrics.write(split, step, values, task=task)
            metrics.close()
            events.write_scalars(step, values)
            events.close()
