"""The Mesh TensorFlow dialect: gin files and --gin_param overrides -> a run.

gin parses the files, so that a typo fails here with the same message. The run then comes from
the arguments that gin would give Mesh TensorFlow's functions, not from the text. A binding that
would change a Mesh TensorFlow run but that the JAX stack does not support is an error that names
the binding and its place; none is ignored.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, get_args

import gin
from t0repro.config import ranges
from t0repro.config.checkpoints import CheckpointChoice
from t0repro.config.configuration import (
    Configuration,
    NotOnJax,
    RunInputs,
    check_adapter,
    check_choice_loss,
)
from t0repro.config.data import EvalDataConfig, TrainDataConfig
from t0repro.config.decoding import DecodingConfig, InferConfig, ScoreStringsConfig
from t0repro.config.gin import door
from t0repro.config.gin.door import Bindings
from t0repro.config.gin.errors import configuration_errors
from t0repro.config.model import DType, DTypePolicy, Layout, ModelConfig
from t0repro.config.mtf import mesh, stand_ins
from t0repro.config.mtf.arguments import Arguments
from t0repro.config.mtf.inputs import dtype_name, read_inputs
from t0repro.config.mtf.jax_settings import refusal_on_mesh_tensorflow
from t0repro.config.mtf.known import refuse_unknown_bindings
from t0repro.config.mtf.misread import check_types, misread, scoped_calls
from t0repro.config.mtf.model import read_model
from t0repro.config.mtf.model_api import FindCheckpoint, parse_model_api, refused_export
from t0repro.config.mtf.optimizer import read_optimizer, read_schedule
from t0repro.config.mtf.parser import MeshInputs, parse
from t0repro.config.mtf.stand_ins import full_name
from t0repro.config.optimizer import ScheduleConfig
from t0repro.config.run import (
    RUN_OF_MODE,
    MeshEvalRun,
    Run,
    TextRun,
    TrainingPlan,
    TrainRun,
    mesh_transformer_plan,
)
from t0repro.errors import UserError
from t0repro.tasks.modules import load_tasks
from t0repro.tasks.vocabulary import BYTES, VocabularyFile
from t0repro.words import without_passwords


def load(
    inputs: MeshInputs,
    *,
    float32_activations: bool = True,
    with_packages: bool = False,
    flags: Any = None,
    find_checkpoint: FindCheckpoint | None = None,
) -> Configuration:
    """Parses the gin inputs as t5_mesh_transformer does, and returns a run's configuration.

    Args:
      inputs: files, overrides and search paths.
      float32_activations: compute in float32 whatever gin binds, as t5_mesh_transformer does
        without --tpu. False follows get_variable_dtype.
      with_packages: import t5 and Mesh TensorFlow and leave gin configured for a run on them;
        otherwise stand-ins describe them, and gin is as it was before.
      flags: with --use_model_api, t5's parsed flags, which stand in for bindings of `run`.
      find_checkpoint: with `flags`, finds the checkpoint that mode finetune starts from.

    Raises:
      UserError: for any mistake in a file, an override or a flag, with its place.
    """
    if not with_packages:
        with configuration_errors():
            load_tasks(inputs.module_imports, into_seqio=False)
    with contextlib.nullcontext() if with_packages else _stand_ins():
        if flags is None or find_checkpoint is None:
            bindings = parse(inputs, with_packages=with_packages)
        else:
            with configuration_errors():
                bindings = parse_model_api(
                    inputs, flags, find_checkpoint, with_packages=with_packages
                )
        # A second block: from here on, messages can give the places of bindings.
        with configuration_errors(bindings):
            return _read(inputs.model_dir, bindings, float32_activations)


@contextlib.contextmanager
def _stand_ins() -> Iterator[None]:
    """Stand-ins within the block; a name that they lack may be known to the real packages."""
    try:
        with stand_ins.registered():
            yield
    except UserError as error:
        if not error.what.startswith("No configurable matching"):
            raise
        fix = f"{error.fix} Or {stand_ins.OTHERWISE}."
        raise NotOnJax(error.what, where=error.where, fix=fix) from error


def _read(model_dir: str, bindings: Bindings, float32_activations: bool) -> Configuration:
    """The run that gin's current configuration describes."""
    check_types(bindings)
    arguments = Arguments(bindings)
    inputs = read_inputs(arguments, model_dir)
    warnings = tuple(misread(bindings, arguments.model_type))
    try:
        if warnings:
            raise warnings[0]
        run = _read_run(arguments, inputs, float32_activations)
    # Kept, not raised: the run may be for Mesh TensorFlow.
    except NotOnJax as refusal:
        run = refusal
    # Calls made here must not appear in the operative_config.gin of a Mesh TensorFlow run.
    door.forget_calls()
    text = without_passwords(gin.config_str())
    return Configuration(
        inputs, run, text, misread=warnings, only_on_jax=refusal_on_mesh_tensorflow()
    )


def _read_run(arguments: Arguments, inputs: RunInputs, float32_activations: bool) -> Run:
    """The run of the mode.

    Raises:
      NotOnJax: naming binding and place, if the JAX stack does not support the configuration.
    """
    refuse_unknown_bindings(arguments)
    _refuse_model_types(arguments)
    for refusal in scoped_calls(arguments.bindings, arguments.model_type):
        raise refusal
    mode, places = inputs.mode, arguments.provenance
    train_steps = _train_steps(arguments, inputs)
    sizes = tuple(each.vocab_size for each in inputs.vocabularies)
    model = read_model(arguments, sizes)
    # Evaluations find an adapter through the checkpoint's adapter.json, not through gin.
    if mode == "train":
        model = _with_choice_loss(arguments, _with_adapter(arguments, model))
    optimizer = read_optimizer(arguments, model)
    train_data = _read_train_data(arguments, "plan.train_data.")
    eval_data: EvalDataConfig | TrainDataConfig | None = _read_eval_data(arguments)
    if eval_data is None and mode == "perplexity_eval":
        eval_data = _read_train_data(arguments, "eval_data.")
    vocabulary, layout = inputs.vocabularies[0], read_layout(arguments, inputs.tpu_mesh)
    values = {
        "mode": mode,
        "model_dir": inputs.model_dir,
        "model": model,
        "dtypes": _read_dtypes(arguments, float32_activations),
        "sequence_length": inputs.sequence_length,
        "batch_size": inputs.batch_size,
        "vocabulary": _address(vocabulary),
        "vocabulary_extra_ids": getattr(vocabulary, "extra_ids", 0),
        "layout": layout,
        "optimizer": optimizer,
        # Schedules with an end count to total_run_steps if it is bound.
        "schedule": read_schedule(arguments, _total_run_steps(arguments, train_steps), optimizer),
        "num_microbatches": inputs.num_microbatches,
        "train_steps": train_steps,
        "plan": _read_plan(arguments, train_data, inputs.init_checkpoint),
        "eval_checkpoint_step": inputs.eval_checkpoint_step,
        "checkpoint_choice": arguments.settings(CheckpointChoice, "checkpoint_choice."),
        "decoding": _read_decoding(arguments),
        "eval_data": eval_data,
    }
    if (read_text := _TEXTS.get(mode)) is not None:
        values["text"] = read_text(arguments)
    if layout.topology:
        arguments.note("layout", "utils.tpu_mesh_shape", "tpu_topology")
    # Settings of the other modes are checked too: a mistake is found before its mode runs.
    for kind in (TrainRun, MeshEvalRun, TextRun):
        values = arguments.values(kind, "", **values)
        ranges.check_values(kind, values, places)
    names = {field.name for field in dataclasses.fields(RUN_OF_MODE[mode])} - {"provenance"}
    run = RUN_OF_MODE[mode](
        **{name: values[name] for name in names},
        provenance={x: places[x] for x in sorted(places) if x.partition(".")[0] in names},
    )
    # Named in errors about the position bias's buckets: the setting that is bound.
    distance, buckets = "relative_attention_max_distance", "relative_attention_num_buckets"
    is_bound = arguments.place(distance, "t0repro.jax_model")
    model.check_position_buckets(places.get(f"model.{distance if is_bound else buckets}"))
    if isinstance(run, TrainRun):
        check_adapter(run)
        check_choice_loss(run)
    if train_data is not None:
        place = places.get("plan.train_data.num_shards")
        name = "t0repro.jax_training.data_shards"
        ranges.check_divides(name, train_data.num_shards, inputs.batch_size, place)
    return run


def _address(vocabulary: Any) -> str | None:
    if isinstance(vocabulary, VocabularyFile):
        return None if vocabulary.address == BYTES else vocabulary.address
    return getattr(vocabulary, "sentencepiece_model_file", None)


# ---- Rules: fields for which an argument itself is not the value ---------------------------------


def _refuse_model_types(arguments: Arguments) -> None:
    model_type, mode = arguments.model_type, arguments.run["mode"]
    if model_type not in ("bitransformer", "lm", "delimited_lm"):
        arguments.refuse(f"model_type {model_type!r}", "model_type")
    if str(mode).startswith("export"):
        raise refused_export(mode, arguments.place("mode"))
    if model_type != "bitransformer" and mode not in ("train", "perplexity_eval"):
        arguments.refuse(
            f"mode {mode!r} of a model without an encoder: it trains such a model and measures"
            " its perplexity, but cannot continue a partial sequence, as decoding has to, or"
            " score one",
            "mode",
        )


def _train_steps(arguments: Arguments, inputs: RunInputs) -> int:
    steps: Any = arguments.run["train_steps"]
    if not callable(steps):  # a number, or nonsense
        place = arguments.place("train_steps")
        ranges.check_field(TrainRun, "train_steps", steps, place)
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


def _total_run_steps(arguments: Arguments, train_steps: int) -> int:
    steps = arguments.run["total_run_steps"]
    if steps is None:
        return train_steps
    place = arguments.place("total_run_steps")
    ranges.check_field(ScheduleConfig, "total_train_steps", steps, place, "run.total_run_steps")
    return steps


def _with_adapter(arguments: Arguments, model: ModelConfig) -> ModelConfig:
    """The model with the adapter that gin binds; one without stays as it is."""
    adapter = arguments.of("t0repro.jax_training")["adapter"]
    if adapter is None:
        return model
    place = arguments.place("targets", f"t0repro.adapters.{adapter.kind}")
    return model.with_adapter(adapter, place or arguments.provenance["model.adapter"])


def _with_choice_loss(arguments: Arguments, model: ModelConfig) -> ModelConfig:
    """The model with the loss over answer choices that gin binds."""
    loss = arguments.of("t0repro.jax_training")["choice_loss"]
    return model.with_choice_loss(loss, arguments.provenance.get("model.loss_denominator"))


def _read_dtypes(arguments: Arguments, float32_activations: bool) -> DTypePolicy:
    configurable = "utils.get_variable_dtype"
    names: dict[str, Any] = {
        field: dtype_name(arguments, f"{field}_dtype")
        for field in ("master", "slice", "activation")
    }
    # As t5's main does without --tpu, whatever gin binds.
    if float32_activations:
        names |= dict.fromkeys(("slice", "activation"), "float32")
    # In evaluation, 16-bit weights and 16-bit activations give the same results.
    if names["slice"] != "float32" and (
        arguments.run["mode"] == "train" or names["activation"] == "float32"
    ):
        arguments.refuse(f"slice_dtype {names['slice']!r}", "slice_dtype", configurable)
    for field, name in names.items():
        if name not in get_args(DType):
            arguments.refuse(f"{field}_dtype {name!r}", f"{field}_dtype", configurable)
    dtypes = arguments.settings(DTypePolicy, "dtypes.", **names)
    if float32_activations:
        for field in ("slice", "activation"):
            arguments.provenance[f"dtypes.{field}"] = "set by t5_mesh_transformer without --tpu"
    return dtypes


def read_layout(arguments: Arguments, tpu_mesh: str | None) -> Layout:
    """The Layout that mesh_shape and layout_rules define; without a mesh, all devices along data.

    Args:
      arguments: gin's.
      tpu_mesh: see `RunInputs.tpu_mesh`.

    Raises:
      NotOnJax: for a rule that shards d_model.
    """
    shape, rules = arguments.run["mesh_shape"], arguments.run["layout_rules"]
    # One device: there is nothing to shard, and rules without a mesh have no meaning.
    if math.prod(each.size for each in mesh.mesh_dimensions(shape)) == 1:
        return Layout()

    # A set: dimensions on the same mesh axis are sharded by it once.
    def shards(*dimensions: str) -> int:
        axes = {axis for name in dimensions for axis in mesh.mesh_axes(name, shape, rules)}
        return math.prod(axis.size for axis in axes)

    if shards("d_model") > 1:
        arguments.refuse("a rule that divides d_model", "layout_rules")
    # Only a mesh computed for a TPU adapts to the devices of this machine.
    topology = arguments.of("utils.tpu_mesh_shape")["tpu_topology"] if tpu_mesh else None
    # Mesh TensorFlow may shard only some of these three; here, all of them are sharded.
    return Layout(shards("batch"), shards("d_ff", "heads", "vocab"), topology=topology)


def _read_plan(
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
    training = arguments.of("t0repro.jax_training")
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
        init_variable_filter=arguments.of(estimator).get("init_variable_filter") or "",
        init_adapter=init_adapter,
        places={
            **{name: arguments.place(name) for name in (*notes.values(), "init_checkpoint")},
            "init_variable_filter": arguments.place("init_variable_filter", estimator),
        },
        **{name: run[name] for name in notes.values()},
    )


def _dataset_scope(arguments: Arguments, caller: str, argument: str, expected: str) -> str | None:
    """The scope in which t5's dataset function is called; None without a function.

    Raises:
      UserError: For another function, or without a mixture.
    """
    if arguments.of(caller).get(argument) is None:
        return None
    reference = arguments.reference(caller, argument)
    if reference is None or reference.name != expected:
        shown = reference.name if reference else arguments.of(caller)[argument]
        arguments.refuse(f"the dataset function {shown}", argument, caller)
    if "mixture_or_task_name" not in arguments.of(expected, reference.scope):
        raise UserError(
            f"{expected}.mixture_or_task_name is not bound.",
            fix="Add --gin_file=dataset.gin and --gin_param=\"MIXTURE_NAME = 'NAME'\".",
        )
    return reference.scope


def _read_train_data(arguments: Arguments, prefix: str) -> TrainDataConfig | None:
    """The dataset of `run.train_dataset_fn`; None without one."""
    run = arguments.run
    scope = _dataset_scope(arguments, "utils.run", "train_dataset_fn", "mesh_train_dataset_fn")
    if scope is None:
        return None
    shards = arguments.of("t0repro.jax_training")["data_shards"]
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


def _read_eval_data(arguments: Arguments) -> EvalDataConfig | None:
    """The data to evaluate; None without a dataset function."""
    caller, argument = "utils.run", "eval_dataset_fn"
    if arguments.run["mode"] == "score_from_dataset":
        _check_postprocess(arguments, "utils.score_from_dataset")
        caller, argument = "utils.score_from_dataset", "score_dataset_fn"
        arguments.required(caller, argument)
    scope = _dataset_scope(arguments, caller, argument, "mesh_eval_dataset_fn")
    if scope is None:
        return None
    return arguments.settings(EvalDataConfig, "eval_data.", scope=scope)


# ---- Rules of the modes eval, infer and score_from_* ---------------------------------------------

# An argument that Mesh TensorFlow passes explicitly overrides a binding of it. For instance,
# `Unitransformer.sample_autoregressive.temperature`, which sample_decode.gin also binds, changes
# nothing in an encoder-decoder model: Bitransformer.decode passes its own.


def _refuse_mode(arguments: Arguments, what: str, argument: str, name: str) -> None:
    raise NotOnJax(
        f"{what} is not supported ({name.rpartition('.')[2]}.{argument}).",
        where=arguments.bindings.source((), full_name(name), argument),
        fix="Change the binding.",
    )


def _read_decoding(arguments: Arguments) -> DecodingConfig:
    decode, options = "Bitransformer.decode", arguments.of("Bitransformer.decode")
    # What Bitransformer.decode and sample_autoregressive refuse.
    if options["beam_size"] > 1:
        for argument, neutral in (("temperature", 0), ("sampling_keep_top_k", -1)):
            if options[argument] != neutral:
                what = f"A beam search with {argument} = {options[argument]!r}"
                _refuse_mode(arguments, what, argument, decode)
    if options["sampling_keep_top_k"] != -1 and options["sampling_keep_top_k"] <= 0:
        what = "sampling_keep_top_k below 1 (but not -1)"
        _refuse_mode(arguments, what, "sampling_keep_top_k", decode)
    search = "beam_search.beam_search"
    prefilter = arguments.of(search)["num_prefilter"]
    # The device mesh decides how many candidates each shard of the vocabulary contributes.
    shards = mesh.count_shards("vocab", arguments.run["mesh_shape"], arguments.run["layout_rules"])
    # A beam search needs two candidates per beam, in case one of them ends.
    if prefilter and prefilter * shards < 2:
        _refuse_mode(arguments, f"num_prefilter = {prefilter}", "num_prefilter", search)
    return arguments.settings(
        DecodingConfig, "decoding.", prefilter=prefilter or 0, vocab_parts=shards
    )


def _read_infer(arguments: Arguments) -> InferConfig:
    reference = arguments.reference("utils.infer_model", "decode_fn")
    if reference is not None and reference.name != "decode_from_file":
        _refuse_mode(arguments, f"infer with {reference.name}", "decode_fn", "utils.infer_model")
    function = "utils.decode_from_file"
    for argument in ("input_filename", "output_filename"):
        arguments.required(function, argument)
    repeats = arguments.of(function)["repeats"]
    if repeats < 1:
        _refuse_mode(arguments, f"repeats = {repeats}", "repeats", function)
    return arguments.settings(InferConfig, "text.")


def _read_strings(arguments: Arguments) -> ScoreStringsConfig:
    function = "utils.score_from_strings"
    _check_postprocess(arguments, function)
    # With inputs = None, Mesh TensorFlow scores the targets alone; only targets must be given.
    lines = {
        "inputs": arguments.required(function, "inputs", none_is_missing=False),
        "targets": arguments.required(function, "targets"),
    }
    # Turn gin's lists into tuples: a run is frozen.
    lines = {name: tuple(x) if isinstance(x, list) else x for name, x in lines.items()}
    return arguments.settings(ScoreStringsConfig, "text.", **lines)


_TEXTS: Mapping[str, Callable[[Arguments], InferConfig | ScoreStringsConfig]] = {
    "infer": _read_infer,
    "score_from_strings": _read_strings,
}


def _check_postprocess(arguments: Arguments, function: str) -> None:
    value = arguments.required(function, "score_postprocess_fn")
    reference = arguments.reference(function, "score_postprocess_fn")
    if reference is None or reference.name != "save_scores":
        shown = f"@{reference.name}" if reference else repr(value)
        _refuse_mode(arguments, f"{shown} on scores", "score_postprocess_fn", function)
