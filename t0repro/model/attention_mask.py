"""Which query of attention sees which key, in a few numbers per position."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp

from t0repro.model.shapes import Array, Bool, Float, Int

# What Mesh TensorFlow adds to the logits of positions that are not visible
# (attention.visibility_mask_to_attention_bias).
INVISIBLE = -1e9


class AttentionMask(NamedTuple):
    """Which query sees which key: of its own segment, those whose order is at most its own.

    With packed rows, for example, and in a decoder:

        segments   1 1 1 2 2 0     padding, segment 0, sees only padding
        order      0 1 2 3 4 5     a query sees itself and what is before it

    Attributes:
      query_segments: int32.
      key_segments: int32.
      query_order: int32; None if order does not matter.
      key_order: int32; None likewise.
    """

    query_segments: Int[Array, "#batch #length"]
    key_segments: Int[Array, "#batch keys"]
    query_order: Int[Array, "#batch #length"] | None = None
    key_order: Int[Array, "#batch keys"] | None = None

    def matrix(self) -> Bool[Array, "#batch 1 #length keys"]:
        """Whether each query (third axis) sees each key (fourth axis)."""
        visible = self.query_segments[:, None, :, None] == self.key_segments[:, None, None, :]
        if self.query_order is None or self.key_order is None:
            return visible
        return visible & (self.query_order[:, None, :, None] >= self.key_order[:, None, None, :])

    def broadcast(self, batch: int, length: int, keys: int) -> AttentionMask:
        """The visibility with all four arrays present, in these sizes."""
        query_order, key_order = self.query_order, self.key_order
        if query_order is None or key_order is None:
            query_order = key_order = jnp.zeros((1, 1), jnp.int32)
        sizes = (length, keys, length, keys)
        arrays = (self.query_segments, self.key_segments, query_order, key_order)
        return AttentionMask(
            *(
                jnp.broadcast_to(x.astype(jnp.int32), (batch, size))
                for x, size in zip(arrays, sizes, strict=True)
            )
        )


def mask_bias(visible: Bool[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Float32 bias for attention logits: 0 where visible, -1e9 elsewhere."""
    return jnp.where(visible, jnp.float32(0.0), jnp.float32(INVISIBLE))
