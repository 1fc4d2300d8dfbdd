"""Records the signatures of Mesh TensorFlow's and t5's configurables, from the real packages.

    python scripts/dev/mtf_signatures.py

It writes t0repro/config/mtf/signatures.json, with which the JAX stack reads Mesh TensorFlow's gin
files without importing TensorFlow. Run it after an update of mesh_tensorflow, t5 or gin-config;
tests/config/test_stand_ins.py compares the file with the installed packages.

A signature is recorded as Python prints it, except for defaults that are not literals:

    gin.REQUIRED                     gin's mark for an argument without a default
    tf.float32                       a type of TensorFlow
    mesh_tensorflow.….LayerStack     another configurable
    ...                              anything else

Only annotations that admit a bool are recorded; nothing reads the others.
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import gin.config

FILE = Path(__file__).parents[2] / "t0repro" / "config" / "mtf" / "signatures.json"
PACKAGES = ("mesh-tensorflow", "t5", "gin-config")
_RECORDED = ("mesh_tensorflow", "t5", "seqio")


def record() -> dict[str, Any]:
    """Everything that signatures.json holds, from the installed packages."""
    from t0repro import compat

    compat.install()
    from t5.models import mesh_transformer, mesh_transformer_main

    utils = importlib.import_module("mesh_tensorflow.transformer.utils")
    configurables = {
        selector: configurable
        for selector, configurable in sorted(gin.config._REGISTRY.items())
        if configurable.wrapped.__module__.startswith((*_RECORDED, "gin.tf"))
    }
    return {
        "versions": {name: version(name) for name in PACKAGES},
        "modules": sorted(_modules()),
        "deprecated": sorted(mesh_transformer.DEPRECATED_GIN_REFERENCES),
        "flags": [
            flag
            for module in (mesh_transformer_main.__name__, utils.__name__)
            for flag in _flags(module)
        ],
        "configurables": {
            selector: _described(configurable.wrapped, configurable)
            for selector, configurable in configurables.items()
        },
    }


def _modules() -> list[str]:
    """Modules that `import` lines name and that register nothing else."""
    known = {selector for selector, _ in gin.config._REGISTRY.items()}
    importlib.import_module("t5.data.mixtures")  # t5's own gin files name it
    assert known == {selector for selector, _ in gin.config._REGISTRY.items()}
    return [
        name
        for name in sys.modules
        if name.partition(".")[0] in _RECORDED and name != "t5.models.hf_model"  # needs torch
    ]


def _described(function: Any, configurable: Any) -> dict[str, Any]:
    described: dict[str, Any] = {"signature": _signature(function)}
    for name in ("allowlist", "denylist"):
        if listed := getattr(configurable, name):
            described[name] = sorted(listed)
    return described


def registered(function: Any) -> str | None:
    """The selector of a function or class; None if it is not configurable."""
    found = gin.config._inverse_lookup(function)
    return found.selector if found else None


def _signature(function: Any) -> str:
    parameters = []
    for parameter in inspect.signature(function).parameters.values():
        text = str(parameter.replace(annotation=parameter.empty, default=parameter.empty))
        if parameter.default is not parameter.empty:
            text += f"={_default(parameter.default)}"
        parameters.append((parameter.kind, text))
    texts = [text for _, text in parameters]
    kinds = [kind for kind, _ in parameters]
    if inspect.Parameter.KEYWORD_ONLY in kinds and inspect.Parameter.VAR_POSITIONAL not in kinds:
        texts.insert(kinds.index(inspect.Parameter.KEYWORD_ONLY), "*")
    return f"({', '.join(texts)})"


def _default(value: Any) -> str:
    if value is gin.REQUIRED:
        return "gin.REQUIRED"
    if type(value).__name__ == "DType":
        return f"tf.{value.name}"
    if isinstance(value, str):
        return repr(str(value))  # TensorFlow Datasets' names of splits are subclasses
    if callable(value):
        return registered(value) or "..."
    try:
        if gin.config._is_literally_representable(value):
            return repr(value)
    except Exception as error:
        raise ValueError(f"{value!r} cannot be recorded") from error
    return "..."


def _flags(module: str) -> list[dict[str, Any]]:
    from absl import flags

    return [
        {
            "name": flag.name,
            "kind": _kind(flag),
            "default": flag.default,
            # absl adds the choices before a help text, and how to repeat a flag after it.
            "help": re.sub(r"^<[^>]*>: |;\s+repeat this option.*", "", flag.help, flags=re.S),
        }
        | ({"choices": flag.parser.enum_values} if hasattr(flag.parser, "enum_values") else {})
        for flag in flags.FLAGS.flags_by_module_dict()[module]
    ]


def _kind(flag: Any) -> str:
    """The name of absl's function DEFINE_<kind> that makes such a flag."""
    kind = flag.parser.flag_type().replace("comma separated list of strings", "list")
    kind = {"bool": "boolean", "int": "integer", "string enum": "enum"}.get(kind, kind)
    return f"multi_{kind}" if type(flag).__name__ == "MultiFlag" else kind


if __name__ == "__main__":
    FILE.write_text(json.dumps(record(), indent=1, ensure_ascii=False) + "\n")
    print(FILE)
