"""Reads a RunConfig off what gin configured: objects and arguments, not the text."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from collections.abc import Mapping
from typing import Any, NoReturn

from t0repro.config import ranges
from t0repro.config.configuration import Configuration, NotOnJax, RunInputs
from t0repro.config.mtf import decoding as mtf_decoding
from t0repro.config.mtf import model as mtf_model
from t0repro.config.mtf import optimizer as mtf_optimizer
from t0repro.config.mtf.parser import MESH_TRANSFORMER, UTILS
from t0repro.config.provenance import Bindings
from t0repro.config.run_config import (
    DTypePolicy,
    EvalDataConfig,
    ModelConfig,
    RunConfig,
    TrainDataConfig,
)
from t0repro.errors import UserError


def read(model_dir: str, bindings: Bindings, *, float32_activations: bool = True) -> Configuration:
    """What gin's current configuration amounts to.

    Raises:
      UserError: naming binding and place, for what neither backend can run.
    """
    import gin.config

    import gin

    reader = _Reader(bindings, float32_activations)
    inputs = reader.inputs(model_dir)
    try:
        run = reader.run_config(inputs)
    except NotOnJax as refusal:
        run = refusal
    # What was called here must not appear in the operative_config.gin of a Mesh TensorFlow run.
    gin.config._OPERATIVE_CONFIG.clear()
    return Configuration(inputs, run, gin.config_str())


# Configurables that a run on the JAX stack reads, with the arguments that it knows. Any other
# argument of these may only be bound to its default. `...` admits every argument, because the real
# function is called or because the value has no effect on what is computed.
KNOWN_BINDINGS: Mapping[str, Any] = {
    f"{UTILS}.run": {
        "vocabulary", "train_dataset_fn", "eval_dataset_fn", "dataset_split", "autostack",
        "eval_checkpoint_step", "export_checkpoint_step", "export_path", "mode",
        "iterations_per_loop", "save_checkpoints_steps", "keep_checkpoint_max", "eval_summary_dir",
        "batch_size", "train_steps", "total_run_steps", "sequence_length", "mesh_shape",
        "mesh_devices", "layout_rules", "learning_rate_schedule", "optimizer", "model_type",
        "perplexity_eval_steps", "init_checkpoint", "output_eval_examples", "eval_dir_suffix",
        "variable_filter", "skip_seen_data", "seen_data_init_step", "checkpoint_input_pipeline",
        "tpu_job_name", "tpu", "gcp_project", "tpu_zone", "model_dir",
    },
    f"{UTILS}.get_variable_dtype": ...,
    f"{UTILS}.serialize_num_microbatches": ...,
    f"{UTILS}.auto_train_steps": ...,
    f"{UTILS}.tpu_mesh_shape": ...,
    f"{UTILS}.tpu_estimator_model_fn": {
        "model_info_file", "tpu_summaries", "init_variable_filter", "hierarchical_tiling_spec",
    },
    f"{UTILS}.score_with_estimator": set(),
    f"{UTILS}.init_checkpoint_variable_mapping": set(),
    f"{UTILS}.should_load_variable": set(),
    f"{MESH_TRANSFORMER}.mesh_train_dataset_fn": {
        "mixture_or_task_name", "use_cached", "pack", "shuffle", "seed",
    },
    f"{MESH_TRANSFORMER}.mesh_eval_dataset_fn": {
        "mixture_or_task_name", "use_cached", "pack", "num_eval_examples", "shuffle_eval_examples",
        "seed",
    },
    f"{MESH_TRANSFORMER}.get_vocabulary": ...,
    "mesh_tensorflow.transformer.dataset.pack_dataset": set(),
    "mesh_tensorflow.layers.unit_scaling_convention": set(),
    "mesh_tensorflow.layers.VarianceScalingInitializer": set(),
    "mesh_tensorflow.ops.rewrite_stack_variables": ...,
    **mtf_model.KNOWN_BINDINGS,
    **mtf_optimizer.KNOWN_BINDINGS,
    **mtf_decoding.KNOWN_BINDINGS,
}  # fmt: skip


_BATCH_METHODS = (
    "tokens_per_batch", "sequences_per_batch", "tokens_per_replica", "sequences_per_replica",
)  # fmt: skip


class _Reader:
    """Reads one RunConfig off gin's configuration, noting each value's provenance."""

    def __init__(self, bindings: Bindings, float32_activations: bool):
        self._bindings = bindings
        self._float32 = float32_activations
        self._utils = importlib.import_module(UTILS)
        self._mesh_transformer = importlib.import_module(MESH_TRANSFORMER)
        self._provenance: dict[str, str] = {}
        self._run = self._run_arguments()

    def _run_arguments(self) -> dict[str, Any]:
        """The arguments of `utils.run`, with what gin calls for them, as for its mesh_shape."""
        try:
            return self._arguments(f"{UTILS}.run", self._utils.run)
        except RuntimeError as error:
            if "tpu_mesh_shape" not in str(error):
                raise
            raise UserError(
                f"{str(error).splitlines()[0]}.",
                where=self._bindings.find((), f"{UTILS}.run", "mesh_shape"),
                fix='Add --gin_param="utils.run.mesh_shape = []"; or, to count a TPU\'s replicas,'
                " --gin_param=\"utils.tpu_mesh_shape.tpu_topology = 'v3-8'\".",
            ) from error

    def inputs(self, model_dir: str) -> RunInputs:
        """What either backend checks before the run."""
        run = self._run
        self._check_run()
        sequence_length = self._sequence_length()
        batch_size = self._batch_size(sequence_length)
        fields = {
            "mode": run["mode"],
            "init_checkpoint": run["init_checkpoint"],
            "eval_checkpoint_step": _hashable(run["eval_checkpoint_step"]),
            "batch_size": batch_size,
            "sequence_length": sequence_length,
        }
        for name in fields:
            self._note(name, f"{UTILS}.run", name)
        name, use_cached = self._data_read()
        vocabulary = run["vocabulary"]
        return RunInputs(
            **fields,
            model_dir=model_dir,
            split=run["dataset_split"],
            mixture_or_task_name=name,
            use_cached=use_cached,
            vocabularies=vocabulary if isinstance(vocabulary, tuple) else (vocabulary, vocabulary),
            vocab_divisor=self._vocab_divisor(),
            master_dtype=self._master_dtype(),
            num_microbatches=self._num_microbatches(batch_size, sequence_length),
            tpu_mesh=self._tpu_mesh(),
            provenance=self._provenance,
        )

    def _data_read(self) -> tuple[str | None, bool]:
        """The mixture that the mode reads, and whether from a cache."""
        mode = self._run["mode"]
        if mode == "train":
            function = "mesh_train_dataset_fn"
        elif mode in ("eval", "score_eval", "perplexity_eval", "score_from_dataset"):
            function = "mesh_eval_dataset_fn"
        else:
            return None, False
        bound = self._arguments(
            f"{MESH_TRANSFORMER}.{function}", getattr(self._mesh_transformer, function)
        )
        return bound.get("mixture_or_task_name"), bound["use_cached"]

    def _tpu_mesh(self) -> str | None:
        """The mesh of a TPU's topology, if run.mesh_shape calls for one."""
        import gin.config

        bound = mtf_optimizer.raw_value(f"{UTILS}.run", "mesh_shape")
        if not isinstance(bound, gin.config.ConfigurableReference):
            return None
        configurable: Any = bound.configurable
        if configurable.name != "tpu_mesh_shape":
            return None
        dimensions = self._run["mesh_shape"].dims
        return ",".join(f"{item.name}:{item.size}" for item in dimensions) or None

    def _vocab_divisor(self) -> int:
        transformer = importlib.import_module("mesh_tensorflow.transformer.transformer")
        bound = self._arguments(
            "mesh_tensorflow.transformer.transformer.Unitransformer", transformer.Unitransformer
        )
        return bound["vocab_divisor"]

    def run_config(self, inputs: RunInputs) -> RunConfig:
        """The RunConfig.

        Raises:
          NotOnJax: naming binding and place, when the JAX stack does not do what is configured.
        """
        self._refuse_unknown_bindings()
        self._refuse_model_types()
        run = self._run
        train_steps = self._train_steps(inputs.batch_size, inputs.sequence_length)
        model = self._model()
        training = mtf_optimizer.OptimizerReader(self._bindings, run, self._provenance)
        optimizer = training.optimizer(model)
        self._decoding = mtf_decoding.DecodingReader(self._bindings, run, self._provenance)
        fields: dict[str, Any] = {
            "mode": inputs.mode,
            "model_dir": inputs.model_dir,
            "model": model,
            **self._decoding.fields(model.vocab_size),
            "dtypes": self._dtypes(),
            "optimizer": optimizer,
            "schedule": training.schedule(run["total_run_steps"] or train_steps, optimizer),
            "train_data": self._train_data(),
            "eval_data": self._eval_data(),
            "sequence_length": inputs.sequence_length,
            "batch_size": inputs.batch_size,
            "num_microbatches": inputs.num_microbatches,
            "train_steps": train_steps,
            "init_checkpoint": inputs.init_checkpoint,
            "eval_checkpoint_step": inputs.eval_checkpoint_step,
            "scores_filename": self._argument(f"{UTILS}.save_scores", "scores_filename"),
            "vocabulary": getattr(inputs.vocabularies[0], "sentencepiece_model_file", None),
        }
        for name in (
            "save_checkpoints_steps", "keep_checkpoint_max", "eval_summary_dir", "eval_dir_suffix",
            "output_eval_examples",
        ):  # fmt: skip
            fields[name] = run[name]
        for name in fields:
            if name in run:
                self._note(name, f"{UTILS}.run", name)
        fields["init_variable_filter"] = (
            self._argument(f"{UTILS}.tpu_estimator_model_fn", "init_variable_filter") or ""
        )
        config = RunConfig(**fields, provenance=dict(sorted(self._provenance.items())))
        ranges.check(config, config.provenance)
        return config

    # ---- Arguments and where they came from ----

    def _arguments(self, selector: str, function: Any) -> dict[str, Any]:
        """A configurable's arguments as a call would receive them: defaults, then bindings."""
        import gin

        signature = inspect.signature(function)
        defaults = {
            name: parameter.default
            for name, parameter in signature.parameters.items()
            if parameter.default is not parameter.empty
        }
        return {**defaults, **gin.get_bindings(selector)}

    def _argument(self, selector: str, name: str) -> Any:
        import gin

        self._note(name, selector, name)
        return gin.get_bindings(selector).get(name)

    def _note(self, field: str, selector: str, argument: str, scopes: tuple[str, ...] = ()) -> None:
        self._provenance[field] = self._bindings.source(scopes, selector, argument)

    def _refuse(self, argument: str, what: str, selector: str = f"{UTILS}.run") -> NoReturn:
        raise NotOnJax(
            f"The JAX stack does not support {what} ({selector.rpartition('.')[2]}.{argument}).",
            where=self._bindings.source(("decoder",), selector, argument),
            fix="Remove the binding, or run with --backend=mtf.",
        )

    def _refuse_unknown_bindings(self) -> None:
        """Refuses a known configurable's argument that is neither read nor at its default."""
        import gin.config

        for (scope, selector), arguments in gin.config._CONFIG.items():
            known = KNOWN_BINDINGS.get(selector)
            if known is None or known is ...:
                continue
            configurable = gin.config._REGISTRY[selector]
            parameters = inspect.signature(configurable.wrapped).parameters
            for argument in set(arguments) - set(known):
                with gin.config_scope(scope or None):
                    value = gin.get_bindings(selector)[argument]
                if argument in parameters and value == parameters[argument].default:
                    continue
                self._refuse(argument, f"{argument} = {value!r}", selector)

    # ---- The parts of a RunConfig ----

    def _refuse_model_types(self) -> None:
        run, mode = self._run, self._run["mode"]
        if run["model_type"] not in ("bitransformer", "lm", "delimited_lm"):
            self._refuse("model_type", f"model_type {run['model_type']!r}")
        if run["model_type"] != "bitransformer" and mode not in ("train", "perplexity_eval"):
            self._refuse(
                "mode",
                f"mode {mode!r} of a model without an encoder: it trains such a model and measures"
                " its perplexity, but cannot go on from a partial sequence, as decoding has to, or"
                " score one",
            )

    def _check_run(self) -> None:
        """Refuses what `run` would not do either."""
        run, mode = self._run, self._run["mode"]
        if mode == "train" and run["dataset_split"] != "train":
            raise UserError(
                f"run.mode is 'train', and run.dataset_split is {run['dataset_split']!r}.",
                where=self._bindings.find((), f"{UTILS}.run", "dataset_split"),
                fix="Training reads the split 'train'; remove the binding.",
            )
        if run["sequence_length"] is None and mode not in ("eval", "score_eval"):
            raise UserError(
                f"run.sequence_length is None, and mode {mode!r} needs one.",
                where=self._bindings.find((), f"{UTILS}.run", "sequence_length"),
                fix="Bind run.sequence_length = {'inputs': N, 'targets': N}.",
            )

    def _train_steps(self, batch_size: int, sequence_length: Mapping[str, int] | None) -> int:
        steps = function = self._run["train_steps"]
        if not callable(steps):  # a number, or nonsense
            ranges.check_field(RunConfig, "train_steps", steps, self._place_of_run("train_steps"))
            return steps
        if sequence_length is None:
            raise UserError(
                "run.train_steps counts tokens, and run.sequence_length is None.",
                where=self._bindings.find((), f"{UTILS}.run", "train_steps"),
                fix="Bind run.train_steps to a number.",
            )
        return function(batch_size, sequence_length)

    def _sequence_length(self) -> Mapping[str, int] | None:
        length = self._run["sequence_length"]
        if isinstance(length, int):
            length = {"inputs": length, "targets": length}
        where = self._place_of_run("sequence_length")
        if length is not None and not isinstance(length, Mapping):
            raise UserError(
                f"run.sequence_length is {length!r}.",
                where=where,
                fix="Bind run.sequence_length = {'inputs': N, 'targets': N}.",
            )
        ranges.check_field(RunConfig, "sequence_length", length, where)
        return length

    def _batch_size(self, sequence_length: Mapping[str, int] | None) -> int:
        size, where = self._run["batch_size"], self._place_of_run("batch_size")
        if isinstance(size, int):
            ranges.check_field(RunConfig, "batch_size", size, where)
            return size
        if not isinstance(size, tuple | list) or len(size) != 2 or size[0] not in _BATCH_METHODS:
            raise UserError(
                f"run.batch_size is {size!r}.",
                where=where,
                fix=f"Bind it to a number or to (METHOD, N), with one of {list(_BATCH_METHODS)}.",
            )
        method, amount = size
        ranges.check_field(RunConfig, "batch_size", amount, where, shown=f"batch_size ({method})")
        if method.startswith("tokens"):
            self._check_tokens(method, amount, sequence_length, where)
        return self._utils.compute_batch_size(
            sequence_length, self._run["mesh_shape"], self._run["layout_rules"], size
        )

    def _check_tokens(
        self, method: str, amount: int, sequence_length: Mapping[str, int] | None, where: str | None
    ) -> None:
        """Raises UserError unless so many tokens are one sequence or several."""
        bound = f"run.batch_size = {(method, amount)!r}"
        if sequence_length is None:
            raise UserError(
                f"{bound} counts tokens, and run.sequence_length is None.",
                where=where,
                fix="Bind run.batch_size to a number or to ('sequences_per_batch', N).",
            )
        longest = max(sequence_length.values())
        if amount % longest:
            raise UserError(
                f"{bound} is not a whole number of sequences of {longest} tokens.",
                where=where,
                fix=f"Bind a multiple of {longest}: ({method!r},"
                f" {max(1, round(amount / longest)) * longest}).",
            )

    def _place_of_run(self, argument: str) -> str | None:
        return self._bindings.find((), f"{UTILS}.run", argument)

    def _num_microbatches(self, batch_size: int, sequence_length: Mapping[str, int] | None) -> int:
        selector = f"{UTILS}.serialize_num_microbatches"
        self._note("num_microbatches", selector, "tokens_per_microbatch_per_replica")
        if sequence_length is None or self._run["mode"] != "train":
            return 1
        mtf = importlib.import_module("mesh_tensorflow")
        batch = mtf.Dimension("batch", batch_size)
        shape = mtf.convert_to_shape(self._run["mesh_shape"])
        rules = mtf.convert_to_layout_rules(self._run["layout_rules"])
        if self._tpu_mesh() and batch_size % mtf.tensor_dim_to_mesh_dim_size(rules, shape, batch):
            shape = mtf.Shape([])  # a batch too small for the TPU is one device's all the same
        return self._utils.serialize_num_microbatches(batch, sequence_length, shape, rules)

    def _check_depth(self) -> None:
        """Checks numbers of layers before Mesh TensorFlow makes an object for each."""
        import gin

        selector = "mesh_tensorflow.transformer.transformer.make_layer_stack"
        for scope in ("", "encoder", "decoder"):
            with gin.config_scope(scope or None):
                depth = gin.get_bindings(selector).get("num_layers")
            place = self._bindings.find((scope,), selector, "num_layers")
            if depth is not None:
                ranges.check_field(ModelConfig, "num_decoder_layers", depth, place, "num_layers")

    def _model(self) -> Any:
        self._check_depth()
        vocabulary = self._run["vocabulary"]
        model = self._utils.build_model(
            model_type=self._run["model_type"],
            input_vocab_size=self._utils.inputs_vocabulary(vocabulary).vocab_size,
            output_vocab_size=self._utils.targets_vocabulary(vocabulary).vocab_size,
            layout_rules=self._run["layout_rules"],
            mesh_shape=self._run["mesh_shape"],
        )
        model_type = self._run["model_type"]
        for field, (selector, argument, scopes) in mtf_model.FIELD_SOURCES.items():
            if model_type != "bitransformer":
                scopes = ()  # there is one tower, which no scope is made for
            self._note(f"model.{field}", selector, argument, scopes)
        return mtf_model.read_model(model, model_type, self._bindings)

    def _master_dtype(self) -> str:
        selector = f"{UTILS}.get_variable_dtype"
        value = self._arguments(selector, self._utils.get_variable_dtype)["master_dtype"]
        self._note("master_dtype", selector, "master_dtype")
        return value if isinstance(value, str) else value.name

    def _dtypes(self) -> DTypePolicy:
        selector = f"{UTILS}.get_variable_dtype"
        arguments = self._arguments(selector, self._utils.get_variable_dtype)
        names = {}
        for field in ("master", "slice", "activation"):
            value = arguments[f"{field}_dtype"]
            names[field] = value if isinstance(value, str) else value.name
            self._note(f"dtypes.{field}", selector, f"{field}_dtype")
        if self._float32:
            for field in ("slice", "activation"):
                names[field] = "float32"
                self._provenance[f"dtypes.{field}"] = "set by t5_mesh_transformer without --tpu"
        # In evaluation, weights of 16 bits and activations of 16 bits come to the same.
        if names["slice"] != "float32" and (
            self._run["mode"] == "train" or names["activation"] == "float32"
        ):
            self._refuse("slice_dtype", f"slice_dtype {names['slice']!r}", selector)
        return DTypePolicy(**names)

    def _train_data(self) -> TrainDataConfig | None:
        function = self._run["train_dataset_fn"]
        if function is None:
            return None
        if function.__name__ != "mesh_train_dataset_fn":
            self._refuse("train_dataset_fn", f"the dataset function {function.__name__}")
        arguments = self._dataset_arguments("train_data", function)
        return TrainDataConfig(
            split=self._run["dataset_split"],
            **_select(arguments, TrainDataConfig),
            **self._data_resumption(),
        )

    def _data_resumption(self) -> dict[str, Any]:
        """Where a resumed run's data go on; skip_seen_data is None where nothing binds it."""
        selector, run = f"{UTILS}.run", self._run
        names = ("skip_seen_data", "seen_data_init_step", "checkpoint_input_pipeline")
        for name in names:
            self._note(f"train_data.{name}", selector, name)
        if run["skip_seen_data"] and run["checkpoint_input_pipeline"]:
            raise UserError(
                "At most one of run.skip_seen_data and run.checkpoint_input_pipeline may be True.",
                where=self._bindings.find((), selector, "checkpoint_input_pipeline"),
                fix="Bind one of them to False.",
            )
        bound = self._bindings.find((), selector, "skip_seen_data") is not None
        return {name: run[name] for name in names} | ({} if bound else {"skip_seen_data": None})

    def _eval_data(self) -> EvalDataConfig | None:
        if self._run["mode"] == "score_from_dataset":
            function = self._decoding.score_dataset_fn()
        else:
            function = self._run["eval_dataset_fn"]
        if function is None:
            return None
        if function.__name__ != "mesh_eval_dataset_fn":
            self._refuse("eval_dataset_fn", f"the dataset function {function.__name__}")
        arguments = self._dataset_arguments("eval_data", function)
        self._note("eval_data.split", f"{UTILS}.run", "dataset_split")
        return EvalDataConfig(
            split=self._run["dataset_split"], **_select(arguments, EvalDataConfig)
        )

    def _dataset_arguments(self, field: str, function: Any) -> dict[str, Any]:
        selector = f"{MESH_TRANSFORMER}.{function.__name__}"
        arguments = self._arguments(selector, function)
        if "mixture_or_task_name" not in arguments:
            raise UserError(
                f"{function.__name__}.mixture_or_task_name is not bound.",
                fix="Add --gin_file=dataset.gin and --gin_param=\"MIXTURE_NAME = 'NAME'\".",
            )
        for argument in KNOWN_BINDINGS[selector]:
            self._note(f"{field}.{argument}", selector, argument)
        return arguments


def _select(arguments: Mapping[str, Any], dataclass: Any) -> dict[str, Any]:
    """The arguments that are fields of a dataclass."""
    names = {field.name for field in dataclasses.fields(dataclass)}
    return {name: value for name, value in arguments.items() if name in names}


def _hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
