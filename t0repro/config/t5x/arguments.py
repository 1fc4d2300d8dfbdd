"""What T5X's gin files may name: its modules, their configurables, and each one's arguments.

An argument that sets a field of a run is declared with that field (`t0repro.config.settings`). The
tables here have the others: those that hold a run's parts together, those that rules read, those of
which only the default is accepted, and those that change nothing.

Source: google-research/t5x at cc342d4.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from t0repro.config.data import VOCABULARIES
from t0repro.config.run import EvalRun, InferRun, TrainRun
from t0repro.config.settings import (
    UNSET,
    Argument,
    alternatives,
    arguments_of,
    describe_type,
    fits,
    hints_of,
    list_parts,
)

REQUIRED: Any = inspect.Parameter.empty
ONLY_T5X = "Remove the binding, or run it with T5X itself."
_KINDS = list_parts(EvalRun, InferRun, TrainRun, *VOCABULARIES)
KIND_OF = {
    configurable: kind
    for kind in _KINDS
    if (configurable := getattr(kind, "gin_configurables", {}).get("t5x"))
}
"""Configurable -> the part of a run whose fields are its arguments."""


@dataclasses.dataclass(frozen=True)
class Parameter:
    """An argument of a configurable.

    Attributes:
      hint: The declared type of values that are not calls.
      default: Its default; `REQUIRED` without one.
      calls: The configurables of which it takes a call; with `why`, those that it has as default.
      why: Why only the default is accepted; "" if other values are too.
      fix: What to do about another value.
    """

    hint: Any = Any
    default: Any = REQUIRED
    calls: tuple[str, ...] = ()
    why: str = ""
    fix: str = ONLY_T5X

    def accepts(self, value: Any, configurable: str | None) -> bool:
        """Whether a value, or a call of a configurable, is of the declared type."""
        if configurable in self.calls or value is self.default:
            return True
        if self.why:
            # None and empty lists count as defaults that gin bound explicitly.
            return value == self.default or value in (None, (), [])
        return self.hint is not UNSET and fits(value, self.hint)

    @property
    def type_in_words(self) -> str:
        """The declared type, in words."""
        parts = list(dict.fromkeys(call.rpartition(".")[2] for call in self.calls))
        if self.hint is not UNSET:
            parts.append(describe_type(self.hint))
        return ", or ".join(parts)


def _refuse(why: str, *standard: str, default: Any = None, fix: str = ONLY_T5X) -> Parameter:
    return Parameter(UNSET, default, standard, why, fix)


def _call(*calls: str) -> Parameter:
    return Parameter(UNSET, calls=calls)


_MODEL, _PARTITIONER = "models.EncoderDecoderModel", "partitioning.PjitPartitioner"
DECODER_ONLY = "models.DecoderOnlyModel"
_DECODER_ONLY_CONFIG = "decoder_only.network.TransformerConfig"
PASS_THROUGH = "seqio.PassThroughFeatureConverter"
CHECKPOINTER = "checkpoints.Checkpointer"
_NO_TRANSFORMATIONS = _refuse("checkpoints are changed by assignment_map alone.", default=())
_ONE_WAY = "checkpoints are read and written in one way, which keeps T5X's tree."
_ONE_MANAGER = _refuse(_ONE_WAY, "checkpoints.OrbaxCheckpointManagerInterface")
_NOT_REPLACED = "this function of the run cannot be replaced."
_LOSS_IN_TRAINING = "the loss is evaluated in training (train_eval)."
_EVALUATION_DATA = "utils.get_training_eval_datasets"
_INITIALIZER = _refuse(_NOT_REPLACED, "utils.TrainStateInitializer")
_SUMMARY = _refuse(
    "the configuration is always written as config.gin.",
    "gin_utils.summarize_gin_config",
    fix="Bind @gin_utils.summarize_gin_config, or leave it out.",
)
_NO_SEED = _refuse("a model that is evaluated has all of its parameters in the checkpoint.")
_IGNORED = Parameter(bool, True)
_FEATURE = "a feature of examples is a sequence of tokens."
_RULES = Sequence[tuple[str, str | Sequence[str] | None]]
_OUTPUT = {"output_dir": Parameter(str | None, None)}
# T5X's files of 2021 bind the loss's arguments for this method instead of the model.
_LOSS = ("label_smoothing", "z_loss", "loss_normalizing_factor")
_PREDICT = {"decoder_params": Parameter(Mapping[str, Any] | None, None)}

# Configurable -> its arguments besides those that fields declare.
_OTHERS: Mapping[str, Mapping[str, Parameter]] = {
    "train": {
        "model": _call(_MODEL, DECODER_ONLY),
        "checkpoint_cfg": _call("utils.CheckpointConfig"),
        "partitioner": _call(_PARTITIONER),
        "trainer_cls": _call("trainer.Trainer"),
        "summarize_config_fn": _SUMMARY,
        "use_hardware_rng": Parameter(bool, False),
        "get_dataset_fn": _refuse(_NOT_REPLACED, "utils.get_dataset"),
        # Ignored: all actions run, whatever else runs at the same time.
        "concurrent_metrics": _IGNORED,
        "train_eval_get_dataset_fn": _refuse(_NOT_REPLACED, _EVALUATION_DATA),
        "train_state_initializer_cls": _INITIALIZER,
        # Ignored: there is one way to write checkpoints.
        "use_orbax": _IGNORED,
        "verify_matching_vocabs_fn": _refuse(_NOT_REPLACED, "utils.verify_matching_vocabs"),
    },
    "evaluate": {
        "model": _call(_MODEL, DECODER_ONLY),
        "partitioner": _call(_PARTITIONER),
        "training_evaluator_cls": _refuse(_LOSS_IN_TRAINING),
        "summarize_config_fn": _SUMMARY,
        "train_state_initializer_cls": _INITIALIZER,
        "train_eval_get_dataset_fn": _refuse(_LOSS_IN_TRAINING, _EVALUATION_DATA),
        "fallback_init_rng": _NO_SEED,
        "use_orbax": _IGNORED,
    },
    "infer": {
        "model": _call(_MODEL, DECODER_ONLY),
        "partitioner": _call(_PARTITIONER),
        "write_fn": _refuse(
            "results are JSON lines in T5X's form.", "write_inferences_to_file", fix="Leave it out."
        ),
        # Ignored: a run resumes by counting chunks, not from an iterator's state.
        "checkpoint_ds_iter": _IGNORED,
        "train_state_initializer_cls": _INITIALIZER,
        "fallback_init_rng": _NO_SEED,
        "merge_fn": _refuse("chunks are put one after the other.", "merge_chunks_to_file"),
        "summarize_config_fn": _SUMMARY,
        "use_orbax": _IGNORED,
    },
    "create_task_from_tfexample_file": {"task_id": Parameter(str | None, None)},
    "utils.DatasetConfig": {
        "use_custom_packing_ops": _refuse(
            "SeqIO's compiled packing is not built here; its packing in TensorFlow is used.",
            default=False,
        ),
        # T5X's old way to name the module that registers the tasks; its run files still bind it.
        "module": Parameter(str | None, None),
    },
    "utils.SaveCheckpointConfig": {
        # Ignored, as T5X's default manager does.
        "keep_dataset_checkpoints": Parameter(int | None, None),
        "state_transformation_fns": _NO_TRANSFORMATIONS,
        "checkpoint_manager_cls": _ONE_MANAGER,
    },
    "utils.RestoreCheckpointConfig": {
        "restore_dataset": _refuse(
            "the position in the data is resumed from model_dir's own checkpoints alone.",
            default=False,
        ),
        "checkpointer_cls": _refuse(_ONE_WAY, CHECKPOINTER),
        "state_transformation_fns": _NO_TRANSFORMATIONS,
        "checkpoint_manager_cls": _ONE_MANAGER,
    },
    "utils.create_learning_rate_scheduler": {
        "factors": Parameter(str, "constant * linear_warmup * rsqrt_decay"),
        "base_learning_rate": Parameter(float, 0.5),
        "warmup_steps": Parameter(int, 1000),
        "decay_factor": Parameter(float, 0.5),
        "steps_per_decay": Parameter(int, 20000),
        "steps_per_cycle": Parameter(int, 100000),
        "step_offset": Parameter(int, 0),
        "min_learning_rate": Parameter(float, 1e-8),
    },
    _MODEL: {
        "module": _call("network.Transformer"),
        "feature_converter_cls": Parameter(Any, None, ("seqio.EncDecFeatureConverter",)),
        "default_decoder_params": Parameter(Mapping[str, Any] | None, None),
    },
    f"{_MODEL}.predict_batch_with_aux": _PREDICT,
    DECODER_ONLY: {
        "module": _call("decoder_only.network.DecoderWrapper"),
        "vocabulary": Parameter(),
        "inputs_bidirectional_attention": Parameter(bool, False),
        "feature_converter_cls": Parameter(Any, None, ("seqio.DecoderFeatureConverter",)),
    },
    f"{DECODER_ONLY}.predict_batch_with_aux": _PREDICT,
    PASS_THROUGH: {},
    "models.get_input_vocabulary": {"model": _call(_MODEL, DECODER_ONLY)},
    "models.get_output_vocabulary": {"model": _call(_MODEL, DECODER_ONLY)},
    "network.Transformer": {
        "config": _call("network.T5Config", "scalable_t5.network.T5Config", "gpu.network.T5Config")
    },
    "decoder_only.network.DecoderWrapper": {"config": _call(_DECODER_ONLY_CONFIG)},
    _DECODER_ONLY_CONFIG: {"num_layers": Parameter(int, 6)},
    "scalable_t5.network.T5Config": {
        # Ignored: it only orders the axes in T5X's own checkpoints.
        "param_scan_axis": Parameter(int, 1)
    },
    # T5X passes a number of its own to both.
    "decoding.beam_search": {"num_decodes": Parameter(int, 4)},
    "decoding.temperature_sample": {
        "num_decodes": Parameter(int, 1),
        "max_decode_steps_hard_limit": Parameter(int | None, None),
    },
    "adafactor.Adafactor": {
        "multiply_by_parameter_scale": Parameter(bool, True, ("adafactor.HParamMap",)),
        "factor_map": Parameter(None, None, ("adafactor.HParamMap",)),
        # Ignored: the Trainer's schedule sets the rate of each step.
        "learning_rate": Parameter(float | None, None),
        "dtype_momentum": _refuse("slots are float32.", default="float32"),
        # T5X reads these for scanned layers only; a plain matrix is factored by its size.
        "logical_factor_rules": Parameter(Any, None),
    },
    "adafactor.HParamMap": {"rules": Parameter(Sequence[tuple[str, Any]])},
    "adafactor.standard_logical_factor_rules": {"rules": Parameter(Mapping[str, Any] | None, None)},
    "optimizers.MultiOptimizer": {
        "traversals_and_optimizers": Parameter(Sequence[tuple[Any, Any]])
    },
    "optimizers.chain": {"transformations": Parameter(Sequence[Any])},
    "checkpoints.SaveBestCheckpointer": {"force_keep_period": Parameter(int | None, None)},
    _PARTITIONER: {
        "num_partitions": Parameter(int | None, None),
        "model_parallel_submesh": Parameter(Sequence[int] | None, None),
        # Ignored, like `backend` and `use_cpu_pjit`: parameters are on the devices JAX finds.
        "params_on_devices": _IGNORED,
        "backend": Parameter(str | None, None),
        "ici_mesh_shape": Parameter(Mapping[str, int] | None, None),
        "dcn_mesh_shape": Parameter(Mapping[str, int] | None, None),
        "logical_axis_rules": Parameter(
            _RULES | None, None, ("partitioning.standard_logical_axis_rules",)
        ),
        "use_cpu_pjit": Parameter(bool, False),
    },
    "partitioning.standard_logical_axis_rules": {
        "activation_partitioning_dims": Parameter(int, 1),
        "parameter_partitioning_dims": Parameter(int, 1),
        "additional_rules": Parameter(_RULES | None, None),
    },
    "trainer.Trainer": {
        "weight_metrics_computer": Parameter(None, None, ("trainer.WeightMetricsComputer",))
    },
    "seqio.SentencePieceVocabulary": {
        "use_fast_tokenizer": _refuse("texts are encoded by SentencePiece itself.", default=False)
    },
    "seqio.Feature": {
        "vocabulary": Parameter(),
        "add_eos": Parameter(bool, True),
        "required": _refuse(_FEATURE, default=True),
        "dtype": _refuse(_FEATURE, default="int32"),
        "rank": _refuse(_FEATURE, default=1),
    },
    "seqio.PyLoggingLogger": _OUTPUT,
    "seqio.TensorBoardLogger": _OUTPUT,
    "seqio.JSONLogger": {**_OUTPUT, "write_n_results": Parameter(int | None, None)},
    "gin_utils.summarize_gin_config": {
        "model_dir": Parameter(str | None, None),
        "summary_writer": Parameter(Any, None),
        "step": Parameter(int, 0),
    },
}
# Arguments of precompile that are those of train, and the defaults of some.
_OF_PRECOMPILE = {
    "model": REQUIRED,
    "train_dataset_cfg": REQUIRED,
    "partitioner": REQUIRED,
    "model_dir": REQUIRED,
    "random_seed": None,
    "adapter": None,
    "choice_loss": None,
}
# The networks of T5X and their arguments that others lack.
NETWORKS = {
    "scalable_t5.network.T5Config": ("scan_layers", "remat_policy"),
    "gpu.network.T5Config": ("scale_attn_logits",),
    "network.T5Config": (),
    _DECODER_ONLY_CONFIG: (),
}
# The arguments of the encoder-decoder's configurables that the decoder-only ones lack.
_LACKING = {
    _DECODER_ONLY_CONFIG: ("num_encoder_layers", "num_decoder_layers", "float32_attention_logits"),
    DECODER_ONLY: ("input_vocabulary", "output_vocabulary"),
    f"{DECODER_ONLY}.predict_batch_with_aux": ("prompt_with_targets",),
}

PROGRAMS = {"train": "train", "eval": "evaluate", "infer": "infer", "precompile": "precompile"}
"""Run mode -> the function that its gin files configure."""
_RESULTS = ("write_inferences_to_file", "merge_chunks_to_file")
_SEQIO = {
    "vocabularies": ("SentencePieceVocabulary", "ByteVocabulary", "PassThroughVocabulary"),
    "dataset_providers": ("Feature",),
    "feature_converters": (
        "EncDecFeatureConverter",
        "DecoderFeatureConverter",
        "PassThroughFeatureConverter",
    ),
    "evaluation": ("Evaluator",),
    "loggers": ("PyLoggingLogger", "TensorBoardLogger", "JSONLogger"),
}
# Where a configurable's module is not t5x.MODULE: what precedes its name -> the module.
_ELSEWHERE = {
    "": "__main__",
    "seqio": "seqio",
    "network": "t5x.examples.t5.network",
    "scalable_t5.network": "t5x.examples.scalable_t5.network",
    "gpu.network": "t5x.contrib.gpu.t5.network",
    "decoder_only.network": "t5x.examples.decoder_only.network",
}


def _list_modules() -> dict[str, dict[str, str]]:
    arguments = (each for kind in _KINDS for each in arguments_of(kind, "t5x").values())
    known = {each.configurable for each in arguments}
    known |= {call for of in _OTHERS.values() for each in of.values() for call in each.calls}
    modules: dict[str, dict[str, str]] = {}
    for configurable in sorted({*known, *_OTHERS, "precompile"}):
        package, _, name = configurable.rpartition(".")
        # A class has its methods.
        if package.rpartition(".")[2][:1].isupper():
            continue
        modules.setdefault(_ELSEWHERE.get(package, f"t5x.{package}"), {})[name] = configurable
    modules["t5x.infer"] = {name: name for name in _RESULTS}
    modules["t5x.partitioning"]["ModelBasedPjitPartitioner"] = _PARTITIONER
    for network in ("scalable_t5.network", "gpu.network"):
        modules[_ELSEWHERE[network]]["Transformer"] = "network.Transformer"
    # SeqIO has each name in its package and in a module.
    for module, names in _SEQIO.items():
        modules[f"seqio.{module}"] = {name: f"seqio.{name}" for name in names}
    return modules


MODULES: Mapping[str, Mapping[str, str]] = _list_modules()
"""Module -> the names that gin files find in it -> the configurable of each."""


def standard_name(configurable: str) -> str:
    """A configurable's name in the tables of fields: of any network and any model, one name."""
    if configurable in NETWORKS:
        return "network.T5Config"
    return configurable.replace(DECODER_ONLY, _MODEL)


@functools.cache
def parameters_of(configurable: str) -> Mapping[str, Parameter]:
    """The arguments of a configurable, by name."""
    if configurable == "precompile":
        of_train = parameters_of("train")
        return {
            name: dataclasses.replace(of_train[name], default=default)
            for name, default in _OF_PRECOMPILE.items()
        }
    model, _, method = configurable.rpartition(".")
    if method == "loss_fn":
        of_model = parameters_of(model)
        return {name: Parameter(of_model[name].hint | None, None) for name in _LOSS}
    name = standard_name(configurable)
    declared: dict[str, Parameter] = {}
    # Of several fields that one argument sets, that of the configurable's class decides its type.
    for kind in sorted(_KINDS, key=lambda kind: kind is not KIND_OF.get(name)):
        for field, argument in arguments_of(kind, "t5x").items():
            if argument.configurable == name:
                declared.setdefault(argument.argument, _field_parameter(kind, field, argument))
    if configurable in NETWORKS:
        for network, names in NETWORKS.items():
            if network != configurable:
                declared = {name: each for name, each in declared.items() if name not in names}
    lacking = _LACKING.get(configurable, ())
    declared = {name: each for name, each in declared.items() if name not in lacking}
    others = dict(_OTHERS.get(configurable, {}))
    # First those that hold the run together, of which messages name the first that is missing.
    return others | declared | others


def _field_parameter(kind: type, field: str, argument: Argument) -> Parameter:
    default = argument.default
    if default is UNSET:
        default = kind.__dataclass_fields__[field].default  # pyright: ignore[reportAttributeAccessIssue]
        default = REQUIRED if default is dataclasses.MISSING else default
    parts = alternatives(argument.hint or hints_of(kind)[field])
    calls = {part: of["t5x"] for part in parts if "t5x" in (of := _configurables(part))}
    rest = tuple(part for part in parts if part not in calls and not _configurables(part))
    hint: Any = functools.reduce(lambda a, b: a | b, rest) if rest else UNSET
    return Parameter(hint, default, tuple(calls.values()))


def _configurables(hint: Any) -> Mapping[str, str]:
    return getattr(hint, "gin_configurables", {})
