"""The Mesh TensorFlow dialect: gin files and --gin_param overrides -> RunConfig.

gin, Mesh TensorFlow and t5 do the parsing, so that a typo fails here with the same message. The
RunConfig then comes from what gin configured (the arguments of `utils.run`, the model that
`build_model` makes, the optimizer class, the schedule function), not from the text. A binding that
would change a Mesh TensorFlow run but that the JAX stack does not support is an error that names
the binding and its place; none is ignored.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, get_args

from t0repro import compat
from t0repro.config import gin_door, ranges
from t0repro.config.configuration import (
    Configuration,
    NotOnJax,
    RunInputs,
    check_adapter,
    check_choice_loss,
)
from t0repro.config.gin_door import Bindings
from t0repro.config.gin_errors import configuration_errors
from t0repro.config.mtf import model as mtf_model
from t0repro.config.mtf import optimizer as mtf_optimizer
from t0repro.config.mtf import packages
from t0repro.config.mtf.misread import check_types, misread, scoped_calls
from t0repro.config.mtf.packages import MESH_TRANSFORMER
from t0repro.config.mtf.parser import (
    JAX_MODEL,
    JAX_TRAINING,
    UTILS,
    FindCheckpoint,
    Flags,
    MeshInputs,
    RunArguments,
    jax_training,
    parse,
    parse_model_api,
    refused_export,
)
from t0repro.config.mtf.run_inputs import (
    DATA_BINDINGS,
    DECODING_BINDINGS,
    DTYPES,
    DatasetReader,
    DecodingReader,
    InputsReader,
    dtype_name,
)
from t0repro.config.run_config import (
    DType,
    DTypePolicy,
    Layout,
    ModelConfig,
    RunConfig,
    ScheduleConfig,
)
from t0repro.config.training_plan import TrainDataConfig, TrainingPlan, mesh_transformer_plan
from t0repro.errors import UserError, needs_reference_tier
from t0repro.tasks.vocabulary import BYTES, VocabularyFile
from t0repro.words import without_passwords


def load(inputs: MeshInputs, *, float32_activations: bool = True) -> Configuration:
    """Parses the gin inputs as t5_mesh_transformer does, and returns a run's configuration.

    Args:
      inputs: files, overrides and search paths.
      float32_activations: compute in float32 whatever gin binds, as t5_mesh_transformer does
        without --tpu. False follows get_variable_dtype.

    Raises:
      UserError: for any mistake in a file or an override, with its place.
    """
    bindings = parse(inputs)
    # A second block: from here on, messages can give the places of bindings.
    with configuration_errors(bindings):
        return read(inputs.model_dir, bindings, float32_activations=float32_activations)


def describe(
    inputs: MeshInputs,
    why_not: Callable[[RunConfig], str | None],
    *,
    float32_activations: bool = True,
) -> Configuration | None:
    """As `load`, but without Mesh TensorFlow, t5, SeqIO and TensorFlow; None if it needs them.

    Args:
      inputs: As for `load`.
      why_not: Returns what in the run needs the packages, if anything; its tasks are only
        described.
      float32_activations: As for `load`.

    Raises:
      UserError: As from `load`, or if the packages are needed and not installed.
    """
    # TensorFlow Datasets' folder is a setting of SeqIO's.
    if inputs.tfds_data_dir or not packages.can_be_described(inputs.module_imports):
        return None
    try:
        with packages.described():
            bindings = _described_bindings(inputs)
            configuration = _described(inputs, bindings, float32_activations)
        why = why_not(configuration.run)
    except packages.NeedsPackages as needed:
        why = str(needed)
    if why is not None and not compat.is_installed():
        raise needs_reference_tier(why)
    return configuration if why is None else None


def describe_or_load(inputs: MeshInputs, *, float32_activations: bool = True) -> Configuration:
    """As `load`, by `describe` if that can do it.

    Raises:
      UserError: As from `describe`.
    """
    activations = {"float32_activations": float32_activations}
    return describe(inputs, lambda run: None, **activations) or load(inputs, **activations)


def _described_bindings(inputs: MeshInputs) -> Bindings:
    try:
        return parse(inputs)
    except UserError as error:
        # A name that is not recorded may be known to a later version of the packages.
        if error.what.startswith("No configurable matching"):
            raise packages.NeedsPackages(error.what) from error
        raise


def _described(inputs: MeshInputs, bindings: Bindings, float32_activations: bool) -> Configuration:
    with configuration_errors(bindings):
        try:
            return read(inputs.model_dir, bindings, float32_activations=float32_activations)
        except UserError:
            raise
        except Exception as error:
            # A stand-in raised it; the real package has its own message.
            raise packages.NeedsPackages(str(error)) from error


def load_model_api(
    inputs: MeshInputs,
    flags: Flags,
    find_checkpoint: FindCheckpoint,
    *,
    float32_activations: bool = True,
) -> Configuration:
    """Like `load`, for --use_model_api, whose flags stand in for bindings of `run`.

    Args:
      inputs: as for `load`.
      flags: t5's parsed flags.
      find_checkpoint: finds the checkpoint that mode finetune starts from; not called in other
        modes.
      float32_activations: as for `load`.

    Raises:
      UserError: as from `load`, and for flags that do not fit together.
    """
    with configuration_errors():
        bindings = parse_model_api(inputs, flags, find_checkpoint)
    with configuration_errors(bindings):
        return read(inputs.model_dir, bindings, float32_activations=float32_activations)


# ---- What gin configured, objects and arguments and not its text, as a RunConfig -----------------


def layout_of(arguments: RunArguments, tpu_mesh: str | None) -> Layout:
    """The Layout that mesh_shape and layout_rules define; without a mesh, all devices along data.

    Args:
      arguments: of `utils.run`.
      tpu_mesh: see `RunInputs.tpu_mesh`.

    Raises:
      NotOnJax: for a rule that shards d_model.
    """
    mtf = packages.module("mesh_tensorflow")
    shape = mtf.convert_to_shape(arguments.run["mesh_shape"])
    rules = mtf.convert_to_layout_rules(arguments.run["layout_rules"])
    arguments.note("layout", f"{UTILS}.run", "mesh_shape")
    # One device: there is nothing to shard, and rules without a mesh have no meaning.
    if shape.size == 1:
        return Layout()

    # A set: dimensions on the same mesh axis are sharded by it once.
    def parts(*dimensions: str) -> int:
        axes = {
            rules.tensor_dimension_to_mesh_axis(mtf.Dimension(name, shape.size), shape)
            for name in dimensions
        } - {None}
        return math.prod(shape.dims[axis].size for axis in axes)

    if parts("d_model") > 1:
        arguments.refuse("layout_rules", "a rule that divides d_model")
    topology = None
    if tpu_mesh:
        selector = f"{UTILS}.tpu_mesh_shape"
        arguments.note("layout", selector, "tpu_topology")
        # Only a mesh computed for a TPU adapts to the devices of this machine.
        bound = arguments.arguments(selector, arguments.utils.tpu_mesh_shape)
        topology = bound["tpu_topology"]
    # Mesh TensorFlow may shard only some of these three; here, all of them are sharded.
    return Layout(parts("batch"), parts("d_ff", "heads", "vocab"), topology=topology)


def read(model_dir: str, bindings: Bindings, *, float32_activations: bool = True) -> Configuration:
    """The run that gin's current configuration describes.

    Raises:
      UserError: naming binding and place, for a configuration that neither backend can run.
    """
    import gin

    check_types(bindings)
    arguments = RunArguments(bindings)
    inputs = InputsReader(arguments).inputs(model_dir)
    warnings = tuple(misread(bindings, arguments.run["model_type"]))
    try:
        if warnings:
            raise warnings[0]
        run = _ConfigReader(arguments, float32_activations).run_config(inputs)
    # Kept, not raised: the run may be for Mesh TensorFlow.
    except NotOnJax as refusal:
        run = refusal
    # Calls made here must not appear in the operative_config.gin of a Mesh TensorFlow run.
    gin_door.forget_calls()
    text = without_passwords(gin.config_str())
    return Configuration(inputs, run, text, misread=warnings)


# Configurables that a run on the JAX stack reads, with the arguments it supports. Any other
# argument of these may only be bound to its default. `...` admits every argument, because the real
# function is called or because the value does not affect the computation.
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
        "init_checkpoint",
    },
    f"{UTILS}.score_with_estimator": set(),
    f"{UTILS}.init_checkpoint_variable_mapping": set(),
    f"{UTILS}.should_load_variable": set(),
    f"{MESH_TRANSFORMER}.get_vocabulary": ...,
    "mesh_tensorflow.transformer.dataset.pack_dataset": set(),
    "mesh_tensorflow.layers.unit_scaling_convention": set(),
    "mesh_tensorflow.layers.VarianceScalingInitializer": set(),
    "mesh_tensorflow.ops.rewrite_stack_variables": ...,
    **mtf_model.KNOWN_BINDINGS,
    **mtf_optimizer.KNOWN_BINDINGS,
    **DECODING_BINDINGS,
    **DATA_BINDINGS,
}  # fmt: skip


def _address(vocabulary: Any) -> str | None:
    if isinstance(vocabulary, VocabularyFile):
        return None if vocabulary.address == BYTES else vocabulary.address
    return getattr(vocabulary, "sentencepiece_model_file", None)


class _ConfigReader:
    """Builds a RunConfig from the arguments, noting each value's provenance."""

    def __init__(self, arguments: RunArguments, float32_activations: bool):
        self._gin = arguments
        self._float32 = float32_activations

    def run_config(self, inputs: RunInputs) -> RunConfig:
        """The RunConfig.

        Raises:
          NotOnJax: naming binding and place, if the JAX stack does not support the configuration.
        """
        self._refuse_unknown_bindings()
        self._refuse_model_types()
        for refusal in scoped_calls(self._gin.bindings, self._gin.run["model_type"]):
            raise refusal
        run = self._gin.run
        train_steps = self._train_steps(inputs.batch_size, inputs.sequence_length)
        model = self._model()
        # Evaluations find an adapter through the checkpoint's adapter.json, not through gin.
        if inputs.mode == "train":
            model = self._with_choice_loss(self._with_adapter(model))
        training = mtf_optimizer.OptimizerReader(self._gin.bindings, run, self._gin.provenance)
        optimizer = training.optimizer(model)
        decoding = DecodingReader(self._gin.bindings, run, self._gin.provenance)
        data = DatasetReader(self._gin, decoding)
        fields: dict[str, Any] = {
            "mode": inputs.mode,
            "model_dir": inputs.model_dir,
            "model": model,
            **decoding.fields(model.vocab_size),
            "dtypes": self._dtypes(),
            "optimizer": optimizer,
            # Schedules with an end count to total_run_steps if it is bound.
            "schedule": training.schedule(self._total_run_steps(train_steps), optimizer),
            "plan": self._plan(data.train_data(), inputs.init_checkpoint),
            "eval_data": data.eval_data(),
            "sequence_length": inputs.sequence_length,
            "batch_size": inputs.batch_size,
            "num_microbatches": inputs.num_microbatches,
            "train_steps": train_steps,
            "eval_checkpoint_step": inputs.eval_checkpoint_step,
            "scores_filename": self._gin.argument(f"{UTILS}.save_scores", "scores_filename"),
            "vocabulary": _address(inputs.vocabularies[0]),
            "vocabulary_extra_ids": getattr(inputs.vocabularies[0], "extra_ids", 0),
            "layout": layout_of(self._gin, inputs.tpu_mesh),
            "weight_metrics_every": jax_training()["weight_metrics_every"],
        }
        self._gin.note("weight_metrics_every", JAX_TRAINING, "weight_metrics_every")
        for name in ("eval_summary_dir", "eval_dir_suffix", "output_eval_examples"):
            fields[name] = run[name]
        for name in fields:
            if name in run:
                self._gin.note(name, f"{UTILS}.run", name)
        config = RunConfig(**fields, provenance=dict(sorted(self._gin.provenance.items())))
        # Check here, where everything has been read, whichever file or flag it came from.
        ranges.check(config, config.provenance)
        config.model.check_position_buckets(config.provenance.get(self._position_setting()))
        check_adapter(config)
        check_choice_loss(config)
        if (train_data := config.plan.train_data) is not None:
            place = config.provenance.get("plan.train_data.num_shards")
            shards, name = train_data.num_shards, f"{JAX_TRAINING}.data_shards"
            ranges.check_divides(name, shards, config.batch_size, place)
        return config

    def _plan(
        self, train_data: TrainDataConfig | None, init_checkpoint: str | None
    ) -> TrainingPlan:
        """The intervals of mesh_transformer_main, with the numbers that gin binds."""
        notes = {"period": "save_checkpoints_steps", "keep": "keep_checkpoint_max"}
        for field, name in notes.items():
            self._gin.note(f"plan.save.{field}", f"{UTILS}.run", name)
        estimator = f"{UTILS}.tpu_estimator_model_fn"
        variables = self._gin.argument(estimator, "init_variable_filter") or ""
        if init_checkpoint is not None:
            self._gin.note("plan.restore.path", f"{UTILS}.run", "init_checkpoint")
            self._gin.note("plan.restore.variable_filter", estimator, "init_variable_filter")
        init_adapter = jax_training()["init_adapter"] if self._gin.run["mode"] == "train" else None
        if init_adapter is not None:
            self._gin.note("plan.restore.adapter", JAX_TRAINING, "init_adapter")
            if init_checkpoint is None:
                raise UserError(
                    f"init_adapter is {init_adapter!r}, but its base is not given.",
                    where=self._gin.provenance.get("plan.restore.adapter"),
                    fix="Bind utils.run.init_checkpoint to the base.",
                )
        return mesh_transformer_plan(
            train_data,
            init_checkpoint=init_checkpoint,
            init_variable_filter=variables,
            init_adapter=init_adapter,
            places={
                **{
                    name: self._gin.place_of_run(name)
                    for name in (*notes.values(), "init_checkpoint")
                },
                "init_variable_filter": self._gin.bindings.find(
                    (), estimator, "init_variable_filter"
                ),
            },
            **{name: self._gin.run[name] for name in notes.values()},
        )

    def _with_adapter(self, model: ModelConfig) -> ModelConfig:
        """The model with the adapter that gin binds; one without stays as it is."""
        adapter = jax_training()["adapter"]
        if adapter is None:
            return model
        self._gin.note("model.adapter", JAX_TRAINING, "adapter")
        find = self._gin.bindings.find
        targets = find((), f"t0repro.adapters.{adapter.kind}", "targets")
        return model.with_adapter(adapter, targets or find((), JAX_TRAINING, "adapter"))

    def _with_choice_loss(self, model: ModelConfig) -> ModelConfig:
        """The model with the loss over answer choices that gin binds."""
        loss = jax_training()["choice_loss"]
        if loss is not None:
            self._gin.note("model.choice_loss", JAX_TRAINING, "choice_loss")
        return model.with_choice_loss(loss, self._gin.provenance.get("model.loss_denominator"))

    def _position_setting(self) -> str:
        """The field to name in errors about the position bias's buckets: the one that is bound."""
        import gin

        distance = "relative_attention_max_distance"
        bound = distance in gin.get_bindings(JAX_MODEL)
        return f"model.{distance if bound else 'relative_attention_num_buckets'}"

    def _refuse_unknown_bindings(self) -> None:
        """Refuses a supported configurable's argument that is neither read nor at its default."""
        for (scope, selector), arguments in gin_door.bound().items():
            known = KNOWN_BINDINGS.get(selector)
            if known is None or known is ...:
                continue
            parameters = inspect.signature(gin_door.function_of(selector)).parameters
            # Compare with the signature's defaults: binding a default changes nothing.
            for argument in set(arguments) - set(known):
                value = gin_door.resolved(scope, selector)[argument]
                if argument in parameters and value == parameters[argument].default:
                    continue
                self._gin.refuse(argument, f"{argument} = {value!r}", selector, scope)

    def _refuse_model_types(self) -> None:
        run, mode = self._gin.run, self._gin.run["mode"]
        if run["model_type"] not in ("bitransformer", "lm", "delimited_lm"):
            self._gin.refuse("model_type", f"model_type {run['model_type']!r}")
        if str(mode).startswith("export"):
            raise refused_export(mode, self._gin.place_of_run("mode"))
        if run["model_type"] != "bitransformer" and mode not in ("train", "perplexity_eval"):
            self._gin.refuse(
                "mode",
                f"mode {mode!r} of a model without an encoder: it trains such a model and measures"
                " its perplexity, but cannot continue a partial sequence, as decoding has to, or"
                " score one",
            )

    def _train_steps(self, batch_size: int, sequence_length: Mapping[str, int] | None) -> int:
        steps = function = self._gin.run["train_steps"]
        if not callable(steps):  # a number, or nonsense
            ranges.check_field(
                RunConfig, "train_steps", steps, self._gin.place_of_run("train_steps")
            )
            return steps
        if sequence_length is None:
            raise UserError(
                "run.train_steps counts tokens, and run.sequence_length is None.",
                where=self._gin.bindings.find((), f"{UTILS}.run", "train_steps"),
                fix="Bind run.train_steps to a number.",
            )
        return function(batch_size, sequence_length)

    def _total_run_steps(self, train_steps: int) -> int:
        steps, place = self._gin.run["total_run_steps"], self._gin.place_of_run("total_run_steps")
        if steps is None:
            return train_steps
        ranges.check_field(ScheduleConfig, "total_train_steps", steps, place, "run.total_run_steps")
        return steps

    def _check_depth(self) -> None:
        """Checks numbers of layers before Mesh TensorFlow makes an object for each."""
        selector = "mesh_tensorflow.transformer.transformer.make_layer_stack"
        for scope in ("", "encoder", "decoder"):
            depth = gin_door.resolved(scope, selector).get("num_layers")
            place = self._gin.bindings.find((scope,), selector, "num_layers")
            if depth is not None:
                ranges.check_field(ModelConfig, "num_decoder_layers", depth, place, "num_layers")

    def _model(self) -> Any:
        import gin

        self._check_depth()
        vocabulary = self._gin.run["vocabulary"]
        model = self._gin.utils.build_model(
            model_type=self._gin.run["model_type"],
            input_vocab_size=self._gin.utils.inputs_vocabulary(vocabulary).vocab_size,
            output_vocab_size=self._gin.utils.targets_vocabulary(vocabulary).vocab_size,
            layout_rules=self._gin.run["layout_rules"],
            mesh_shape=self._gin.run["mesh_shape"],
        )
        model_type = self._gin.run["model_type"]
        for field, (selector, argument, scopes) in mtf_model.FIELD_SOURCES.items():
            if model_type != "bitransformer":
                scopes = ()  # a single tower is built in no scope
            self._gin.note(f"model.{field}", selector, argument, scopes)
        if gin.get_bindings(JAX_MODEL).get("recompute") is not None:
            self._gin.note("model.recompute", JAX_MODEL, "recompute")
        return mtf_model.read_model(model, model_type, self._gin.bindings)

    def _dtypes(self) -> DTypePolicy:
        names: dict[str, Any] = {}
        for field in ("master", "slice", "activation"):
            names[field] = dtype_name(self._gin, f"{field}_dtype")
            self._gin.note(f"dtypes.{field}", DTYPES, f"{field}_dtype")
        # As t5's main does without --tpu, whatever gin binds.
        if self._float32:
            for field in ("slice", "activation"):
                names[field] = "float32"
                self._gin.provenance[f"dtypes.{field}"] = "set by t5_mesh_transformer without --tpu"
        # In evaluation, 16-bit weights and 16-bit activations give the same results.
        if names["slice"] != "float32" and (
            self._gin.run["mode"] == "train" or names["activation"] == "float32"
        ):
            self._gin.refuse("slice_dtype", f"slice_dtype {names['slice']!r}", DTYPES)
        for field, name in names.items():
            if name not in get_args(DType):
                self._gin.refuse(f"{field}_dtype", f"{field}_dtype {name!r}", DTYPES)
        return DTypePolicy(**names)
