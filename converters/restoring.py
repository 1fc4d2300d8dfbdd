"""What a training run takes from a checkpoint that another run or program wrote, in any format.

Trees are flat and have T5X's names: `target/decoder/...` for parameters, `state/param_states/...`
for slots.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from t0repro.config.run_config import RunConfig
from t0repro.config.training_plan import RestoreConfig
from t0repro.converters import sources, storage
from t0repro.converters.arithmetic import open_configured
from t0repro.converters.tensors import FlatTree, StoredTree, with_parameters_in
from t0repro.errors import UserError
from t0repro.parameters import naming
from t0repro.parameters.assignment import assigned_names
from t0repro.progress import say
from t0repro.words import counted


def starting_tree(config: RunConfig, fresh: Callable[[], FlatTree]) -> StoredTree | None:
    """A checkpoint that another program wrote into model_dir, or else the plan's checkpoint.

    Args:
      config: A run without a checkpoint of its own.
      fresh: Makes a newly initialized state's tree, for whatever is not restored.

    Returns:
      A flat tree with the model's names; None for initialized parameters.

    Raises:
      UserError: If the checkpoint is missing or damaged, the model is not configured as its
        config.json says, or the plan's rules do not fit it.
    """
    model_dir, rules, model = os.fspath(config.model_dir), config.plan.restore, config.model
    if model.adapter is not None:
        # The base's parameters; checkpoints in model_dir are the adapter's.
        assert rules is not None and isinstance(rules.path, str), "RunConfig.check_adapter"
        return open_configured(sources.find_checkpoint(rules.path), model)
    if storage.is_directory(model_dir) and sources.list_checkpoints(model_dir):
        return open_configured(sources.find_checkpoint(model_dir), model)
    if rules is None:
        return None
    assert isinstance(rules.path, str), "a training run starts from one checkpoint"
    ref = sources.find_checkpoint(rules.path)
    # The shared position bias stays under its name too, which an assignment_map may give.
    tree = open_configured(ref, model, keep_shared=bool(rules.assignment_map))
    if rules.variable_filter is not None:
        place = config.provenance.get("plan.restore.variable_filter")
        return keep_matching(tree, rules.variable_filter, model.mesh_variables(), fresh, place)
    say(f"restore: {ref.path}")
    # Values, not only shapes: entries that the rules do not restore come from here.
    return restored(tree, fresh(), rules, config.provenance.get("plan.restore.path"))


def keep_matching(
    tree: StoredTree,
    pattern: str,
    variables: Mapping[str, str],
    fresh: Callable[[], FlatTree],
    place: str | None = None,
) -> StoredTree:
    """Keeps only the entries of a checkpoint whose names match a pattern.

    Parameters that do not match are those of a new state, slots start at zero, and the step starts
    at 0 unless the pattern matches `global_step`, as in Mesh TensorFlow's tpu_estimator_model_fn.

    Args:
      tree: an init_checkpoint with T5X's names.
      pattern: a regular expression on Mesh TensorFlow's names; "" keeps everything.
      variables: Mesh TensorFlow's name of each of the model's parameters, by path.
      fresh: makes the new state's tree.
      place: where the pattern was set.

    Raises:
      UserError: if the pattern matches nothing.
    """
    if not pattern:
        return dict(tree)
    # Patterns are written for Mesh TensorFlow's names.
    names = _names_in_mtf(tree, variables)
    kept = {key: tree[key] for key, name in names.items() if re.search(pattern, name)}
    if not kept:
        raise UserError(
            f"init_variable_filter {pattern!r} matches no variable.",
            where=place,
            fix=f"Names are for instance {', '.join(list(variables.values())[:3])}.",
        )
    wanted = [key for key, name in names.items() if name]
    report_unmatched(kept, wanted, {key: key for key in kept})
    # Slots and the step need no entry: `from_flat_tree` starts missing ones at zero.
    new = {key: x for key, x in fresh().items() if key.startswith(naming.PARAMETERS)}
    return kept | {key: x for key, x in new.items() if key not in kept}


def _names_in_mtf(tree: Mapping[str, Any], variables: Mapping[str, str]) -> dict[str, str]:
    """Mesh TensorFlow's names of a flat tree's entries; "" for entries that the model lacks.

    Args:
      tree: A flat tree, or its shapes.
      variables: Mesh TensorFlow's name of each parameter, by path.
    """

    def named(key: str) -> str:
        if key == naming.STEP:
            return naming.MTF_STEP
        try:
            path, slot = naming.split_key(key)
        except ValueError:
            return ""
        parameter = tree.get(naming.PARAMETERS + path)
        if path not in variables or parameter is None:
            return ""
        if slot is None:
            return variables[path]
        if len(parameter.shape) < 2 and slot in ("v_row", "v_col"):
            return ""  # an unused slot
        return naming.join_mtf_slot(variables[path], naming.slot_to_mtf(slot, parameter.shape))

    return {key: named(key) for key in tree}


def restored(
    tree: StoredTree,
    fresh: FlatTree,
    rules: RestoreConfig,
    where: str | None = None,
) -> StoredTree:
    """A checkpoint's entries under the names of the model to be trained.

    Args:
      tree: the checkpoint.
      fresh: a new state of the model, for its names and for entries missing in the checkpoint.
      rules: T5X's rules: renaming, what may be missing, rounding.
      where: where they were set.

    Raises:
      UserError: if a rule matches nothing or leads to nothing, or if slots are missing although the
        rules are strict. `from_flat_tree` reports missing parameters by name.
    """
    names = assigned_names(fresh, tree, rules.assignment_map)
    result: dict[str, Any] = {new: tree[old] for new, old in names.items() if old is not None}
    scratch = {new for new, old in names.items() if old is None}
    if rules.fallback_to_scratch:
        scratch |= {name for name in fresh if name not in result}
    result |= {name: fresh[name] for name in scratch}
    # T5X writes one entry for a slot that its optimizer does not use.
    wanted = [name for name in fresh if not name.startswith(naming.SLOTS) or fresh[name].size > 1]
    if rules.strict:
        _check_slots(result, [name for name in wanted if name.startswith(naming.SLOTS)], where)
    report_unmatched(tree, wanted, {new: old for new, old in names.items() if old is not None})
    if rules.dtype in (None, "float32"):
        return result
    return with_parameters_in(result, rules.dtype)


def report_unmatched(
    tree: Collection[str], wanted: Collection[str], filled: Mapping[str, str]
) -> None:
    """Lists the entries that a partial restore does not fill, and those that it does not use.

    Parameters are listed by name. Slots follow their parameters and are only counted, or not
    mentioned if the checkpoint has none.

    Args:
      tree: names of the checkpoint's entries.
      wanted: names of the model's entries.
      filled: restored entries, name in the model -> name in the checkpoint.
    """
    kinds = {
        "initialised, not restored": [name for name in wanted if name not in filled],
        "in the checkpoint, not used": sorted(set(tree) - set(filled.values())),
    }
    has_slots = any(name.startswith(naming.SLOTS) for name in tree)
    for kind, names in kinds.items():
        parameters = [name for name in names if name.startswith(naming.PARAMETERS)]
        slots = sum(name.startswith(naming.SLOTS) for name in names) if has_slots else 0
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
