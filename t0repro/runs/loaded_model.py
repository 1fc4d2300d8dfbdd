"""Loads checkpoints for the modes that evaluate, generate or score with them."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from t0repro.config.configuration import Configuration
from t0repro.runs.command_record import record_command

if TYPE_CHECKING:
    from t0repro.evaluation.opened import Checkpoint


def loaded(configuration: Configuration, checkpoints: Iterator[Any]) -> Iterator[Checkpoint]:
    """Yields each checkpoint with the configured model, loaded only when its turn comes.

    Raises:
      UserError: If the model is not configured as a checkpoint's config.json says.
    """
    import jax

    from t0repro.converters.arithmetic import open_configured
    from t0repro.evaluation.opened import on_devices
    from t0repro.model.t5 import T5, held_for_evaluation, parameter_shapes
    from t0repro.partitioning.devices import choose, line_of

    config = configuration.run
    record_command(configuration)
    model = T5(config.model, config.dtypes)
    # Shapes alone say whether a checkpoint fits; nothing is initialised.
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
      configuration: Says how to decode, and with which batch size and vocabulary.
      checkpoint: The model and its parameters.
      inputs: Token ids of each input.
      inputs_length: Number of tokens that inputs are padded to.
      fill_with_first: As for `generate_tokens`.
    """
    from t0repro.evaluation.generation import generate_tokens, texts_of

    config = configuration.run
    tokens = generate_tokens(
        checkpoint.params,
        checkpoint.model,
        inputs,
        config.decoding,
        # Outputs have as much room as the padded inputs unless the length is bound.
        length=config.decoding.max_length or inputs_length,
        batch_size=config.batch_size,
        inputs_length=inputs_length,
        fill_with_first=fill_with_first,
    )
    return texts_of(tokens, configuration.vocabularies[1])
