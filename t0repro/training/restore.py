"""T5X's rules for starting from a checkpoint: renaming, what may be missing, and rounding.

Names are those of a flat tree (t0repro.training.checkpoints), as in T5X: `target/decoder/...` for
parameters, `state/param_states/...` for slots.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np

from t0repro.config.training_plan import RestoreConfig
from t0repro.errors import UserError
from t0repro.parameters import layout
from t0repro.parameters.assignment import assigned_names
from t0repro.training.train_state import FlatTree, with_parameters_in
from t0repro.words import counted

Say = Callable[[str], None]


def restored(
    tree: FlatTree,
    fresh: FlatTree,
    config: RestoreConfig,
    where: str | None = None,
    say: Say = lambda line: None,
) -> dict[str, np.ndarray]:
    """A checkpoint's entries under the names of the model that is about to be trained.

    Args:
      tree: the checkpoint.
      fresh: a new state of the model, for its names and for what the checkpoint does not give.
      config: the rules.
      where: where they were set.
      say: receives what `say_unmatched` says.

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
    # T5X writes one entry in place of a slot that its optimizer does not use.
    wanted = [name for name in fresh if not name.startswith(layout.SLOTS) or fresh[name].size > 1]
    if config.strict:
        _check_slots(result, [name for name in wanted if name.startswith(layout.SLOTS)], where)
    say_unmatched(tree, wanted, {new: old for new, old in names.items() if old is not None}, say)
    if config.dtype in (None, "float32"):
        return result
    return with_parameters_in(result, config.dtype)


def say_unmatched(
    tree: Collection[str], wanted: Collection[str], filled: Mapping[str, str], say: Say
) -> None:
    """Lists what a partial restore leaves new, and what it leaves in the checkpoint.

    Parameters are listed by name. Slots follow their parameters and are counted, and not at all if
    the checkpoint has none.

    Args:
      tree: names of the checkpoint's entries.
      wanted: names of the model's entries.
      filled: name in the model -> name in the checkpoint, of what is restored.
      say: receives a line for each kind; none if everything is restored.
    """
    kinds = {
        "initialised, not restored": [name for name in wanted if name not in filled],
        "in the checkpoint, not used": sorted(set(tree) - set(filled.values())),
    }
    has_slots = any(name.startswith(layout.SLOTS) for name in tree)
    for kind, names in kinds.items():
        parameters = [name for name in names if name.startswith(layout.PARAMETERS)]
        slots = sum(name.startswith(layout.SLOTS) for name in names) if has_slots else 0
        if parameters or slots:
            counts = f"{counted(len(parameters), 'parameter')} and {counted(slots, 'slot')}"
            say(f"restore: {counts} {kind}{': ' if parameters else ''}{', '.join(parameters)}")


def _check_slots(tree: Collection[str], wanted: Sequence[str], where: str | None) -> None:
    """Refuses a checkpoint that has only some of the slots; one without any is accepted."""
    missing = [name for name in wanted if name not in tree]
    if missing and len(missing) < len(wanted):
        raise UserError(
            f"The checkpoint lacks {len(missing)} of {len(wanted)} slots, for instance"
            f" {missing[0]}.",
            where=where,
            fix="Bind the optimizer that trained it; or utils.RestoreCheckpointConfig.strict ="
            " False, to start the missing ones at zero.",
        )
