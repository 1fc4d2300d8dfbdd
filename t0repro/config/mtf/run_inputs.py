"""Reads what a run reads and writes, by mode: its data and batches, its decoding and scoring."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any, get_args

from t0repro.config import gin_door, ranges
from t0repro.config.configuration import NotOnJax, RunInputs
from t0repro.config.decoding import DecodingConfig, InferConfig, ScoreStringsConfig
from t0repro.config.gin_door import Bindings
from t0repro.config.mtf import packages
from t0repro.config.mtf.misread import scopes_read
from t0repro.config.mtf.packages import MESH_TRANSFORMER, TRANSFORMER
from t0repro.config.mtf.parser import (
    JAX_TRAINING,
    UTILS,
    RunArguments,
    jax_training,
)
from t0repro.config.run_config import CheckpointChoice, DType, EvalDataConfig, RunConfig
from t0repro.config.training_plan import TrainDataConfig
from t0repro.errors import UserError

DTYPES = f"{UTILS}.get_variable_dtype"
_BATCH_METHODS = (
    "tokens_per_batch", "sequences_per_batch", "tokens_per_replica", "sequences_per_replica",
)  # fmt: skip


class InputsReader:
    """Builds a RunInputs from the arguments."""

    def __init__(self, arguments: RunArguments):
        self._gin = arguments

    def inputs(self, model_dir: str) -> RunInputs:
        """The values that either backend checks before the run."""
        run = self._gin.run
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
            self._gin.note(name, f"{UTILS}.run", name)
        name, use_cached = self._data_read()
        vocabulary = run["vocabulary"]
        return RunInputs(
            **fields,
            model_dir=model_dir,
            split=run["dataset_split"],
            mixture_or_task_name=name,
            use_cached=use_cached,
            # t5 gives a pair, or one vocabulary for both features.
            vocabularies=vocabulary if isinstance(vocabulary, tuple) else (vocabulary, vocabulary),
            vocab_divisor=self._vocab_divisor(),
            master_dtype=self._master_dtype(),
            num_microbatches=self._num_microbatches(batch_size, sequence_length),
            tpu_mesh=self._tpu_mesh(),
            provenance=self._gin.provenance,
        )

    def _check_run(self) -> None:
        """Refuses arguments that `run` would refuse too."""
        run, mode = self._gin.run, self._gin.run["mode"]
        if mode == "train" and run["dataset_split"] != "train":
            raise UserError(
                f"run.mode is 'train', and run.dataset_split is {run['dataset_split']!r}.",
                where=self._gin.bindings.find((), f"{UTILS}.run", "dataset_split"),
                fix="Training reads the split 'train'; remove the binding.",
            )
        if mode == "train":
            self._check_init_checkpoint()
        # In these two modes None stands for the longest example's length.
        if run["sequence_length"] is None and mode not in ("eval", "score_eval"):
            raise UserError(
                f"run.sequence_length is None, and mode {mode!r} needs one.",
                where=self._gin.bindings.find((), f"{UTILS}.run", "sequence_length"),
                fix="Bind run.sequence_length = {'inputs': N, 'targets': N}.",
            )

    def _check_init_checkpoint(self) -> None:
        """Refuses a checkpoint to start from where only older versions of Mesh TensorFlow read it.

        Today's gets its `init_checkpoint` from `run`, and silently starts from random parameters if
        there is none.
        """
        estimator = f"{UTILS}.tpu_estimator_model_fn"
        start = gin_door.resolved("", estimator).get("init_checkpoint")
        if start is not None and start != self._gin.run["init_checkpoint"]:
            raise UserError(
                f"tpu_estimator_model_fn.init_checkpoint is {start!r}, which Mesh TensorFlow no"
                " longer reads: it takes run.init_checkpoint,"
                f" which is {self._gin.run['init_checkpoint']!r}.",
                where=self._gin.bindings.find((), estimator, "init_checkpoint"),
                fix=f"Bind run.init_checkpoint = {start!r}; or, not to start from it,"
                " tpu_estimator_model_fn.init_checkpoint = None.",
            )

    def _data_read(self) -> tuple[str | None, bool]:
        """The mixture that the mode reads, and whether it comes from a cache."""
        mode = self._gin.run["mode"]
        if mode == "train":
            function, reader = "mesh_train_dataset_fn", (f"{UTILS}.run", "train_dataset_fn")
        elif mode in ("eval", "score_eval", "perplexity_eval"):
            function, reader = "mesh_eval_dataset_fn", (f"{UTILS}.run", "eval_dataset_fn")
        elif mode == "score_from_dataset":
            function, reader = "mesh_eval_dataset_fn", (f"{UTILS}.{mode}", "score_dataset_fn")
        else:
            # infer and score_from_strings read lines, not a mixture.
            return None, False
        bound = self._gin.arguments(
            f"{MESH_TRANSFORMER}.{function}",
            getattr(self._gin.mesh_transformer, function),
            gin_door.scope_of(*reader),
        )
        return bound.get("mixture_or_task_name"), bound["use_cached"]

    def _tpu_mesh(self) -> str | None:
        """The device mesh for a TPU's topology, if run.mesh_shape calls for one."""
        # Read the binding as written: after the call it is a Shape, which no longer shows its
        # origin.
        bound = gin_door.value_of(f"{UTILS}.run", "mesh_shape")
        if gin_door.selector_of(bound) != f"{UTILS}.tpu_mesh_shape":
            return None
        dimensions = self._gin.run["mesh_shape"].dims
        return ",".join(f"{item.name}:{item.size}" for item in dimensions) or None

    def _vocab_divisor(self) -> int:
        transformer = packages.module(TRANSFORMER)
        selector = "mesh_tensorflow.transformer.transformer.Unitransformer"
        # With two towers the decoder decides, as for the model; the encoder must agree.
        scope = scopes_read(selector, self._gin.run["model_type"])[-1]
        bound = self._gin.arguments(selector, transformer.Unitransformer, scope)
        return bound["vocab_divisor"]

    def _sequence_length(self) -> Mapping[str, int] | None:
        length = self._gin.run["sequence_length"]
        # Mesh TensorFlow takes one number for both features.
        if isinstance(length, int) and not isinstance(length, bool):
            length = {"inputs": length, "targets": length}
        where = self._gin.place_of_run("sequence_length")
        if length is None:
            return None
        if not isinstance(length, Mapping):
            raise UserError(
                f"run.sequence_length is {length!r}.",
                where=where,
                fix="Bind run.sequence_length = {'inputs': N, 'targets': N}.",
            )
        ranges.check_field(RunConfig, "sequence_length", length, where)
        # Only the task itself lists further features.
        needed = ("targets",) if self._gin.run["model_type"] == "lm" else ("inputs", "targets")
        for feature in needed:
            if feature not in length:
                raise UserError(
                    f"run.sequence_length has no length for {feature!r}, only for"
                    f" {', '.join(map(repr, length)) or 'nothing'}.",
                    where=where,
                    fix="Bind run.sequence_length = {'inputs': N, 'targets': N}.",
                )
        return length

    def _batch_size(self, sequence_length: Mapping[str, int] | None) -> int:
        size, where = self._gin.run["batch_size"], self._gin.place_of_run("batch_size")
        if isinstance(size, int | float):
            ranges.check_field(RunConfig, "batch_size", size, where)
            return int(size)
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
        return self._gin.utils.compute_batch_size(
            sequence_length, self._gin.run["mesh_shape"], self._gin.run["layout_rules"], size
        )

    def _check_tokens(
        self, method: str, amount: int, sequence_length: Mapping[str, int] | None, where: str | None
    ) -> None:
        """Raises UserError unless the number of tokens makes at least one sequence."""
        bound = f"run.batch_size = {(method, amount)!r}"
        if sequence_length is None:
            raise UserError(
                f"{bound} counts tokens, and run.sequence_length is None.",
                where=where,
                fix="Bind run.batch_size to a number or to ('sequences_per_batch', N).",
            )
        # Mesh TensorFlow counts a batch's tokens by the longer of its features.
        longest = max(sequence_length.values())
        if amount % longest:
            raise UserError(
                f"{bound} is not a whole number of sequences of {longest} tokens.",
                where=where,
                fix=f"Bind a multiple of {longest}: ({method!r},"
                f" {max(1, round(amount / longest)) * longest}).",
            )

    def _num_microbatches(self, batch_size: int, sequence_length: Mapping[str, int] | None) -> int:
        selector = f"{UTILS}.serialize_num_microbatches"
        self._gin.note("num_microbatches", selector, "tokens_per_microbatch_per_replica")
        # Only training accumulates gradients.
        if sequence_length is None or self._gin.run["mode"] != "train":
            return 1
        mtf = packages.module("mesh_tensorflow")
        batch = mtf.Dimension("batch", batch_size)
        shape = mtf.convert_to_shape(self._gin.run["mesh_shape"])
        rules = mtf.convert_to_layout_rules(self._gin.run["layout_rules"])
        if self._tpu_mesh() and batch_size % mtf.tensor_dim_to_mesh_dim_size(rules, shape, batch):
            shape = mtf.Shape([])  # a batch too small for the TPU still fits one device
        return self._gin.utils.serialize_num_microbatches(batch, sequence_length, shape, rules)

    def _master_dtype(self) -> str:
        self._gin.note("master_dtype", DTYPES, "master_dtype")
        return dtype_name(self._gin, "master_dtype")


def dtype_name(arguments: RunArguments, argument: str) -> str:
    """The name of the type that get_variable_dtype is bound to, given as text or TensorFlow's own.

    Raises:
      UserError: if TensorFlow has no such type.
    """
    value = arguments.arguments(DTYPES, arguments.utils.get_variable_dtype)[argument]
    # These two are answered without importing TensorFlow.
    if isinstance(value, str) and value in get_args(DType):
        return value
    if packages.is_described():
        if isinstance(value, packages.DType):
            return value.name
        raise packages.NeedsPackages(f"{value!r} is a type of TensorFlow's, or none")
    import tensorflow

    try:
        # TensorFlow reads a number as the number of one of its types: 1 and True are float32.
        if not isinstance(value, str | tensorflow.DType):
            raise TypeError
        return tensorflow.as_dtype(value).name
    except TypeError as error:
        raise UserError(
            f"get_variable_dtype.{argument} is {value!r}; TensorFlow has no such type.",
            where=arguments.bindings.find((), DTYPES, argument),
            fix="Bind 'float32' or 'bfloat16'.",
        ) from error


def _hashable(value: Any) -> Any:
    # gin reads lists, and a RunConfig is frozen.
    return tuple(value) if isinstance(value, list) else value


# ---- The modes eval, infer and score_from_* ------------------------------------------------------

# An argument that Mesh TensorFlow passes explicitly overrides a binding of it. For instance,
# `Unitransformer.sample_autoregressive.temperature`, which sample_decode.gin also binds, changes
# nothing in an encoder-decoder model: Bitransformer.decode passes its own.

_DECODE = "Bitransformer.decode"
_BEAM_SEARCH = "mesh_tensorflow.beam_search.beam_search"
_INFER = f"{UTILS}.decode_from_file"
_STRINGS = f"{UTILS}.score_from_strings"
_DATASET = f"{UTILS}.score_from_dataset"
_ITERATOR = f"{UTILS}.get_checkpoint_iterator"

# For the reader: configurables of these modes, with the arguments that are read here or that the
# caller always passes. Any other may only be bound to its default.
DECODING_BINDINGS: Mapping[str, Any] = {
    _DECODE: {
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
    f"{UTILS}.infer_model": {"decode_fn"},
    _INFER: {"input_filename", "output_filename", "eos_id", "repeats"},
    f"{UTILS}.decode": set(),
    f"{UTILS}.clean_decodes": set(),
    _STRINGS: {"inputs", "targets", "score_postprocess_fn", "eos_id", "score_eos"},
    _DATASET: {"score_dataset_fn", "score_postprocess_fn"},
    f"{UTILS}.save_scores": {"scores_filename", "save_example_text"},
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
        self._utils = packages.module(UTILS)
        self._transformer = packages.module(TRANSFORMER)

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
                f"{UTILS}.save_scores", self._utils.save_scores, "save_example_text"
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
            field: self._read(_DECODE, decode, argument, f"decoding.{field}")
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
                        _DECODE, argument, f"A beam search with {argument} = {values[field]!r}"
                    )
        if values["keep_top_k"] != -1 and values["keep_top_k"] <= 0:
            self._refuse(_DECODE, "sampling_keep_top_k", "sampling_keep_top_k below 1 (but not -1)")

    def _infer(self) -> InferConfig:
        decode_fn = self._read(f"{UTILS}.infer_model", self._utils.infer_model, "decode_fn")
        if decode_fn.__name__ != "decode_from_file":
            self._refuse(f"{UTILS}.infer_model", "decode_fn", f"infer with {decode_fn.__name__}")
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
                where=self._bindings.find((), f"{UTILS}.run", "mode"),
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


# ---- What a run trains and evaluates on: arguments of t5's dataset functions ---------------------


DATA_BINDINGS: Mapping[str, set[str]] = {
    f"{MESH_TRANSFORMER}.mesh_train_dataset_fn": {
        "mixture_or_task_name", "use_cached", "pack", "shuffle", "seed",
    },
    f"{MESH_TRANSFORMER}.mesh_eval_dataset_fn": {
        "mixture_or_task_name", "use_cached", "pack", "num_eval_examples", "shuffle_eval_examples",
        "seed",
    },
}  # fmt: skip


class DatasetReader:
    """Builds TrainDataConfig and EvalDataConfig from the arguments."""

    def __init__(self, arguments: RunArguments, decoding: DecodingReader):
        self._gin = arguments
        self._decoding = decoding

    def train_data(self) -> TrainDataConfig | None:
        """The dataset of `run.train_dataset_fn`; None without one.

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
        """How many shards make a batch: a setting of the JAX stack only."""
        self._gin.note("plan.train_data.num_shards", JAX_TRAINING, "data_shards")
        num_shards = jax_training()["data_shards"]
        if num_shards != 1 and self._gin.run["checkpoint_input_pipeline"]:
            raise UserError(
                "The state of an input pipeline in several shards cannot be saved.",
                where=self._gin.bindings.find((), f"{UTILS}.run", "checkpoint_input_pipeline"),
                fix="Bind run.checkpoint_input_pipeline = False: a resumed run finds its place all"
                " the same.",
            )
        return num_shards

    def _data_resumption(self) -> dict[str, Any]:
        """Where a resumed run's data continues; skip_seen_data is None if nothing binds it."""
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
        # False and unbound differ: only unbound resumes exactly (see TrainDataConfig).
        bound = self._gin.bindings.find((), selector, "skip_seen_data") is not None
        return {name: run[name] for name in names} | ({} if bound else {"skip_seen_data": None})

    def eval_data(self) -> EvalDataConfig | None:
        """The data to evaluate; None without a dataset function. Raises like `train_data`."""
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
        """The arguments of the function bound to the caller's argument, in its scope."""
        selector = f"{MESH_TRANSFORMER}.{function.__name__}"
        scope = gin_door.scope_of(caller, argument)
        arguments = self._gin.arguments(selector, function, scope)
        if "mixture_or_task_name" not in arguments:
            raise UserError(
                f"{function.__name__}.mixture_or_task_name is not bound.",
                fix="Add --gin_file=dataset.gin and --gin_param=\"MIXTURE_NAME = 'NAME'\".",
            )
        # Note every argument, even at its default, so that explain can show it.
        for argument in DATA_BINDINGS[selector]:
            self._gin.note(f"{field}.{argument}", selector, argument, gin_door.enclosing(scope))
        return arguments


def _select(arguments: Mapping[str, Any], dataclass: Any) -> dict[str, Any]:
    """The arguments that are fields of a dataclass."""
    names = {field.name for field in dataclasses.fields(dataclass)}
    return {name: value for name, value in arguments.items() if name in names}
