"""The checkpoints that T5X's eval and infer restore."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator
from typing import Any

import flax.traverse_util

from t0repro import storage
from t0repro.config.checkpoints import RestoreConfig
from t0repro.config.run import InferenceRun
from t0repro.converters import finding, jax_tree, sources
from t0repro.converters.model_files import open_configured
from t0repro.converters.tensors import CheckpointRef, cast_parameters
from t0repro.converters.witnesses import INTEGRITY
from t0repro.errors import UserError
from t0repro.evaluation.opened import Checkpoint, load_on_devices
from t0repro.parameters import naming
from t0repro.partitioning.processes import broadcast_from_first
from t0repro.runs.checkpoint_choice import checkpoints_in, model_on_devices, new_checkpoints
from t0repro.words import remove_passwords

POLL_SECONDS = 5.0


def choose_checkpoints(restore: RestoreConfig) -> list[CheckpointRef]:
    """The existing checkpoints, by ascending step within a path; an adapter's with its base.

    Raises:
      UserError: If a path has no checkpoint, or the adapter's path no adapter.
    """
    refs: list[CheckpointRef] = []
    for path in restore.paths:
        if restore.mode == "all":
            present = checkpoints_in(path)
            if not present:
                finding.find_checkpoint(path)  # raises, and says what is wrong
            refs += present
        else:
            # By the time another process looks, the latest may be a newer one.
            found = broadcast_from_first(lambda path=path: str(finding.find_checkpoint(path).path))
            refs.append(finding.find_checkpoint(found))
    if restore.adapter is None:
        return refs
    adapter = restore.adapter
    own = finding.find_adapter(
        broadcast_from_first(lambda: str(finding.find_adapter(adapter).path))
    )
    return [dataclasses.replace(own, base=ref.path) for ref in refs]


def is_there(restore: RestoreConfig) -> bool:
    """Whether each path has a checkpoint that `choose_checkpoints` finds, and the adapter's too."""

    def is_found() -> bool:
        try:
            paths = [*restore.paths, *([restore.adapter] if restore.adapter else [])]
            return all(finding.find_checkpoint(path) for path in paths)
        except UserError:
            return False

    # Only the first process checks; the others receive its answer.
    return broadcast_from_first(is_found)


def wait_for_checkpoints(
    restore: RestoreConfig, until: int | None, seconds: float
) -> Iterator[CheckpointRef]:
    """Yields checkpoints as they appear in a folder, each once, starting with the existing ones.

    Mode "latest" skips a checkpoint that has a successor by the time it would be evaluated.

    Args:
      restore: Mode "latest" or "all".
      until: Ends after a checkpoint of this step or a later one; None never ends.
      seconds: Polling interval of the folder.

    Raises:
      UserError: If the mode is "specific" or an adapter is named: then no new checkpoint can
        appear.
    """
    if restore.adapter is not None:
        raise UserError(
            "There is nothing to watch: an adapter has one base.",
            where="utils.RestoreCheckpointConfig.adapter",
            fix="To watch a run that trains an adapter, bind its folder as the path, and no"
            " adapter: each of its checkpoints is read with its base.",
        )
    if restore.mode == "specific" or not isinstance(restore.path, str):
        raise UserError(
            "There is nothing to watch: the checkpoints are named one by one.",
            where="utils.RestoreCheckpointConfig.mode",
            fix="Bind 'latest' or 'all' and the path of their folder, or leave --watch out.",
        )
    for ref in new_checkpoints(restore.path, seconds, skips=restore.mode == "latest"):
        yield ref
        if until is not None and (ref.step or 0) >= until:
            return


def own_path(ref: CheckpointRef) -> str:
    """A checkpoint's own path, however it was given: relative, or through a symbolic link."""
    return remove_passwords(storage.real(storage.local_path(ref.path)))


def identity(ref: CheckpointRef) -> str | None:
    """Tells a checkpoint from its replacement at the same path; None if it is gone.

    Reads no values: for a known checkpoint, the caller has nothing else to do.
    """
    # The first process's: copies on other machines have other modification times.
    return broadcast_from_first(lambda: _identity(ref))


def _identity(ref: CheckpointRef) -> str | None:
    try:
        account = _account(ref)
    except FileNotFoundError:  # removed meanwhile, as by a training run's retention
        account = b""
    return hashlib.blake2b(account, digest_size=8).hexdigest() if account else None


def _account(ref: CheckpointRef) -> bytes:
    """The listing of a checkpoint's files with checksums; empty if there are no files."""
    # In T5X's layout the tree, with its list of files, has a folder of its own.
    for folder in (ref.path, storage.join(ref.path, jax_tree.STATE)):
        listing = storage.join(folder, INTEGRITY)
        if storage.is_file(listing):
            return storage.read(listing)  # checksums, which a copy has too
    # Without such a listing, identify files by modification time, since all checkpoints of a model
    # have the same names and sizes. A restored copy then counts as another checkpoint: repeating
    # its work does less harm than keeping the results of another one.
    files = sources.fingerprint(dataclasses.replace(ref, path=own_path(ref)))
    return json.dumps(sorted(files.items())).encode() if files else b""


def open_restored(plan: InferenceRun, ref: CheckpointRef) -> Checkpoint:
    """A checkpoint of any format with the plan's model; slots are not read.

    Raises:
      UserError: If a parameter is missing or has another shape than the model's, or the model is
        not configured as the checkpoint's config.json says.
    """
    model, shapes = model_on_devices(plan, "partitioning.PjitPartitioner")
    tree = _tree(plan, ref, shapes)
    if plan.restore.dtype not in (None, "float32"):
        # Still stored in the model's own dtype, with values rounded to this one.
        tree = cast_parameters(tree, plan.restore.dtype)
    return load_on_devices(tree, shapes, model, str(ref.path))


def make_generating_model(plan: InferenceRun, network: Any) -> Any:
    """The model that generates and scores: the network itself, or the user's model around it."""
    if plan.user_model is None:
        return network
    from t0repro.data.vocabulary_checks import seqio_vocabulary
    from t0repro.training.models import make_user_model

    vocabularies = (
        seqio_vocabulary(plan.input_vocabulary),
        seqio_vocabulary(plan.output_vocabulary),
    )
    return make_user_model(plan.user_model, network, None, vocabularies, plan.decoding)


def _tree(plan: InferenceRun, ref: CheckpointRef, shapes: Any) -> dict[str, Any]:
    """A checkpoint's step and parameters under the model's names."""
    if not plan.restore.assignment_map:
        return open_configured(ref, plan.model, slots=False)
    from t0repro.converters.restoring import assign_names

    # The user's patterns may name a shared position bias that the model itself no longer has.
    stored = open_configured(ref, plan.model, slots=False, keep_shared=True)
    wanted = [f"target/{name}" for name in flax.traverse_util.flatten_dict(shapes, sep="/")]
    names = assign_names(wanted, stored, plan.restore.assignment_map)
    tree = {name: stored[source] for name, source in names.items() if source is not None}
    # The map renames parameters only; the step has one name everywhere.
    return tree | {naming.STEP: stored[naming.STEP]}
