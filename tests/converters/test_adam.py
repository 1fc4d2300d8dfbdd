"""Adam's moments: Mesh TensorFlow's adam_m and adam_v, optax's mu and nu in T5X's tree.

T5X saves flax's state dictionary of {"target", "state": {"step", "param_states"}}, param_states
being the state of the optax optimizer, without the empty ones (t5x/optimizers.py, OptaxWrapper).
"""

from __future__ import annotations

import jax
import numpy as np
import pytest

from t0repro.converters.convert import convert
from t0repro.converters.sources import load_any
from t0repro.parameters import naming

from .checkpoint_files import assert_same_bits, read_variables
from .older_t5x import write_by_older_t5x
from .t5x_reader import restore_as_t5x

STEP = 7


@pytest.fixture
def adam_variables(tiny_family, mesh_variables):
    """A Mesh TensorFlow checkpoint's variables with Adam's slots, the second moments positive."""
    variables = {name: x for name, x in mesh_variables(tiny_family).items() if "_slot_" not in name}
    generator = np.random.default_rng(3)
    for name in [name for name in variables if name != "global_step"]:
        for moment in ("adam_m", "adam_v"):
            value = generator.normal(size=variables[name].shape).astype(np.float32)
            variables[f"{name}/{moment}"] = value if moment == "adam_m" else np.square(value)
    return variables


def nested(tree, prefix):
    import flax.traverse_util

    part = {key.removeprefix(prefix): x for key, x in tree.items() if key.startswith(prefix)}
    return flax.traverse_util.unflatten_dict(part, sep="/")


def t5x_state_dict(params, optax_state):
    """What T5X saves: flax's state dictionary, flat, in which empty dictionaries are nothing."""
    import flax.serialization
    import flax.traverse_util

    state = {"step": np.asarray(STEP, np.int32), "param_states": optax_state}
    content = flax.serialization.to_state_dict({"target": params, "state": state})
    flat = flax.traverse_util.flatten_dict(content, sep="/")
    return {name: np.asarray(x) for name, x in flat.items()}


def an_optimizer(kind):
    import optax

    return {
        "adam": lambda: optax.adam(1e-3),
        "adam with a schedule": lambda: optax.adam(optax.linear_schedule(1e-3, 0.0, 100)),
        "adamw": lambda: optax.adamw(1e-3),
        "adamw behind a clip": lambda: optax.chain(optax.clip(1.0), optax.adamw(1e-3)),
    }[kind]()


@pytest.mark.parametrize(
    ("kind", "place"),
    [
        ("adam", "0/mu"),
        ("adam with a schedule", "0/mu"),
        ("adamw", "0/mu"),
        ("adamw behind a clip", "1/0/mu"),
    ],
)
@pytest.mark.parametrize("older", [False, True])
def test_what_t5x_saves_of_optax_s_adam_becomes_mesh_tensorflow_s_slots(
    adam_variables, write_mesh_checkpoint, tmp_path, kind, place, older
):
    from t0repro.training.checkpoints import save_tree

    source = write_mesh_checkpoint(tmp_path / "source", adam_variables)
    params = nested(load_any(source), naming.PARAMETERS)
    optimizer = an_optimizer(kind)
    # The parameters stand for gradients too.
    state = jax.jit(lambda x: optimizer.update(x, optimizer.init(x), x)[1])(params)
    tree = t5x_state_dict(params, state)
    key = f"{naming.SLOTS}{place}/token_embedder/embedding"
    if older:
        write_by_older_t5x(tmp_path / "t5x" / "checkpoint_7", tree, inline=("count",))
    else:
        save_tree(tmp_path / "t5x" / "checkpoint_7", tree)
    convert(tmp_path / "t5x", tmp_path / "mtf", "mtf")
    variables = read_variables(tmp_path / "mtf")
    assert variables.keys() == adam_variables.keys()
    np.testing.assert_array_equal(variables["shared/embedding/adam_m"], tree[key])
    np.testing.assert_array_equal(
        variables["shared/embedding/adam_v"], tree[key.replace("/mu/", "/nu/")]
    )


def test_optax_restores_mesh_tensorflow_s_moments_and_makes_its_update(
    adam_variables, write_mesh_checkpoint, tmp_path
):
    import flax.serialization
    import optax

    source = write_mesh_checkpoint(tmp_path / "source", adam_variables)
    convert(source, tmp_path / "t5x", "t5x")
    tree = restore_as_t5x(tmp_path / "t5x", STEP)
    params = nested(tree, naming.PARAMETERS)
    optimizer = optax.adam(1.0, b1=0.9, b2=0.999, eps=1e-6)
    saved = nested(tree, naming.SLOTS) | {"1": {}}  # T5X puts the empty ones back
    state = flax.serialization.from_state_dict(optimizer.init(params), saved)
    updates, _ = jax.jit(optimizer.update)(params, state, params)
    m, v = (adam_variables[f"encoder/rms_norm/scale/{slot}"] for slot in ("adam_m", "adam_v"))
    g = adam_variables["encoder/rms_norm/scale"]
    # optax corrects the bias by the number of updates, which is the global step.
    mean = (0.9 * m + 0.1 * g) / (1 - 0.9 ** (STEP + 1))
    square = (0.999 * v + 0.001 * g * g) / (1 - 0.999 ** (STEP + 1))
    np.testing.assert_allclose(
        updates["encoder"]["encoder_norm"]["scale"], -mean / (np.sqrt(square) + 1e-6), rtol=2e-5
    )


@pytest.mark.parametrize("scan", [False, True])
def test_adam_s_moments_come_back_through_t5x_and_hf(
    adam_variables, write_mesh_checkpoint, tmp_path, scan
):
    source = write_mesh_checkpoint(tmp_path / "source", adam_variables)
    convert(source, tmp_path / "t5x", "t5x", scan=scan)
    convert(tmp_path / "t5x", tmp_path / "hf", "hf")
    convert(tmp_path / "hf", tmp_path / "mtf", "mtf")
    assert_same_bits(adam_variables, read_variables(tmp_path / "mtf"))
