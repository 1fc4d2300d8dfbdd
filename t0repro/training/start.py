"""Takes only some of the variables of another run's checkpoint, as Mesh TensorFlow does."""

from __future__ import annotations

import re
from collections.abc import Callable

import flax.traverse_util
import numpy as np

from t0repro.config.run_config import ModelConfig
from t0repro.errors import UserError
from t0repro.parameters import layout
from t0repro.training.restore import Say, say_unmatched
from t0repro.training.train_state import OpenTree, TrainState


def keep_matching(
    tree: OpenTree,
    pattern: str,
    model: ModelConfig,
    fresh: Callable[[], TrainState],
    place: str | None = None,
    say: Say = lambda line: None,
) -> OpenTree:
    """Keeps only those entries of a checkpoint whose names match a pattern.

    Parameters that do not match are those of a new state, slots start at zero, and the step starts
    at 0 unless the pattern matches `global_step`, as in Mesh TensorFlow's tpu_estimator_model_fn.

    Args:
      tree: an init_checkpoint with T5X's names.
      pattern: a regular expression on Mesh TensorFlow's names; "" keeps everything.
      model: the model.
      fresh: makes the new state.
      place: where the pattern was set.
      say: receives what `t0repro.training.restore.say_unmatched` says.

    Raises:
      UserError: if the pattern matches nothing.
    """
    if not pattern:
        return dict(tree)
    names = model.mesh_variables()
    kept = {
        key: value
        for key, value in tree.items()
        # Patterns are written for Mesh TensorFlow's names.
        if re.search(pattern, _mesh_name(key, names, tree))
    }
    if not kept:
        raise UserError(
            f"init_variable_filter {pattern!r} matches no variable.",
            where=place,
            fix=f"Names are for instance {', '.join(list(names.values())[:3])}.",
        )
    wanted = [name for name in tree if _mesh_name(name, names, tree)]
    say_unmatched(kept, wanted, {name: name for name in kept}, say)
    for path, value in flax.traverse_util.flatten_dict(fresh().params, sep="/").items():
        # Slots and the step need no entry: `from_flat_tree` starts missing ones at zero.
        kept.setdefault(layout.PARAMETERS + path, np.asarray(value))
    return kept


def _mesh_name(key: str, names: dict[str, str], tree: OpenTree) -> str:
    """Mesh TensorFlow's name of a checkpoint's entry; "" if the model has no such entry."""
    if key == layout.STEP:
        return layout.MTF_STEP
    try:
        path, slot = layout.split_key(key)
    except ValueError:
        return ""
    parameter = tree.get(layout.PARAMETERS + path)
    if path not in names or parameter is None:
        return ""
    if slot is None:
        return names[path]
    if len(parameter.shape) < 2 and slot in ("v_row", "v_col"):
        return ""  # an unused slot
    return layout.join_mtf_slot(names[path], layout.slot_to_mtf(slot, parameter.shape))
