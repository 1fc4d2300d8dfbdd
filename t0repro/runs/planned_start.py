"""Starts a training that a T5X gin file describes: its data, its checkpoint, its files."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from t0repro.config.run_config import RunConfig
from t0repro.config.t5x import programs
from t0repro.config.t5x.gin_files import Parsed

if TYPE_CHECKING:
    from clu.metric_writers import MetricWriter

    from t0repro.data.seqio_data import EvalBatches
    from t0repro.runs.plan import InferEval
    from t0repro.training.loop import TrainingLoop

Say = Callable[[str], None]


def start(
    parsed: Parsed, config: RunConfig, *, allow_changed: bool = False, say: Say | None = None
) -> None:
    """Trains from model_dir's latest checkpoint, or the one to restore, or new parameters.

    Args:
      parsed: The gin files, whose modules have been imported.
      config: What `train_config` made of them.
      allow_changed: Whether to continue in a model_dir although settings changed.
      say: Receives lines about what is being done; prints to standard error by default.

    Raises:
      UserError: If the data, the checkpoint or the folder does not fit the run.
    """
    from t0repro.converters import sources
    from t0repro.data.seqio_data import SeqioTrainBatches
    from t0repro.partitioning.processes import is_first
    from t0repro.runs import train as training
    from t0repro.runs.description import describe_training
    from t0repro.runs.plan import PlannedInputs, chosen_seed
    from t0repro.training.model_dir import held_for_training

    say = say or (lambda line: print(line, file=sys.stderr, flush=True))
    assert config.plan is not None
    plan = dataclasses.replace(config.plan, random_seed=chosen_seed(config.plan, say))
    config = dataclasses.replace(config, plan=plan)
    program, model_dir = parsed.program, Path(config.model_dir)
    check_data(program, config)
    with held_for_training(model_dir, "jax", config, allow_changed=allow_changed):
        # Asked under the lock: before it, another run might still be saving here.
        resumed = bool(sources.list_checkpoints(model_dir))
        tree = None if resumed else starting_tree(config, say)
        if is_first():
            describe_training(config, parsed.gin_text)
        training.train(
            config,
            SeqioTrainBatches(
                plan.train_data, save_dataset=bool(plan.save and plan.save.data), resumed=resumed
            ),
            restore_from=tree if not resumed else _foreign_checkpoint(model_dir, config),
            say=say,
            planned=PlannedInputs(
                train_eval=train_eval(config, say),
                infer_eval=infer_eval(parsed, config, say),
                open_writer=_opener_of_writers(model_dir, parsed.gin_text, tree),
                **_for_users_model(parsed, config),
            ),
        )


def _for_users_model(parsed: Parsed, config: RunConfig) -> dict[str, Any]:
    """What only a model of the user's reads: the vocabularies, and how T5X's would generate."""
    from t0repro.config.t5x.inference import decoding_plan
    from t0repro.config.t5x.places import Places
    from t0repro.data.vocabularies import seqio_vocabulary

    if config.plan is None or "model" not in config.plan.user_classes:
        return {}
    record = parsed.program.model
    vocabularies = tuple(map(seqio_vocabulary, (record.input_vocabulary, record.output_vocabulary)))
    return {
        "vocabularies": vocabularies,
        "decoding": decoding_plan(record, Places.of(parsed.values)),
    }


def _opener_of_writers(
    model_dir: Path, gin_text: str, tree: dict[str, Any] | None
) -> Callable[[str], MetricWriter]:
    """Opens TensorBoard's files in model_dir/<split>; those of `train` show the configuration."""
    import gin
    from t0repro.converters import sources
    from t0repro.event_files import event_writer
    from t0repro.partitioning.processes import output_folder

    saved, written = sources.list_checkpoints(model_dir), output_folder(model_dir)
    # T5X puts the text at the step that the run starts from.
    step = (saved[-1].step or 0) if saved else int((tree or {}).get("state/step", 0))

    def open_writer(split: str) -> MetricWriter:
        writer = event_writer(written / split)
        if split == "train":
            writer.write_texts(step, {"config": gin.markdown(gin_text)})
        return writer

    return open_writer


def check_data(program: programs.TrainProgram, config: RunConfig) -> None:
    """Checks tasks, splits, caches and vocabularies, before anything is built or written.

    Raises:
      UserError: If a task is missing, not cached, or encoded with another vocabulary, if no task
        has the split to train on, if the model's embedding is too small for the vocabulary, or if
        a feature's length is missing.
    """
    from t0repro.data.checks import (
        check_lengths,
        check_mixture,
        check_readable,
        check_shards,
        no_task_has,
        tasks_to_train_on,
        tasks_with_split,
    )
    from t0repro.data.vocabularies import check_rows, check_vocabularies

    plan = config.plan
    assert plan is not None
    for data in (plan.train_data, plan.train_eval_data, plan.infer_eval_data):
        if data is None:
            continue
        check_mixture(data.mixture_or_task_name)
        check_lengths(data.mixture_or_task_name, data.sequence_length)
        model = program.model
        check_vocabularies(
            data.mixture_or_task_name, model.input_vocabulary, model.output_vocabulary
        )
        check_rows(config.model.vocab_size, model.input_vocabulary, model.output_vocabulary)
        trains = data is plan.train_data
        # Evaluations without the split are left out, as in T5X.
        tasks = (
            tasks_to_train_on(data)
            if trains
            else tasks_with_split(data.mixture_or_task_name, data.split)
        )
        if not tasks and trains:
            raise no_task_has(
                data.mixture_or_task_name, data.split, "train/utils.DatasetConfig.split"
            )
        check_readable(
            data.mixture_or_task_name, data.split, use_cached=data.use_cached, tasks=tasks
        )
        check_shards(
            data.mixture_or_task_name, data.split, data.num_shards, use_cached=data.use_cached
        )


def starting_tree(config: RunConfig, say: Say) -> dict[str, Any] | None:
    """Reads the checkpoint that the plan restores, under the model's names; None for none.

    Raises:
      UserError: If the checkpoint is missing or damaged, the model is not configured as its
        config.json says, or the plan's rules do not fit it.
    """
    import jax

    from t0repro.converters import sources
    from t0repro.converters.arithmetic import check_configured, repeated_biases
    from t0repro.model.t5 import T5, initial_parameters
    from t0repro.runs.plan import keys
    from t0repro.training.optimizers import make_optimizer
    from t0repro.training.restore import restored
    from t0repro.training.train_state import new_train_state, to_flat_tree

    plan = config.plan
    assert plan is not None and plan.random_seed is not None and config.optimizer is not None
    if plan.restore is None:
        return None
    assert isinstance(plan.restore.path, str)
    ref = sources.find_checkpoint(plan.restore.path)
    check_configured(ref, config.model)
    say(f"restore: {ref.path}")
    model = T5(config.model, config.dtypes)
    initial_key, _ = keys(plan.random_seed)
    # Values, not only shapes: what the rules leave out of the checkpoint is taken from here.
    fresh = new_train_state(
        initial_parameters(model, initial_key), make_optimizer(config.optimizer)
    )
    tree = sources.load_any(ref.path)
    # A model with a position bias in each layer may start from one whose layers share it.
    tree |= {name: tree[shared] for name, shared in repeated_biases(tree, config.model).items()}
    place = config.provenance.get("plan.restore.path")
    return restored(tree, to_flat_tree(jax.device_get(fresh)), plan.restore, place, say)


def _foreign_checkpoint(model_dir: Path, config: RunConfig) -> dict[str, Any] | None:
    """model_dir's latest checkpoint if another program wrote it; `train` restores its own."""
    from t0repro.converters import sources
    from t0repro.converters.arithmetic import open_configured

    latest = sources.find_checkpoint(model_dir)
    return None if latest.format == "jax" else open_configured(latest, config.model)


def train_eval(config: RunConfig, say: Say) -> Mapping[str, EvalBatches]:
    """Batches for evaluating the training's loss, by task; none if no task has the split."""
    from t0repro.data.seqio_data import train_eval_batches

    plan = config.plan
    assert plan is not None
    data = plan.train_eval_data
    if data is None:
        return {}
    found = train_eval_batches(data, plan.eval_steps)
    if not found:
        say(f"train_eval: no task of {data.mixture_or_task_name} has {data.split}")
    return found


def infer_eval(parsed: Parsed, config: RunConfig, say: Say) -> InferEval | None:
    """What evaluates the tasks' own metrics in a training; None if the run has no such thing."""
    plan = config.plan
    assert plan is not None
    if plan.infer_eval_data is None or plan.evaluator is None:
        return None
    import seqio

    from t0repro.config.t5x.inference import decoding_plan
    from t0repro.config.t5x.places import Places
    from t0repro.evaluation.seqio_evaluator import TaskEvaluator
    from t0repro.model.layer_stacks import by_layer, stacks_in
    from t0repro.model.t5 import T5
    from t0repro.partitioning.processes import output_folder

    data = plan.infer_eval_data
    tasks = seqio.get_subtasks(seqio.get_mixture_or_task(data.mixture_or_task_name))
    if not any(task.metric_fns and data.split in task.splits for task in tasks):
        say(f"infer_eval: no task of {data.mixture_or_task_name} has {data.split} and a metric")
        return None
    decoding = decoding_plan(parsed.program.model, Places.of(parsed.values))
    # Every process evaluates, since they share the devices, but only the first keeps results.
    evaluator = TaskEvaluator(data, plan.evaluator, output_folder(config.model_dir), decoding)
    model, users = T5(config.model, config.dtypes), "model" in plan.user_classes

    def evaluate(loop: TrainingLoop) -> Mapping[str, Mapping[str, float]]:
        params = loop.held_state.params
        # The network alone for this project's own model; a user's generates by its methods.
        trained = loop.trainer.model if users else model
        return evaluator.evaluate(trained, by_layer(params, stacks_in(params)), loop.step)

    return evaluate
