"""Turns a T5X program's record into a RunConfig, where both dialects meet."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from t0repro.adapters import Adapter
from t0repro.config import ranges
from t0repro.config.configuration import check_adapter, check_choice_loss
from t0repro.config.decoding import GREEDY
from t0repro.config.inference_plan import EvalPlan, InferPlan
from t0repro.config.run_config import CheckpointChoice, RunConfig
from t0repro.config.t5x import data, inference, modules, programs, records
from t0repro.config.t5x import model as t5x_model
from t0repro.config.t5x import optimizer as t5x_optimizer
from t0repro.config.t5x.gin_files import Parsed, Places, check_summary, provenance
from t0repro.config.t5x.inference import decoding_fields, decoding_plan
from t0repro.config.t5x.model import layout_of
from t0repro.config.training_plan import Replaced, SeqioDataConfig, TrainingPlan, UserClass
from t0repro.errors import UserError

_FIELDS = {
    "layout": "partitioning.PjitPartitioner.num_partitions",
    "model_dir": "train.model_dir",
    "train_steps": "train.total_steps",
    "batch_size": "train/utils.DatasetConfig.batch_size",
    "sequence_length": "train/utils.DatasetConfig.task_feature_lengths",
    "num_microbatches": "trainer.Trainer.num_microbatches",
    "schedule": "trainer.Trainer.learning_rate_fn",
    # The same number as train_steps.
    "schedule.total_train_steps": "train.total_steps",
    "vocabulary": "seqio.SentencePieceVocabulary.sentencepiece_model_file",
    "vocabulary_extra_ids": "seqio.SentencePieceVocabulary.extra_ids",
    "dtypes.master": "utils.SaveCheckpointConfig.dtype",
    "plan.random_seed": "train.random_seed",
    "plan.relative_steps": "train.relative_steps",
    "plan.eval_steps": "train.eval_steps",
    "plan.eval_period": "train.eval_period",
    "plan.stats_period": "train.stats_period",
    "plan.run_eval_before_training": "train.run_eval_before_training",
    "plan.gc_period": "train.gc_period",
    "plan.actions": "train.actions",
    "weight_metrics_every": "trainer.WeightMetricsComputer.every",
    "model.adapter": "train.adapter",
    "model.choice_loss": "train.choice_loss",
    "plan.user_classes.model": "train.model",
    "plan.user_classes.trainer": "train.trainer_cls",
    "plan.user_classes.partitioner": "train.partitioner",
    "plan.user_classes.weight_metrics_computer": "trainer.Trainer.weight_metrics_computer",
}
_SCHEDULE_ARGUMENTS = (
    "factors base_learning_rate warmup_steps decay_factor steps_per_decay steps_per_cycle"
    " step_offset min_learning_rate"
).split()
# Functions that replace T5X's own; they could only be T5X code.
_OWN_CODE = {
    name: "this function of the run cannot be replaced."
    for name in (
        "get_dataset_fn",
        "train_eval_get_dataset_fn",
        "train_state_initializer_cls",
        "verify_matching_vocabs_fn",
    )
}


def train_config(parsed: Parsed) -> RunConfig:
    """The RunConfig of a training run.

    Raises:
      UserError: For a value without a counterpart here or out of range, with its place.
    """
    program, places = parsed.program, Places.of(parsed.values)
    assert isinstance(program, programs.TrainProgram)
    places.check_unset(program, "train", _OWN_CODE)
    check_summary(program, "train", places)
    plan = _plan(program, places)
    model = t5x_model.model_config(program.model, places)
    model = model.with_adapter(program.adapter, _targets_place(program.adapter, places))
    divisor = places.place(t5x_model.FIELDS["loss_denominator"])
    model = model.with_choice_loss(program.choice_loss, divisor)
    train = plan.train_data
    assert isinstance(train, SeqioDataConfig)
    config = RunConfig(
        mode="train",
        model_dir=program.model_dir,
        model=model,
        dtypes=t5x_model.dtypes(program.model, places, plan.save and plan.save.dtype),
        optimizer=t5x_optimizer.optimizer_config(program.model, model, places),
        schedule=t5x_optimizer.schedule_config(program.trainer_cls, program.total_steps, places),
        sequence_length=train.sequence_length,
        batch_size=train.batch_size,
        # T5X takes None and 0 to mean no microbatches.
        num_microbatches=program.trainer_cls.num_microbatches or 1,
        train_steps=program.total_steps,
        plan=plan,
        weight_metrics_every=_weight_metrics_every(program.trainer_cls),
        layout=layout_of(program.partitioner, places),
        provenance=_provenance(program, places),
        **shared_fields(program.model),
    )
    ranges.check(config, config.provenance)
    check_adapter(config)
    check_choice_loss(config)
    _check(config, places)
    _check_infer_eval(program, places)
    return config


def precompile_config(parsed: Parsed) -> RunConfig:
    """The training run whose step T5X's precompile.gin compiles; its rate is 0.001, as in T5X.

    Raises:
      UserError: See `train_config`.
    """
    program, places = parsed.program, Places.of(parsed.values)
    assert isinstance(program, programs.PrecompileProgram)
    if modules.user_class(program.model, places) is not None:
        raise UserError(
            "precompile compiles the step of T5X's own model, and not that of a subclass.",
            where=places.place("precompile.model"),
            fix="Compile the step by a training run of one step.",
        )
    rate = records.LearningRateSchedule(factors="constant", base_learning_rate=1e-3)
    training = programs.TrainProgram(
        model=program.model,
        train_dataset_cfg=program.train_dataset_cfg,
        train_eval_dataset_cfg=None,
        infer_eval_dataset_cfg=None,
        checkpoint_cfg=records.CheckpointConfig(),
        partitioner=program.partitioner,
        trainer_cls=records.Trainer(learning_rate_fn=rate),
        model_dir=program.model_dir,
        total_steps=1,
        eval_steps=1,
        eval_period=1,
        # T5X's own default. Nothing is sampled: the step is compiled but not run.
        random_seed=program.random_seed or 42,
        adapter=program.adapter,
        choice_loss=program.choice_loss,
    )
    return train_config(dataclasses.replace(parsed, program=training))


def shared_fields(model: records.EncoderDecoderModel) -> dict[str, Any]:
    """The fields of a RunConfig that only Mesh TensorFlow's modes read, and the vocabulary."""
    vocabulary = getattr(model.output_vocabulary, "sentencepiece_model_file", None)
    parameters = model.decoding.decoder_params or {}
    return {
        # Mesh TensorFlow's modes do not use such a RunConfig, so these are placeholders.
        "eval_data": None,
        "eval_checkpoint_step": None,
        "eval_summary_dir": None,
        "eval_dir_suffix": None,
        "output_eval_examples": True,
        "checkpoint_choice": CheckpointChoice(0, None, True),
        "perplexity_eval_steps": 1,
        "decoding": dataclasses.replace(
            GREEDY,
            beam_size=model.decoding.num_decodes,
            alpha=parameters.get("alpha", GREEDY.alpha),
            length_multiplier=0.0,
            length_constant=0.0,
        ),
        "infer": None,
        "score_strings": None,
        "scores_filename": None,
        "save_example_text": True,
        "vocabulary": vocabulary,
        "vocabulary_extra_ids": getattr(model.output_vocabulary, "extra_ids", None) or 0,
    }


def _plan(program: programs.TrainProgram, places: Places) -> TrainingPlan:
    def dataset(record: records.DatasetConfig | None, scope: str) -> Any:
        return None if record is None else data.dataset_config(record, scope, places)

    train_data = dataset(program.train_dataset_cfg, "train")
    if train_data.sequence_length is None:
        raise places.refused(
            "train/utils.DatasetConfig.task_feature_lengths",
            None,
            "training needs a length for each feature.",
            "Set TASK_FEATURE_LENGTHS.",
        )
    infer_eval_data = dataset(program.infer_eval_dataset_cfg, "infer_eval")
    evaluator = data.evaluator_config(program.inference_evaluator_cls, places)
    user_classes = _user_classes(program, places)
    generates = infer_eval_data is not None and evaluator is not None
    return TrainingPlan(
        train_data=train_data,
        train_eval_data=dataset(program.train_eval_dataset_cfg, "train_eval"),
        infer_eval_data=infer_eval_data,
        evaluator=evaluator,
        random_seed=program.random_seed,
        relative_steps=program.relative_steps,
        eval_steps=program.eval_steps,
        eval_period=program.eval_period,
        stats_period=program.stats_period,
        run_eval_before_training=program.run_eval_before_training,
        save=data.save_config(program.checkpoint_cfg.save, places),
        restore=data.restore_config(program.checkpoint_cfg.restore, places),
        actions=data.actions_config(program.actions, places),
        gc_period=program.gc_period,
        user_classes=user_classes,
        # A user's model may generate at any time.
        decoding=decoding_plan(program.model, places)
        if generates or "model" in user_classes
        else None,
    )


def _user_classes(program: programs.TrainProgram, places: Places) -> dict[Replaced, UserClass]:
    parts: dict[Replaced, Any] = {
        "model": program.model,
        "trainer": program.trainer_cls,
        "partitioner": program.partitioner,
        "weight_metrics_computer": program.trainer_cls.weight_metrics_computer,
    }
    found = dict[Replaced, UserClass]()
    for part, record in parts.items():
        made = modules.user_class(record, places)
        if made is not None:
            found[part] = made
    return found


def _targets_place(adapter: Adapter | None, places: Places) -> str | None:
    """Where an adapter's targets were set, or else the adapter."""
    if adapter is None:
        return None
    return places.place(f"adapters.{adapter.kind}.targets") or places.place("train.adapter")


def _weight_metrics_every(trainer: records.Trainer) -> int:
    computer = trainer.weight_metrics_computer
    return 0 if computer is None else computer.every


def _check(config: RunConfig, places: Places) -> None:
    """Refuses what T5X's train refuses, before reading any data or checkpoint."""
    plan = config.plan
    if plan.restore and plan.restore.mode == "all":
        raise places.refused(
            "utils.RestoreCheckpointConfig.mode",
            "all",
            "training starts from a single checkpoint.",
            "Bind 'specific' or 'latest'.",
        )
    if plan.restore and not isinstance(plan.restore.path, str):
        raise places.refused(
            "utils.RestoreCheckpointConfig.path",
            list(plan.restore.path),
            "training starts from a single checkpoint.",
            "Give its path, or [] for initialized parameters.",
        )
    assert plan.train_data is not None
    for name, parts in (
        ("trainer.Trainer.num_microbatches", config.num_microbatches),
        ("train/utils.DatasetConfig.num_shards", plan.train_data.num_shards),
    ):
        ranges.check_divides(name, parts, config.batch_size, places.place(name))
    _check_periods(plan, places)


def _check_infer_eval(program: programs.TrainProgram, places: Places) -> None:
    """Refuses settings with which the evaluation by the tasks' metrics would fail, steps later."""
    if program.infer_eval_dataset_cfg is None:
        return
    if program.inference_evaluator_cls is None:
        raise places.refused(
            "train.inference_evaluator_cls",
            None,
            "infer_eval_dataset_cfg asks for an evaluation, which needs an evaluator.",
            "Bind @seqio.Evaluator, or train.infer_eval_dataset_cfg = None.",
        )


def _check_periods(plan: TrainingPlan, places: Places) -> None:
    """Refuses periods that are not multiples of the shortest."""
    periods = {
        "train.eval_period": eval_period(plan),
        "utils.SaveCheckpointConfig.period": (plan.save and plan.save.period) or 0,
        "train.gc_period": plan.gc_period,
    }
    # 0 turns a period off.
    named = {name: period for name, period in periods.items() if period}
    # T5X trains in rounds of the shortest period and acts between them, so it refuses them too.
    shortest = min(named.values(), default=1)
    for name, period in named.items():
        if period % shortest:
            other = min(named, key=lambda key: named[key])
            raise UserError(
                f"{name} = {period} is not a multiple of {other} = {shortest}.",
                where=f"{places.place(name)}; {places.place(other)}",
                fix="Choose periods that are multiples of the shortest one.",
            )


def eval_period(plan: TrainingPlan) -> int:
    """Steps between evaluations; 0 if there are none."""
    return plan.eval_period if plan.train_eval_data or plan.infer_eval_data else 0


def _provenance(program: programs.TrainProgram, places: Places) -> dict[str, str]:
    names = _FIELDS | t5x_model.model_fields()
    names |= {
        f"optimizer.{field}": f"{t5x_optimizer.ADAFACTOR}.{name}"
        for field, name in t5x_optimizer.FIELDS.items()
    }
    names |= {
        f"schedule.arguments.{name}": f"{t5x_optimizer.SCHEDULE}.{name}"
        for name in _SCHEDULE_ARGUMENTS
    }
    # The same arguments in three scopes.
    for part in ("train", "train_eval", "infer_eval"):
        names |= data.data_fields(f"plan.{part}_data", part)
    names |= data.restore_fields("plan.restore") | data.save_fields("plan.save")
    names |= data.evaluator_fields("plan.evaluator")
    names |= decoding_fields("plan.decoding", program.model)
    return provenance(places, names)


# ---- A program's record: training, evaluation or inference ---------------------------------------


_READERS: Mapping[type, Callable[[Parsed], Any]] = {
    programs.TrainProgram: train_config,
    programs.PrecompileProgram: precompile_config,
    programs.EvalProgram: inference.eval_plan,
    programs.InferProgram: inference.infer_plan,
}


def converted(parsed: Parsed) -> RunConfig | EvalPlan | InferPlan:
    """The configuration for the program's run mode.

    Raises:
      UserError: for a value without a counterpart here or out of range, with its place.
    """
    return _READERS[type(parsed.program)](parsed)
