"""Turns the calls of T5X's train, precompile, eval and infer into the runs that they describe."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections.abc import Callable, Mapping
from typing import Any, get_args

from t0repro.adapters import Adapter
from t0repro.config.checkpoints import RestoreConfig
from t0repro.config.combinations import check_combinations
from t0repro.config.data import ExampleFiles
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
from t0repro.config.settings import check_divides, check_settings
from t0repro.config.t5x.calls import Call, build, call_with_defaults
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


def read_train_run(parsed: Parsed) -> TrainRun:
    """The run of T5X's train.

    Raises:
      UserError: For a value without a counterpart here or out of range, with its place.
    """
    program = parsed.program
    targets_place = _find_targets_place(parsed)
    model_call, places = program["model"], dict[str, str]()
    _check_program(program)
    plan = _read_plan(program, places)
    model = read_model(program, places).with_adapter(program["adapter"], targets_place)
    model = model.with_choice_loss(program["choice_loss"], places.get("model.loss_denominator"))
    _, targets = read_vocabularies(model_call, places)
    # The model may have another vocabulary for its inputs, which is the first of the run's.
    call = model_call.arguments.get("vocabulary") or model_call["output_vocabulary"]
    for field, argument in (
        ("vocabulary", "sentencepiece_model_file"),
        ("vocabulary_extra_ids", "extra_ids"),
    ):
        if isinstance(call, Call) and argument in call.places:
            places[field] = call.places[argument]
    config = program.read(
        TrainRun,
        places,
        mode="train",
        model=model,
        dtypes=read_dtypes(program, places, plan.save and plan.save.dtype),
        optimizer=read_optimizer(model_call, model, places),
        schedule=read_schedule(program, places),
        plan=plan,
        layout=read_layout(program["partitioner"]),
        vocabulary=getattr(targets, "sentencepiece_model_file", None),
        vocabulary_extra_ids=getattr(targets, "extra_ids", None) or 0,
        provenance=places,
    )
    check_settings(config, config.provenance)
    check_combinations(config)
    _check_together(config, program)
    return config


def _check_program(program: Call) -> None:
    """Refuses what T5X's train refuses in the arguments of its parts."""
    if program["train_dataset_cfg"] is None:
        why = "training needs examples."
        program.refuse("train_dataset_cfg", why, "Bind @train/utils.DatasetConfig().")
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
        if mode not in get_args(ActionMode):
            words = ", ".join(map(repr, get_args(ActionMode)))
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


def _read_plan(program: Call, places: dict[str, str]) -> TrainingPlan:
    user_classes = _read_user_classes(program, places)
    actions = _read_actions(program, places)
    # A user's model may generate at any time.
    decodes = program["infer_eval_dataset_cfg"] is not None or "model" in user_classes
    plan = program.read(TrainingPlan, places, "plan.", actions=actions, user_classes=user_classes)
    converter = read_converter(program["model"])
    data = {
        part: dataclasses.replace(found, converter=converter)
        for part in ("train_data", "train_eval_data", "infer_eval_data")
        if (found := getattr(plan, part)) is not None
    }
    decoding = read_decoding(program, places, "plan.decoding.") if decodes else None
    return dataclasses.replace(plan, **data, decoding=decoding)


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
    program: Call, places: dict[str, str]
) -> Mapping[ActionMode, tuple[ActionConfig, ...]]:
    """The actions on metrics, by the metrics' origin."""
    actions = build(program["actions"] or {}, places, "plan.actions.")
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


def _check_together(config: TrainRun, program: Call) -> None:
    """Refuses settings that do not go together, of a batch, of its features and of periods.

    T5X trains in rounds of the shortest period and acts between them, so others must divide.
    """
    plan = config.plan
    assert plan.train_data is not None
    for name, parts in (
        ("trainer.Trainer.num_microbatches", config.num_microbatches),
        ("utils.DatasetConfig.num_shards", plan.train_data.num_shards),
    ):
        found = program.find(name)
        assert found is not None
        call, argument = found
        where = call.places.get(argument)
        check_divides(f"{call.shown}.{argument}", parts, config.batch_size, where)
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
            set_by = [found for key in (name, other) if (found := program.find(key))]
            raise UserError(
                f"{name} = {period} is not a multiple of {other} = {shortest}.",
                where="; ".join(str(call.places.get(argument)) for call, argument in set_by),
                fix="Choose periods that are multiples of the shortest one.",
            )


def read_eval_run(parsed: Parsed) -> EvalRun:
    """The evaluation that a program describes.

    Raises:
      UserError: For a value without a counterpart here or out of range, with its place.
    """
    program = parsed.program
    if program["inference_evaluator_cls"] is None:
        program.refuse(
            "inference_evaluator_cls", "an evaluation needs an evaluator.", "Bind @seqio.Evaluator."
        )
    places: dict[str, str] = {}
    plan = program.read(EvalRun, places, **_read_parts(program, places))
    check_settings(plan, plan.provenance)
    return plan


def read_infer_run(parsed: Parsed) -> InferRun:
    """The inference that a program describes.

    Raises:
      UserError: For a value without a counterpart here or out of range, with its place.
    """
    program = parsed.program
    _check_infer(program)
    places: dict[str, str] = {}
    data, files = program["dataset_cfg"], None
    task = data["mixture_or_task_name"]
    if isinstance(task, Call) and task.configurable == "create_task_from_tfexample_file":
        files = _read_files(task, places)
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
    common = _read_parts(program, places, data)
    plan = program.read(InferRun, places, files=files, **common)
    check_settings(plan, plan.provenance)
    lacks_inputs = plan.data.converter == "decoder" and "inputs" not in data["task_feature_lengths"]
    if lacks_inputs and (plan.mode != "score" or plan.model.input_full_attention):
        data.refuse(
            "task_feature_lengths",
            "without a length for inputs, examples are targets alone.",
            "Give a length for inputs in TASK_FEATURE_LENGTHS.",
        )
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
    # An empty list leaves T5X's default too.
    if written and written["include_all_inputs"] and written["input_fields_to_include"] is not None:
        why = "include_all_inputs writes all of them."
        written.refuse("input_fields_to_include", why, "Bind one of the two.")


def _read_parts(program: Call, places: dict[str, str], data: Call | None = None) -> dict[str, Any]:
    """The parts that evaluation and inference share."""
    model: Call = program["model"]
    restore_call: Call = program["restore_checkpoint_cfg"]
    examples: Call = data or program["dataset_cfg"]
    if examples["pack"]:
        examples.refuse("pack", "outputs belong to single examples.", "Bind False.")
    restore: RestoreConfig | None = build(restore_call, places, "restore.")
    if restore is None:
        restore_call.refuse("path", "no checkpoint is given.", "Set CHECKPOINT_PATH.")
    if restore.adapter is not None and (restore.mode == "all" or isinstance(restore.path, tuple)):
        restore_call.refuse(
            "adapter",
            "an adapter has one base, and several checkpoints are chosen.",
            "Bind 'specific' or 'latest' and the base's path. To evaluate all checkpoints of a run"
            " that trains an adapter, bind its folder as the path, and no adapter.",
        )
    inputs, outputs = read_vocabularies(model, places)
    read_data = build(examples, places, "data.")
    return {
        "model": read_model(program, places),
        "user_model": model.user_class,
        # No parameters are saved, so no dtype is given.
        "dtypes": read_dtypes(program, places, None),
        "data": dataclasses.replace(read_data, converter=read_converter(model)),
        "restore": restore,
        "decoding": read_decoding(program, places, "decoding."),
        "input_vocabulary": inputs,
        "output_vocabulary": outputs,
        "layout": read_layout(program["partitioner"]),
        "provenance": places,
    }


def _read_files(task: Call, places: dict[str, str]) -> ExampleFiles:
    paths = [task["paths"]] if isinstance(task["paths"], str) else list(task["paths"])
    # Build the name as T5X does, so that its results' files can be found again.
    keys = [task["inputs_key"], task["targets_key"] or ""]
    digest = hashlib.md5(":".join(paths + keys).encode()).hexdigest()[:10]
    features = {
        name: (build(feature["vocabulary"], places, ""), feature["add_eos"])
        for name, feature in task["features"].items()
    }
    name = f"infer_{task['task_id'] or digest}"
    return task.read(
        ExampleFiles, places, "files.", name=name, paths=tuple(paths), features=features
    )


_READERS: Mapping[str, Callable[[Parsed], Any]] = {
    "train": read_train_run,
    "precompile": read_precompile_run,
    "evaluate": read_eval_run,
    "infer": read_infer_run,
}


def read_run(parsed: Parsed) -> TrainRun | EvalRun | InferRun:
    """The configuration for the program's run mode.

    Raises:
      UserError: For a value without a counterpart here or out of range, with its place.
    """
    return _READERS[parsed.program.configurable](parsed)
