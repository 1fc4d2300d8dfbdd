"""Turns the calls of T5X's train and precompile into the run that they describe."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping

from t0repro.adapters import Adapter
from t0repro.config.combinations import check_combinations
from t0repro.config.data import SeqioDataConfig
from t0repro.config.run import (
    ActionConfig,
    ActionMode,
    EarlyStoppingConfig,
    Replaced,
    TerminateOnNanConfig,
    TrainingPlan,
    TrainRun,
    UserClass,
)
from t0repro.config.settings import check_divides, check_settings, read
from t0repro.config.t5x.calls import Call, T5xSource, call_with_defaults, check_refused
from t0repro.config.t5x.gin_files import Parsed
from t0repro.config.t5x.layout import read_layout
from t0repro.config.t5x.model import (
    read_converter,
    read_decoding,
    read_dtypes,
    read_model,
    read_vocabularies,
)
from t0repro.config.t5x.optimizer import read_optimizer, read_schedule
from t0repro.errors import UserError

_ACTION_MODES = ("TRAIN", "TRAIN_EVAL", "INFER_EVAL")


def read_train_run(parsed: Parsed) -> TrainRun:
    """The run of T5X's train.

    Raises:
      UserError: For a value without a counterpart here or out of range, with its place.
    """
    program = parsed.program
    targets_place = _find_targets_place(parsed)
    _check_program(program)
    places: dict[str, str] = {}
    source, model_call = T5xSource(program, places), program["model"]
    check_refused(program)
    plan = _read_plan(program, source)
    train, trainer = plan.train_data, program["trainer_cls"]
    assert isinstance(train, SeqioDataConfig)
    model = read_model(model_call, source).with_adapter(program["adapter"], targets_place)
    model = model.with_choice_loss(program["choice_loss"], places.get("model.loss_denominator"))
    _, targets = read_vocabularies(model_call, source)
    computer = trainer["weight_metrics_computer"]
    # The model may have another vocabulary for its inputs, which is the first of the run's.
    call = model_call.arguments.get("vocabulary") or model_call["output_vocabulary"]
    for field, argument in (
        ("vocabulary", "sentencepiece_model_file"),
        ("vocabulary_extra_ids", "extra_ids"),
    ):
        if isinstance(call, Call) and argument in call.places:
            places[field] = call.places[argument]
    config = read(
        TrainRun,
        source,
        places,
        "",
        mode="train",
        model=model,
        dtypes=read_dtypes(model_call, source, plan.save and plan.save.dtype),
        optimizer=read_optimizer(model_call, model, source),
        schedule=read_schedule(trainer, source),
        sequence_length=train.sequence_length,
        batch_size=train.batch_size,
        plan=plan,
        weight_metrics_every=0 if computer is None else computer["every"],
        layout=read_layout(program["partitioner"]),
        vocabulary=getattr(targets, "sentencepiece_model_file", None),
        vocabulary_extra_ids=getattr(targets, "extra_ids", None) or 0,
        provenance=places,
    )
    check_settings(config, config.provenance)
    check_combinations(config)
    _check_together(config, program, source)
    return config


def _check_program(program: Call) -> None:
    """Refuses what T5X's train refuses in the arguments of its parts."""
    for data in (program["train_dataset_cfg"], program["train_eval_dataset_cfg"]):
        if data is not None and data["task_feature_lengths"] is None:
            data.refuse(
                "task_feature_lengths",
                "training needs a length for each feature.",
                "Set TASK_FEATURE_LENGTHS.",
            )
    if program["infer_eval_dataset_cfg"] is not None and program["inference_evaluator_cls"] is None:
        program.refuse(
            "inference_evaluator_cls",
            "infer_eval_dataset_cfg asks for an evaluation, which needs an evaluator.",
            "Bind @seqio.Evaluator, or train.infer_eval_dataset_cfg = None.",
        )
    for mode in program["actions"] or {}:
        if mode not in _ACTION_MODES:
            words = ", ".join(map(repr, _ACTION_MODES))
            why, fix = f"it must be one of {words}.", f"Bind one of {words}."
            program.refuse("actions", why, fix, value=mode)
    restore = program["checkpoint_cfg"]["restore"]
    if restore is not None and restore["path"]:
        why = "training starts from a single checkpoint."
        if restore["mode"] == "all":
            restore.refuse("mode", why, "Bind 'specific' or 'latest'.")
        if not isinstance(restore["path"], str):
            restore.refuse("path", why, "Give its path, or [] for initialized parameters.")


def read_precompile_run(parsed: Parsed) -> TrainRun:
    """The training run whose step T5X's precompile.gin compiles; its rate is 0.001, as in T5X.

    Raises:
      UserError: See `read_train_run`.
    """
    program = parsed.program
    if program["model"].user_class is not None:
        raise UserError(
            "precompile compiles the step of T5X's own model, and not that of a subclass.",
            where=program.places.get("model"),
            fix="Compile the step by a training run of one step.",
        )
    rate = call_with_defaults(
        "utils.create_learning_rate_scheduler", factors="constant", base_learning_rate=1e-3
    )
    trainer = call_with_defaults("trainer.Trainer", learning_rate_fn=rate)
    training = call_with_defaults(
        "train",
        **program.arguments,
        train_eval_dataset_cfg=None,
        infer_eval_dataset_cfg=None,
        checkpoint_cfg=call_with_defaults("utils.CheckpointConfig"),
        trainer_cls=trainer,
        total_steps=1,
        eval_steps=1,
        eval_period=1,
    )
    # T5X's own default. Nothing is sampled: the step is compiled but not run.
    arguments = {**training.arguments, "random_seed": program["random_seed"] or 42}
    training = dataclasses.replace(training, arguments=arguments, places=program.places)
    return read_train_run(dataclasses.replace(parsed, program=training))


def _read_plan(program: Call, source: T5xSource) -> TrainingPlan:
    user_classes = _read_user_classes(program, source.places)
    actions = _read_actions(program, source)
    # A user's model may generate at any time.
    decodes = program["infer_eval_dataset_cfg"] is not None or "model" in user_classes
    converter = read_converter(program["model"])
    parts = {}
    for part in ("train_data", "train_eval_data", "infer_eval_data"):
        call = program[f"{part.removesuffix('_data')}_dataset_cfg"]
        data = source.build(call, f"plan.{part}.")
        parts[part] = data and dataclasses.replace(data, converter=converter)
    return read(
        TrainingPlan,
        source,
        source.places,
        "plan.",
        **parts,
        actions=actions,
        user_classes=user_classes,
        decoding=read_decoding(program["model"], source, "plan.decoding.") if decodes else None,
    )


def _read_user_classes(program: Call, places: dict[str, str]) -> dict[Replaced, UserClass]:
    trainer = program["trainer_cls"]
    parts: dict[Replaced, tuple[Call, str]] = {
        "model": (program, "model"),
        "trainer": (program, "trainer_cls"),
        "partitioner": (program, "partitioner"),
        "weight_metrics_computer": (trainer, "weight_metrics_computer"),
    }
    user_classes = {}
    for part, (call, argument) in parts.items():
        value = call[argument]
        if isinstance(value, Call) and value.user_class is not None:
            user_classes[part] = value.user_class
            places[f"plan.user_classes.{part}"] = call.places.get(argument, "")
    return user_classes


def _read_actions(
    program: Call, source: T5xSource
) -> Mapping[ActionMode, tuple[ActionConfig, ...]]:
    """The actions on metrics, by the metrics' origin."""
    actions = source.build(program["actions"] or {}, "plan.actions.")
    for item in itertools.chain(*actions.values()):
        if not isinstance(item, EarlyStoppingConfig | TerminateOnNanConfig | UserClass):
            kind = type(item)
            raise UserError(
                f"{program.shown}.actions has an object of {kind.__module__}."
                f"{kind.__qualname__}, which is not an action.",
                where=program.places.get("actions"),
                fix="Derive its class from t0repro.training.trainer.BaseAction (docs/trainer.md).",
            )
    return actions


def _find_targets_place(parsed: Parsed) -> str | None:
    """Where the targets of an adapter were set, or else the adapter."""
    adapter: Adapter | None = parsed.program["adapter"]
    if adapter is None:
        return None
    # The adapter's functions are this project's own, which gin calls.
    name = f"adapters.{adapter.kind}.targets"
    places = (value.place for value in parsed.values if value.name.endswith(name))
    return next(places, parsed.program.places.get("adapter"))


def _check_together(config: TrainRun, program: Call, source: T5xSource) -> None:
    """Refuses settings that do not go together, of a batch, of its features and of periods.

    T5X trains in rounds of the shortest period and acts between them, so others must divide.
    """
    plan = config.plan
    assert plan.train_data is not None
    for name, parts in (
        ("trainer.Trainer.num_microbatches", config.num_microbatches),
        ("utils.DatasetConfig.num_shards", plan.train_data.num_shards),
    ):
        setting = source.find(name)
        assert setting is not None
        check_divides(setting.name, parts, config.batch_size, setting.place)
    for data in (plan.train_data, plan.train_eval_data):
        if data is None or data.converter != "decoder" or "inputs" in (data.sequence_length or {}):
            continue
        if config.model.input_full_attention:
            program["model"].refuse(
                "inputs_bidirectional_attention",
                "the data have no length for inputs, so examples are targets alone.",
                "Bind False, or give a length for inputs in TASK_FEATURE_LENGTHS.",
            )
    periods = {
        "train.eval_period": plan.evaluation_period,
        "utils.SaveCheckpointConfig.period": (plan.save and plan.save.period) or 0,
        "train.gc_period": plan.gc_period,
    }
    # 0 turns a period off.
    named = {name: period for name, period in periods.items() if period}
    shortest = min(named.values(), default=1)
    for name, period in named.items():
        if period % shortest:
            other = min(named, key=lambda key: named[key])
            places = [setting.place for key in (name, other) if (setting := source.find(key))]
            raise UserError(
                f"{name} = {period} is not a multiple of {other} = {shortest}.",
                where="; ".join(map(str, places)),
                fix="Choose periods that are multiples of the shortest one.",
            )
