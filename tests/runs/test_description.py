"""model-info.txt: T5X's lines of parameters and slots."""

import jax

import tests.helpers.tiny_models as tiny
from t0repro.partitioning.devices import choose
from t0repro.runs.description import model_info


def test_each_array_has_its_logical_axes_and_the_axis_of_the_mesh_that_divides_it():
    state = jax.eval_shape(tiny.new_state)
    config = tiny.run_config("a", 1)
    lines = model_info(state, choose(config.layout, config.model)).splitlines()
    by_name = {line.split()[1]: line for line in lines if line.startswith("Variable")}
    assert by_name["encoder/layers_0/mlp/wi_0/kernel"] == (
        f"Variable    {'encoder/layers_0/mlp/wi_0/kernel':<80} size {96:<12}"
        f" shape {'(embed=8, mlp=12)':<40} partition spec (None, 'model')"
    )
    norm = by_name["decoder/decoder_norm/scale"]
    assert "shape (embed=8)" in norm and norm.endswith("partition spec (None,)")
    assert "(heads=2, relpos_buckets=8)" in by_name["encoder/relpos_bias/rel_embedding"]
    size = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    total = lines.index(f"Total number of parameters: {size}")
    assert lines[total + 1] == "" and all("/v" in line for line in lines[total + 2 : -1])
    assert (
        "param_states/token_embedder/embedding/v_col" in by_name and lines[-1].split()[1] == "step"
    )
