"""Turns a T5X program's calls into the run that they describe."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Mapping
from typing import Any

from t0repro.adapters import Adapter
from t0repro.config import ranges
from t0repro.config.checkpoints import RestoreConfig
from t0repro.config.configuration import check_adapter, check_choice_loss
from t0repro.config.data import ExampleFiles, SeqioDataConfig
from t0repro.config.read import read
from t0repro.config.run import (
    ActionConfig,
    ActionMode,
    EarlyStoppingConfig,
    EvalRun,
    InferRun,
    Replaced,
    TerminateOnNanConfig,
    TrainingPlan,
    TrainRun,
    UserClass,
)
from t0repro.config.t5x.calls import Call, call_with_defaults, check_refused
from t0repro.config.t5x.gin_files import Parsed
from t0repro.config.t5x.layout import layout_of
from t0repro.config.t5x.model import decoding_plan, dtypes, model_config, vocabularies
from t0repro.config.t5x.optimizer import optimizer_config, schedule_config
from t0repro.config.t5x.source import T5xSource
from t0repro.errors import UserError

_ACTION_MODES = ("TRAIN", "TRAIN_EVAL", "INFER_EVAL")


# ---- Training ------------------------------------------------------------------------------------


def train_config(parsed: Parsed) -> TrainRun:
    """The run of T5X's train.

    Raises:
      UserError: For a value without a counterpart here or out of range, with its place.
    """
    program = parsed.program
    check_refused(program)
    places: dict[str, str] = {}
    source, model_call = T5xSource(program, places), program["model"]
    plan = _plan(program, source)
    train, trainer = plan.train_data, program["trainer_cls"]
    assert isinstance(train, SeqioDataConfig)
    model = model_config(model_call, source)
    model = model.with_adapter(program["adapter"], _targets_place(parsed))
    model = model.with_choice_loss(program["choice_loss"], places.get("model.loss_denominator"))
    _, targets = vocabularies(model_call, source)
    computer = trainer["weight_metrics_computer"]
    for field, call, argument in (
        ("layout", program["partitioner"], "num_partitions"),
        ("batch_size", program["train_dataset_cfg"], "batch_size"),
        ("sequence_length", program["train_dataset_cfg"], "task_feature_lengths"),
        ("vocabulary", model_call["output_vocabulary"], "sentencepiece_model_file"),
        ("vocabulary_extra_ids", model_call["output_vocabulary"], "extra_ids"),
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
        dtypes=dtypes(model_call, source, plan.save and plan.save.dtype),
        optimizer=optimizer_config(model_call, model, source),
        schedule=schedule_config(trainer, source),
        sequence_length=train.sequence_length,
        batch_size=train.batch_size,
        plan=plan,
        weight_metrics_every=0 if computer is None else computer["every"],
        layout=layout_of(program["partitioner"]),
        vocabulary=getattr(targets, "sentencepiece_model_file", None),
        vocabulary_extra_ids=getattr(targets, "extra_ids", None) or 0,
        provenance=places,
    )
    ranges.check(config, config.provenance)
    check_adapter(config)
    check_choice_loss(config)
    _check(config, program, source)
    return config


def precompile_config(parsed: Parsed) -> TrainRun:
    """The training run whose step T5X's precompile.gin compiles; its rate is 0.001, as in T5X.

    Raises:
      UserError: See `train_config`.
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
    return train_config(dataclasses.replace(parsed, program=training))


def _plan(program: Call, source: T5xSource) -> TrainingPlan:
    data, evaluator = program["train_dataset_cfg"], program["inference_evaluator_cls"]
    if data["task_feature_lengths"] is None:
        data.refuse(
            "task_feature_lengths",
            "training needs a length for each feature.",
            "Set TASK_FEATURE_LENGTHS.",
        )
    if program["infer_eval_dataset_cfg"] is not None and evaluator is None:
        program.refuse(
            "inference_evaluator_cls",
            "infer_eval_dataset_cfg asks for an evaluation, which needs an evaluator.",
            "Bind @seqio.Evaluator, or train.infer_eval_dataset_cfg = None.",
        )
    user_classes = _user_classes(program, source.places)
    generates = program["infer_eval_dataset_cfg"] is not None and evaluator is not None
    # A user's model may generate at any time.
    decodes = generates or "model" in user_classes
    parts = {
        part: source.build(program[f"{part.removesuffix('_data')}_dataset_cfg"], f"plan.{part}.")
        for part in ("train_data", "train_eval_data", "infer_eval_data")
    }
    return read(
        TrainingPlan,
        source,
        source.places,
        "plan.",
        **parts,
        actions=_actions(program, source),
        user_classes=user_classes,
        decoding=decoding_plan(program["model"], source, "plan.decoding.") if decodes else None,
    )


def _user_classes(program: Call, places: dict[str, str]) -> dict[Replaced, UserClass]:
    trainer = program["trainer_cls"]
    parts: dict[Replaced, tuple[Call, str]] = {
        "model": (program, "model"),
        "trainer": (program, "trainer_cls"),
        "partitioner": (program, "partitioner"),
        "weight_metrics_computer": (trainer, "weight_metrics_computer"),
    }
    found = {}
    for part, (call, argument) in parts.items():
        value = call[argument]
        if isinstance(value, Call) and value.user_class is not None:
            found[part] = value.user_class
            places[f"plan.user_classes.{part}"] = call.places.get(argument, "")
    return found


def _actions(program: Call, source: T5xSource) -> Mapping[ActionMode, tuple[ActionConfig, ...]]:
    """The actions on metrics, by the metrics' origin."""
    found: dict[Any, tuple[ActionConfig, ...]] = {}
    for mode, items in (program["actions"] or {}).items():
        if mode not in _ACTION_MODES:
            words = ", ".join(map(repr, _ACTION_MODES))
            why, fix = f"it must be one of {words}.", f"Bind one of {words}."
            program.refuse("actions", why, fix, value=mode)
        found[mode] = source.build(items, "plan.actions.")
        for item in found[mode]:
            if not isinstance(item, EarlyStoppingConfig | TerminateOnNanConfig | UserClass):
                kind = type(item)
                raise UserError(
                    f"{program.shown}.actions has an object of {kind.__module__}."
                    f"{kind.__qualname__}, which is not an action.",
                    where=program.places.get("actions"),
                    fix="Derive its class from t0repro.training.trainer.BaseAction"
                    " (docs/trainer.md).",
                )
    return found


def _targets_place(parsed: Parsed) -> str | None:
    """Where the targets of an adapter were set, or else the adapter."""
    adapter: Adapter | None = parsed.program["adapter"]
    if adapter is None:
        return None
    # The adapter's functions are this project's own, which gin calls.
    name = f"adapters.{adapter.kind}.targets"
    places = (value.place for value in parsed.values if value.name.endswith(name))
    return next(places, parsed.program.places.get("adapter"))


def _check(config: TrainRun, program: Call, source: T5xSource) -> None:
    """Refuses what T5X's train refuses, before reading any data or checkpoint."""
    restore = program["checkpoint_cfg"]["restore"]
    if (plan := config.plan).restore is not None:
        why = "training starts from a single checkpoint."
        if plan.restore.mode == "all":
            restore.refuse("mode", why, "Bind 'specific' or 'latest'.")
        if not isinstance(plan.restore.path, str):
            restore.refuse("path", why, "Give its path, or [] for initialized parameters.")
    assert plan.train_data is not None
    for name, parts in (
        ("trainer.Trainer.num_microbatches", config.num_microbatches),
        ("utils.DatasetConfig.num_shards", plan.train_data.num_shards),
    ):
        setting = source.find(name)
        assert setting is not None
        ranges.check_divides(setting.name, parts, config.batch_size, setting.place)
    _check_periods(plan, source)


def _check_periods(plan: TrainingPlan, source: T5xSource) -> None:
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
            places = [setting.place for key in (name, other) if (setting := source.find(key))]
            raise UserError(
                f"{name} = {period} is not a multiple of {other} = {shortest}.",
                where="; ".join(map(str, places)),
                fix="Choose periods that are multiples of the shortest one.",
            )


def eval_period(plan: TrainingPlan) -> int:
    """Steps between evaluations; 0 if there are none."""
    return plan.eval_period if plan.train_eval_data or plan.infer_eval_data else 0


# ---- Evaluation and inference --------------------------------------------------------------------


def eval_plan(parsed: Parsed) -> EvalRun:
    """The evaluation that a program describes.

    Raises:
      UserError: For a value without a counterpart here or out of range, with its place.
    """
    program = parsed.program
    check_refused(program)
    if program["inference_evaluator_cls"] is None:
        program.refuse(
            "inference_evaluator_cls", "an evaluation needs an evaluator.", "Bind @seqio.Evaluator."
        )
    source = T5xSource(program, {})
    plan = read(EvalRun, source, source.places, "", **_common(program, source))
    ranges.check(plan, plan.provenance)
    return plan


def infer_plan(parsed: Parsed) -> InferRun:
    """The inference that a program describes.

    Raises:
      UserError: For a value without a counterpart here or out of range, with its place.
    """
    program = parsed.program
    check_refused(program)
    _check_infer(program)
    source = T5xSource(program, {})
    data, files = program["dataset_cfg"], None
    task = data["mixture_or_task_name"]
    if isinstance(task, Call) and task.configurable == "create_task_from_tfexample_file":
        files = _files(task, source)
        # The rest of the plan reads the task's name.
        data = dataclasses.replace(
            data, arguments={**data.arguments, "mixture_or_task_name": files.name}
        )
    if data["task_feature_lengths"] is None:
        data.refuse(
            "task_feature_lengths",
            "inference needs a length for each feature.",
            "Set TASK_FEATURE_LENGTHS.",
        )
    common = _common(program, source, data)
    plan = read(InferRun, source, source.places, "", files=files, **common)
    ranges.check(plan, plan.provenance)
    return plan


def _check_infer(program: Call) -> None:
    if program["shard_id"] >= program["num_shards"]:
        places = program.places
        raise UserError(
            f"infer.shard_id = {program['shard_id']}: the {program['num_shards']} shards are"
            " numbered from 0.",
            where=f"{places.get('shard_id')}; {places.get('num_shards')}",
            fix="Choose a shard below infer.num_shards.",
        )
    restore = program["restore_checkpoint_cfg"]
    is_path = isinstance(restore["path"], str) and restore["path"]
    for name, is_one in (("mode", restore["mode"] != "all"), ("path", is_path)):
        if not is_one:
            fix = "Bind 'specific' or 'latest' and one path."
            restore.refuse(name, "an inference takes one checkpoint.", fix)
    written = program["write_fn"]
    if written is not None and written["include_all_inputs"]:
        if written["input_fields_to_include"] is not None:
            why = "include_all_inputs writes all of them."
            written.refuse("input_fields_to_include", why, "Bind one of the two.")


def _common(program: Call, source: T5xSource, data: Call | None = None) -> dict[str, Any]:
    """The parts that evaluation and inference share."""
    model: Call = program["model"]
    restore_call: Call = program["restore_checkpoint_cfg"]
    examples: Call = data or program["dataset_cfg"]
    if examples["pack"]:
        examples.refuse("pack", "outputs belong to single examples.", "Bind False.")
    restore: RestoreConfig | None = source.build(restore_call, "restore.")
    if restore is None:
        restore_call.refuse("path", "no checkpoint is given.", "Set CHECKPOINT_PATH.")
    if restore.adapter is not None and (restore.mode == "all" or isinstance(restore.path, tuple)):
        restore_call.refuse(
            "adapter",
            "an adapter has one base, and several checkpoints are chosen.",
            "Bind 'specific' or 'latest' and the base's path. To evaluate all checkpoints of a run"
            " that trains an adapter, bind its folder as the path, and no adapter.",
        )
    inputs, outputs = vocabularies(model, source)
    if place := program["partitioner"].places.get("num_partitions"):
        source.places["layout"] = place
    return {
        "model": model_config(model, source),
        "user_model": model.user_class,
        # No parameters are saved, so no dtype is given.
        "dtypes": dtypes(model, source, None),
        "data": source.build(examples, "data."),
        "restore": restore,
        "decoding": decoding_plan(model, source, "decoding."),
        "input_vocabulary": inputs,
        "output_vocabulary": outputs,
        "layout": layout_of(program["partitioner"]),
        "provenance": source.places,
    }


def _files(task: Call, source: T5xSource) -> ExampleFiles:
    paths = [task["paths"]] if isinstance(task["paths"], str) else list(task["paths"])
    # Build the name as T5X does, so that its results' files can be found again.
    keys = [task["inputs_key"], task["targets_key"] or ""]
    digest = hashlib.md5(":".join(paths + keys).encode()).hexdigest()[:10]
    features = {
        name: (source.build(feature["vocabulary"], ""), feature["add_eos"])
        for name, feature in task["features"].items()
    }
    name = f"infer_{task['task_id'] or digest}"
    return read(
        ExampleFiles,
        source.below(task),
        source.places,
        "files.",
        name=name,
        paths=tuple(paths),
        features=features,
    )


def model_vocabularies(parsed: Parsed) -> tuple[Any, Any]:
    """The vocabularies of a run's model, of inputs and of targets."""
    return vocabularies(parsed.program["model"], T5xSource(parsed.program, {}))


_READERS: Mapping[str, Callable[[Parsed], Any]] = {
    "train": train_config,
    "precompile": precompile_config,
    "evaluate": eval_plan,
    "infer": infer_plan,
}


def converted(parsed: Parsed) -> TrainRun | EvalRun | InferRun:
    """The configuration for the program's run mode.

    Raises:
      UserError: For a value without a counterpart here or out of range, with its place.
    """
    return _READERS[parsed.program.configurable](parsed)
