"""What a run starts from when its folder has no checkpoint of its own, read from any format."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from t0repro.config.run_config import RunConfig
from t0repro.converters import sources
from t0repro.converters.arithmetic import check_configured, open_configured, repeated_biases
from t0repro.training.restore import Say, restored
from t0repro.training.start import keep_matching
from t0repro.training.train_state import OpenTree, TrainState, to_flat_tree


def starting_tree(config: RunConfig, fresh: Callable[[], TrainState], say: Say) -> OpenTree | None:
    """A checkpoint that another program wrote into model_dir, or else what the plan restores.

    Args:
      config: A run without a checkpoint of its own.
      fresh: Makes the state that it would start with otherwise, for what is not restored.
      say: Receives lines about what is restored.

    Returns:
      A flat tree with the model's names; None for new parameters.

    Raises:
      UserError: If the checkpoint is missing or damaged, the model is not configured as its
        config.json says, or the plan's rules do not fit it.
    """
    model_dir, rules = Path(config.model_dir), config.plan.restore
    if model_dir.is_dir() and sources.list_checkpoints(model_dir):
        return open_configured(sources.find_checkpoint(model_dir), config.model)
    if rules is None:
        return None
    assert isinstance(rules.path, str), "a training starts from one checkpoint"
    ref = sources.find_checkpoint(rules.path)
    places = config.provenance
    if rules.variable_filter is not None:
        place = places.get("plan.restore.variable_filter")
        tree = open_configured(ref, config.model)
        return keep_matching(tree, rules.variable_filter, config.model, fresh, place, say)
    check_configured(ref, config.model)
    say(f"restore: {ref.path}")
    tree: dict[str, Any] = dict(sources.load_any(ref.path))
    # A model with a position bias in each layer may start from one whose layers share it.
    tree |= {name: tree[shared] for name, shared in repeated_biases(tree, config.model).items()}
    # Values, not only shapes: what the rules leave out of the checkpoint is taken from here.
    new = to_flat_tree(jax.device_get(fresh()))
    return restored(tree, new, rules, places.get("plan.restore.path"), say)
