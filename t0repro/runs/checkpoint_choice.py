"""The checkpoints that a mode evaluates: chosen from a model_dir, waited for, and loaded.

Source: mesh_tensorflow.transformer.utils.get_checkpoint_iterator and tf.train.checkpoints_iterator.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from t0repro.config.configuration import Configuration
from t0repro.config.inference_plan import InferencePlan
from t0repro.config.run_config import RunConfig
from t0repro.config.training_plan import RestoreConfig
from t0repro.converters import jax_tree, sources, storage
from t0repro.converters.model_files import open_configured
from t0repro.converters.tensors import CheckpointRef, with_parameters_in
from t0repro.converters.witnesses import INTEGRITY
from t0repro.errors import UserError
from t0repro.evaluation.generation import generate_tokens, texts_of
from t0repro.evaluation.opened import Checkpoint, on_devices
from t0repro.model.t5 import T5, held_for_evaluation, parameter_shapes
from t0repro.parameters import naming
from t0repro.partitioning.devices import choose, line_of
from t0repro.partitioning.processes import from_first
from t0repro.progress import say
from t0repro.words import without_passwords

# As in tf.train.checkpoints_iterator.
SECONDS_BETWEEN_POLLS = 1.0


def checkpoints_in(folder: str) -> list[Any]:
    """A folder's checkpoints; with several processes, all use the first one's listing."""
    names = from_first(lambda: [str(ref.path) for ref in sources.list_checkpoints(folder)])
    return [ref for ref in sources.list_checkpoints(folder) if str(ref.path) in names]


def chosen_checkpoints(config: RunConfig) -> Iterator[Any]:
    """Yields the checkpoints that eval_checkpoint_step chooses, by ascending step.

    - one step or several: each that exists, or the one nearest to it (find_closest);
    - "all": every checkpoint after skip_until;
    - -1: the latest;
    - None: the latest, then each new one as it appears, forever or until stop_after.

    Raises:
      UserError: if there is no such checkpoint (never for None, which waits).
    """
    if config.eval_checkpoint_step is None:
        return _coming(config)
    # Not a generator, so that a missing checkpoint is an error before any data is read.
    return iter(_present(config))


def one_checkpoint(config: RunConfig) -> Any:
    """The one checkpoint that eval_checkpoint_step chooses, for modes that write a single file.

    Raises:
      UserError: if it chooses several, none, or an open-ended series.
    """
    # None also waits for future checkpoints, which a single output file cannot hold.
    found = list(_present(config)) if config.eval_checkpoint_step is not None else []
    if len(found) != 1:
        raise UserError(
            f"Mode {config.mode!r} scores one checkpoint; eval_checkpoint_step ="
            f" {config.eval_checkpoint_step!r} chooses {len(found) or 'any number'}.",
            where=config.provenance.get("eval_checkpoint_step"),
            fix="Bind run.eval_checkpoint_step to one step, or to -1 (the latest).",
        )
    return found[0]


def _present(config: RunConfig) -> list[Any]:
    found = checkpoints_in(config.model_dir)
    by_step = {ref.step: ref for ref in found if ref.step is not None}
    wanted, choice = config.eval_checkpoint_step, config.checkpoint_choice
    if wanted == "all":
        steps = [step for step in sorted(by_step) if step > choice.skip_until]
    elif wanted == -1:
        steps = [max(by_step)] if by_step else []
    else:
        asked = (wanted,) if isinstance(wanted, int) else tuple(map(int, wanted or ()))
        # find_closest: a requested step that is missing stands for the nearest one that exists.
        if choice.find_closest and by_step:
            asked = {min(by_step, key=lambda there: abs(there - step)) for step in asked}
        steps = sorted(step for step in set(asked) if step in by_step)
    if not steps:
        there = ", ".join(map(str, sorted(by_step))) or "none"
        raise UserError(
            f"There is no checkpoint to evaluate for eval_checkpoint_step = {wanted!r}"
            f" (steps there: {there}).",
            where=config.model_dir,
            fix="Bind run.eval_checkpoint_step to a step that is there, 'all' or -1.",
        )
    return [by_step[step] for step in steps]


def _coming(config: RunConfig) -> Iterator[Any]:
    """Polls for new checkpoints and yields each, until stop_after."""
    choice, last, announced = config.checkpoint_choice, None, False
    while True:
        found = [ref for ref in checkpoints_in(config.model_dir) if ref.step is not None]
        # The list ascends by step, so the last is the latest.
        latest = found[-1] if found else None
        if latest is None or latest == last:
            if not announced:
                print(f"Waiting for a new checkpoint in {config.model_dir}.", file=sys.stderr)
            announced = True
            time.sleep(SECONDS_BETWEEN_POLLS)
            continue
        last, announced = latest, False
        assert latest.step is not None
        # Skip it silently but remember it, so that it does not count as new again.
        if latest.step <= choice.skip_until:
            continue
        if choice.stop_after is None or latest.step <= choice.stop_after:
            yield latest
        if choice.stop_after is not None and latest.step >= choice.stop_after:
            return


def loaded(configuration: Configuration, checkpoints: Iterator[Any]) -> Iterator[Checkpoint]:
    """Yields each checkpoint with the configured model, loaded only when its turn comes.

    Raises:
      UserError: If the model is not configured as a checkpoint's config.json says.
    """
    config = configuration.run
    configuration.record_command()
    model = T5(config.model, config.dtypes)
    # Shapes alone decide whether a checkpoint fits; nothing is initialized.
    shapes = parameter_shapes(model)
    partitioning = choose(config.layout, config.model, where=config.provenance.get("layout"))
    shapes = partitioning.placed(held_for_evaluation(model, shapes))
    if jax.device_count() > 1:
        print(line_of(partitioning, config.layout), file=sys.stderr)
    for checkpoint in checkpoints:
        tree = open_configured(checkpoint, config.model, slots=False)
        yield on_devices(tree, shapes, model, str(checkpoint.path))


def generated_texts(
    configuration: Configuration,
    checkpoint: Checkpoint,
    inputs: Sequence[np.ndarray],
    inputs_length: int,
    fill_with_first: int = 0,
) -> list[str]:
    """Generates one text per input.

    Args:
      configuration: Sets the decoding, the batch size and the vocabulary.
      checkpoint: The model and its parameters.
      inputs: Token ids of each input.
      inputs_length: Number of tokens that inputs are padded to.
      fill_with_first: As for `generate_tokens`.
    """
    config = configuration.run
    tokens = generate_tokens(
        checkpoint.params,
        checkpoint.model,
        inputs,
        config.decoding,
        # Outputs get as much room as the padded inputs unless the length is bound.
        length=config.decoding.max_length or inputs_length,
        batch_size=config.batch_size,
        inputs_length=inputs_length,
        fill_with_first=fill_with_first,
    )
    return texts_of(tokens, configuration.vocabularies[1])


# ---- The checkpoints that T5X's eval and infer restore -------------------------------------------


POLL_SECONDS = 5.0


def chosen(restore: RestoreConfig) -> list[CheckpointRef]:
    """The existing checkpoints, by ascending step within a path; an adapter's with its base.

    Raises:
      UserError: If a path has no checkpoint, or the adapter's path no adapter.
    """
    refs: list[CheckpointRef] = []
    for path in _paths(restore):
        if restore.mode == "all":
            present = checkpoints_in(path)
            if not present:
                sources.find_checkpoint(path)  # raises, and says what is wrong
            refs += present
        else:
            # By the time another process looks, the latest may be a newer one.
            found = from_first(lambda path=path: str(sources.find_checkpoint(path).path))
            refs.append(sources.find_checkpoint(found))
    if restore.adapter is None:
        return refs
    adapter = restore.adapter
    own = sources.find_adapter(from_first(lambda: str(sources.find_adapter(adapter).path)))
    return [dataclasses.replace(own, base=ref.path) for ref in refs]


def is_there(restore: RestoreConfig) -> bool:
    """Whether each path has a checkpoint, and the adapter's too, so that `chosen` finds them."""

    def found() -> bool:
        try:
            paths = [*_paths(restore), *([restore.adapter] if restore.adapter else [])]
            return all(sources.find_checkpoint(path) for path in paths)
        except UserError:
            return False

    # Only the first process checks; the others receive its answer.
    return from_first(found)


def _paths(restore: RestoreConfig) -> Sequence[str]:
    return [restore.path] if isinstance(restore.path, str) else restore.path


def coming(
    restore: RestoreConfig,
    until: int | None = None,
    seconds: float = POLL_SECONDS,
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
    return without_passwords(storage.real(storage.local_path(ref.path)))


def identity(ref: CheckpointRef) -> str | None:
    """Tells a checkpoint from its replacement at the same path; None if it is gone.

    Reads no values: for a known checkpoint, the caller has nothing else to do.
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


def opened(plan: InferencePlan, ref: CheckpointRef) -> Checkpoint:
    """A checkpoint of any format with the plan's model; slots are not read.

    Raises:
      UserError: If a parameter is missing or has another shape than the model's, or the model is
        not configured as the checkpoint's config.json says.
    """
    from t0repro.model.t5 import T5, held_for_evaluation, parameter_shapes
    from t0repro.partitioning.devices import choose, line_of

    model = T5(plan.model, plan.dtypes)
    # Shapes alone: nothing is initialized.
    shapes = parameter_shapes(model)
    partitioning = choose(plan.layout, plan.model, where="partitioning.PjitPartitioner")
    if partitioning.mesh.size > 1:
        print(line_of(partitioning, plan.layout), file=sys.stderr)
    held = partitioning.placed(held_for_evaluation(model, shapes))
    tree = _tree(plan, ref, shapes)
    if plan.restore.dtype not in (None, "float32"):
        # Still stored in the model's own dtype, with values rounded to this one.
        tree = with_parameters_in(tree, plan.restore.dtype)
    return on_devices(tree, held, model, str(ref.path))


def generating_model(plan: InferencePlan, network: Any) -> Any:
    """The model that generates and scores: the network itself, or the user's model around it."""
    if plan.user_model is None:
        return network
    from t0repro.data.checks import seqio_vocabulary
    from t0repro.training.models import user_model

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

    from t0repro.converters.restoring import assigned_names

    # The user's patterns may name a shared position bias that the model itself no longer has.
    stored = open_configured(ref, plan.model, slots=False, keep_shared=True)
    wanted = [f"target/{name}" for name in flax.traverse_util.flatten_dict(shapes, sep="/")]
    names = assigned_names(wanted, stored, plan.restore.assignment_map)
    tree = {name: stored[source] for name, source in names.items() if source is not None}
    # The map renames parameters only; the step has one name everywhere.
    return tree | {naming.STEP: stored[naming.STEP]}
