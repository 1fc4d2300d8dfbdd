"""The rules by which gin's bindings make the data of a run."""

from __future__ import annotations

from t0repro.config.data import EvalDataConfig, TrainDataConfig
from t0repro.config.mtf.arguments import Arguments
from t0repro.config.mtf.decoding import check_postprocess
from t0repro.errors import UserError


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
