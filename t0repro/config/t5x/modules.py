"""The modules that a T5X gin file imports, visible to gin only.

During parsing, gin's import function is replaced. Names of T5X, SeqIO and `__main__` resolve to the
records of this package. Any other module is imported when gin first looks up a name in it. No
module called `t5x` is ever placed where Python finds it, and an installed T5X is not read. A user's
class in place of one of T5X's is found here too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import importlib.util
import inspect
import json
import types
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from t0repro.config import gin_door
from t0repro.config.ranges import alternatives
from t0repro.config.t5x import programs, records
from t0repro.config.training_plan import UserClass
from t0repro.errors import UserError, nearest_names

if TYPE_CHECKING:  # for types only: config imports the modules that serve these classes
    from t0repro.config.t5x.gin_files import Places

# The function that each run mode's gin file configures, and its record.
PROGRAMS = {
    "train": ("train", programs.TrainProgram),
    "eval": ("evaluate", programs.EvalProgram),
    "infer": ("infer", programs.InferProgram),
    "precompile": ("precompile", programs.PrecompileProgram),
}

_SEQIO: Mapping[str, Mapping[str, Any]] = {
    "vocabularies": {
        "SentencePieceVocabulary": records.SentencePieceVocabulary,
        "ByteVocabulary": records.ByteVocabulary,
        "PassThroughVocabulary": records.PassThroughVocabulary,
    },
    "dataset_providers": {"Feature": records.Feature},
    "feature_converters": {"EncDecFeatureConverter": programs.EncDecFeatureConverter},
    "evaluation": {"Evaluator": records.Evaluator},
    "loggers": {
        "PyLoggingLogger": records.PyLoggingLogger,
        "TensorBoardLogger": records.TensorBoardLogger,
        "JSONLogger": records.JSONLogger,
    },
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
    # SeqIO has each name in its package too.
    "seqio": {name: record for names in _SEQIO.values() for name, record in names.items()},
    **{f"seqio.{module}": names for module, names in _SEQIO.items()},
}


def records_by_module() -> Mapping[str, Mapping[str, Any]]:
    """The names available to gin files: module -> name -> the record that stands for it."""
    return _MODULES


def standard_name(record: Any) -> str | None:
    """`trainer.Trainer` for T5X's trainer, by whatever name, or for a user's; else None."""
    replaces = hasattr(record, "stands_for")
    for module, names in _MODULES.items():
        for name, known in names.items():
            if record is known or (replaces and issubclass(record, known)):
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
        return _served_class(getattr(importlib.import_module(self._name), name))


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
        if root != "optax" and not any(
            known == name or known.startswith(f"{name}.") for known in _MODULES
        ):
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


# ---- User classes in place of T5X's own ----------------------------------------------------------

# gin sees a subclass of one of this project's extension points as a record of the same kind, with
# the arguments of T5X's class and the subclass's own. The rest of a run is thus read as if it named
# T5X's class. The user's class itself is instantiated when the run begins (`UserClass.made`).

# Classes to subclass: (module, name) -> the record with T5X's arguments.
_EXTENSIONS: dict[tuple[str, str], type[records.Record]] = {
    ("t0repro.training.models", "EncoderDecoderModel"): records.EncoderDecoderModel,
    ("t0repro.training.trainer", "BaseTrainer"): records.Trainer,
    ("t0repro.training.partitioner", "Partitioner"): records.PjitPartitioner,
    ("t0repro.training.train_step", "WeightMetricsComputer"): records.WeightMetrics,
    ("t0repro.training.stopping", "BaseAction"): records.Action,
}
# Arguments that the run supplies to these classes; no gin file binds them.
_SUPPLIED = frozenset(
    "self model train_state partitioner eval_names summary_dir train_state_axes rng open_writer"
    " files partitioning say".split()
)
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def _served_class(value: Any) -> Any:
    """The record class for a user's usable class; any other value unchanged."""
    for base in value.__mro__ if isinstance(value, type) else ():
        record = _EXTENSIONS.get((base.__module__, base.__qualname__))
        if record is not None:
            return _record_class(value, record)
    return value


def base_class(hint: Any) -> str | None:
    """The class to subclass for an argument of a declared type; None if it accepts none."""
    for (module, name), record in _EXTENSIONS.items():
        if record in alternatives(hint):
            return f"{module}.{name}"
    return None


def user_class(record: Any, places: Places) -> UserClass | None:
    """The class that a record stands for, with the arguments that T5X's class lacks.

    Raises:
      UserError: for an argument that JSON cannot represent, with its place.
    """
    cls = getattr(record, "stands_for", None)
    if cls is None:
        return None
    shared = _fields(_kind_of(record))
    named = {name for name, field in _fields(type(record)).items() if field.init} - shared.keys()
    arguments = {name: getattr(record, name) for name in sorted(named)}
    for name, value in arguments.items():
        try:
            # Convert through JSON, so that RunConfig can be written and read back equal.
            arguments[name] = json.loads(json.dumps(value))
        except TypeError:
            raise places.refused(
                f"{cls.__name__}.{name}",
                value,
                "only numbers, words, lists and dictionaries can be arguments.",
                "Make the object inside the class.",
            ) from None
    return UserClass(cls.__module__, cls.__qualname__, arguments)


def _kind_of(record: Any) -> type[records.Record]:
    return next(base for base in type(record).__mro__ if base in _EXTENSIONS.values())


# gin refuses another object under a name that it has registered.
@functools.cache
def _record_class(cls: type, record: type[records.Record]) -> type[records.Record]:
    """A record with the arguments of a user's class."""
    fields = _own_fields(cls, record)
    # gin identifies a method by its class's name, so copy inherited ones.
    methods = {
        name: types.FunctionType(
            method.__code__, method.__globals__, name, method.__defaults__, method.__closure__
        )
        for name, method in vars(record).items()
        if isinstance(method, types.FunctionType) and not name.startswith("_")
    }
    for name, method in methods.items():
        method.__qualname__, method.__kwdefaults__ = f"{cls.__name__}.{name}", None
    return dataclasses.make_dataclass(
        cls.__name__,
        fields,
        bases=(record,),
        frozen=True,
        kw_only=True,
        # Use this package's module name, so that gin forgets it with the other records.
        namespace={**methods, "stands_for": cls, "__module__": records.__name__},
    )


def _fields(record: type[records.Record]) -> dict[str, dataclasses.Field]:
    fields = dataclasses.fields(record)  # pyright: ignore[reportArgumentType]
    return {field.name: field for field in fields}


def _recorded(default: Any) -> Any:
    """The record of a default that is one of this project's decoding functions."""
    if getattr(default, "__module__", None) != "t0repro.model.t5x_decoding":
        return default
    record = _MODULES["t5x.decoding"].get(default.__name__)
    return default if record is None else record()


def _own_fields(cls: type, record: type[records.Record]) -> list[tuple[str, Any, Any]]:
    """The fields of a user's arguments, with their defaults, as `make_dataclass` expects them."""
    parameters = inspect.signature(cls).parameters
    inherited, fields = _fields(record), []
    for name, parameter in parameters.items():
        if name in _SUPPLIED or parameter.kind not in _NAMED:
            continue
        default = _recorded(parameter.default)
        kind = inherited[name].type if name in inherited else Any
        if default is parameter.empty:
            if name not in inherited:
                fields.append((name, kind, dataclasses.field()))
        elif type(default).__hash__ is None:  # a dataclass refuses an unhashable default
            fields.append((name, kind, dataclasses.field(default_factory=lambda x=default: x)))
        else:
            fields.append((name, kind, dataclasses.field(default=default)))
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    # Bind these too: the run uses them, not the object.
    if takes_all or record not in (records.EncoderDecoderModel, records.Trainer):
        return fields
    for name, field in inherited.items():
        if name not in parameters and field.init and field.default is not dataclasses.MISSING:
            unbound = dataclasses.field(init=False, default=field.default)
            fields.append((name, field.type, unbound))
    return fields
