"""Reads the settings of the modes eval, infer and score_from_* from gin's bindings.

An argument that Mesh TensorFlow passes explicitly overrides a binding of it. For instance,
`Unitransformer.sample_autoregressive.temperature`, which sample_decode.gin also binds, changes
nothing in an encoder-decoder model: Bitransformer.decode passes its own.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from t0repro.config.configuration import NotOnJax
from t0repro.config.decoding import DecodingConfig, InferConfig, ScoreStringsConfig
from t0repro.config.gin_door import Bindings
from t0repro.config.mtf import packages
from t0repro.config.run_config import CheckpointChoice
from t0repro.errors import UserError

_UTILS = "mesh_tensorflow.transformer.utils"
_TRANSFORMER = "mesh_tensorflow.transformer.transformer"
DECODE = "Bitransformer.decode"
_BEAM_SEARCH = "mesh_tensorflow.beam_search.beam_search"
_INFER = f"{_UTILS}.decode_from_file"
_STRINGS = f"{_UTILS}.score_from_strings"
_DATASET = f"{_UTILS}.score_from_dataset"
_ITERATOR = f"{_UTILS}.get_checkpoint_iterator"

# For the reader: configurables of these modes, with the arguments that are read here or that the
# caller always passes. Any other may only be bound to its default.
KNOWN_BINDINGS: Mapping[str, Any] = {
    DECODE: {
        "beam_size", "alpha", "temperature", "sampling_keep_top_k", "decode_length_multiplier",
        "decode_length_constant", "max_decode_length", "variable_dtype",
    },
    "Unitransformer.sample_autoregressive": {
        "temperature", "sampling_keep_top_k", "variable_dtype", "has_partial_sequences",
        "encoder_output", "encoder_sequence_id", "encoder_inputs", "shared_params",
        "encoder_layer_outputs",
    },
    _BEAM_SEARCH: {"num_prefilter", "alpha", "decode_length", "use_tpu", "dtype", "layout",
                   "mesh_shape", "states"},
    f"{_UTILS}.infer_model": {"decode_fn"},
    _INFER: {"input_filename", "output_filename", "eos_id", "repeats"},
    f"{_UTILS}.decode": set(),
    f"{_UTILS}.clean_decodes": set(),
    _STRINGS: {"inputs", "targets", "score_postprocess_fn", "eos_id", "score_eos"},
    _DATASET: {"score_dataset_fn", "score_postprocess_fn"},
    f"{_UTILS}.save_scores": {"scores_filename", "save_example_text"},
    _ITERATOR: {"skip_until", "stop_after", "find_closest"},
}  # fmt: skip


class DecodingReader:
    """Reads the fields of a RunConfig that evaluation modes use.

    Args:
      bindings: to look up the place of a refused value.
      run: the arguments of `utils.run`.
      provenance: field -> where its value was set; filled in.
    """

    def __init__(self, bindings: Bindings, run: Mapping[str, Any], provenance: dict[str, str]):
        self._bindings, self._run, self._provenance = bindings, run, provenance
        self._utils = packages.module(_UTILS)
        self._transformer = packages.module(_TRANSFORMER)

    def fields(self, vocab_size: int) -> dict[str, Any]:
        """The fields, by their names in RunConfig.

        Args:
          vocab_size: The model's padded vocabulary size.

        Raises:
          UserError: for options that the JAX stack does not support, with the binding's place.
        """
        mode = self._run["mode"]
        return {
            "checkpoint_choice": self._checkpoint_choice(),
            "perplexity_eval_steps": self._run["perplexity_eval_steps"],
            "decoding": self._decoding(vocab_size),
            "infer": self._infer() if mode == "infer" else None,
            "score_strings": self._strings() if mode == "score_from_strings" else None,
            "save_example_text": self._read(
                f"{_UTILS}.save_scores", self._utils.save_scores, "save_example_text"
            ),
        }

    def score_dataset_fn(self) -> Any:
        """The dataset function that score_from_dataset is bound to."""
        self._check_postprocess(_DATASET)
        return self._required(_DATASET, self._utils.score_from_dataset, "score_dataset_fn")

    def _decoding(self, vocab_size: int) -> DecodingConfig:
        decode = self._transformer.Bitransformer.decode
        mtf = packages.module("mesh_tensorflow")
        sources = {
            "beam_size": "beam_size",
            "alpha": "alpha",
            "temperature": "temperature",
            "keep_top_k": "sampling_keep_top_k",
            "length_multiplier": "decode_length_multiplier",
            "length_constant": "decode_length_constant",
            "max_length": "max_decode_length",
        }
        values = {
            field: self._read(DECODE, decode, argument, f"decoding.{field}")
            for field, argument in sources.items()
        }
        self._check_decoding(values)
        search = packages.module("mesh_tensorflow.beam_search").beam_search
        prefilter = self._read(_BEAM_SEARCH, search, "num_prefilter", "decoding.prefilter")
        # The device mesh decides how many candidates each shard of the vocabulary contributes.
        parts = mtf.tensor_dim_to_mesh_dim_size(
            self._run["layout_rules"], self._run["mesh_shape"], mtf.Dimension("vocab", vocab_size)
        )
        # A beam search needs two candidates per beam, in case one of them ends.
        if prefilter and prefilter * parts < 2:
            self._refuse(_BEAM_SEARCH, "num_prefilter", f"num_prefilter = {prefilter}")
        return DecodingConfig(**values, prefilter=prefilter or 0, vocab_parts=parts)

    def _check_decoding(self, values: Mapping[str, Any]) -> None:
        """Refuses options that Bitransformer.decode and sample_autoregressive refuse."""
        if values["beam_size"] > 1:
            for field, argument, neutral in (
                ("temperature", "temperature", 0),
                ("keep_top_k", "sampling_keep_top_k", -1),
            ):
                if values[field] != neutral:
                    self._refuse(
                        DECODE, argument, f"A beam search with {argument} = {values[field]!r}"
                    )
        if values["keep_top_k"] != -1 and values["keep_top_k"] <= 0:
            self._refuse(DECODE, "sampling_keep_top_k", "sampling_keep_top_k below 1 (but not -1)")

    def _infer(self) -> InferConfig:
        decode_fn = self._read(f"{_UTILS}.infer_model", self._utils.infer_model, "decode_fn")
        if decode_fn.__name__ != "decode_from_file":
            self._refuse(f"{_UTILS}.infer_model", "decode_fn", f"infer with {decode_fn.__name__}")
        function = self._utils.decode_from_file
        names = {
            name: self._required(_INFER, function, name)
            for name in ("input_filename", "output_filename")
        }
        more = {name: self._read(_INFER, function, name) for name in ("eos_id", "repeats")}
        if more["repeats"] < 1:
            self._refuse(_INFER, "repeats", f"repeats = {more['repeats']}")
        return InferConfig(**names, **more)

    def _strings(self) -> ScoreStringsConfig:
        self._check_postprocess(_STRINGS)
        function = self._utils.score_from_strings
        values = {
            # With inputs = None, Mesh TensorFlow scores the targets alone; only targets must be
            # given.
            name: self._required(_STRINGS, function, name, none_is_missing=name == "targets")
            for name in ("inputs", "targets")
        }
        # Turn gin's lists into tuples: RunConfig is frozen.
        values = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
        more = {name: self._read(_STRINGS, function, name) for name in ("eos_id", "score_eos")}
        return ScoreStringsConfig(**values, **more)

    def _check_postprocess(self, selector: str) -> None:
        function = getattr(self._utils, selector.rpartition(".")[2])
        postprocess = self._required(selector, function, "score_postprocess_fn")
        # gin wraps the functions it configures; unwrap to reach the function itself.
        while not hasattr(postprocess, "__name__") and hasattr(postprocess, "func"):
            postprocess = postprocess.func
        if getattr(postprocess, "__name__", "") != "save_scores":
            self._refuse(selector, "score_postprocess_fn", f"{postprocess!r} on scores")

    def _checkpoint_choice(self) -> CheckpointChoice:
        function = self._utils.get_checkpoint_iterator
        return CheckpointChoice(
            **{
                name: self._read(_ITERATOR, function, name, f"checkpoint_choice.{name}")
                for name in ("skip_until", "stop_after", "find_closest")
            }
        )

    def _read(self, selector: str, function: Any, argument: str, field: str | None = None) -> Any:
        """An argument's bound value, or its default; notes where it was set."""
        import gin

        self._provenance[field or argument] = self._bindings.source((), selector, argument)
        default = inspect.signature(function).parameters[argument].default
        return gin.get_bindings(selector).get(argument, default)

    def _required(
        self, selector: str, function: Any, argument: str, none_is_missing: bool = True
    ) -> Any:
        import gin

        value = self._read(selector, function, argument)
        if value is gin.REQUIRED or (value is None and none_is_missing):
            short = f"{selector.rpartition('.')[2]}.{argument}"
            raise UserError(
                f"{short} is not bound, and mode {self._run['mode']!r} needs it.",
                where=self._bindings.find((), f"{_UTILS}.run", "mode"),
                fix=f'Add --gin_param="{short} = ...", or t5\'s gin file of the mode '
                "(infer.gin, score_from_file.gin, score_from_task.gin).",
            )
        return value

    def _refuse(self, selector: str, argument: str, what: str) -> None:
        short = f"{selector.rpartition('.')[2]}.{argument}"
        raise NotOnJax(
            f"{what} is not supported ({short}).",
            where=self._bindings.source((), selector, argument),
            fix="Change the binding.",
        )
