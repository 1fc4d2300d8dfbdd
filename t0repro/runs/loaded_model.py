"""A checkpoint's model in memory, for the modes that compute with one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from t0repro.config.configuration import Configuration
from t0repro.runs.command_record import record_command


class LoadedModel(NamedTuple):
    """A T5, its parameters and the global step that they are of."""

    model: Any
    params: dict
    step: int


def loaded(configuration: Configuration, checkpoints: Iterator[Any]) -> Iterator[LoadedModel]:
    """Each checkpoint's model, loaded when its turn comes."""
    import jax

    from t0repro.converters import sources
    from t0repro.model.t5 import T5, initial_parameters
    from t0repro.training.train_state import parameters_from_flat_tree

    config = configuration.run
    record_command(configuration)
    model = T5(config.model, config.dtypes)
    shapes = jax.eval_shape(lambda: initial_parameters(model, jax.random.key(0)))
    for checkpoint in checkpoints:
        tree = sources.load_any(checkpoint.path, slots=False)
        params = parameters_from_flat_tree(tree, shapes, where=checkpoint.path)
        yield LoadedModel(model, params, int(tree["state/step"]))


def generated_texts(
    configuration: Configuration,
    loaded_model: LoadedModel,
    inputs: Sequence[np.ndarray],
    inputs_length: int,
    fill_with_first: int = 0,
) -> list[str]:
    """The texts that a model generates for inputs, each padded to `inputs_length` tokens.

    Args:
      configuration: says how to decode.
      loaded_model: generates.
      inputs: token ids of each input.
      inputs_length: tokens that inputs are padded to.
      fill_with_first: as of `generate_tokens`.
    """
    from t0repro.evaluation.generation import generate_tokens, texts_of

    config = configuration.run
    tokens = generate_tokens(
        loaded_model.params,
        loaded_model.model,
        inputs,
        config.decoding,
        # Outputs have as much room as the padded inputs unless the length is bound.
        length=config.decoding.max_length or inputs_length,
        batch_size=config.batch_size,
        inputs_length=inputs_length,
        fill_with_first=fill_with_first,
    )
    return texts_of(tokens, configuration.vocabularies[1])
