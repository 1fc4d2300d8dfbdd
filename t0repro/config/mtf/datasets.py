"""Reads what a run trains and evaluates on: arguments of t5's dataset functions."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from t0repro.config import gin_door
from t0repro.config.mtf import jax_model
from t0repro.config.mtf.arguments import RunArguments
from t0repro.config.mtf.decoding import DecodingReader
from t0repro.config.mtf.parser import MESH_TRANSFORMER, UTILS
from t0repro.config.run_config import EvalDataConfig
from t0repro.config.training_plan import TrainDataConfig
from t0repro.errors import UserError

KNOWN_BINDINGS: Mapping[str, set[str]] = {
    f"{MESH_TRANSFORMER}.mesh_train_dataset_fn": {
        "mixture_or_task_name", "use_cached", "pack", "shuffle", "seed",
    },
    f"{MESH_TRANSFORMER}.mesh_eval_dataset_fn": {
        "mixture_or_task_name", "use_cached", "pack", "num_eval_examples", "shuffle_eval_examples",
        "seed",
    },
}  # fmt: skip


class DatasetReader:
    """Reads TrainDataConfig and EvalDataConfig off the arguments."""

    def __init__(self, arguments: RunArguments, decoding: DecodingReader):
        self._gin = arguments
        self._decoding = decoding

    def train_data(self) -> TrainDataConfig | None:
        """What `run.train_dataset_fn` reads; None without one.

        Raises:
          NotOnJax: for a dataset function other than t5's own.
        """
        function = self._gin.run["train_dataset_fn"]
        if function is None:
            return None
        if function.__name__ != "mesh_train_dataset_fn":
            self._gin.refuse("train_dataset_fn", f"the dataset function {function.__name__}")
        arguments = self._dataset_arguments(
            "plan.train_data", function, f"{UTILS}.run", "train_dataset_fn"
        )
        return TrainDataConfig(
            split=self._gin.run["dataset_split"],
            num_shards=self._num_shards(),
            **_select(arguments, TrainDataConfig),
            **self._data_resumption(),
        )

    def _num_shards(self) -> int:
        """How many shards make a batch: a setting of the JAX stack alone."""
        self._gin.note("plan.train_data.num_shards", jax_model.TRAINING, "data_shards")
        num_shards = jax_model.jax_training()["data_shards"]
        if num_shards != 1 and self._gin.run["checkpoint_input_pipeline"]:
            raise UserError(
                "The state of an input pipeline in several shards cannot be saved.",
                where=self._gin.bindings.find((), f"{UTILS}.run", "checkpoint_input_pipeline"),
                fix="Bind run.checkpoint_input_pipeline = False: a resumed run finds its place all"
                " the same.",
            )
        return num_shards

    def _data_resumption(self) -> dict[str, Any]:
        """Where a resumed run's data continue; skip_seen_data is None if nothing binds it."""
        selector, run = f"{UTILS}.run", self._gin.run
        names = ("skip_seen_data", "seen_data_init_step", "checkpoint_input_pipeline")
        for name in names:
            self._gin.note(f"plan.train_data.{name}", selector, name)
        if run["skip_seen_data"] and run["checkpoint_input_pipeline"]:
            raise UserError(
                "At most one of run.skip_seen_data and run.checkpoint_input_pipeline may be True.",
                where=self._gin.bindings.find((), selector, "checkpoint_input_pipeline"),
                fix="Bind one of them to False.",
            )
        # False and unbound are different: only unbound resumes exactly (see TrainDataConfig).
        bound = self._gin.bindings.find((), selector, "skip_seen_data") is not None
        return {name: run[name] for name in names} | ({} if bound else {"skip_seen_data": None})

    def eval_data(self) -> EvalDataConfig | None:
        """What the mode evaluates; None without a dataset function. Raises as `train_data`."""
        if self._gin.run["mode"] == "score_from_dataset":
            function = self._decoding.score_dataset_fn()
            reader = (f"{UTILS}.score_from_dataset", "score_dataset_fn")
        else:
            function = self._gin.run["eval_dataset_fn"]
            reader = (f"{UTILS}.run", "eval_dataset_fn")
        if function is None:
            return None
        if function.__name__ != "mesh_eval_dataset_fn":
            self._gin.refuse("eval_dataset_fn", f"the dataset function {function.__name__}")
        arguments = self._dataset_arguments("eval_data", function, *reader)
        self._gin.note("eval_data.split", f"{UTILS}.run", "dataset_split")
        return EvalDataConfig(
            split=self._gin.run["dataset_split"], **_select(arguments, EvalDataConfig)
        )

    def _dataset_arguments(
        self, field: str, function: Any, caller: str, argument: str
    ) -> dict[str, Any]:
        """The arguments of the function that the caller's argument is bound to, in its scope."""
        selector = f"{MESH_TRANSFORMER}.{function.__name__}"
        scope = gin_door.scope_of(caller, argument)
        arguments = self._gin.arguments(selector, function, scope)
        if "mixture_or_task_name" not in arguments:
            raise UserError(
                f"{function.__name__}.mixture_or_task_name is not bound.",
                fix="Add --gin_file=dataset.gin and --gin_param=\"MIXTURE_NAME = 'NAME'\".",
            )
        # Every argument is noted, also those at their defaults, so that explain can say so.
        for argument in KNOWN_BINDINGS[selector]:
            self._gin.note(f"{field}.{argument}", selector, argument, gin_door.enclosing(scope))
        return arguments


def _select(arguments: Mapping[str, Any], dataclass: Any) -> dict[str, Any]:
    """The arguments that are fields of a dataclass."""
    names = {field.name for field in dataclasses.fields(dataclass)}
    return {name: value for name, value in arguments.items() if name in names}
