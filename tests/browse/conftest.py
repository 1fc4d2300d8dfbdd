"""A small model of the demo's shape, and axe-core."""

import dataclasses

import pytest

from ..reports.browser import read_axe


@pytest.fixture(scope="session")
def models(once):
    """Two checkpoints of random parameters, of the demo's model's shape: `a` and `b`."""

    def fill(folder):
        import flax.traverse_util
        import jax
        import numpy as np

        from t0repro.model.t5 import T5, initial_parameters
        from t0repro.training.checkpoints import save_tree

        from ..helpers.tiny_models import FLOAT32, T5_1_1

        # gin/demo/t5.1.1.demo.gin
        sizes = {"num_encoder_layers": 2, "num_decoder_layers": 2, "d_model": 128, "d_ff": 256}
        heads = {"num_heads": 4, "d_kv": 32, "relative_attention_num_buckets": 32}
        config = dataclasses.replace(T5_1_1, **sizes, **heads, vocab_size=1408)
        for seed, name in enumerate("ab"):
            params = initial_parameters(T5(config, FLOAT32), jax.random.key(seed))
            flat = flax.traverse_util.flatten_dict(params, sep="/")
            tree = {f"target/{key}": np.asarray(value) for key, value in flat.items()}
            save_tree(folder / name / "checkpoint_1", {**tree, "state/step": np.int32(1)})

    return once("browse_models", fill)


@pytest.fixture(scope="session")
def axe(tmp_path_factory) -> str:
    """axe-core's script."""
    return read_axe(tmp_path_factory.mktemp("axe"))
