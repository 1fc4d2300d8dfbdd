"""The Mesh TensorFlow dialect: gin files and --gin_param overrides -> RunConfig.

gin, Mesh TensorFlow and t5 do the parsing, so that a typo fails here in the words in which it fails
there. The RunConfig is then read off what gin configured (the arguments of `utils.run`, the model
that `build_model` makes, the optimizer class, the schedule function), not off the text. A binding
that would change a Mesh TensorFlow run but that the JAX stack does not know is an error that names
the binding and its place; none is ignored.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import os
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from t0repro.config import cloud
from t0repro.config.mtf import decoding as mtf_decoding
from t0repro.config.mtf import model as mtf_model
from t0repro.config.mtf import optimizer as mtf_optimizer
from t0repro.config.provenance import Bindings, record_bindings
from t0repro.config.run_config import (
    DTypePolicy,
    EvalDataConfig,
    RunConfig,
    TrainDataConfig,
)
from t0repro.errors import UserError

_UTILS = "mesh_tensorflow.transformer.utils"
_MESH_TRANSFORMER = "t5.models.mesh_transformer"


@dataclasses.dataclass(frozen=True)
class GinInputs:
    """What the command line of t5_mesh_transformer says about gin.

    Attributes:
      skip_unknown: True to ignore every unknown configurable, or the names of those to ignore
        beside t5's own list of deprecated references.
    """

    model_dir: str
    gin_files: Sequence[str] = ()
    gin_params: Sequence[str] = ()
    location_prefixes: Sequence[str] = ()
    module_imports: Sequence[str] = ()
    cache_dirs: Sequence[str] = ()
    skip_unknown: bool | Sequence[str] = ()


def load(inputs: GinInputs, *, float32_activations: bool = True) -> tuple[RunConfig, Bindings]:
    """Parses the gin inputs as t5_mesh_transformer does and reads the RunConfig off them.

    Args:
      inputs: files, overrides and search paths.
      float32_activations: compute in float32 whatever gin says, which is what t5_mesh_transformer
        does without --tpu. False follows get_variable_dtype.

    Raises:
      UserError: for a binding that the JAX stack does not support, or a mixture that is unknown.
      ValueError, TypeError, SyntaxError: gin's own errors, with the file and line.
    """
    bindings = parse(inputs)
    return read(inputs.model_dir, bindings, float32_activations=float32_activations), bindings


def parse(inputs: GinInputs) -> Bindings:
    """Fills gin's global configuration from the inputs, in mesh_transformer_main's order."""
    import gin
    from t0repro.mesh import compat

    compat.install()
    mesh_transformer = importlib.import_module(_MESH_TRANSFORMER)
    utils = importlib.import_module(_UTILS)
    seqio = importlib.import_module("seqio")
    for module in inputs.module_imports:
        importlib.import_module(module)

    skip: Any = inputs.skip_unknown
    if skip is not True:
        skip = (*mesh_transformer.DEPRECATED_GIN_REFERENCES, *(skip or ()))
    gin.clear_config()
    own_gin_files = os.path.dirname(str(importlib.import_module("t0repro.gin").__file__))
    for prefix in (_folder(mesh_transformer, "gin"), own_gin_files, *inputs.location_prefixes):
        gin.add_config_file_search_path(prefix)
    cloud.guard_gin()
    for cache_dir in inputs.cache_dirs:
        cloud.check_address(cache_dir, "--additional_task_cache_dirs")
    with record_bindings() as bindings:
        gin.parse_config_file(
            os.path.join(_folder(utils, "gin"), "defaults.gin"), skip_unknown=skip
        )
        gin.parse_config_files_and_bindings(
            list(inputs.gin_files),
            list(inputs.gin_params),
            skip_unknown=skip,
            finalize_config=False,
        )
    # Released operative configs bind functions that are gone as the vocabulary; t5 overrides it.
    gin.bind_parameter("run.vocabulary", mesh_transformer.get_vocabulary())
    gin.finalize()
    seqio.add_global_cache_dirs(list(inputs.cache_dirs))
    return bindings


def _folder(module: Any, name: str) -> str:
    return os.path.join(os.path.dirname(module.__file__), name)


def read(model_dir: str, bindings: Bindings, *, float32_activations: bool = True) -> RunConfig:
    """The RunConfig of gin's current configuration.

    Raises:
      UserError: naming binding and place, when the JAX stack does not support what is configured.
    """
    return _Reader(bindings, float32_activations).run_config(model_dir)


# Configurables that a run on the JAX stack reads, with the arguments that it knows. Any other
# argument of these may only be bound to its default. `...` admits every argument, because the real
# function is called or because the value has no effect on what is computed.
_KNOWN: Mapping[str, Any] = {
    f"{_UTILS}.run": {
        "vocabulary", "train_dataset_fn", "eval_dataset_fn", "dataset_split", "autostack",
        "eval_checkpoint_step", "export_checkpoint_step", "export_path", "mode",
        "iterations_per_loop", "save_checkpoints_steps", "keep_checkpoint_max", "eval_summary_dir",
        "batch_size", "train_steps", "total_run_steps", "sequence_length", "mesh_shape",
        "mesh_devices", "layout_rules", "learning_rate_schedule", "optimizer", "model_type",
        "perplexity_eval_steps", "init_checkpoint", "output_eval_examples", "eval_dir_suffix",
        "variable_filter", "skip_seen_data", "seen_data_init_step", "checkpoint_input_pipeline",
        "tpu_job_name", "tpu", "gcp_project", "tpu_zone", "model_dir",
    },
    f"{_UTILS}.get_variable_dtype": ...,
    f"{_UTILS}.serialize_num_microbatches": ...,
    f"{_UTILS}.auto_train_steps": ...,
    f"{_UTILS}.tpu_mesh_shape": ...,
    f"{_UTILS}.tpu_estimator_model_fn": {
        "model_info_file", "tpu_summaries", "init_variable_filter", "hierarchical_tiling_spec",
    },
    f"{_UTILS}.score_with_estimator": set(),
    f"{_UTILS}.init_checkpoint_variable_mapping": set(),
    f"{_UTILS}.should_load_variable": set(),
    f"{_MESH_TRANSFORMER}.mesh_train_dataset_fn": {
        "mixture_or_task_name", "use_cached", "pack", "shuffle", "seed",
    },
    f"{_MESH_TRANSFORMER}.mesh_eval_dataset_fn": {
        "mixture_or_task_name", "use_cached", "pack", "num_eval_examples", "shuffle_eval_examples",
        "seed",
    },
    f"{_MESH_TRANSFORMER}.get_vocabulary": ...,
    "mesh_tensorflow.transformer.dataset.pack_dataset": set(),
    "mesh_tensorflow.layers.unit_scaling_convention": set(),
    "mesh_tensorflow.layers.VarianceScalingInitializer": set(),
    "mesh_tensorflow.ops.rewrite_stack_variables": ...,
    **mtf_model.KNOWN_BINDINGS,
    **mtf_optimizer.KNOWN_BINDINGS,
    **mtf_decoding.KNOWN_BINDINGS,
}  # fmt: skip


class _Reader:
    """Reads one RunConfig off gin's configuration, noting each value's provenance."""

    def __init__(self, bindings: Bindings, float32_activations: bool):
        self._bindings = bindings
        self._float32 = float32_activations
        self._utils = importlib.import_module(_UTILS)
        self._provenance: dict[str, str] = {}
        self._run = self._run_arguments()

    def _run_arguments(self) -> dict[str, Any]:
        """The arguments of `utils.run`, with what gin calls for them, as for its mesh_shape."""
        try:
            return self._arguments(f"{_UTILS}.run", self._utils.run)
        except RuntimeError as error:
            if "tpu_mesh_shape" not in str(error):
                raise
            raise UserError(
                f"{str(error).splitlines()[0]}.",
                where=self._bindings.find((), f"{_UTILS}.run", "mesh_shape"),
                fix='Add --gin_param="utils.run.mesh_shape = []"; or, to count a TPU\'s replicas,'
                " --gin_param=\"utils.tpu_mesh_shape.tpu_topology = 'v3-8'\".",
            ) from error

    def run_config(self, model_dir: str) -> RunConfig:
        self._refuse_unknown_bindings()
        run = self._run
        self._check_run()
        sequence_length = self._sequence_length()
        batch_size = self._batch_size(sequence_length)
        train_steps = self._train_steps(batch_size, sequence_length)
        model = self._model()
        training = mtf_optimizer.OptimizerReader(self._bindings, run, self._provenance)
        optimizer = training.optimizer(model)
        self._decoding = mtf_decoding.DecodingReader(self._bindings, run, self._provenance)
        fields: dict[str, Any] = {
            "mode": run["mode"],
            "model_dir": model_dir,
            "model": model,
            **self._decoding.fields(model.vocab_size),
            "dtypes": self._dtypes(),
            "optimizer": optimizer,
            "schedule": training.schedule(run["total_run_steps"] or train_steps, optimizer),
            "train_data": self._train_data(),
            "eval_data": self._eval_data(),
            "sequence_length": sequence_length,
            "batch_size": batch_size,
            "num_microbatches": self._num_microbatches(batch_size, sequence_length),
            "train_steps": train_steps,
            "eval_checkpoint_step": _hashable(run["eval_checkpoint_step"]),
            "scores_filename": self._argument(f"{_UTILS}.save_scores", "scores_filename"),
            "vocabulary": _vocabulary_path(run["vocabulary"]),
        }
        for name in (
            "save_checkpoints_steps", "keep_checkpoint_max", "init_checkpoint",
            "eval_summary_dir", "eval_dir_suffix", "output_eval_examples",
        ):  # fmt: skip
            fields[name] = run[name]
        for name in fields:
            if name in run:
                self._note(name, f"{_UTILS}.run", name)
        fields["init_variable_filter"] = (
            self._argument(f"{_UTILS}.tpu_estimator_model_fn", "init_variable_filter") or ""
        )
        return RunConfig(**fields, provenance=dict(sorted(self._provenance.items())))

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
        place = self._bindings.find(scopes, selector, argument)
        self._provenance[field] = place or f"default of {selector.rpartition('.')[2]}.{argument}"

    def _refuse(self, argument: str, what: str, selector: str = f"{_UTILS}.run") -> NoReturn:
        place = self._bindings.find(("decoder",), selector, argument)
        raise UserError(
            f"The JAX stack does not support {what} ({selector.rpartition('.')[2]}.{argument}).",
            where=place,
            fix="Remove the binding, or run with --backend=mtf.",
        )

    def _refuse_unknown_bindings(self) -> None:
        """Refuses a known configurable's argument that is neither read nor at its default."""
        import gin.config

        for (scope, selector), arguments in gin.config._CONFIG.items():
            known = _KNOWN.get(selector)
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

    def _check_run(self) -> None:
        """Refuses what `run` would not do either, and what only the mtf backend does."""
        run, mode = self._run, self._run["mode"]
        if run["model_type"] not in ("bitransformer", "lm", "delimited_lm"):
            self._refuse("model_type", f"model_type {run['model_type']!r}")
        if run["model_type"] != "bitransformer" and mode not in ("train", "perplexity_eval"):
            self._refuse("mode", f"mode {mode!r} of a model without an encoder")
        if mode == "train" and run["dataset_split"] != "train":
            raise UserError(
                f"run.mode is 'train', and run.dataset_split is {run['dataset_split']!r}.",
                where=self._bindings.find((), f"{_UTILS}.run", "dataset_split"),
                fix="Training reads the split 'train'; remove the binding.",
            )
        if run["sequence_length"] is None and mode not in ("eval", "score_eval"):
            raise UserError(
                f"run.sequence_length is None, and mode {mode!r} needs one.",
                where=self._bindings.find((), f"{_UTILS}.run", "sequence_length"),
                fix="Bind run.sequence_length = {'inputs': N, 'targets': N}.",
            )

    def _train_steps(self, batch_size: int, sequence_length: Mapping[str, int] | None) -> int:
        steps = self._run["train_steps"]
        if isinstance(steps, int):
            return steps
        if sequence_length is None:
            raise UserError(
                "run.train_steps counts tokens, and run.sequence_length is None.",
                where=self._bindings.find((), f"{_UTILS}.run", "train_steps"),
                fix="Bind run.train_steps to a number.",
            )
        return steps(batch_size, sequence_length)

    def _sequence_length(self) -> dict[str, int] | None:
        length = self._run["sequence_length"]
        return {"inputs": length, "targets": length} if isinstance(length, int) else length

    def _batch_size(self, sequence_length: Mapping[str, int] | None) -> int:
        size = self._run["batch_size"]
        if isinstance(size, int):
            return size
        if sequence_length is None and size[0].startswith("tokens"):
            raise UserError(
                f"run.batch_size = {tuple(size)!r} counts tokens, and run.sequence_length is None.",
                where=self._bindings.find((), f"{_UTILS}.run", "batch_size"),
                fix="Bind run.batch_size to a number or to ('sequences_per_batch', N).",
            )
        return self._utils.compute_batch_size(
            sequence_length, self._run["mesh_shape"], self._run["layout_rules"], size
        )

    def _num_microbatches(self, batch_size: int, sequence_length: Mapping[str, int] | None) -> int:
        selector = f"{_UTILS}.serialize_num_microbatches"
        self._note("num_microbatches", selector, "tokens_per_microbatch_per_replica")
        if sequence_length is None or self._run["mode"] != "train":
            return 1
        mtf = importlib.import_module("mesh_tensorflow")
        return self._utils.serialize_num_microbatches(
            mtf.Dimension("batch", batch_size),
            sequence_length,
            mtf.convert_to_shape(self._run["mesh_shape"]),
            mtf.convert_to_layout_rules(self._run["layout_rules"]),
        )

    def _model(self) -> Any:
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

    def _dtypes(self) -> DTypePolicy:
        selector = f"{_UTILS}.get_variable_dtype"
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
        selector, run = f"{_UTILS}.run", self._run
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
        self._note("eval_data.split", f"{_UTILS}.run", "dataset_split")
        return EvalDataConfig(
            split=self._run["dataset_split"], **_select(arguments, EvalDataConfig)
        )

    def _dataset_arguments(self, field: str, function: Any) -> dict[str, Any]:
        selector = f"{_MESH_TRANSFORMER}.{function.__name__}"
        arguments = self._arguments(selector, function)
        if "mixture_or_task_name" not in arguments:
            raise UserError(
                f"{function.__name__}.mixture_or_task_name is not bound.",
                fix="Add --gin_file=dataset.gin and --gin_param=\"MIXTURE_NAME = 'NAME'\".",
            )
        for argument in _KNOWN[selector]:
            self._note(f"{field}.{argument}", selector, argument)
        return arguments


def _select(arguments: Mapping[str, Any], dataclass: Any) -> dict[str, Any]:
    """The arguments that are fields of a dataclass."""
    names = {field.name for field in dataclasses.fields(dataclass)}
    return {name: value for name, value in arguments.items() if name in names}


def _hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _vocabulary_path(vocabulary: Any) -> str | None:
    inputs = vocabulary[0] if isinstance(vocabulary, tuple) else vocabulary
    return getattr(inputs, "sentencepiece_model_file", None)
