"""Dropout with Flax's keys, in layers that are called one by one or scanned."""

from __future__ import annotations

import collections
import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.core.scope import LazyRng

from t0repro.model.initialization import flax_hash
from t0repro.model.shapes import Array, Float, Int
from t0repro.partitioning.devices import draw_for_group


@dataclasses.dataclass(frozen=True, eq=False)
class ScannedLayer:
    """One iteration of a scanned tower, whose body is traced once for all layers.

    Attributes:
      index: which layer it is, from 0.
      count: number of layers.
      rng: the tower's key; Flax folds the path of each module below it into it.
      drawn: number of keys that each module has taken so far.
    """

    index: Int[Array, ""]
    count: int
    rng: LazyRng
    drawn: collections.Counter[tuple[str, ...]] = dataclasses.field(
        default_factory=collections.Counter
    )

    def key(self, path: tuple[str, ...]) -> jax.Array:
        """The key that Flax gives the module at this path below `layers_<index>`.

        Flax folds in a hash of the path, so this looks it up in a table of all layers' hashes.
        """
        # Increment before hashing: Flax numbers a module's keys from 1.
        self.drawn[path] += 1
        hashes = [
            flax_hash(*self.rng.suffix, f"layers_{layer}", *path, self.drawn[path])
            for layer in range(self.count)
        ]
        return jax.random.fold_in(self.rng.rng, jnp.asarray(hashes, jnp.uint32)[self.index])


class Dropout(nn.Module):
    """Zeroes entries and scales up the rest, with one mask for all positions along an axis.

    Mesh TensorFlow broadcasts its noise over the length: it drops a channel for a whole sequence.
    With a broadcast_axis of None, every entry is sampled separately.

    Attributes:
      rate: the fraction of entries that become zero.
      broadcast_axis: see above.
      layer: the layer that this is in, if its tower is scanned.
    """

    rate: float
    broadcast_axis: int | None
    layer: ScannedLayer | None = None

    @nn.compact
    def __call__(self, x: Float[Array, "*shape"], *, deterministic: bool) -> Float[Array, "*shape"]:
        """Returns x itself when deterministic or when the rate is zero."""
        if deterministic or self.rate == 0.0:
            return x
        keep = 1.0 - self.rate
        shape = list(x.shape)
        if self.broadcast_axis is not None:
            shape[self.broadcast_axis] = 1
        key = self.make_rng("dropout") if self.layer is None else self.layer.key(self.path)
        # All groups sample one mask for the batch, so that a sharded run drops the same entries.
        keep_mask = draw_for_group(lambda rows: jax.random.bernoulli(key, keep, rows), tuple(shape))
        return x * (keep_mask.astype(x.dtype) / jnp.asarray(keep, x.dtype))
