"""t0repro: the T0 recipe on Mesh TensorFlow and on JAX, from the same gin parameters.

The names in `__all__` are the Python interface that docs/python.md shows. Each is imported when it
is first used, so that `import t0repro` stays fast.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from t0repro.config.recipe import t5_1_1, training_config
    from t0repro.converters.convert import convert
    from t0repro.data.cached import CachedBatches
    from t0repro.errors import UserError
    from t0repro.reports.report import load_report
    from t0repro.runs.encode import encode
    from t0repro.runs.flax_t5 import FlaxT5EncoderModel
    from t0repro.runs.text_scores import score

__version__ = "0.1.0"
__all__ = [
    "CachedBatches",
    "FlaxT5EncoderModel",
    "UserError",
    "convert",
    "encode",
    "load_report",
    "score",
    "t5_1_1",
    "training_config",
]

_MODULES = {
    "CachedBatches": "data.cached",
    "FlaxT5EncoderModel": "runs.flax_t5",
    "UserError": "errors",
    "convert": "converters.convert",
    "encode": "runs.encode",
    "load_report": "reports.report",
    "score": "runs.text_scores",
    "t5_1_1": "config.recipe",
    "training_config": "config.recipe",
}


def __getattr__(name: str) -> object:
    if name in _MODULES:
        return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
