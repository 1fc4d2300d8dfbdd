"""Known errors, injected into the JAX side to show that a comparison finds them.

The names are those of `t0repro parity --inject`:

    slot-swap         the factored slots of square matrices are not exchanged on their way between
                      the stacks, as in T5X's importer
    bucket-eps        an epsilon inside the logarithm of the relative-position buckets; it is 0.1
                      here, because T5X's own of 1.2e-7 moves no offset up to 2048
    loss-denominator  the loss is divided by the number of real targets, padding left out
    no-shift          the decoder reads the target that it is to predict
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from t0repro.config.run_config import RunConfig
from t0repro.errors import UserError
from t0repro.parameters import naming
from t0repro.training.train_state import FlatTree

Error = Literal["slot-swap", "bucket-eps", "loss-denominator", "no-shift"]
EPSILON = 0.1


@contextlib.contextmanager
def injected(error: Error | None) -> Iterator[None]:
    """Patches the error into the JAX model within the block, and clears JAX's caches."""
    from t0repro.model import layers, t5

    replaced: dict[tuple[Any, str], Any] = {}
    if error == "bucket-eps":
        replaced[layers, "relative_position_bucket"] = _bucket_with_epsilon
    elif error == "no-shift":
        replaced[t5, "shift_right"] = lambda targets, segments: jnp.abs(targets)
    before = {place: getattr(*place) for place in replaced}
    _replace(replaced)
    try:
        yield
    finally:
        _replace(before)


def _replace(values: Mapping[tuple[Any, str], Any]) -> None:
    for (module, name), value in values.items():
        setattr(module, name, value)
    # Functions already compiled would continue using the old ones.
    if values:
        jax.clear_caches()


def with_error(
    error: Error | None, config: RunConfig, batches: Any, start: FlatTree
) -> tuple[RunConfig, FlatTree]:
    """Puts the error into the configuration or the starting tree, if that is where it belongs.

    Raises:
      UserError: if the error would change nothing here.
    """
    if error == "loss-denominator":
        targets = batches[0]["targets"]
        real = int(np.count_nonzero(targets))
        if real == targets.size:
            raise _changes_nothing(error, "there is no padding in the first batch's targets")
        model = dataclasses.replace(config.model, loss_denominator=float(real))
        return dataclasses.replace(config, model=model), start
    if error == "slot-swap":
        return config, without_exchange(start)
    return config, start


def without_exchange(tree: FlatTree) -> dict[str, np.ndarray]:
    """Swaps v_row and v_col of every parameter whose two largest axes are equally long."""
    swapped = dict(tree)
    for key in tree:
        path, slot = naming.split_key(key) if key != naming.STEP else ("", None)
        if slot != "v_row" or tree[key].shape == (1,):
            continue
        shape = tree[naming.PARAMETERS + path].shape
        other = naming.slot_key(path, "v_col")
        # A tie of the two largest axes, as in layout.factored_slots.
        if sorted(shape)[-1] == sorted(shape)[-2]:
            swapped[key], swapped[other] = tree[other], tree[key]
    if all(swapped[key] is tree[key] for key in tree):
        raise _changes_nothing("slot-swap", "no square matrix of this model has factored slots")
    return swapped


def _changes_nothing(error: str, why: str) -> UserError:
    return UserError(
        f"--inject {error} would change nothing: {why}.",
        where="--inject",
        fix="Inject another error, or compare on a model and batches in which it matters.",
    )


def _bucket_with_epsilon(
    offset: np.ndarray,
    bidirectional: bool,
    num_buckets: int = 32,
    max_distance: int = 128,
    *,
    epsilon: bool = False,
) -> np.ndarray:
    """`layers.relative_position_bucket` with EPSILON added to the logarithm's argument."""
    del epsilon  # T5X's, which is too small to change a bucket
    bucket = np.zeros_like(offset)
    distance = -offset
    if bidirectional:
        num_buckets //= 2
        bucket = bucket + (distance < 0).astype(np.int32) * num_buckets
        distance = np.abs(distance)
    distance = np.maximum(distance, 0)
    exact = num_buckets // 2
    scaled = np.log(np.maximum(distance, 1) / exact + EPSILON) / math.log(max_distance / exact)
    large = np.minimum(exact + (scaled * (num_buckets - exact)).astype(np.int32), num_buckets - 1)
    return (bucket + np.where(distance < exact, distance, large)).astype(np.int32)
