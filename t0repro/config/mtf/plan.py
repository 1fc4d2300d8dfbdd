"""The rules by which gin's bindings make a run's data, the plan of a training run, and its outputs.

An argument that Mesh TensorFlow passes explicitly overrides a binding of it. For instance,
`Unitransformer.sample_autoregressive.temperature`, which sample_decode.gin also binds, changes
nothing in an encoder-decoder model: Bitransformer.decode passes its own.
"""

from __future__ import annotations

from t0repro.config.checkpoints import RestoreConfig, SaveConfig
from t0repro.config.configuration import NotOnJax
from t0repro.config.data import EvalDataConfig, TrainDataConfig
from t0repro.config.decoding import DecodingConfig, InferConfig, ScoreStringsConfig
from t0repro.config.mtf.arguments import Arguments, full_name
from t0repro.config.mtf.inputs import count_shards
from t0repro.config.run import TrainingPlan
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


def read_decoding(arguments: Arguments) -> DecodingConfig:
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


def read_text(arguments: Arguments) -> dict[str, InferConfig | ScoreStringsConfig]:
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
    lines = {
        "inputs": arguments.require(function, "inputs", none_is_missing=False),
        "targets": arguments.require(function, "targets"),
    }
    # Turn gin's lists into tuples: a run is frozen.
    lines = {name: tuple(x) if isinstance(x, list) else x for name, x in lines.items()}
    return arguments.settings(ScoreStringsConfig, "text.", **lines)


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
