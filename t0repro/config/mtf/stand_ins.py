"""Stand-ins for the configurables of Mesh TensorFlow and t5, made from their recorded signatures.

With them gin parses Mesh TensorFlow's files without importing TensorFlow: every name, argument and
default is the real one's (`signatures.json`, which `scripts/mtf_signatures.py` writes). What a
called stand-in returns is in `towers` and `meshes`; the rest needs the real packages.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gin
from t0repro.config.mtf import meshes, towers
from t0repro.config.mtf.packages import NeedsPackages

OPAQUE = object()
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
    transformer = modules["mesh_tensorflow.transformer.transformer"]
    # gin calls methods such as Bitransformer.decode by their class, as if it were their module.
    for tower in ("Bitransformer", "Unitransformer"):
        for name, method in vars(modules.pop(tower)).items():
            setattr(getattr(transformer, tower), name, method)
    vars(modules["t5.models.mesh_transformer"])["DEPRECATED_GIN_REFERENCES"] = tuple(
        recorded()["deprecated"]
    )
    helpers: Mapping[str, Any] = {
        "mesh_tensorflow": meshes.FUNCTIONS,
        "mesh_tensorflow.transformer.utils": {
            "build_model": functools.partial(towers.build_model, transformer),
            "inputs_vocabulary": lambda pair: pair[0],
            "targets_vocabulary": lambda pair: pair[1],
            "compute_batch_size": meshes.compute_batch_size,
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
        signature = signature_of(record["signature"], self._default)
        # Classes have a base, which may be none of the configurables; functions have no such entry.
        if "base" in record:
            base = self.of(record["base"]) if record["base"] else object
            made = _class(name, base, signature, towers.FINISHED.get(selector))
        else:
            made = _function(name, signature, functools.partial(self._call, selector))
        # By this name, `packages.described` makes gin forget the stand-ins again.
        made.__module__ = __name__
        lists = {key: record[key] for key in ("allowlist", "denylist") if key in record}
        register: Any = gin.configurable(name, module=module, **lists)
        return register(made)

    def _call(self, selector: str, arguments: Mapping[str, Any]) -> Any:
        function = {**towers.CALLED, **meshes.CALLED}.get(selector)
        if function is None:
            raise NeedsPackages(f"{selector} is called")
        transformer = self.modules["mesh_tensorflow.transformer.transformer"]
        return function(transformer, **arguments)

    def _default(self, node: ast.expr) -> Any:
        """The value of a default as recorded (see scripts/mtf_signatures.py)."""
        text = ast.unparse(node)
        if text == "...":
            return OPAQUE
        if text == "gin.REQUIRED":
            return gin.REQUIRED
        if text.startswith("tf."):
            return DType(text.removeprefix("tf."))
        return self.of(text) if text in recorded()["configurables"] else ast.literal_eval(node)


def signature_of(text: str, default: Callable[[ast.expr], Any]) -> inspect.Signature:
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
