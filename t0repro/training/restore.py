"""T5X's rules for starting from a checkpoint: renaming, what may be missing, and rounding.

Names are those of a flat tree (t0repro.training.checkpoints), as in T5X: `target/decoder/...` for
parameters, `state/param_states/...` for slots.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from t0repro.config.training_plan import RestoreConfig
from t0repro.errors import UserError
from t0repro.parameters import layout
from t0repro.parameters.assignment import assigned_names
from t0repro.training.train_state import FlatTree, with_parameters_in


def restored(
    tree: FlatTree, fresh: FlatTree, config: RestoreConfig, where: str | None = None
) -> dict[str, np.ndarray]:
    """A checkpoint's entries under the names of the model that is about to be trained.

    Args:
      tree: the checkpoint.
      fresh: a new state of the model, for its names and for what the checkpoint does not give.
      config: the rules.
      where: where they were set.

    Raises:
      UserError: if a rule matches nothing or leads to nothing, or if slots are missing although
        the rules are strict. A missing parameter is left to `from_flat_tree`, which names it.
    """
    names = assigned_names(fresh, tree, config.assignment_map)
    result = {new: tree[old] for new, old in names.items() if old is not None}
    scratch = {new for new, old in names.items() if old is None}
    if config.fallback_to_scratch:
        scratch |= {name for name in fresh if name not in result}
    result |= {name: fresh[name] for name in scratch}
    if config.strict:
        _check_slots(result, fresh, where)
    if config.dtype in (None, "float32"):
        return result
    return with_parameters_in(result, config.dtype)


def _check_slots(tree: Mapping[str, np.ndarray], fresh: FlatTree, where: str | None) -> None:
    """Refuses a checkpoint that has only some of the slots; one without any is accepted."""
    # T5X writes one entry in place of a slot that its optimizer does not use.
    wanted = [name for name in fresh if name.startswith(layout.SLOTS) and fresh[name].size > 1]
    missing = [name for name in wanted if name not in tree]
    if missing and len(missing) < len(wanted):
        raise UserError(
            f"The checkpoint lacks {len(missing)} of {len(wanted)} slots, for instance"
            f" {missing[0]}.",
            where=where,
            fix="Bind the optimizer that trained it; or utils.RestoreCheckpointConfig.strict ="
            " False, to start the missing ones at zero.",
        )
