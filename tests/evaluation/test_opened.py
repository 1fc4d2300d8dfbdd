"""A checkpoint opened for evaluation holds its parameters as they are computed in."""

import jax
import numpy as np

from t0repro.converters.sources import load_any, open_any
from t0repro.converters.tensors import StoredTensor
from t0repro.converters.witnesses import parameters_digest
from t0repro.evaluation.engine import score_examples
from t0repro.evaluation.opened import load_on_devices, open_checkpoint

from .small_model import save_model

EXAMPLES = [
    {"inputs": [5, 6, 7, 1], "targets": [3, 1]},
    {"inputs": [5, 6, 7, 1], "targets": [4, 9, 1]},
]


def test_kernels_opened_for_bfloat16_are_bfloat16_and_scores_are_the_same(tmp_path):
    folder = str(save_model(tmp_path))
    half, whole = (open_checkpoint(folder, None, dtype) for dtype in ("bfloat16", "float32"))
    bytes_of = [sum(x.nbytes for x in jax.tree.leaves(each.params)) for each in (half, whole)]
    # Norms and position biases, which stay float32, are a larger part of so small a model.
    assert bytes_of[0] < 0.6 * bytes_of[1]
    assert half.digest == whole.digest
    scores = [score_examples(each.params, half.model, EXAMPLES, None) for each in (half, whole)]
    np.testing.assert_array_equal(*scores)


def test_each_tensor_is_read_once_when_its_turn_comes(tmp_path):
    folder = str(save_model(tmp_path))
    opened, whole = open_checkpoint(folder, None, "float32"), load_any(folder, slots=False)
    reads: list[str] = []

    def counted(name, tensor):
        return StoredTensor(tensor.shape, lambda: reads.append(name) or tensor.read())

    tree = {name: counted(name, tensor) for name, tensor in open_any(folder, slots=False).items()}
    assert not reads
    again = load_on_devices(tree, opened.params, opened.model, folder)
    parameters = sorted(name for name in tree if name.startswith("target/"))
    assert reads == [*parameters, "state/step"]
    assert again.digest == opened.digest == parameters_digest(whole, whole.__getitem__)
    assert again.step == opened.step
    jax.tree.map(np.testing.assert_array_equal, again.params, opened.params)
