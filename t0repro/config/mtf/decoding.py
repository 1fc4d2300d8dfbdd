"""The rules by which gin's bindings decide how a run generates, and which lines of text it reads.

An argument that Mesh TensorFlow passes explicitly overrides a binding of it. For instance,
`Unitransformer.sample_autoregressive.temperature`, which sample_decode.gin also binds, changes
nothing in an encoder-decoder model: Bitransformer.decode passes its own.
"""

from __future__ import annotations

from t0repro.config.configuration import NotOnJax
from t0repro.config.decoding import DecodingConfig, InferConfig, ScoreStringsConfig
from t0repro.config.mtf import mesh
from t0repro.config.mtf.arguments import Arguments
from t0repro.config.mtf.stand_ins import full_name


def read_decoding(arguments: Arguments) -> DecodingConfig:
    """How outputs are generated.

    Raises:
      NotOnJax: For options that Mesh TensorFlow's decoding refuses too.
    """
    decode, options = "Bitransformer.decode", arguments.read("Bitransformer.decode")
    # What Bitransformer.decode and sample_autoregressive refuse.
    if options["beam_size"] > 1:
        for argument, neutral in (("temperature", 0), ("sampling_keep_top_k", -1)):
            if options[argument] != neutral:
                what = f"A beam search with {argument} = {options[argument]!r}"
                _refuse(arguments, what, argument, decode)
    if options["sampling_keep_top_k"] != -1 and options["sampling_keep_top_k"] <= 0:
        what = "sampling_keep_top_k below 1 (but not -1)"
        _refuse(arguments, what, "sampling_keep_top_k", decode)
    search = "beam_search.beam_search"
    prefilter = arguments.read(search)["num_prefilter"]
    # The device mesh decides how many candidates each shard of the vocabulary contributes.
    shards = mesh.count_shards("vocab", arguments.run["mesh_shape"], arguments.run["layout_rules"])
    # A beam search needs two candidates per beam, in case one of them ends.
    if prefilter and prefilter * shards < 2:
        _refuse(arguments, f"num_prefilter = {prefilter}", "num_prefilter", search)
    return arguments.settings(
        DecodingConfig, "decoding.", prefilter=prefilter or 0, vocab_parts=shards
    )


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
    repeats = arguments.read(function)["repeats"]
    if repeats < 1:
        _refuse(arguments, f"repeats = {repeats}", "repeats", function)
    return arguments.settings(InferConfig, "text.")


def _read_strings(arguments: Arguments) -> ScoreStringsConfig:
    function = "utils.score_from_strings"
    check_postprocess(arguments, function)
    # With inputs = None, Mesh TensorFlow scores the targets alone; only targets must be given.
    lines = {
        "inputs": arguments.require(function, "inputs", none_is_missing=False),
        "targets": arguments.require(function, "targets"),
    }
    # Turn gin's lists into tuples: a run is frozen.
    lines = {name: tuple(x) if isinstance(x, list) else x for name, x in lines.items()}
    return arguments.settings(ScoreStringsConfig, "text.", **lines)


def check_postprocess(arguments: Arguments, function: str) -> None:
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
