"""Array types with shapes, as in `Float[Array, "batch length d_model"]`.

jaxtyping is optional, because the JAX core also runs on accelerator machines that have only jax,
flax, optax and orbax. There the annotations have no effect; in the tests beartype checks them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int
else:
    try:
        from jaxtyping import Array, Bool, Float, Int
    except ImportError:

        class _Unchecked:
            """Replaces a jaxtyping type: any subscript means any array."""

            def __class_getitem__(cls, item: object) -> Any:
                return Any

        Array = jax.Array
        Bool = Float = Int = _Unchecked

__all__ = ["Array", "Bool", "Float", "Int"]
