"""The Mesh TensorFlow dialect: gin files and --gin_param overrides -> RunConfig.

gin, Mesh TensorFlow and t5 do the parsing, so that a typo fails here in the words in which it fails
there. The RunConfig is then read off what gin configured (the arguments of `utils.run`, the model
that `build_model` makes, the optimizer class, the schedule function), not off the text. A binding
that would change a Mesh TensorFlow run but that the JAX stack does not know is an error that names
the binding and its place; none is ignored.
"""

from __future__ import annotations

from t0repro.config.mtf import reader
from t0repro.config.mtf.parser import GinInputs, parse
from t0repro.config.provenance import Bindings
from t0repro.config.run_config import RunConfig


def load(inputs: GinInputs, *, float32_activations: bool = True) -> tuple[RunConfig, Bindings]:
    """Parses the gin inputs as t5_mesh_transformer does and reads the RunConfig off them.

    Args:
      inputs: files, overrides and search paths.
      float32_activations: compute in float32 whatever gin says, which is what t5_mesh_transformer
        does without --tpu. False follows get_variable_dtype.

    Raises:
      UserError: for a binding that the JAX stack does not support, or a mixture that is unknown.
      ValueError, TypeError, SyntaxError: gin's own errors, with the file and line.
    """
    bindings = parse(inputs)
    return reader.read(
        inputs.model_dir, bindings, float32_activations=float32_activations
    ), bindings
