"""Adapters: a few parameters beside the frozen ones of a T5, named in gin as in PEFT.

Gin files call `lora` and `ia3` of this package (docs/adapters.md).
"""

from t0repro.adapters.adapter import Adapter, ia3, lora

__all__ = ["Adapter", "ia3", "lora"]
