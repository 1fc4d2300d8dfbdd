"""The Mesh TensorFlow dialect: gin files and --gin_param overrides -> a run.

gin parses the files, so that a typo fails here with the same message. The run then comes from
the arguments that gin would give Mesh TensorFlow's functions, not from the text. A binding that
would change a Mesh TensorFlow run but that the JAX stack does not support is an error that names
the binding and its place; none is ignored.

An argument that Mesh TensorFlow passes explicitly overrides a binding of it. For instance,
`Unitransformer.sample_autoregressive.temperature`, which sample_decode.gin also binds, changes
nothing in an encoder-decoder model: Bitransformer.decode passes its own.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any, get_args

import gin
from t0repro.config.checkpoints import CheckpointChoice, RestoreConfig, SaveConfig
from t0repro.config.combinations import check_combinations
from t0repro.config.configuration import Configuration, NotOnJax, RunInputs
from t0repro.config.data import EvalDataConfig, TrainDataConfig
from t0repro.config.decoding import DecodingConfig, InferConfig, ScoreStringsConfig
from t0repro.config.gin import door
from t0repro.config.gin.errors import configuration_errors
from t0repro.config.model import ModelType
from t0repro.config.mtf import stand_ins
from t0repro.config.mtf.arguments import Arguments, full_name
from t0repro.config.mtf.inputs import count_shards, read_inputs
from t0repro.config.mtf.model import add_adapter_and_loss, read_dtypes, read_layout, read_model
from t0repro.config.mtf.model_api import FindCheckpoint, export_refusal, parse_model_api
from t0repro.config.mtf.optimizer import read_optimizer, read_schedule, read_train_steps
from t0repro.config.mtf.parser import MeshInputs, parse
from t0repro.config.mtf.refusals import (
    check_types,
    list_misread,
    refusal_on_mesh_tensorflow,
    refuse_unsupported,
)
from t0repro.config.run import RUN_OF_MODE, MeshEvalRun, Run, TextRun, TrainingPlan, TrainRun
from t0repro.config.settings import check_divides, check_values
from t0repro.errors import UserError
from t0repro.tasks.modules import load_tasks
from t0repro.tasks.vocabulary import BYTES, VocabularyFile
from t0repro.words import remove_passwords


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
            check_types(bindings)
            arguments = Arguments(bindings)
            run_inputs = read_inputs(arguments, inputs.model_dir)
            warnings = tuple(list_misread(bindings, arguments.model_type))
            only_on_jax = refusal_on_mesh_tensorflow()
            try:
                if warnings:
                    raise warnings[0]
                refuse_unsupported(arguments)
                run = _read_run(arguments, run_inputs, float32_activations)
            # Kept, not raised: the run may be for Mesh TensorFlow.
            except NotOnJax as refusal:
                run = refusal
            # Calls made here must not appear in the operative_config.gin of a Mesh TensorFlow run.
            door.forget_calls()
            text = remove_passwords(gin.config_str())
            return Configuration(run_inputs, run, text, warnings, only_on_jax)


@contextlib.contextmanager
def _stand_ins() -> Iterator[None]:
    """Stand-ins within the block; a name that they lack may be known to the real packages."""
    try:
        with stand_ins.register():
            yield
    except UserError as error:
        if not error.what.startswith("No configurable matching"):
            raise
        fix = f"{error.fix} Or {stand_ins.OTHERWISE}."
        raise NotOnJax(error.what, where=error.where, fix=fix) from error


def _read_run(arguments: Arguments, inputs: RunInputs, float32_activations: bool) -> Run:
    """The run of the mode.

    Raises:
      NotOnJax: naming binding and place, if the JAX stack does not support the configuration.
    """
    model_type, mode = arguments.model_type, inputs.mode
    if model_type not in get_args(ModelType):
        arguments.refuse(f"model_type {model_type!r}", "model_type")
    if str(mode).startswith("export"):
        raise export_refusal(mode, arguments.place("mode"))
    if model_type != "bitransformer" and mode not in ("train", "perplexity_eval"):
        arguments.refuse(
            f"mode {mode!r} of a model without an encoder, which it trains and measures by"
            " perplexity; `t0repro rank-eval` ranks and generates with its checkpoints",
            "mode",
        )
    values = _read_values(arguments, inputs, float32_activations)
    # Settings of the other modes are checked too: a mistake is found before its mode runs.
    for kind in (TrainRun, MeshEvalRun, TextRun):
        values = arguments.values(kind, "", **values)
        check_values(kind, values, arguments.provenance)
    run_kind, places = RUN_OF_MODE[inputs.mode], arguments.provenance
    fields = {field.name for field in dataclasses.fields(run_kind)} - {"provenance"}
    run = run_kind(
        **{name: values[name] for name in fields},
        provenance={k: v for k, v in sorted(places.items()) if k.partition(".")[0] in fields},
    )
    # Named in errors about the position bias's buckets: the setting that is bound.
    distance, buckets = "relative_attention_max_distance", "relative_attention_num_buckets"
    is_bound = arguments.place(distance, "t0repro.jax_model")
    run.model.check_position_buckets(places.get(f"model.{distance if is_bound else buckets}"))
    if isinstance(run, TrainRun):
        check_combinations(run)
    # Of a training run that is only bound, too.
    if (train_data := values["plan"].train_data) is not None:
        place, name = places.get("plan.train_data.num_shards"), "t0repro.jax_training.data_shards"
        check_divides(name, train_data.num_shards, run.batch_size, place)
    return run


def _read_values(
    arguments: Arguments, inputs: RunInputs, float32_activations: bool
) -> dict[str, Any]:
    """The fields of all modes' runs that rules give."""
    model = read_model(arguments, tuple(each.vocab_size for each in inputs.vocabularies))
    # Evaluations find an adapter through the checkpoint's adapter.json, not through gin.
    if inputs.mode == "train":
        model = add_adapter_and_loss(arguments, model)
    layout = read_layout(arguments, inputs.tpu_mesh)
    dtypes = read_dtypes(arguments, float32_activations)
    optimizer = read_optimizer(arguments, model)
    train_steps = read_train_steps(arguments, inputs)
    schedule = read_schedule(arguments, train_steps, optimizer)
    train_data = _read_train_data(arguments, "plan.train_data.")
    eval_data = _read_eval_data(arguments)
    if eval_data is None and inputs.mode == "perplexity_eval":
        eval_data = _read_train_data(arguments, "eval_data.")
    vocabulary = inputs.vocabularies[0]
    address = getattr(vocabulary, "sentencepiece_model_file", None)
    if isinstance(vocabulary, VocabularyFile):
        address = None if vocabulary.address == BYTES else vocabulary.address
    checked = ("mode", "model_dir", "sequence_length", "batch_size", "num_microbatches")
    return {
        **{name: getattr(inputs, name) for name in (*checked, "eval_checkpoint_step")},
        "model": model,
        "layout": layout,
        "dtypes": dtypes,
        "vocabulary": address,
        "vocabulary_extra_ids": getattr(vocabulary, "extra_ids", 0),
        "optimizer": optimizer,
        "schedule": schedule,
        "train_steps": train_steps,
        "plan": _read_plan(arguments, train_data, inputs.init_checkpoint),
        "checkpoint_choice": arguments.settings(CheckpointChoice, "checkpoint_choice."),
        "decoding": _read_decoding(arguments),
        "eval_data": eval_data,
        **_read_text(arguments),
    }


def _read_train_data(arguments: Arguments, prefix: str) -> TrainDataConfig | None:
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


def _read_eval_data(arguments: Arguments) -> EvalDataConfig | TrainDataConfig | None:
    """The data to evaluate; None without a dataset function."""
    caller, argument = "utils.run", "eval_dataset_fn"
    if arguments.run["mode"] == "score_from_dataset":
        _check_postprocess(arguments, "utils.score_from_dataset")
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
        fix = f"Register its examples as a task of SeqIO's, and bind {argument} = @{expected}"
        if shown == "tsv_dataset_fn":
            fix = f"Make the TSV file a task (docs/from_t0.md, A TSV file), and bind @{expected}"
        arguments.refuse(f"the dataset function {shown}", argument, caller, fix=fix)
    if "mixture_or_task_name" not in arguments.read(expected, reference.scope):
        raise UserError(
            f"{expected}.mixture_or_task_name is not bound.",
            fix="Add --gin_file=dataset.gin and --gin_param=\"MIXTURE_NAME = 'NAME'\".",
        )
    return reference.scope


def _read_plan(
    arguments: Arguments, train_data: TrainDataConfig | None, init_checkpoint: str | None
) -> TrainingPlan:
    """The intervals of mesh_transformer_main, with the numbers that gin binds."""
    restore, training = None, arguments.read("t0repro.jax_training")
    init_adapter = training["init_adapter"] if arguments.run["mode"] == "train" else None
    if init_checkpoint is not None:
        restore = arguments.settings(RestoreConfig, "plan.restore.", adapter=init_adapter)
    elif init_adapter is not None:
        raise UserError(
            f"init_adapter is {init_adapter!r}, but its base is not given.",
            where=arguments.place("init_adapter", "t0repro.jax_training"),
            fix="Bind utils.run.init_checkpoint to the base.",
        )
    save = arguments.settings(SaveConfig, "plan.save.")
    parts = {"train_data": train_data, "save": save, "restore": restore}
    return arguments.settings(TrainingPlan, "plan.", **parts)


def _read_decoding(arguments: Arguments) -> DecodingConfig:
    """How outputs are generated.

    Raises:
      NotOnJax: For options that Mesh TensorFlow's decoding refuses too.
    """
    # The device mesh decides how many candidates each shard of the vocabulary contributes.
    shards = count_shards(arguments, "vocab")
    decoding = arguments.settings(DecodingConfig, "decoding.", vocab_parts=shards)
    # What Bitransformer.decode and sample_autoregressive refuse.
    if decoding.beam_size > 1:
        for argument, value, neutral in (
            ("temperature", decoding.temperature, 0),
            ("sampling_keep_top_k", decoding.keep_top_k, -1),
        ):
            if value != neutral:
                what = f"A beam search with {argument} = {value!r}"
                _refuse(arguments, what, argument, "Bitransformer.decode")
    # A beam search needs two candidates per beam, in case one of them ends.
    if decoding.prefilter and decoding.prefilter * shards < 2:
        what = f"num_prefilter = {decoding.prefilter}"
        _refuse(arguments, what, "num_prefilter", "beam_search.beam_search")
    return decoding


def _read_text(arguments: Arguments) -> dict[str, InferConfig | ScoreStringsConfig]:
    """The field `text` of the modes that read lines of text; nothing for other modes."""
    readers = {"infer": _read_infer, "score_from_strings": _read_strings}
    mode = arguments.run["mode"]
    return {"text": readers[mode](arguments)} if mode in readers else {}


def _read_infer(arguments: Arguments) -> InferConfig:
    reference = arguments.reference("utils.infer_model", "decode_fn")
    if reference is not None and reference.name != "decode_from_file":
        _refuse(arguments, f"infer with {reference.name}", "decode_fn", "utils.infer_model")
    function = "utils.decode_from_file"
    for argument in ("input_filename", "output_filename"):
        arguments.require(function, argument)
    return arguments.settings(InferConfig, "text.")


def _read_strings(arguments: Arguments) -> ScoreStringsConfig:
    function = "utils.score_from_strings"
    _check_postprocess(arguments, function)
    # With inputs = None, Mesh TensorFlow scores the targets alone; only targets must be given.
    arguments.require(function, "inputs", none_is_missing=False)
    arguments.require(function, "targets")
    return arguments.settings(ScoreStringsConfig, "text.")


def _check_postprocess(arguments: Arguments, function: str) -> None:
    """Raises NotOnJax if a function that scores does anything but save the scores."""
    value = arguments.require(function, "score_postprocess_fn")
    reference = arguments.reference(function, "score_postprocess_fn")
    if reference is None or reference.name != "save_scores":
        shown = f"@{reference.name}" if reference else repr(value)
        _refuse(arguments, f"{shown} on scores", "score_postprocess_fn", function)


def _refuse(arguments: Arguments, what: str, argument: str, name: str) -> None:
    raise NotOnJax(
        f"{what} is not supported ({name.rpartition('.')[2]}.{argument}).",
        where=arguments.bindings.source((), full_name(name), argument),
        fix="Change the binding.",
    )
