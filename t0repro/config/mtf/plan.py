"""The rules by which gin's bindings make the plan of a training run, and its steps."""

from __future__ import annotations

from typing import Any

from t0repro.config.configuration import RunInputs
from t0repro.config.data import TrainDataConfig
from t0repro.config.mtf.arguments import Arguments
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
