"""Stand-ins for Mesh TensorFlow's and t5's configurables, made from their recorded signatures.

With them gin parses Mesh TensorFlow's files without importing TensorFlow: every name, argument and
default is the real one's (`signatures.json`, which `scripts/dev/mtf_signatures.py` writes). Nothing
calls them but gin, for a binding such as `@tpu_mesh_shape()`; the few that it may call are in
`_CALLED`. Everything else about a run is read from gin's bindings.
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
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import gin
from t0repro.config.configuration import NotOnJax
from t0repro.config.gin import door
from t0repro.config.gin.folders import has_module
from t0repro.tasks.registry import find_tasks
from t0repro.tasks.vocabulary import default_vocabulary

PACKAGES = ("tensorflow", "mesh_tensorflow", "t5", "seqio")
OTHERWISE = "run with --backend=mtf, which has the real packages"


@dataclasses.dataclass(frozen=True)
class DType:
    """A type of TensorFlow, by name."""

    name: str


@functools.cache
def read_signatures() -> Mapping[str, Any]:
    """The content of signatures.json."""
    return json.loads((Path(__file__).parent / "signatures.json").read_text())


@contextlib.contextmanager
def register() -> Iterator[None]:
    """Puts the stand-ins in gin's registry, in the place of the packages' own, within the block.

    gin's configuration is empty before the block, and again after it.
    """
    others = door.swap_configurables(_all())

    def import_named(name: str, *args: Any, **kwargs: Any) -> Any:
        """Imports what a gin file names, except what stand-ins describe."""
        nonlocal others
        package, _, inside = name.partition(".")
        if name in read_signatures()["modules"]:
            return None
        # Older gin files import modules that the packages no longer have: fail as they would.
        if package in PACKAGES and not has_module(package, inside):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        # What else the packages register is unknown here, and refused by name.
        if package in PACKAGES:
            return None
        # A user's module may import the packages, which then register their own configurables.
        stand_ins = door.swap_configurables(others)
        try:
            return importlib.__import__(name, *args, **kwargs)
        finally:
            others = door.swap_configurables(stand_ins)

    gin.clear_config()
    try:
        with door.replace_import(import_named):
            yield
    finally:
        gin.clear_config()
        door.swap_configurables(others)


@functools.cache
def _all() -> Mapping[str, Any]:
    """Selector -> gin's record of its stand-in."""

    @functools.cache  # each once, after those that are its defaults
    def make(selector: str) -> Any:
        record = read_signatures()["configurables"][selector]
        module, _, name = selector.rpartition(".")
        names: dict[str, Any] = {"gin": gin, "tf": _Named(DType)}
        names |= {package: _Named(make, package) for package in PACKAGES}
        signature = _read_signature(record["signature"], names)

        def stand_in(*args: Any, **kwargs: Any) -> Any:
            arguments = signature.bind(*args, **kwargs)
            arguments.apply_defaults()
            if name not in _CALLED:
                raise NotOnJax(
                    f"The JAX stack cannot call {selector}.",
                    fix=f"Bind another value than @{name}(), or {OTHERWISE}.",
                )
            return _CALLED[name](**arguments.arguments)

        stand_in.__name__ = stand_in.__qualname__ = name
        # gin asks for the signature to fill in what is bound and to refuse unknown arguments.
        stand_in.__signature__ = signature
        lists = {key: record[key] for key in ("allowlist", "denylist") if key in record}
        register: Any = gin.configurable(name, module=module, **lists)
        return register(stand_in)

    # A run on Mesh TensorFlow in this process may have locked gin's configuration.
    with gin.unlock_config(), door.register_apart() as made:
        for selector in read_signatures()["configurables"]:
            make(selector)
    return dict(made)


def signature_of(selector: str) -> inspect.Signature:
    """The recorded signature of a configurable, by its full name."""
    return inspect.signature(_all()[selector].wrapped)


def _read_signature(text: str, names: Mapping[str, Any]) -> inspect.Signature:
    """A signature as scripts/dev/mtf_signatures.py writes it.

    Args:
      text: Arguments by position, perhaps **kwargs; defaults are literals or names with dots.
      names: What such a name may begin with.
    """
    (function,) = ast.parse(f"def function{text}: ...").body
    assert isinstance(function, ast.FunctionDef)
    arguments, kwargs = function.args.args, function.args.kwarg
    required = len(arguments) - len(function.args.defaults)

    def read(node: ast.expr) -> Any:
        match node:
            case ast.Name(name):
                return names[name]
            case ast.Attribute(of, name):
                return getattr(read(of), name)
        return ast.literal_eval(node)

    defaults = [inspect.Parameter.empty] * required + [read(x) for x in function.args.defaults]
    parameters = [
        inspect.Parameter(each.arg, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default)
        for each, default in zip(arguments, defaults, strict=True)
    ]
    if kwargs:
        parameters.append(inspect.Parameter(kwargs.arg, inspect.Parameter.VAR_KEYWORD))
    return inspect.Signature(parameters)


class _Named:
    """What a recorded default names by a dotted path, such as `tf.float32`, as attributes."""

    def __init__(self, make: Callable[[str], Any], path: str = ""):
        self._make, self._path = make, path

    def __getattr__(self, name: str) -> Any:
        path = f"{self._path}.{name}" if self._path else name
        is_complete = not self._path or path in read_signatures()["configurables"]
        return self._make(path) if is_complete else _Named(self._make, path)


def _get_vocabulary(mixture_or_task_name: Any = None) -> Any:
    """The vocabularies of inputs and targets of the mixture that is named, or that gin binds."""
    name = mixture_or_task_name
    if not name:
        try:
            name = gin.query_parameter("%MIXTURE_NAME")
        except ValueError:
            # Nothing binds the macro: t5 then takes its default.
            return default_vocabulary(), default_vocabulary()
    try:
        features = find_tasks(name)[0].output_features
    except (KeyError, TypeError):
        # In SeqIO's words, to which `configuration_errors` adds the place of the name.
        raise ValueError(f"No Task or Mixture found with name {str(name)!r}") from None
    both = [features[each] for each in ("inputs", "targets") if each in features]
    # A task of one feature has one vocabulary.
    both = both if len(both) == 2 else [*features.values()][:1] * 2
    return tuple(feature.vocabulary for feature in both)


class Dimension(NamedTuple):
    """A dimension of a mesh."""

    name: str
    size: int


class TpuMesh(NamedTuple):
    """The mesh that `tpu_mesh_shape` derives from a TPU's topology."""

    dims: tuple[Dimension, ...]


def tpu_mesh_shape(
    tpu_topology: str, model_parallelism: int, ensemble_parallelism: int | None
) -> TpuMesh:
    """Mesh TensorFlow's function of this name.

    Raises:
      ValueError: For a topology that is not written `v3-256` or `8x16`, or no number of shards.
    """
    name = re.fullmatch(r"v.*-(\d+)|(\d+(?:x\d+)*)(?:_(?:un)?twisted.*)?", str(tpu_topology))
    if name is None or type(model_parallelism) is not int:
        raise ValueError(
            "tpu_mesh_shape reads a topology such as 'v3-256' or '8x16' and a number of shards, not"
            f" {tpu_topology!r} and {model_parallelism!r}"
        )
    # A chip has two cores, the default of TensorFlow's flag logical_cores_per_chip.
    cores = int(name[1]) if name[1] else 2 * math.prod(map(int, name[2].split("x")))
    ensemble = ensemble_parallelism or 1
    sizes = {
        "ensemble": ensemble,
        "batch": cores // model_parallelism // ensemble,
        "model": model_parallelism,
    }
    # Mesh TensorFlow leaves dimensions of size 1 out of the mesh.
    return TpuMesh(tuple(Dimension(name, size) for name, size in sizes.items() if size > 1))


_CALLED: Mapping[str, Callable[..., Any]] = {
    "get_vocabulary": _get_vocabulary,
    "tpu_mesh_shape": tpu_mesh_shape,
    "auto_train_steps": lambda batch_size, sequence_length, train_tokens: (
        train_tokens // (batch_size * max(sequence_length.values()))
    ),
}
