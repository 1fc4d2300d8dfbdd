"""The modules that a T5X gin file imports, visible to gin only.

During parsing, gin's import function is replaced. Names of T5X, SeqIO and `__main__` resolve to the
records of this package. Any other module is imported when gin first looks up a name in it. No
module called `t5x` is ever placed where Python finds it, and an installed T5X is not read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import importlib.util
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from t0repro.config import gin_door
from t0repro.config.t5x import programs, records, user_classes
from t0repro.errors import UserError, nearest_names

# The function that each run mode's gin file configures, and its record.
PROGRAMS = {
    "train": ("train", programs.TrainProgram),
    "eval": ("evaluate", programs.EvalProgram),
    "infer": ("infer", programs.InferProgram),
    "precompile": ("precompile", programs.PrecompileProgram),
}

_MODULES: Mapping[str, Mapping[str, Any]] = {
    "__main__": {
        **dict(PROGRAMS.values()),
        "create_task_from_tfexample_file": programs.TfExampleTask,
        "write_inferences_to_file": programs.WriteInferences,
        "merge_chunks_to_file": programs.MergeChunks,
    },
    "t5x.infer": {
        "write_inferences_to_file": programs.WriteInferences,
        "merge_chunks_to_file": programs.MergeChunks,
    },
    "t5x.utils": {
        "DatasetConfig": records.DatasetConfig,
        "SaveCheckpointConfig": records.SaveCheckpointConfig,
        "RestoreCheckpointConfig": records.RestoreCheckpointConfig,
        "CheckpointConfig": records.CheckpointConfig,
        "create_learning_rate_scheduler": records.LearningRateSchedule,
        "get_dataset": programs.GetDataset,
        "get_training_eval_datasets": programs.TrainingEvalDatasets,
        "TrainStateInitializer": programs.StateInitializer,
        "verify_matching_vocabs": programs.VerifyMatchingVocabs,
    },
    "t5x.models": {
        "EncoderDecoderModel": records.EncoderDecoderModel,
        "get_input_vocabulary": records.InputVocabulary,
        "get_output_vocabulary": records.OutputVocabulary,
    },
    "t5x.decoding": {
        "beam_search": records.BeamSearch,
        "temperature_sample": records.TemperatureSample,
    },
    "t5x.checkpoints": {
        "SaveBestCheckpointer": records.SaveBestCheckpointer,
        "Checkpointer": programs.Checkpointer,
        "OrbaxCheckpointManagerInterface": programs.CheckpointManager,
    },
    "t5x.optimizers": {
        "chain": records.OptaxChain,
        "MultiOptimizer": records.MultiOptimizer,
    },
    "t5x.adafactor": {
        "Adafactor": records.Adafactor,
        "HParamMap": records.HParamMap,
        "standard_logical_factor_rules": records.StandardFactorRules,
    },
    "t5x.partitioning": {
        "PjitPartitioner": records.PjitPartitioner,
        "ModelBasedPjitPartitioner": records.PjitPartitioner,
        "standard_logical_axis_rules": records.AxisRules,
    },
    "t5x.trainer": {
        "Trainer": records.Trainer,
        "WeightMetricsComputer": records.WeightMetrics,
        "EarlyStoppingAction": records.EarlyStopping,
        "TerminateOnNanAction": records.TerminateOnNan,
    },
    "t5x.gin_utils": {"summarize_gin_config": programs.WriteConfig},
    "t5x.examples.t5.network": {
        "Transformer": records.Transformer,
        "T5Config": records.T5Config,
    },
    "t5x.examples.scalable_t5.network": {
        "Transformer": records.Transformer,
        "T5Config": records.ScannedT5Config,
    },
    "t5x.contrib.gpu.t5.network": {
        "Transformer": records.Transformer,
        "T5Config": records.GpuT5Config,
    },
    "seqio": {
        "SentencePieceVocabulary": records.SentencePieceVocabulary,
        "ByteVocabulary": records.ByteVocabulary,
        "PassThroughVocabulary": records.PassThroughVocabulary,
        "Feature": records.Feature,
        "EncDecFeatureConverter": programs.EncDecFeatureConverter,
        "Evaluator": records.Evaluator,
        "PyLoggingLogger": records.PyLoggingLogger,
        "TensorBoardLogger": records.TensorBoardLogger,
        "JSONLogger": records.JSONLogger,
    },
}


def records_by_module() -> Mapping[str, Mapping[str, Any]]:
    """The names available to gin files: module -> name -> the record that stands for it."""
    return _MODULES


def name_of_replaced(record: Any) -> str | None:
    """`trainer.Trainer` for the record of a user's trainer; None for any other record."""
    if not hasattr(record, "stands_for"):
        return None
    for module, names in _MODULES.items():
        for name, known in names.items():
            if issubclass(record, known):
                return f"{module.rpartition('.')[2]}.{name}"
    return None


class _Served:
    """A module as gin sees it: records by name, and nested modules."""

    def __init__(self, name: str, contents: Mapping[str, Any]):
        self._name = name
        self.__dict__.update(contents)

    def __getattr__(self, name: str) -> Any:
        known = [key for key in self.__dict__ if not key.startswith("_")]
        raise UserError(
            f"{self._name}.{name} is not supported in a T5X gin file.",
            fix=f"Known here: {nearest_names(name, known, count=3)} (of {', '.join(known)}).",
        )


class _Optax:
    """optax and T5X's wrappers of it, as gin sees them: calls are recorded, not made."""

    def __init__(self, contents: Mapping[str, Any]):
        self.__dict__.update(contents)

    def __getattr__(self, name: str) -> Any:
        return _described(name)


# gin refuses another object under a name that it has registered.
@functools.cache
def _described(name: str) -> Any:
    """A function with the signature of optax's that returns its arguments as an OptaxCall."""
    # Here, because it imports JAX, and errors in files that need no optax should not wait for it.
    import optax

    function = getattr(optax, name, None)
    if not callable(function):
        raise UserError(
            f"optax has no {name}.", fix=f"Its names: {nearest_names(name, dir(optax), count=3)}."
        )

    # gin reads the signature, which this copies, to refuse unknown arguments.
    @functools.wraps(function)
    def describe(*args: Any, **kwargs: Any) -> records.OptaxCall:
        bound = inspect.signature(function).bind(*args, **kwargs)
        return records.OptaxCall(function=name, arguments=dict(bound.arguments))

    return describe


class _Deferred:
    """A user's module, imported when a gin file first refers to a name in it."""

    def __init__(self, name: str):
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return user_classes.served_class(getattr(importlib.import_module(self._name), name))


@dataclasses.dataclass(frozen=True)
class Imports:
    """The imports of gin files other than the modules served to them.

    Attributes:
      users: modules of the user's. They register tasks, and importing them may take seconds
        (TensorFlow, datasets); the caller imports them once the files are known to be valid.
      absent: modules of T5X without a substitute, imported for their side effects.
    """

    users: list[str] = dataclasses.field(default_factory=list)
    absent: list[str] = dataclasses.field(default_factory=list)


@contextlib.contextmanager
def served() -> Iterator[Imports]:
    """Serves T5X's modules to gin within the block; yields the files' other imports."""
    imports = Imports()

    def import_for_gin(name: str, *_: Any, fromlist: Any = None, **__: Any) -> Any:
        root = name.partition(".")[0]
        # Only these roots are served here; anything else is a user's module.
        if root not in ("t5x", "seqio", "optax", "__main__"):
            # Only the root is looked for: to find a submodule, Python would import its package.
            if importlib.util.find_spec(root) is None:
                raise UserError(
                    f"No module named {root!r}, which a gin file imports ({name}).",
                    fix="Install it, or correct the import.",
                )
            if name not in imports.users:
                imports.users.append(name)
            # As Python's own __import__: the module itself with a `from` list, else its root.
            return _Deferred(name if fromlist else root)
        if fromlist:
            return _module(name)
        if not any(known == name or known.startswith(f"{name}.") for known in _MODULES):
            imports.absent.append(name)
        return _module(root)

    with gin_door.importing_with(import_for_gin):
        yield imports


def _module(name: str) -> _Served | _Optax:
    # Any function of optax can be called, so look names up rather than list them.
    if name in ("optax", "t5x.optimizers"):
        return _Optax(_MODULES.get(name, {}))
    contents: dict[str, Any] = dict(_MODULES.get(name, {}))
    inside = {
        key[len(name) + 1 :].partition(".")[0] for key in _MODULES if key.startswith(f"{name}.")
    }
    if not contents and not inside:
        parent = name.rpartition(".")[0]
        raise UserError(
            f"t0repro does not support the module {name}.",
            fix=f"Known: {nearest_names(name, _MODULES, count=3)}"
            + (f" (of {parent})." if parent else "."),
        )
    return _Served(name, contents | {child: _module(f"{name}.{child}") for child in inside})
