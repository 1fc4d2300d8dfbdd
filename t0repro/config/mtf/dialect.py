"""The Mesh TensorFlow dialect: gin files and --gin_param overrides -> RunConfig.

gin, Mesh TensorFlow and t5 do the parsing, so that a typo fails here in the words in which it fails
there. The RunConfig is then read off what gin configured (the arguments of `utils.run`, the model
that `build_model` makes, the optimizer class, the schedule function), not off the text. A binding
that would change a Mesh TensorFlow run but that the JAX stack does not support is an error that
names the binding and its place; none is ignored.
"""

from __future__ import annotations

from t0repro.config.configuration import Configuration
from t0repro.config.gin_errors import configuration_errors
from t0repro.config.mtf import model_api, reader
from t0repro.config.mtf.parser import MeshInputs, parse


def load(inputs: MeshInputs, *, float32_activations: bool = True) -> Configuration:
    """Parses the gin inputs as t5_mesh_transformer does and reads a run's configuration off them.

    Args:
      inputs: files, overrides and search paths.
      float32_activations: compute in float32 whatever gin says, which is what t5_mesh_transformer
        does without --tpu. False follows get_variable_dtype.

    Raises:
      UserError: for anything that is wrong in a file or an override, with its place.
    """
    bindings = parse(inputs)
    # A second block: from here on the places of bindings are known to messages.
    with configuration_errors(bindings):
        return reader.read(inputs.model_dir, bindings, float32_activations=float32_activations)


def load_model_api(
    inputs: MeshInputs,
    flags: model_api.Flags,
    find_checkpoint: model_api.FindCheckpoint,
    *,
    float32_activations: bool = True,
) -> Configuration:
    """`load` for --use_model_api, whose flags stand in for bindings of `run`.

    Args:
      inputs: as for `load`.
      flags: t5's parsed flags.
      find_checkpoint: finds the checkpoint that mode finetune starts from; called in no other mode.
      float32_activations: as for `load`.

    Raises:
      UserError: as from `load`, and for flags that do not fit together.
    """
    with configuration_errors():
        bindings = model_api.parse(inputs, flags, find_checkpoint)
    with configuration_errors(bindings):
        return reader.read(inputs.model_dir, bindings, float32_activations=float32_activations)
