"""The checkpoints that T5X's eval and infer restore: given ones, the latest, all, or new ones."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from t0repro.config.inference_plan import InferencePlan
from t0repro.config.training_plan import RestoreConfig
from t0repro.converters import jax_tree, sources, storage
from t0repro.converters.arithmetic import check_configured, open_configured, repeated_biases
from t0repro.converters.tensors import CheckpointRef, StoredTensor
from t0repro.converters.witnesses import INTEGRITY
from t0repro.errors import UserError
from t0repro.evaluation.opened import Checkpoint, on_devices
from t0repro.parameters import layout
from t0repro.partitioning.processes import from_first
from t0repro.progress import say
from t0repro.redaction import without_passwords
from t0repro.runs.checkpoint_choice import checkpoints_in

SECONDS_BETWEEN_LOOKS = 5.0


def chosen(restore: RestoreConfig) -> list[CheckpointRef]:
    """The checkpoints that are there, by ascending step within a path.

    Raises:
      UserError: If a path has no checkpoint.
    """
    refs: list[CheckpointRef] = []
    for path in _paths(restore):
        if restore.mode == "all":
            present = checkpoints_in(path)
            if not present:
                sources.find_checkpoint(path)  # raises, and says what is wrong
            refs += present
        else:
            # The latest may be another one by the time that another process looks.
            found = from_first(lambda path=path: str(sources.find_checkpoint(path).path))
            refs.append(sources.find_checkpoint(found))
    return refs


def is_there(restore: RestoreConfig) -> bool:
    """Whether each path has a checkpoint, so that `chosen` finds it."""

    def found() -> bool:
        try:
            return all(sources.find_checkpoint(path) for path in _paths(restore))
        except UserError:
            return False

    # Decided by the first process: the others would wait for what it says of a checkpoint.
    return from_first(found)


def _paths(restore: RestoreConfig) -> Sequence[str]:
    return [restore.path] if isinstance(restore.path, str) else restore.path


def coming(
    restore: RestoreConfig,
    until: int | None = None,
    seconds: float = SECONDS_BETWEEN_LOOKS,
) -> Iterator[CheckpointRef]:
    """Yields checkpoints as they appear in a folder, each once, beginning with those there.

    Mode "latest" skips a checkpoint that has a successor by the time it would be evaluated.

    Args:
      restore: Mode "latest" or "all".
      until: Ends after a checkpoint of this step or a later one; None never ends.
      seconds: Between polls of the folder.

    Raises:
      UserError: If the mode is "specific", which no new checkpoint changes.
    """
    if restore.mode == "specific" or not isinstance(restore.path, str):
        raise UserError(
            "There is nothing to watch: the checkpoints are named one by one.",
            where="utils.RestoreCheckpointConfig.mode",
            fix="Bind 'latest' or 'all' and the path of their folder, or leave --watch out.",
        )
    seen: set[str] = set()
    while True:
        present = [ref for ref in checkpoints_in(restore.path) if ref.path not in seen]
        if restore.mode == "latest":
            seen.update(ref.path for ref in present[:-1])
            present = present[-1:]
        for ref in present[:1]:  # one at a time: the folder may change meanwhile
            seen.add(ref.path)
            yield ref
            if until is not None and (ref.step or 0) >= until:
                return
        if not present:
            say(f"waiting for a new checkpoint in {restore.path}")
            time.sleep(seconds)


def own_path(ref: CheckpointRef) -> str:
    """A checkpoint's own path, however it was given: relative, or through a symbolic link."""
    path = storage.local_path(ref.path)
    return without_passwords(path) if storage.is_remote(path) else os.path.realpath(path)


def identity(ref: CheckpointRef) -> str | None:
    """What tells a checkpoint from one that took its place at the same path; None if it is gone.

    Its values are not read: who asks this has nothing else to do if the checkpoint is known.
    """
    # The first process's: copies on other machines have other modification times.
    return from_first(lambda: _identity(ref))


def _identity(ref: CheckpointRef) -> str | None:
    try:
        account = _account(ref)
    except FileNotFoundError:  # removed meanwhile, as by a training run's retention
        account = b""
    return hashlib.blake2b(account, digest_size=8).hexdigest() if account else None


def _account(ref: CheckpointRef) -> bytes:
    """What is written about a checkpoint's files; empty if there are none."""
    # In T5X's layout the tree, with its list of files, has a folder of its own.
    for folder in (ref.path, storage.join(ref.path, jax_tree.STATE)):
        listing = storage.join(folder, INTEGRITY)
        if storage.is_file(listing):
            return storage.read(listing)  # checksums, which a copy has too
    # Files that come without such a list are known by their modification times, since all
    # checkpoints of a model have the same names and sizes. A copy put back in place counts as
    # another one: to do its work once more does less harm than to keep another one's results.
    files = sources.fingerprint(dataclasses.replace(ref, path=own_path(ref)))
    return json.dumps(sorted(files.items())).encode() if files else b""


def opened(plan: InferencePlan, ref: CheckpointRef) -> Checkpoint:
    """A checkpoint of any format with the plan's model; slots are not read.

    Raises:
      UserError: If a parameter is missing or has another shape than the model's, or the model is
        not configured as the checkpoint's config.json says.
    """
    from t0repro.model.t5 import T5, held_for_evaluation, parameter_shapes
    from t0repro.partitioning.devices import choose, line_of
    from t0repro.training.train_state import with_parameters_in

    model = T5(plan.model, plan.dtypes)
    # Shapes alone: nothing is drawn.
    shapes = parameter_shapes(model)
    partitioning = choose(plan.layout, plan.model, where="partitioning.PjitPartitioner")
    if partitioning.mesh.size > 1:
        print(line_of(partitioning, plan.layout), file=sys.stderr)
    held = partitioning.placed(held_for_evaluation(model, shapes))
    tree = _tree(plan, ref, shapes)
    if plan.restore.dtype not in (None, "float32"):
        # Held in the model's own types all the same, with the values that this type can hold.
        tree = with_parameters_in(tree, plan.restore.dtype)
    return on_devices(tree, held, model, str(ref.path))


def generating_model(plan: InferencePlan, network: Any) -> Any:
    """What generates and scores: the network itself, or the user's model of it."""
    if plan.user_model is None:
        return network
    from t0repro.data.vocabularies import seqio_vocabulary
    from t0repro.training.assembling import user_model

    vocabularies = (
        seqio_vocabulary(plan.input_vocabulary),
        seqio_vocabulary(plan.output_vocabulary),
    )
    return user_model(plan.user_model, network, None, vocabularies, plan.decoding)


def _tree(plan: InferencePlan, ref: CheckpointRef, shapes: Any) -> dict[str, Any]:
    """A checkpoint's step and parameters under the model's names."""
    if not plan.restore.assignment_map:
        return open_configured(ref, plan.model, slots=False)
    import flax.traverse_util

    from t0repro.parameters.assignment import assigned_names

    check_configured(ref, plan.model)
    reader = sources.open_checkpoint(ref)
    wanted = [f"target/{name}" for name in flax.traverse_util.flatten_dict(shapes, sep="/")]
    repeated = repeated_biases(reader.tensors, plan.model)
    stored = {*reader.tensors, *repeated}
    names = assigned_names(wanted, stored, plan.restore.assignment_map)
    tree = {
        name: StoredTensor.of(reader, repeated.get(source, source))
        for name, source in names.items()
        if source is not None
    }
    # The map is for parameters; the step has one name everywhere.
    return tree | {layout.STEP: StoredTensor.of(reader, layout.STEP)}
