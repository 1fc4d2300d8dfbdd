"""What both stacks generate with Mesh TensorFlow's `lm`, which continues its inputs.

Mesh TensorFlow's mode infer fills each row of inputs up to the lengths of inputs and targets
together, greedily.
"""

import flax.traverse_util
import jax
import numpy as np
import pytest

from t0repro.config.decoding import GREEDY
from t0repro.converters.hf_config import Computation
from t0repro.evaluation.opened import make_scoring_config
from t0repro.model.decoding import generate
from t0repro.model.t5 import T5
from t0repro.parameters import naming
from t0repro.parameters.shape import recognize

from ..helpers.tiny_models import FLOAT32
from .conftest import decode_by_mesh

pytestmark = pytest.mark.mtf

INPUTS, BATCH, TARGETS = 80, 40, 12
BINDINGS = """
include 'defaults.gin'
include 'models/lm_v1.gin'
utils.get_variable_dtype.activation_dtype = 'float32'
utils.get_variable_dtype.master_dtype = 'float32'
num_layers = 2
num_heads = 4
d_kv = 16
d_model = 64
d_ff = 96
dropout_rate = 0.0
"""


@pytest.fixture(scope="module")
def decoded(tmp_path_factory) -> dict[str, np.ndarray]:
    """Mesh TensorFlow's inputs, variables and outputs."""
    return decode_by_mesh(
        tmp_path_factory.mktemp("decoded"),
        inputs=INPUTS,
        bindings=BINDINGS,
        model_type="lm",
        batch_size=BATCH,
        runs=[{"targets": TARGETS}],
    )


def test_greedy_outputs_are_those_of_mesh_tensorflows_lm(decoded):
    theirs, inputs = decoded["outputs/0"], decoded["inputs"]
    assert theirs.shape == (INPUTS, inputs.shape[1] + TARGETS)
    variables = {
        name.removeprefix("variables/"): x
        for name, x in decoded.items()
        if name.startswith("variables/")
    }
    params = {naming.mtf_to_path(name): jax.numpy.asarray(x) for name, x in variables.items()}
    family = recognize({f"target/{name}": x.shape for name, x in params.items()})
    model = T5(make_scoring_config(family, Computation(("relu",)), "here"), FLOAT32)
    assert model.config.model_type == "lm"
    tree = flax.traverse_util.unflatten_dict(params, sep="/")
    ours = np.asarray(generate(model, tree, inputs, GREEDY, length=theirs.shape[1]).tokens)
    lengths = np.count_nonzero(inputs, axis=1)
    ours = np.where(np.arange(theirs.shape[1]) < theirs.shape[1] - lengths[:, None], ours, 0)
    np.testing.assert_array_equal(ours, theirs)
    ends = [int(np.argmax(row == 1)) for row in theirs]
    assert len({tuple(row) for row in theirs.tolist()}) > 20 and len(set(ends)) > 3
