"""The rules by which gin's bindings make a run's steps, its data and the plan of a training."""

from __future__ import annotations

from typing import Any

from t0repro.config.configuration import RunInputs
from t0repro.config.data import EvalDataConfig, TrainDataConfig
from t0repro.config.mtf.arguments import Arguments
from t0repro.config.mtf.decoding import check_postprocess
from t0repro.config.optimizer import ScheduleConfig
from t0repro.config.run import TrainingPlan, TrainRun, mesh_transformer_plan
from t0repro.config.settings import check_field
from t0repro.errors import UserError


def read_train_steps(arguments: Arguments, inputs: RunInputs) -> int:
    """The global step at which training ends.

    Raises:
      UserError: For neither a number of steps nor auto_train_steps.
    """
    steps: Any = arguments.run["train_steps"]
    if not callable(steps):  # a number, or nonsense
        place = arguments.place("train_steps")
        check_field(TrainRun, "train_steps", steps, place)
        return steps
    reference = arguments.reference("utils.run", "train_steps")
    # The default is auto_train_steps too.
    if reference is not None and reference.name != "auto_train_steps":
        arguments.refuse(f"train_steps = @{reference.name}", "train_steps")
    if inputs.sequence_length is None:
        raise UserError(
            "run.train_steps counts tokens, and run.sequence_length is None.",
            where=arguments.place("train_steps"),
            fix="Bind run.train_steps to a number.",
        )
    count_steps: Any = steps
    return count_steps(inputs.batch_size, inputs.sequence_length)


def read_total_steps(arguments: Arguments, train_steps: int) -> int:
    """The step to which a schedule with an end counts: total_run_steps, or else `train_steps`."""
    steps = arguments.run["total_run_steps"]
    if steps is None:
        return train_steps
    place = arguments.place("total_run_steps")
    check_field(ScheduleConfig, "total_train_steps", steps, place, "run.total_run_steps")
    return steps


def read_train_data(arguments: Arguments, prefix: str) -> TrainDataConfig | None:
    """The dataset of `run.train_dataset_fn`; None without one."""
    run = arguments.run
    scope = _dataset_scope(arguments, "utils.run", "train_dataset_fn", "mesh_train_dataset_fn")
    if scope is None:
        return None
    shards = arguments.read("t0repro.jax_training")["data_shards"]
    if shards != 1 and run["checkpoint_input_pipeline"]:
        raise UserError(
            "The state of an input pipeline in several shards cannot be saved.",
            where=arguments.place("checkpoint_input_pipeline"),
            fix="Bind run.checkpoint_input_pipeline = False: resuming works without it.",
        )
    if run["skip_seen_data"] and run["checkpoint_input_pipeline"]:
        raise UserError(
            "At most one of run.skip_seen_data and run.checkpoint_input_pipeline may be True.",
            where=arguments.place("checkpoint_input_pipeline"),
            fix="Bind one of them to False.",
        )
    # False and unbound differ: only unbound resumes exactly (see TrainDataConfig).
    is_bound = arguments.place("skip_seen_data") is not None
    return arguments.settings(
        TrainDataConfig,
        prefix,
        scope=scope,
        skip_seen_data=run["skip_seen_data"] if is_bound else None,
    )


def read_eval_data(arguments: Arguments) -> EvalDataConfig | TrainDataConfig | None:
    """The data to evaluate; None without a dataset function."""
    caller, argument = "utils.run", "eval_dataset_fn"
    if arguments.run["mode"] == "score_from_dataset":
        check_postprocess(arguments, "utils.score_from_dataset")
        caller, argument = "utils.score_from_dataset", "score_dataset_fn"
        arguments.require(caller, argument)
    scope = _dataset_scope(arguments, caller, argument, "mesh_eval_dataset_fn")
    if scope is None:
        return None
    return arguments.settings(EvalDataConfig, "eval_data.", scope=scope)


def _dataset_scope(arguments: Arguments, caller: str, argument: str, expected: str) -> str | None:
    """The scope in which t5's dataset function is called; None without a function.

    Raises:
      UserError: For another function, or without a mixture.
    """
    if arguments.read(caller).get(argument) is None:
        return None
    reference = arguments.reference(caller, argument)
    if reference is None or reference.name != expected:
        shown = reference.name if reference else arguments.read(caller)[argument]
        arguments.refuse(f"the dataset function {shown}", argument, caller)
    if "mixture_or_task_name" not in arguments.read(expected, reference.scope):
        raise UserError(
            f"{expected}.mixture_or_task_name is not bound.",
            fix="Add --gin_file=dataset.gin and --gin_param=\"MIXTURE_NAME = 'NAME'\".",
        )
    return reference.scope


def read_plan(
    arguments: Arguments, train_data: TrainDataConfig | None, init_checkpoint: str | None
) -> TrainingPlan:
    """The intervals of mesh_transformer_main, with the numbers that gin binds."""
    run, estimator = arguments.run, "utils.tpu_estimator_model_fn"
    notes = {"period": "save_checkpoints_steps", "keep": "keep_checkpoint_max"}
    for field, name in notes.items():
        arguments.note(f"plan.save.{field}", "utils.run", name)
    if init_checkpoint is not None:
        arguments.note("plan.restore.path", "utils.run", "init_checkpoint")
        arguments.note("plan.restore.variable_filter", estimator, "init_variable_filter")
    training = arguments.read("t0repro.jax_training")
    init_adapter = training["init_adapter"] if run["mode"] == "train" else None
    if init_adapter is not None:
        arguments.note("plan.restore.adapter", "t0repro.jax_training", "init_adapter")
        if init_checkpoint is None:
            raise UserError(
                f"init_adapter is {init_adapter!r}, but its base is not given.",
                where=arguments.provenance["plan.restore.adapter"],
                fix="Bind utils.run.init_checkpoint to the base.",
            )
    return mesh_transformer_plan(
        train_data,
        init_checkpoint=init_checkpoint,
        init_variable_filter=arguments.read(estimator).get("init_variable_filter") or "",
        init_adapter=init_adapter,
        places={
            **{name: arguments.place(name) for name in (*notes.values(), "init_checkpoint")},
            "init_variable_filter": arguments.place("init_variable_filter", estimator),
        },
        **{name: run[name] for name in notes.values()},
    )
