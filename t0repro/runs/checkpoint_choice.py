"""The checkpoints that a mode evaluates: chosen from a model_dir, waited for, and loaded.

Source: mesh_tensorflow.transformer.utils.get_checkpoint_iterator and tf.train.checkpoints_iterator.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from t0repro.config.configuration import Configuration
from t0repro.config.run import CheckpointRun, InferenceRun
from t0repro.converters import finding
from t0repro.converters.model_files import open_configured
from t0repro.errors import UserError
from t0repro.evaluation.generation import decode_texts, generate_tokens
from t0repro.evaluation.opened import Checkpoint, load_on_devices
from t0repro.model.t5 import T5, evaluation_shapes, parameter_shapes
from t0repro.partitioning.devices import choose, describe_devices
from t0repro.partitioning.processes import broadcast_from_first
from t0repro.progress import Waiting, say
from t0repro.training.run_state import describe_run

# As in tf.train.checkpoints_iterator.
SECONDS_BETWEEN_POLLS = 1.0


def checkpoints_in(folder: str) -> list[Any]:
    """A folder's checkpoints; with several processes, all use the first one's listing."""
    names = broadcast_from_first(
        lambda: [str(ref.path) for ref in finding.list_checkpoints(folder)]
    )
    return [ref for ref in finding.list_checkpoints(folder) if str(ref.path) in names]


def choose_checkpoints(config: CheckpointRun) -> Iterator[Any]:
    """Yields the checkpoints that eval_checkpoint_step chooses, by ascending step.

    - one step or several: each that exists, or the one nearest to it (find_closest);
    - "all": every checkpoint after skip_until;
    - -1: the latest;
    - None: the latest, then each new one as it appears, forever or until stop_after.

    Raises:
      UserError: if there is no such checkpoint (never for None, which waits).
    """
    if config.eval_checkpoint_step is None:
        return _wait_for_checkpoints(config)
    # Not a generator, so that a missing checkpoint is an error before any data is read.
    return iter(_present(config))


def one_checkpoint(config: CheckpointRun) -> Any:
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


def _present(config: CheckpointRun) -> list[Any]:
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
            closest = {step: min(by_step, key=lambda there: abs(there - step)) for step in asked}
            for step in [step for step in closest if closest[step] != step]:
                say(f"note: there is no checkpoint of step {step}; {closest[step]} is the closest")
            asked = closest.values()
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


def _wait_for_checkpoints(config: CheckpointRun) -> Iterator[Any]:
    """Waits for new checkpoints and yields each, until stop_after."""
    choice = config.checkpoint_choice
    for ref in new_checkpoints(config.model_dir, SECONDS_BETWEEN_POLLS):
        # Skipped silently; it does not count as new again.
        if ref.step <= choice.skip_until:
            continue
        if choice.stop_after is None or ref.step <= choice.stop_after:
            yield ref
        if choice.stop_after is not None and ref.step >= choice.stop_after:
            return


def new_checkpoints(folder: str, seconds: float, *, skips: bool = True) -> Iterator[Any]:
    """Yields checkpoints as they appear in a folder, forever, each once, from the existing ones on.

    Args:
      folder: The folder, which need not exist yet.
      seconds: The polling interval.
      skips: Whether to leave out a checkpoint that has a successor when its turn comes.
    """
    seen: set[str] = set()
    waiting = Waiting()
    while True:
        present = [ref for ref in checkpoints_in(folder) if ref.path not in seen]
        if skips:
            seen.update(ref.path for ref in present[:-1])
            present = present[-1:]
        for ref in present[:1]:  # one at a time: the folder may change meanwhile
            seen.add(ref.path)
            yield ref
            waiting = Waiting()
        if not present:
            waiting.report(f"waiting for a new checkpoint in {folder}", describe_run(folder))
            time.sleep(seconds)


def model_on_devices(run: CheckpointRun | InferenceRun, where: str | None) -> tuple[T5, Any]:
    """A run's model and its parameters' shapes on the devices; prints these if there are several.

    Shapes alone decide whether a checkpoint fits; nothing is initialized.

    Args:
      run: The run.
      where: Where its layout was set, for messages.
    """
    model = T5(run.model, run.dtypes)
    partitioning = choose(run.layout, run.model, where=where)
    if jax.device_count() > 1:
        print(describe_devices(partitioning, run.layout), file=sys.stderr)
    shapes = evaluation_shapes(model, parameter_shapes(model))
    return model, partitioning.shapes_on_devices(shapes)


def load_checkpoints(
    configuration: Configuration[CheckpointRun], checkpoints: Iterator[Any]
) -> Iterator[Checkpoint]:
    """Yields each checkpoint with the configured model, loaded only when its turn comes.

    Raises:
      UserError: If the model is not configured as a checkpoint's config.json says.
    """
    config = configuration.run
    configuration.record_command()
    model, shapes = model_on_devices(config, config.provenance.get("layout"))
    for checkpoint in checkpoints:
        tree = open_configured(checkpoint, config.model, slots=False)
        yield load_on_devices(tree, shapes, model, str(checkpoint.path))


def generate_texts(
    configuration: Configuration[CheckpointRun],
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
    return decode_texts(tokens, configuration.vocabularies[1])
