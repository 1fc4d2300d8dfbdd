"""`t5_mesh_transformer --backend=jax`: the JAX stack behind Mesh TensorFlow's command line.

The flags and gin parameters are those of the mtf backend. This module is the seam: it turns them
into a RunConfig, finds the checkpoint to start from (Mesh TensorFlow's or ours), makes the batches
and hands all three to the stack, which knows neither flags nor gin.
"""

from __future__ import annotations

import functools
import shlex
import sys
from pathlib import Path
from typing import Any

from t0repro.config import mtf_gin
from t0repro.config.run_config import RunConfig
from t0repro.errors import UserError
from t0repro.files import write_atomically


def run(flags: Any) -> None:
    """Runs what the flags say.

    Args:
      flags: the parsed absl flags of t5_mesh_transformer; module imports are done.

    Raises:
      UserError: for a mode or an option that the JAX stack lacks, or bad input.
    """
    if flags.use_model_api:
        raise UserError(
            "--use_model_api is not available on the JAX stack.",
            fix="Use gin's run.mode (train or score_eval), or --backend=mtf.",
        )
    from t0repro.mesh.main import gin_inputs

    config, _ = mtf_gin.load(gin_inputs(flags), float32_activations=not _has_accelerator())
    runners = {"train": train, "score_eval": score_eval}
    if config.mode not in runners:
        raise UserError(
            f"The JAX stack does not run mode {config.mode!r} yet; it runs {', '.join(runners)}.",
            where=config.provenance.get("mode"),
            fix="Run this mode with --backend=mtf.",
        )
    runners[config.mode](config)


def _has_accelerator() -> bool:
    import jax

    return jax.default_backend() != "cpu"


def train(config: RunConfig) -> None:
    """Trains from model_dir's latest checkpoint, else init_checkpoint, else random parameters."""
    from t0repro.converters import sources
    from t0repro.data.train_data import TrainBatches
    from t0repro.training import train as training
    from t0repro.training.metrics import event_writer

    model_dir = Path(config.model_dir)
    has_checkpoint = model_dir.is_dir() and bool(sources.list_checkpoints(model_dir))
    start = starting_point(config)
    record_command(config)
    training.train(
        config,
        TrainBatches(config, has_checkpoint=has_checkpoint),
        restore_from=start,
        writers=[event_writer(config.model_dir)],
    )


def starting_point(config: RunConfig) -> dict[str, Any] | None:
    """The checkpoint that training starts from, as a flat T5X tree; None for a fresh start.

    Mesh TensorFlow's order: what model_dir holds wins over init_checkpoint.
    """
    from t0repro.converters import sources

    model_dir = Path(config.model_dir)
    found = sources.list_checkpoints(model_dir) if model_dir.is_dir() else []
    if not found:
        return None if config.init_checkpoint is None else sources.load_any(config.init_checkpoint)
    latest = sources.find_checkpoint(model_dir)
    if latest.format == "jax":
        return None  # training finds its own
    if any(ref.format == "jax" for ref in found):
        raise UserError(
            f"{latest.path} is later than the JAX checkpoints beside it.",
            where=config.model_dir,
            fix="Move one kind elsewhere, or continue with --backend=mtf.",
        )
    return sources.load_any(latest.path)


def score_eval(config: RunConfig) -> None:
    """Scores the evaluation's tasks at each chosen checkpoint and writes scores and metrics."""
    import jax

    from t0repro.converters import sources
    from t0repro.data.batches import eval_tasks, targets_vocabulary
    from t0repro.evaluation import score_eval as evaluation
    from t0repro.evaluation.engine import score_examples
    from t0repro.model.t5 import T5, initial_parameters
    from t0repro.training.metrics import MetricsManager, event_writer
    from t0repro.training.train_state import parameters_from_flat_tree

    assert config.eval_data is not None
    checkpoints = checkpoints_to_evaluate(config)
    model = T5(config.model, config.dtypes)
    shapes = jax.eval_shape(lambda: initial_parameters(model, jax.random.key(0)))
    tasks = list(eval_tasks(config.eval_data, config.sequence_length))
    record_command(config)
    for checkpoint in checkpoints:
        tree = sources.load_any(checkpoint.path, slots=False)
        params = parameters_from_flat_tree(tree, shapes, where=checkpoint.path)
        lengths = config.sequence_length or evaluation.longest(tasks)
        score = functools.partial(
            score_examples,
            params,
            model,
            tokens_per_batch=config.batch_size * max(lengths.values()),
        )
        results = []
        metrics = MetricsManager(config.model_dir, writers=[event_writer(config.model_dir)])
        for result in evaluation.evaluate(config, tasks, int(tree["state/step"]), score):
            results.append(result)
            metrics.write(config.eval_data.split, result.step, result.metrics, task=result.task)
        metrics.close()
        if config.scores_filename is not None:
            vocabulary = targets_vocabulary(config.eval_data)
            evaluation.save_scores(config.scores_filename, results, tasks, vocabulary.decode)


def checkpoints_to_evaluate(config: RunConfig) -> list[Any]:
    """The checkpoints in model_dir that eval_checkpoint_step chooses, by ascending step.

    A step that is not there stands for the nearest one that is, as in Mesh TensorFlow's
    get_checkpoint_iterator.
    """
    from t0repro.converters import sources

    found = sources.list_checkpoints(config.model_dir)
    by_step = {ref.step: ref for ref in found if ref.step is not None}
    wanted = config.eval_checkpoint_step
    if wanted is None:
        raise UserError(
            "eval_checkpoint_step is None: the JAX stack does not wait for new checkpoints yet.",
            where=config.provenance.get("eval_checkpoint_step"),
            fix="Bind eval_checkpoint_step to a step, a list of steps, 'all' or -1 (the latest).",
        )
    if wanted == "all":
        return [by_step[step] for step in sorted(by_step)]
    if wanted == -1:
        return [by_step[max(by_step)]]
    steps = (wanted,) if isinstance(wanted, int) else map(int, wanted)
    nearest = {min(by_step, key=lambda there: abs(there - step)) for step in steps}
    return [by_step[step] for step in sorted(nearest)]


def record_command(config: RunConfig) -> None:
    """Writes commands/command[.N] and operative_config.gin, as t5_mesh_transformer does on mtf."""
    import gin

    folder = Path(config.model_dir) / "commands"
    names = ["command", *(f"command.{count}" for count in range(1, 1 + _count(folder)))]
    write_atomically(folder / names[-1], shlex.join(sys.argv))
    if config.mode == "train":
        write_atomically(Path(config.model_dir) / "operative_config.gin", gin.config_str())


def _count(folder: Path) -> int:
    return len(list(folder.glob("command*"))) if folder.is_dir() else 0
