"""Mesh TensorFlow's and t5's modules: the real ones, or stand-ins that import no TensorFlow.

With stand-ins, gin parses Mesh TensorFlow's files without importing TensorFlow: every name,
argument and default is the real one's (`signatures.json`, which `scripts/mtf_signatures.py`
writes). The few that are called while a configuration is read are written out below; the rest needs
the real packages.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import importlib
import inspect
import json
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import gin
from t0repro.config import gin_door
from t0repro.config.gin_errors import not_described
from t0repro.config.gin_imports import has_module
from t0repro.tasks import task
from t0repro.tasks.vocabulary import default_vocabulary

TRANSFORMER = "mesh_tensorflow.transformer.transformer"
MESH_TRANSFORMER = "t5.models.mesh_transformer"
_LAYERS = "mesh_tensorflow.transformer.transformer_layers"
_PACKAGES = ("tensorflow", "mesh_tensorflow", "t5", "seqio")


# Not an Exception, since gin and `configuration_errors` would turn that into a user's error.
class NeedsPackages(BaseException):
    """A configuration asks for something that only the real packages can do."""


_stand_ins: Mapping[str, Any] | None = None


def module(name: str) -> Any:
    """A module of Mesh TensorFlow or t5; within `described`, its stand-in."""
    return importlib.import_module(name) if _stand_ins is None else _stand_ins[name]


def is_described() -> bool:
    """Whether stand-ins take the place of the packages."""
    return _stand_ins is not None


def can_be_described(module_imports: Sequence[str]) -> bool:
    """Whether stand-ins may be tried: nothing has registered the real configurables with gin.

    Args:
      module_imports: Modules of tasks; a user's own may import and register anything.
    """
    from t0repro.tasks.registration import needs_seqio

    return not any(name in sys.modules for name in _PACKAGES) and not needs_seqio(module_imports)


@contextlib.contextmanager
def described() -> Iterator[None]:
    """Stand-ins for the packages within the block; afterwards gin is as it was before.

    Raises:
      NeedsPackages: From the block, if the stand-ins do not suffice.
    """
    global _stand_ins
    with (
        gin_door.left_empty(lambda name: name == __name__),
        gin_door.search_path_restored(),
        gin_door.importing_with(_import),
    ):
        _stand_ins = registered()
        try:
            yield
        finally:
            _stand_ins = None


def _import(name: str, *args: Any, **kwargs: Any) -> Any:
    """Imports what a gin file names, except what stand-ins describe."""
    package, _, inside = name.partition(".")
    if name in recorded()["modules"]:
        return None
    # Older gin files import modules that the packages no longer have: fail as they would.
    if package in _PACKAGES and not has_module(package, inside):
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    if package != "t0repro":
        raise NeedsPackages(f"a gin file imports {name}")
    return importlib.__import__(name, *args, **kwargs)


# ---- Stand-ins made from the recorded signatures -------------------------------------------------

_OPAQUE = object()
"""Stands for a default that is neither a literal nor configurable."""


@dataclasses.dataclass(frozen=True)
class DType:
    """A type of TensorFlow, by name."""

    name: str


@functools.cache
def recorded() -> Mapping[str, Any]:
    """The content of signatures.json."""
    return json.loads((Path(__file__).parent / "signatures.json").read_text())


def registered() -> dict[str, SimpleNamespace]:
    """Registers all stand-ins with gin; returns them as modules, by the modules' names."""
    makers = _StandIns()
    modules: dict[str, SimpleNamespace] = {}
    for selector in recorded()["configurables"]:
        module, _, name = selector.rpartition(".")
        setattr(modules.setdefault(module, SimpleNamespace()), name, makers.of(selector))
    transformer = modules[TRANSFORMER]
    # gin calls methods such as Bitransformer.decode by their class, as if it were their module.
    for tower in ("Bitransformer", "Unitransformer"):
        for name, method in vars(modules.pop(tower)).items():
            setattr(getattr(transformer, tower), name, method)
    vars(modules[MESH_TRANSFORMER])["DEPRECATED_GIN_REFERENCES"] = tuple(recorded()["deprecated"])
    helpers: Mapping[str, Any] = {
        "mesh_tensorflow": _FUNCTIONS,
        "mesh_tensorflow.transformer.utils": {
            "build_model": functools.partial(build_model, transformer),
            "inputs_vocabulary": lambda pair: pair[0],
            "targets_vocabulary": lambda pair: pair[1],
            "compute_batch_size": compute_batch_size,
        },
    }
    for module, functions in helpers.items():
        vars(modules.setdefault(module, SimpleNamespace())).update(functions)
    makers.modules.update(modules)
    return modules


class _StandIns:
    """Makes each stand-in once, after those that are its defaults or bases."""

    def __init__(self):
        self._made: dict[str, Any] = {}
        self.modules: dict[str, SimpleNamespace] = {}

    def of(self, selector: str) -> Any:
        """The stand-in for a configurable, registered with gin."""
        if selector not in self._made:
            self._made[selector] = self._make(selector, recorded()["configurables"][selector])
        return self._made[selector]

    def _make(self, selector: str, record: Mapping[str, Any]) -> Any:
        module, _, name = selector.rpartition(".")
        signature = _signature_of(record["signature"], self._default)
        # Classes have a base, which may be none of the configurables; functions have no such entry.
        if "base" in record:
            base = self.of(record["base"]) if record["base"] else object
            made = _class(name, base, signature, _FINISHED.get(selector))
        else:
            made = _function(name, signature, functools.partial(self._call, selector))
        # By this name, `described` makes gin forget the stand-ins again.
        made.__module__ = __name__
        lists = {key: record[key] for key in ("allowlist", "denylist") if key in record}
        register: Any = gin.configurable(name, module=module, **lists)
        return register(made)

    def _call(self, selector: str, arguments: Mapping[str, Any]) -> Any:
        function = _CALLED.get(selector)
        if function is None:
            raise NeedsPackages(f"{selector} is called")
        transformer = self.modules[TRANSFORMER]
        return function(transformer, **arguments)

    def _default(self, node: ast.expr) -> Any:
        """The value of a default as recorded (see scripts/mtf_signatures.py)."""
        text = ast.unparse(node)
        if text == "...":
            return _OPAQUE
        if text == "gin.REQUIRED":
            return gin.REQUIRED
        if text.startswith("tf."):
            return DType(text.removeprefix("tf."))
        return self.of(text) if text in recorded()["configurables"] else ast.literal_eval(node)


def _signature_of(text: str, default: Callable[[ast.expr], Any]) -> inspect.Signature:
    """The signature that a recorded text describes."""
    function = ast.parse(f"def f{text}: pass").body[0]
    assert isinstance(function, ast.FunctionDef)
    given, kinds = function.args, inspect.Parameter
    empty = [None] * (len(given.args) - len(given.defaults))
    listed = [(kinds.POSITIONAL_OR_KEYWORD, *pair) for pair in
              zip(given.args, [*empty, *given.defaults], strict=True)]  # fmt: skip
    if given.vararg:
        listed.append((kinds.VAR_POSITIONAL, given.vararg, None))
    listed += [(kinds.KEYWORD_ONLY, *pair) for pair in
               zip(given.kwonlyargs, given.kw_defaults, strict=True)]  # fmt: skip
    if given.kwarg:
        listed.append((kinds.VAR_KEYWORD, given.kwarg, None))
    # Only truth values are recorded with an annotation, since `misread` checks those alone.
    annotations = {"bool": bool, "bool | None": bool | None}
    return inspect.Signature([
        kinds(
            argument.arg,
            kind,
            default=kinds.empty if value is None else default(value),
            annotation=annotations[ast.unparse(argument.annotation)]
            if argument.annotation
            else kinds.empty,
        )
        for kind, argument, value in listed
    ])  # fmt: skip


def _function(
    name: str, signature: inspect.Signature, call: Callable[[Mapping[str, Any]], Any]
) -> Any:
    def stand_in(*args: Any, **kwargs: Any) -> Any:
        return call(_arguments(signature, args, kwargs))

    stand_in.__name__ = stand_in.__qualname__ = name
    return _with(stand_in, signature)


def _class(
    name: str, base: type, signature: inspect.Signature, finish: Callable[[Any], None] | None
) -> type:
    """A class whose objects have their arguments as attributes, and what `finish` adds."""
    own = [inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)]
    own += signature.parameters.values()
    of_init = signature.replace(parameters=own)

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        given = _arguments(of_init, (self, *args), kwargs)
        if finish is None:
            raise NeedsPackages(f"a {name} is made")
        del given["self"]
        # A class with **kwargs passes all of its arguments on to its base.
        if "kwargs" in given:
            super(made_class, self).__init__(**given.pop("kwargs"), **given)
        vars(self).update(given)
        finish(self)

    made_class = type(name, (base,), {"__init__": _with(__init__, of_init)})
    return made_class


def _with(function: Any, signature: inspect.Signature) -> Any:
    # gin asks for the signature to fill in what is bound and to refuse unknown arguments.
    function.__signature__ = signature
    function.__annotations__ = {
        name: each.annotation
        for name, each in signature.parameters.items()
        if each.annotation is not each.empty
    }
    return function


def _arguments(
    signature: inspect.Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    return dict(bound.arguments)


# ---- How a model is built, as far as RunConfig describes one -------------------------------------

# `build_model` calls the same constructors with the same arguments in the same gin scopes as the
# real one, so that every binding takes effect where it would; the objects hold only arguments.


def build_model(
    transformer: Any,
    *,
    model_type: str,
    input_vocab_size: int,
    output_vocab_size: int,
    layout_rules: Any,
    mesh_shape: Any,
) -> Any:
    """The model of utils.build_model, for the model types of the JAX stack."""
    common = {"layout": layout_rules, "mesh_shape": mesh_shape}
    sizes = {"input_vocab_size": input_vocab_size, "output_vocab_size": output_vocab_size}
    if model_type == "bitransformer":
        return transformer.make_bitransformer(**sizes, **common)
    stack = transformer.make_layer_stack()
    return transformer.Unitransformer(autoregressive=True, layer_stack=stack, **sizes, **common)


def _make_bitransformer(
    transformer: Any,
    input_vocab_size: int,
    output_vocab_size: int,
    layout: Any,
    mesh_shape: Any,
    encoder_name: str,
    decoder_name: str,
    bitransformer_cls: Any,
) -> Any:
    towers = [
        ("encoder", encoder_name, input_vocab_size, None, False),
        ("decoder", decoder_name, output_vocab_size, output_vocab_size, True),
    ]
    made = []
    # The scopes in which gin files bind each tower's layers: `encoder/make_layer_stack.layers`.
    for scope, name, inputs, outputs, autoregressive in towers:
        with gin.config_scope(scope):
            made.append(
                transformer.Unitransformer(
                    layer_stack=transformer.make_layer_stack(),
                    input_vocab_size=inputs,
                    output_vocab_size=outputs,
                    autoregressive=autoregressive,
                    name=name,
                    layout=layout,
                    mesh_shape=mesh_shape,
                )
            )
    return bitransformer_cls(*made)


def _make_layer_stack(
    _: Any, layers: Sequence[Any], layer_stack_cls: Any, num_layers: int, block_scope: bool
) -> Any:
    """The layers of all blocks. An item is a class, or a list of a class, a name and arguments."""
    stack: list[Any] = []
    for block in range(num_layers):
        for number, item in enumerate(layers):
            parts = item if isinstance(item, list | tuple) else [item]
            # Mesh TensorFlow goes through an item in order, so the last name and arguments win.
            name = next((part for part in reversed(parts) if isinstance(part, str)), None)
            given = next((part for part in reversed(parts) if isinstance(part, dict)), {})
            (made,) = (part for part in parts if not isinstance(part, str | dict))
            # The names become parts of the variables' names in a checkpoint.
            position = number if block_scope else len(stack)
            name = name or f"layer_{position:03d}"
            layer = made(**given)
            layer.name = f"block_{block:03d}/{name}" if block_scope else name
            stack.append(layer)
    return layer_stack_cls(stack)


def _get_vocabulary(_: Any, mixture_or_task_name: str | None) -> Any:
    """The vocabularies of inputs and targets of the mixture that is named, or that gin binds."""
    name = mixture_or_task_name
    if not name:
        try:
            name = gin.query_parameter("%MIXTURE_NAME")
        except ValueError:
            # Nothing binds the macro: t5 then takes its default.
            return default_vocabulary(), default_vocabulary()
    if not isinstance(name, str) or not task.is_described(name):
        raise NeedsPackages(not_described(str(name)))
    features = task.find_tasks(name)[0].output_features
    return tuple(features[each].vocabulary for each in ("inputs", "targets"))


# ---- What a constructor adds to its arguments ----------------------------------------------------


def _finish_unitransformer(model: Any) -> None:
    # Rows of the embedding are padded so that any mesh can divide them.
    def padded(size: int | None) -> Dimension | None:
        divisor = model.vocab_divisor
        return Dimension("vocab", -(-size // divisor) * divisor) if size else None

    model.model_dim = Dimension("d_model", model.d_model)
    model.input_vocab_dim = padded(model.input_vocab_size)
    model.output_vocab_dim = padded(model.output_vocab_size)
    if model.sinusoid_positional_embedding:
        model.positional_embedding = True
    model._loss_denominator = model.loss_denominator
    if model.input_full_attention and not model.autoregressive:
        raise NeedsPackages("input_full_attention without autoregressive")


def _finish_stack(stack: Any) -> None:
    """Makes the arguments private; a dropout rate and an epsilon stand for T5 1.0's sublayers."""
    for name in ("layers", "recompute_grads", *_SUBLAYERS):
        setattr(stack, f"_{name}", vars(stack).pop(name))
    rate, epsilon = vars(stack).pop("dropout_rate"), vars(stack).pop("norm_epsilon")
    if (rate is None) != (epsilon is None):
        raise NeedsPackages("one of LayerStack.dropout_rate and norm_epsilon")
    # The legacy mode of T5 1.0's gin files, in which the stack ignores its lists of sublayers.
    if rate is not None:
        stack.dropout_rate, stack.norm_epsilon = rate, epsilon
        for name, functions in _SUBLAYERS.items():
            setattr(stack, f"_{name}", [_named(function) for function in functions])


_SUBLAYERS = {
    "sublayers_initial": ("sublayer_legacy_dropout",),
    "sublayers_per_layer": (
        "sublayer_legacy_rms_norm", "sublayer_call_layer", "sublayer_legacy_dropout",
        "sublayer_residual",
    ),
    "sublayers_final": ("sublayer_legacy_final_rms_norm", "sublayer_legacy_dropout"),
}  # fmt: skip


def _named(name: str) -> Any:
    def sublayer() -> None:
        """Stands for a function of which only the name is read."""

    sublayer.__name__ = name
    return sublayer


def _finish_nothing(made: Any) -> None:
    """For constructors that add nothing."""


def _finish_attention(layer: Any) -> None:
    layer.attention_kwargs = layer.attention_kwargs or {}


_FINISHED: Mapping[str, Callable[[Any], None]] = {
    f"{TRANSFORMER}.Unitransformer": _finish_unitransformer,
    f"{TRANSFORMER}.Bitransformer": _finish_nothing,
    f"{TRANSFORMER}.LayerStack": _finish_stack,
    f"{_LAYERS}.SelfAttention": _finish_attention,
    f"{_LAYERS}.EncDecAttention": _finish_nothing,
    f"{_LAYERS}.DenseReluDense": _finish_nothing,
}
"""The classes of which a configuration that the JAX stack supports has objects."""


# ---- The arithmetic of mesh shapes, layout rules and batches -------------------------------------

# A shape is written `batch:16,model:8`, layout rules `batch:batch,d_ff:model`: a rule names the
# mesh dimension that shards a tensor's dimension. Input that Mesh TensorFlow refuses is passed on
# to it, so that the message is its own.


class Dimension(NamedTuple):
    """A dimension of a tensor or of a mesh."""

    name: str
    size: int


@dataclasses.dataclass(frozen=True)
class Shape:
    """The dimensions of a mesh."""

    dims: tuple[Dimension, ...]

    @property
    def size(self) -> int:
        """Number of processors."""
        return math.prod(each.size for each in self.dims)

    def __iter__(self) -> Iterator[Dimension]:
        return iter(self.dims)


@dataclasses.dataclass(frozen=True)
class LayoutRules:
    """Pairs of a tensor's dimension and the mesh's dimension that divides it."""

    pairs: frozenset[tuple[str, str]]

    def tensor_dimension_to_mesh_axis(self, dimension: Dimension, mesh: Shape) -> int | None:
        """The number of the mesh's dimension that divides a tensor's; None if none does."""
        axes = [i for i, each in enumerate(mesh) if (dimension.name, each.name) in self.pairs]
        if len(axes) > 1:
            raise NeedsPackages(f"{dimension.name} is divided twice by {self.pairs}")
        return axes[0] if axes else None


def convert_to_shape(value: Any) -> Shape:
    """A mesh's shape from its text, from pairs, or as it is."""
    if isinstance(value, Shape):
        return value
    try:
        pairs: Any = _pairs(value) if isinstance(value, str) else value
        as_size = int if isinstance(value, str) else lambda size: size
        dims = tuple(Dimension(name, as_size(size)) for name, size in pairs)
    except (TypeError, ValueError) as error:
        raise NeedsPackages(f"{value!r} is no shape") from error
    if len({each.name for each in dims}) < len(dims):
        raise NeedsPackages(f"a dimension is repeated in {value!r}")
    if not all(isinstance(each.name, str) and type(each.size) is int for each in dims):
        raise NeedsPackages(f"{value!r} is no shape")
    return Shape(dims)


def convert_to_layout_rules(value: Any) -> LayoutRules:
    """Layout rules from their text, from pairs, or as they are."""
    if isinstance(value, LayoutRules):
        return value
    try:
        pairs = _pairs(value) if isinstance(value, str) else value
        return LayoutRules(frozenset((tensor, mesh) for tensor, mesh in pairs))
    except (TypeError, ValueError) as error:
        raise NeedsPackages(f"{value!r} are no layout rules") from error


def _pairs(text: str) -> list[tuple[str, str]]:
    parts = [part.split(":") for part in re.split(r"[,;]", text.replace(" ", "")) if part]
    if not all(len(part) == 2 and all(part) for part in parts):
        raise NeedsPackages(f"{text!r} is no list of pairs")
    return [(first, second) for first, second in parts]


def _mesh_dim_size(layout: Any, mesh: Any, dimension: Dimension) -> int:
    """How many parts a tensor's dimension is divided into."""
    shape = convert_to_shape(mesh)
    axis = convert_to_layout_rules(layout).tensor_dimension_to_mesh_axis(dimension, shape)
    return 1 if axis is None else shape.dims[axis].size


def compute_batch_size(
    lengths: Mapping[str, int], mesh: Any, layout: Any, method_and_value: tuple[str, int]
) -> int:
    """Sequences in a batch; tokens are counted by the longest feature."""
    method, value = method_and_value
    # The longest feature alone: T0's tokens_per_batch of 2**20 at 1,024 inputs is 1,024 sequences.
    if method.startswith("tokens"):
        value, rest = divmod(value, max(lengths.values()))
        if rest:
            raise NeedsPackages(f"{method_and_value} is no whole number of sequences")
    if method.endswith("per_batch"):
        return value
    # A layout rule goes by a dimension's name alone, so a size of 0 does no harm.
    replicas = (_mesh_dim_size(layout, mesh, Dimension(name, 0)) for name in _BATCH)
    return value * math.prod(replicas)


# Mesh TensorFlow counts replicas along both of these dimensions.
_BATCH = ("batch", "outer_batch")


def _tpu_mesh_shape(
    _: Any, tpu_topology: str, model_parallelism: int, ensemble_parallelism: int | None
) -> Shape:
    # How other spellings of a topology are read depends on a flag of TensorFlow's.
    version, _, cores = tpu_topology.partition("-")
    if not (version.startswith("v") and cores.isdigit()) or type(model_parallelism) is not int:
        raise NeedsPackages(f"{tpu_topology} and {model_parallelism}")
    ensemble = ensemble_parallelism or 1
    sizes = {
        "ensemble": ensemble,
        "batch": int(cores) // model_parallelism // ensemble,
        "model": model_parallelism,
    }
    # Mesh TensorFlow leaves dimensions of size 1 out of the mesh.
    return Shape(tuple(Dimension(name, size) for name, size in sizes.items() if size > 1))


def _serialize_num_microbatches(
    _: Any,
    batch_dim: Dimension,
    sequence_length: Mapping[str, int],
    mesh_shape: Any,
    layout_rules: Any,
    tokens_per_microbatch_per_replica: int | None,
) -> int:
    """The fewest microbatches of at most so many tokens a replica."""
    if not tokens_per_microbatch_per_replica:
        return 1
    rows, rest = divmod(batch_dim.size, _mesh_dim_size(layout_rules, mesh_shape, batch_dim))
    if rest:
        raise NeedsPackages(f"{batch_dim} is not divided by {mesh_shape}")
    # As in Mesh TensorFlow, a microbatch has at least one sequence, however long, and its size
    # divides the replica's rows.
    most = max(1, tokens_per_microbatch_per_replica // max(sequence_length.values()))
    size = next(size for size in range(most, 0, -1) if rows % size == 0)
    return int(rows // size)


def _auto_train_steps(
    _: Any, batch_size: int, sequence_length: Mapping[str, int], train_tokens: int
) -> int:
    return train_tokens // (batch_size * max(sequence_length.values()))


# What the reader of the configuration takes from the module mesh_tensorflow.
_FUNCTIONS: Mapping[str, Any] = {
    "Dimension": Dimension,
    "Shape": lambda dims: Shape(tuple(dims)),
    "convert_to_shape": convert_to_shape,
    "convert_to_layout_rules": convert_to_layout_rules,
    "tensor_dim_to_mesh_dim_size": _mesh_dim_size,
}
# Configurables that are called while a configuration is read, with the stand-in for Mesh
# TensorFlow's module `transformer` as first argument.
_CALLED: Mapping[str, Callable[..., Any]] = {
    f"{TRANSFORMER}.make_bitransformer": _make_bitransformer,
    f"{TRANSFORMER}.make_layer_stack": _make_layer_stack,
    "t5.models.mesh_transformer.get_vocabulary": _get_vocabulary,
    "mesh_tensorflow.transformer.utils.tpu_mesh_shape": _tpu_mesh_shape,
    "mesh_tensorflow.transformer.utils.serialize_num_microbatches": _serialize_num_microbatches,
    "mesh_tensorflow.transformer.utils.auto_train_steps": _auto_train_steps,
}
