import dataclasses
import functools
import re

import flax.linen as nn
import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from t0repro.adapters import ia3, join_adapter, lora
from t0repro.config.model import Arithmetic
from t0repro.model.t5 import (
    T5,
    adapter_shapes,
    evaluation_shapes,
    initial_parameters,
    segments_of,
    shift_right,
)
from t0repro.model.towers import Block, Tower
from t0repro.training.token_losses import training_loss

from ..helpers.tiny_models import BFLOAT16, FLOAT32, T5_1_0, T5_1_1, UMT5, model_config


@pytest.fixture(scope="module")
def params():
    return initial_parameters(T5(T5_1_1, FLOAT32), jax.random.key(0))


def batch_of(inputs, targets, **more):
    columns = {"inputs": inputs, "targets": targets, **more}
    return {name: jnp.asarray(x, jnp.int32) for name, x in columns.items()}


@functools.partial(jax.jit, static_argnums=0)
def logits_of(model, params, batch):
    return model.apply({"params": params}, batch)


def shapes_of(config):
    params = initial_parameters(T5(config, FLOAT32), jax.random.key(0))
    return {path: x.shape for path, x in flax.traverse_util.flatten_dict(params, sep="/").items()}


def attention_shapes(prefix):
    shapes = {f"{prefix}/{name}/kernel": (16, 8) for name in ("query", "key", "value")}
    return shapes | {f"{prefix}/out/kernel": (8, 16)}


def test_parameters_of_t5_1_1_have_t5x_names_and_shapes():
    encoder, decoder = "encoder/layers_0", "decoder/layers_0"
    assert shapes_of(T5_1_1) == {
        "token_embedder/embedding": (128, 16),
        "encoder/relpos_bias/rel_embedding": (2, 8),
        **attention_shapes(f"{encoder}/attention"),
        f"{encoder}/pre_attention_layer_norm/scale": (16,),
        f"{encoder}/pre_mlp_layer_norm/scale": (16,),
        f"{encoder}/mlp/wi_0/kernel": (16, 24),
        f"{encoder}/mlp/wi_1/kernel": (16, 24),
        f"{encoder}/mlp/wo/kernel": (24, 16),
        "encoder/encoder_norm/scale": (16,),
        "decoder/relpos_bias/rel_embedding": (2, 8),
        **attention_shapes(f"{decoder}/self_attention"),
        **attention_shapes(f"{decoder}/encoder_decoder_attention"),
        f"{decoder}/pre_self_attention_layer_norm/scale": (16,),
        f"{decoder}/pre_cross_attention_layer_norm/scale": (16,),
        f"{decoder}/pre_mlp_layer_norm/scale": (16,),
        f"{decoder}/mlp/wi_0/kernel": (16, 24),
        f"{decoder}/mlp/wi_1/kernel": (16, 24),
        f"{decoder}/mlp/wo/kernel": (24, 16),
        "decoder/decoder_norm/scale": (16,),
        "decoder/logits_dense/kernel": (16, 128),
    }


def test_t5_1_0_has_one_input_kernel_and_no_logits_kernel():
    old, new = shapes_of(T5_1_0), shapes_of(T5_1_1)
    assert {name for name in old if name not in new} == {
        "encoder/layers_0/mlp/wi/kernel",
        "decoder/layers_0/mlp/wi/kernel",
    }
    assert {name for name in new if name not in old} == {
        f"{tower}/layers_0/mlp/wi_{index}/kernel"
        for tower in ("encoder", "decoder")
        for index in (0, 1)
    } | {"decoder/logits_dense/kernel"}


def test_a_position_bias_per_layer_stands_in_each_layer_and_in_no_tower():
    biases = {name for name in shapes_of(UMT5) if "relpos_bias" in name}
    assert biases == {
        f"{tower}/layers_0/relpos_bias/rel_embedding" for tower in ("encoder", "decoder")
    }


def test_equal_biases_in_each_layer_are_one_that_the_layers_share():
    shared = model_config(num_encoder_layers=2, num_decoder_layers=2)
    params = initial_parameters(T5(shared, FLOAT32), jax.random.key(0))
    batch = batch_of([[5, 6, 1]], [[7, 1]])
    expected = logits_of(T5(shared, FLOAT32), params, batch)
    for tower in (params["encoder"], params["decoder"]):
        bias = tower.pop("relpos_bias")
        tower["layers_0"]["relpos_bias"] = tower["layers_1"]["relpos_bias"] = bias
    each = dataclasses.replace(shared, position_bias_per_layer=True)
    logits = logits_of(T5(each, FLOAT32), params, batch)
    np.testing.assert_allclose(logits, expected, atol=1e-6)
    second = params["decoder"]["layers_1"]
    second["relpos_bias"] = jax.tree.map(lambda x: x + jnp.arange(8), second["relpos_bias"])
    changed = logits_of(T5(each, FLOAT32), params, batch)
    assert np.abs(changed - expected)[0, 1].max() > 1e-3


def test_unscaled_tied_logits_are_the_scaled_ones_times_the_root_of_the_width():
    params = initial_parameters(T5(T5_1_0, FLOAT32), jax.random.key(0))
    batch = batch_of([[5, 6, 1]], [[7, 1]])
    scaled = logits_of(T5(T5_1_0, FLOAT32), params, batch)
    unscaled = dataclasses.replace(T5_1_0, scale_tied_logits=False)
    logits = logits_of(T5(unscaled, FLOAT32), params, batch)
    np.testing.assert_allclose(logits, scaled * 4.0, rtol=1e-6)  # d_model is 16


def test_scaled_queries_are_those_of_kernels_divided_by_the_root_of_the_heads_width():
    config = model_config(scale_queries=True)
    params = initial_parameters(T5(config, FLOAT32), jax.random.key(0))
    batch = batch_of([[5, 6, 1]], [[7, 1]])
    logits = logits_of(T5(config, FLOAT32), params, batch)
    divided = jax.tree.map_with_path(
        lambda path, x: x / config.d_kv**0.5 if any(key.key == "query" for key in path) else x,
        params,
    )
    plain = model_config()
    np.testing.assert_allclose(logits, logits_of(T5(plain, FLOAT32), divided, batch), atol=1e-6)
    assert np.abs(logits - logits_of(T5(plain, FLOAT32), params, batch)).max() > 1e-3


@pytest.mark.parametrize(
    "change",
    [{"relative_attention_max_distance": 6}, {"rms_norm_epsilon": 0.1}],
    ids=lambda change: next(iter(change)),
)
def test_a_field_that_transformers_has_changes_the_logits(params, change):
    batch = batch_of([range(5, 25)], [range(30, 50)])
    before = logits_of(T5(T5_1_1, FLOAT32), params, batch)
    after = logits_of(T5(model_config(**change), FLOAT32), params, batch)
    assert np.abs(before - after).max() > 1e-3


def test_t5_1_1_base_has_as_many_parameters_as_the_released_model():
    base = dataclasses.replace(
        T5_1_1,
        num_encoder_layers=12,
        num_decoder_layers=12,
        d_model=768,
        d_ff=2048,
        num_heads=12,
        d_kv=64,
        vocab_size=32128,
        relative_attention_num_buckets=32,
    )
    shapes = jax.eval_shape(lambda: initial_parameters(T5(base, FLOAT32), jax.random.key(0)))
    # The sum over the variables of t5.1.1.base as its gin file and Mesh TensorFlow define them.
    attention, mlp, norm = 4 * 768 * 768, 3 * 768 * 2048, 768
    encoder = 12 * (attention + mlp + 2 * norm) + norm + 12 * 32
    decoder = 12 * (2 * attention + mlp + 3 * norm) + norm + 12 * 32
    size = sum(leaf.size for leaf in jax.tree.leaves(shapes))
    assert size == encoder + decoder + 2 * 32128 * 768 == 247_577_856


def test_initial_values_have_mesh_tensorflows_deviations():
    wide = dataclasses.replace(T5_1_1, d_model=256, d_ff=512, num_heads=4, d_kv=32, vocab_size=1024)
    params = initial_parameters(T5(wide, FLOAT32), jax.random.key(0))
    flat = flax.traverse_util.flatten_dict(params, sep="/")
    # A normal distribution cut at two deviations has 0.8796 of its deviation.
    cut = 0.87962566
    expected = {
        "token_embedder/embedding": 1.0,
        "encoder/layers_0/attention/query/kernel": (256 * 32) ** -0.5,
        "encoder/layers_0/attention/key/kernel": 256**-0.5,
        "encoder/layers_0/attention/value/kernel": 256**-0.5,
        "encoder/layers_0/attention/out/kernel": (4 * 32) ** -0.5,
        "decoder/layers_0/mlp/wi_0/kernel": cut * 256**-0.5,
        "decoder/layers_0/mlp/wo/kernel": cut * 512**-0.5,
        "decoder/logits_dense/kernel": cut * 256**-0.5,
    }
    for path, deviation in expected.items():
        # 32,768 values or more: the estimate's standard error is under 0.4%.
        assert abs(float(flat[path].std()) / deviation - 1) < 0.02, path
    bias = flat["encoder/relpos_bias/rel_embedding"]
    assert float(jnp.abs(bias).max()) <= (6 / (4 + 8)) ** 0.5
    assert np.all(flat["encoder/encoder_norm/scale"] == 1)


def test_decoder_reads_each_segment_shifted_and_beginning_with_zero():
    targets = jnp.array([[6, 4, 1, 3, 1, 0, 0]])
    segments = jnp.array([[1, 1, 1, 2, 2, 0, 0]])
    np.testing.assert_array_equal(shift_right(targets, segments), [[0, 6, 4, 0, 3, 0, 0]])


def test_decoder_reads_the_absolute_value_of_a_target_without_loss():
    targets = jnp.array([[-6, 4, 1]])
    segments = jnp.array([[1, 1, 1]])
    np.testing.assert_array_equal(shift_right(targets, segments), [[0, 6, 4]])


def test_segments_of_an_unpacked_row_end_where_padding_begins():
    np.testing.assert_array_equal(segments_of(jnp.array([[9, 7, 1, 0]]), None), [[1, 1, 1, 0]])


def test_two_evaluations_are_equal_bit_by_bit(params):
    model = T5(dataclasses.replace(T5_1_1, dropout_rate=0.5), FLOAT32)
    batch = batch_of([[5, 6, 1]], [[7, 1]])
    first, second = (logits_of(model, params, batch) for _ in range(2))
    np.testing.assert_array_equal(first, second)


def test_dropout_depends_on_its_key_alone(params):
    model = T5(dataclasses.replace(T5_1_1, dropout_rate=0.5), FLOAT32)
    batch = batch_of([[5, 6, 1]], [[7, 1]])

    def logits(seed):
        rngs = {"dropout": jax.random.key(seed)}
        return model.apply({"params": params}, batch, deterministic=False, rngs=rngs)

    np.testing.assert_array_equal(logits(1), logits(1))
    assert np.abs(logits(1) - logits(2)).max() > 1e-3


@pytest.mark.parametrize("config", [T5_1_1, T5_1_0], ids=["1.1", "1.0"])
def test_parameters_and_logits_are_float32_under_bfloat16_activations(config):
    model = T5(config, BFLOAT16)
    params = initial_parameters(model, jax.random.key(0))
    batch = batch_of([[5, 6, 1]], [[7, 1]])
    assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype("float32")}
    logits = logits_of(model, params, batch)
    assert logits.dtype == jnp.float32
    exact = logits_of(T5(config, FLOAT32), params, batch)
    # bfloat16 has 8 bits: this says that it is the same function, not how close it is.
    assert np.abs(logits - exact).max() < 0.1 * np.abs(exact).max()


def test_gradients_under_bfloat16_activations_are_float32s_up_to_bfloat16s_precision(params):
    """With natural texts' frequencies: a few ids take most positions, and add up to one vector."""
    draws = np.random.default_rng(0)
    ids = np.minimum(draws.pareto(0.7, (8, 200)) + 2, T5_1_1.vocab_size - 1).astype(np.int32)
    batch = batch_of(ids, ids[:, :50])

    def gradients(dtypes):
        def loss(params):
            log_p = jax.nn.log_softmax(logits_of(T5(T5_1_1, dtypes), params, batch))
            return -jnp.take_along_axis(log_p, jnp.asarray(batch["targets"])[..., None], -1).sum()

        return flax.traverse_util.flatten_dict(jax.jit(jax.grad(loss))(params), sep="/")

    expected = gradients(FLOAT32)
    for name, gradient in gradients(BFLOAT16).items():
        apart = jnp.linalg.norm(gradient - expected[name]) / jnp.linalg.norm(expected[name])
        # bfloat16 has 8 bits.
        assert apart < 8 * 2**-8, (name, float(apart))


IN_T5X = model_config(arithmetic=Arithmetic(True, *[True] * 8))


@pytest.mark.parametrize(
    "config",
    [T5_1_1, UMT5, IN_T5X, T5_1_1.with_adapter(ia3()), T5_1_1.with_adapter(lora())],
    ids=["Mesh TensorFlow's", "umT5's", "T5X's", "(IA)3's", "LoRA's"],
)
def test_no_gradient_under_bfloat16_activations_is_a_bfloat16_sum(config):
    """A sum over the positions of a large batch stopped growing: a quarter was left on CPUs."""
    model = T5(dataclasses.replace(config, dropout_rate=0.1), BFLOAT16)
    trained = jax.eval_shape(lambda: initial_parameters(model, jax.random.key(0)))
    if config.adapter is not None:
        trained = join_adapter(trained, adapter_shapes(model))
    batch = batch_of(*[np.ones((8, 200), np.int32)] * 2)

    def loss(params):
        key = jax.random.key(1)
        return training_loss(model, params, batch, denominator=1.0, dropout_key=key)

    steps = str(jax.make_jaxpr(jax.grad(loss))(trained))
    sums = re.findall(r":(\w+)\[\S+ = (?:reduce_sum|scatter-add)\[", steps)
    assert "f32" in sums and "bf16" not in sums


def test_encode_and_decode_together_are_the_call(params):
    model = T5(T5_1_1, FLOAT32)
    batch = batch_of([[5, 6, 1, 0]], [[7, 1]])
    segments = {name: segments_of(x, None) for name, x in batch.items()}
    variables = {"params": params}
    encoded = model.apply(variables, batch["inputs"], segments["inputs"], method="encode")
    assert not encoded[0, 3].any(), "padding is encoded as zero"
    logits = model.apply(
        variables,
        encoded,
        segments["inputs"],
        batch["targets"],
        segments["targets"],
        method="decode",
    )
    np.testing.assert_array_equal(logits, model.apply(variables, batch))


@settings(max_examples=15)
@given(data=st.data())
def test_packed_examples_get_the_logits_that_they_get_alone(params, data):
    lengths = st.integers(1, 5)
    pairs = data.draw(st.lists(st.tuples(lengths, lengths), min_size=2, max_size=2))
    generator = np.random.default_rng(data.draw(st.integers(0, 1000)))
    packed = {name: np.zeros((1, 12), np.int32) for name in ("inputs", "targets")}
    packed |= {
        f"{name}_segmentation": np.zeros((1, 12), np.int32) for name in ("inputs", "targets")
    }
    starts, alone = {"inputs": 0, "targets": 0}, []
    for segment, sizes in enumerate(pairs, start=1):
        example, places = {}, {}
        for name, size in zip(("inputs", "targets"), sizes, strict=True):
            example[name] = np.zeros((1, 12), np.int32)
            example[name][0, :size] = generator.integers(2, 128, size)
            place = slice(starts[name], starts[name] + size)
            packed[name][0, place] = example[name][0, :size]
            packed[f"{name}_segmentation"][0, place] = segment
            starts[name], places[name] = starts[name] + size, place
        alone.append((example, places["targets"]))
    together = run(params, packed)
    for example, place in alone:
        separate = run(params, example)[0, : place.stop - place.start]
        np.testing.assert_allclose(together[0, place], separate, atol=2e-5)


@settings(max_examples=10)
@given(st.integers(0, 1000))
def test_padding_and_later_targets_do_not_change_a_logit(params, seed):
    generator = np.random.default_rng(seed)
    inputs = np.zeros((1, 12), np.int32)
    inputs[0, :4] = generator.integers(2, 128, 4)
    targets = generator.integers(2, 128, (1, 12)).astype(np.int32)
    changed = targets.copy()
    changed[0, 6:] = generator.integers(2, 128, 6)
    before = run(params, {"inputs": inputs, "targets": targets})
    after = run(params, {"inputs": inputs, "targets": changed})
    np.testing.assert_allclose(before[0, :7], after[0, :7], atol=2e-5)
    short = logits_of(T5(T5_1_1, FLOAT32), params, batch_of(inputs[:, :4], targets[:, :7]))
    np.testing.assert_allclose(short[0], before[0, :7], atol=2e-5)


@jax.jit
def run(params, batch):
    return logits_of(T5(T5_1_1, FLOAT32), params, batch)


@pytest.mark.parametrize(("config", "wider"), [(T5_1_1, "logits_dense"), (T5_1_0, "embedding")])
@pytest.mark.parametrize("float32_logits", [False, True])
def test_parameters_held_in_bfloat16_compute_the_same_bits(config, wider, float32_logits):
    arithmetic = dataclasses.replace(config.arithmetic, float32_vocabulary_logits=float32_logits)
    model = T5(dataclasses.replace(config, arithmetic=arithmetic), BFLOAT16)
    params = initial_parameters(model, jax.random.key(0))
    types = jax.tree.map(lambda x: x.dtype, evaluation_shapes(model, params))
    held = jax.tree.map(lambda x, dtype: x.astype(dtype), params, types)
    batch = batch_of([[5, 6, 1, 0]], [[7, 8, 1]])
    logits = [logits_of(model, each, batch) for each in (params, held)]
    np.testing.assert_array_equal(*logits)
    # Norms and position biases stay float32, and what logits are made from if they are.
    flat = flax.traverse_util.flatten_dict(types)
    wide = {path for path, dtype in flat.items() if dtype == jnp.float32}
    assert {path for path in flat if path[-1] in ("scale", "rel_embedding")} <= wide
    assert {path for path in wide if path[-1] in ("kernel", "embedding")} == {
        path for path in flat if wider in path and float32_logits
    }


@pytest.mark.parametrize("config", [T5_1_1, UMT5], ids=["1.1", "a bias in each layer"])
def test_layers_without_dropout_are_traced_once_for_the_same_program(config, monkeypatch):
    deep = dataclasses.replace(config, num_encoder_layers=3, num_decoder_layers=3, dropout_rate=0.0)
    model, calls = T5(deep, FLOAT32), []
    params = jax.eval_shape(lambda: initial_parameters(model, jax.random.key(0)))
    batch = batch_of([[5, 8, 1, 0]], [[6, 4, 1, 0]])

    def note(function, args, kwargs, context):
        if isinstance(context.module, Block) and context.method_name == "__call__":
            calls.append(context.module.encoder)
        return function(*args, **kwargs)

    def program():
        calls.clear()
        total = lambda p, b: model.apply({"params": p}, b).sum()  # noqa: E731
        with nn.intercept_methods(note):
            text = jax.jit(jax.grad(total)).lower(params, batch).as_text()
        # Not their names, nor constants: equal ones of several layers may be one.
        return [name for name in re.findall("stablehlo[.]([a-z_]+)", text) if name != "constant"]

    once, seen = program(), list(calls)
    monkeypatch.setattr(Tower, "_can_share_trace", lambda *_: False)
    each = program()
    assert seen == [True, False]
    assert calls == [True] * 3 + [False] * 3
    assert sorted(once) == sorted(each)
    if jax.__version_info__ < (0, 11):  # from then on, gradients may add up in another order
        assert once == each


def test_a_caller_gets_the_intermediate_values_of_every_layer():
    deep = dataclasses.replace(T5_1_1, num_encoder_layers=2, num_decoder_layers=2, dropout_rate=0.0)
    model = T5(deep, FLOAT32)
    params = initial_parameters(model, jax.random.key(0))
    batch = batch_of([[5, 8, 1, 0]], [[6, 4, 1, 0]])

    @jax.jit
    def values(params, batch):
        return model.apply(
            {"params": params}, batch, capture_intermediates=True, mutable=["intermediates"]
        )[1]["intermediates"]

    assert {"layers_0", "layers_1"} <= values(params, batch)["decoder"].keys()
