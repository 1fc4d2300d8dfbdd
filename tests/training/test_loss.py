import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, AxisType

from t0repro.model.t5 import initial_parameters
from t0repro.training import token_losses as loss_module
from t0repro.training.step_records import counts_of
from t0repro.training.t5_model import T5Model
from t0repro.training.token_losses import (
    add_loss_weights,
    count_examples,
    count_inputs,
    count_targets,
    cross_entropy,
    evaluation_metrics,
    evaluation_sums,
    loss_denominator,
    map_targets,
    training_loss,
)

from ..helpers import tiny_models as tiny


def by_hand(logits, targets, *, smoothing=0.0, z_loss=0.0):
    """The loss of each target in float64."""
    log_z = np.log(np.exp(np.asarray(logits, np.float64)).sum(-1))
    at_target = np.take_along_axis(logits, np.maximum(targets, 0)[..., None], -1)[..., 0]
    at_all = (1 - smoothing) * at_target + smoothing * logits.mean(-1)
    return log_z - at_all + z_loss * log_z**2


@settings(max_examples=20)
@given(
    seed=st.integers(0, 1000),
    smoothing=st.sampled_from([0.0, 0.1, 0.5]),
    z_loss=st.sampled_from([0.0, 1e-4, 0.1]),
)
def test_cross_entropy_is_that_of_smoothed_one_hot_targets(seed, smoothing, z_loss):
    generator = np.random.default_rng(seed)
    logits = generator.normal(size=(2, 3, 7), scale=3).astype(np.float32)
    targets = generator.integers(0, 7, (2, 3)).astype(np.int32)
    expected = by_hand(logits, targets, smoothing=smoothing, z_loss=z_loss)
    ours = cross_entropy(
        jnp.asarray(logits), jnp.asarray(targets), label_smoothing=smoothing, z_loss=z_loss
    )
    np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-5)


def test_a_negative_target_has_the_cross_entropy_of_the_first_entry():
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(1, 2, 7)), jnp.float32)
    negative, first = (cross_entropy(logits, jnp.array([[3, id]])) for id in (-9, 0))
    np.testing.assert_array_equal(negative, first)


def test_denominator_counts_padding_unless_the_model_has_its_own():
    batch = tiny.batches(1)[0]
    assert loss_denominator(tiny.MODEL, batch) == 20.0
    assert loss_denominator(tiny.model(loss_denominator=7.0).config, batch) == 7.0
    assert loss_denominator(tiny.model_config(model_type="lm"), batch) == 20.0


def test_inputs_that_become_targets_are_in_the_denominator():
    config, batch = tiny.model_config(model_type="delimited_lm"), tiny.batches(1)[0]
    assert loss_denominator(config, batch) == 4 * (6 + 5)
    assert loss_denominator(config, {"targets": batch["targets"]}) == 20.0


def test_a_denominator_that_counts_targets_is_at_least_one():
    real = tiny.model_config(loss_denominator="NUM_REAL_TARGET_TOKENS")
    average = tiny.model_config(loss_denominator="AVERAGE_PER_SEQUENCE")
    for targets, tokens, examples in ([[3, 1, -2, 0]], 2, 1), ([[0, 0], [0, -1]], 1, 1):
        batch = {"targets": np.array(targets, np.int32)}
        found = loss_denominator(real, batch)
        assert (float(found), found.dtype) == (tokens, np.float32)
        assert float(loss_denominator(average, add_loss_weights(average, batch))) == examples


def test_each_example_of_an_average_per_sequence_weighs_the_same():
    config = tiny.model_config(loss_denominator="AVERAGE_PER_SEQUENCE")
    batch = {"inputs": np.ones((3, 2)), "targets": np.array([[4, 3, 1, 0], [-3, 7, 1, 0], [0] * 4])}
    weighted = add_loss_weights(config, batch)
    expected = [[1 / 3, 1 / 3, 1 / 3, 0], [0, 1 / 2, 1 / 2, 0], [0] * 4]
    np.testing.assert_allclose(weighted["loss_weights"], expected, rtol=1e-6)
    assert weighted["loss_weights"].dtype == np.float32
    assert weighted["inputs"] is batch["inputs"] and weighted["targets"] is batch["targets"]
    packed = {"targets": np.array([[5, 6, 7]]), "targets_segmentation": np.array([[1, 1, 2]])}
    weights = add_loss_weights(config, packed)["loss_weights"]
    np.testing.assert_allclose(weights, [[1 / 2, 1 / 2, 1]], rtol=1e-6)
    assert add_loss_weights(tiny.MODEL, batch) is batch


def test_losses_and_sums_are_those_of_the_logits():
    """In float64, with rows predicted, in part and not at all, and one of padding alone."""
    smoothing, z_loss, denominator = 0.1, 0.5, 20.0
    model = tiny.model(label_smoothing=smoothing, z_loss=z_loss)
    shapes = jax.eval_shape(lambda: initial_parameters(model, jax.random.key(0)))
    random = np.random.default_rng(11)
    params = jax.tree.map(lambda x: jnp.asarray(random.normal(size=x.shape), x.dtype), shapes)

    @jax.jit
    def computed(batch):
        return (
            model.apply({"params": params}, batch),
            evaluation_sums(model, params, batch, denominator=denominator),
            training_loss(model, params, batch, denominator=denominator),
        )

    batch = {"inputs": np.full((4, 2), 7, np.int32), "targets": np.full((4, 4), 5, np.int32)}
    targets = batch["targets"]
    for position in range(4):
        targets[0, position] = computed(batch)[0][0, position].argmax()
    targets[1] = [targets[0, 0], targets[0, 1] % 127 + 1, -9, 0]
    targets[2] = [targets[0, 0] % 127 + 1, 0, 0, 0]
    targets[3] = 0
    logits, sums, loss = jax.device_get(computed(batch))
    assert (targets[0] > 0).all() and len(set(targets[0])) == 4

    plain, smoothed = by_hand(logits, targets), by_hand(logits, targets, smoothing=smoothing)
    with_z_loss = by_hand(logits, targets, smoothing=smoothing, z_loss=z_loss)
    counted = targets > 0
    assert loss == pytest.approx((with_z_loss * counted).sum() / 20, rel=1e-5)
    assert sums == {
        "batches": 1,
        "loss": pytest.approx((smoothed * counted).sum() / 20, rel=1e-5),
        "cross_entropy": pytest.approx((plain * counted).sum(), rel=1e-5),
        "correct_tokens": 5,
        "correct_rows": 1,
        "tokens": 7,
        "rows": 3,
        "labels": (targets * counted).sum(),
    }


def test_a_language_models_inputs_have_loss_unless_left_out_and_never_count_in_metrics():
    model = tiny.model(model_type="delimited_lm", num_encoder_layers=0)
    targets_only = tiny.model(
        model_type="delimited_lm", num_encoder_layers=0, loss_on_targets_only=True
    )
    params = initial_parameters(model, jax.random.key(0))
    batch = {
        "inputs": np.array([[5, 8, 1], [9, 1, 0]], np.int32),
        "targets": np.array([[6, 1, 0], [3, 4, 1]], np.int32),
    }
    targets = np.array([[5, 8, 1, 6, 1, 0], [9, 1, 3, 4, 1, 0]])
    real = np.array([[0, 0, 0, 1, 1, 0], [0, 0, 1, 1, 1, 0]])

    @jax.jit
    def computed(batch):
        logits = model.apply({"params": params}, batch)
        return logits, [
            (
                evaluation_sums(each, params, batch, denominator=2.0),
                training_loss(each, params, batch, denominator=2.0),
            )
            for each in (model, targets_only)
        ]

    logits, found = jax.device_get(computed(batch))
    plain = by_hand(logits, targets)
    with_z_loss = by_hand(logits, targets, z_loss=1e-4)
    for counted, (sums, loss) in zip([targets > 0, real], found, strict=True):
        assert loss == pytest.approx((with_z_loss * counted).sum() / 2, rel=1e-5)
        assert sums["loss"] == pytest.approx((plain * counted).sum() / 2, rel=1e-5)
        assert sums["cross_entropy"] == pytest.approx((plain * real).sum(), rel=1e-5)
        assert (sums["tokens"], sums["labels"]) == (5, 6 + 1 + 3 + 4 + 1)
    # The loss per target token is a mean over the tokens that have loss.
    for each, counted in ((model, targets > 0), (targets_only, real)):
        trained = T5Model(each)
        for rows in (batch, {"targets": targets}):
            tokens = counts_of(rows, trained)["target_tokens"]
            assert tokens == counted.sum()
            mean = (with_z_loss * counted).sum() / tokens
            loss = (with_z_loss * counted).sum() / 12
            assert trained.loss_per_target_token(loss, tokens, rows) == pytest.approx(mean)


def test_evaluation_metrics_are_means_over_targets_with_loss():
    metrics = evaluation_metrics(
        {
            "batches": 2.0,
            "loss": 3.0,
            "cross_entropy": 8.0,
            "correct_tokens": 2.0,
            "correct_rows": 1.0,
            "tokens": 4.0,
            "rows": 2.0,
        }
    )
    assert metrics == {
        "loss": 1.5,
        "neg_log_perplexity": -2.0,
        "token_accuracy": 0.5,
        "sequence_accuracy": 0.5,
        "num_eval_tokens": 4.0,
    }


@pytest.mark.parametrize("count", [0.0, 1.0])
def test_metrics_of_nothing_are_zero_and_those_of_one_target_are_its_own(count):
    names = ("batches", "loss", "cross_entropy", "correct_tokens", "correct_rows", "tokens", "rows")
    metrics = evaluation_metrics(dict.fromkeys(names, count))
    assert metrics == {
        "loss": count,
        "neg_log_perplexity": -count,
        "token_accuracy": count,
        "sequence_accuracy": count,
        "num_eval_tokens": count,
    }


@pytest.mark.parametrize(
    ("batch", "examples", "targets"),
    [
        ({"targets": np.array([[3, 1, 2], [0, 0, 0], [-4, 1, 0]])}, 2, 4),
        (
            {
                "targets": np.array([[3, 1, 5], [4, 1, 0]]),
                "targets_segmentation": np.array([[1, 1, 2], [1, 1, 0]]),
            },
            3,
            5,
        ),
    ],
    ids=["unpacked", "packed"],
)
def test_examples_and_targets_are_counted(batch, examples, targets):
    assert count_examples(batch) == examples
    assert count_targets(batch) == targets


def test_inputs_are_counted_without_padding():
    assert count_inputs({"inputs": np.array([[5, 0, -3], [1, 0, 0]])}) == 3
    assert count_inputs({"targets": np.array([[5]])}) == 0


@pytest.mark.parametrize(
    ("limit", "mesh", "positions"),
    [
        (5120, (1, 1), 5),  # all logits: 4 bytes of 2 rows of 5 targets of 128 entries
        (5119, (1, 1), 3),
        (2048, (1, 1), 2),
        (1, (1, 1), 1),
        (1280, (2, 2), 5),  # a quarter on each device
        (1279, (2, 2), 3),
    ],
)
def test_logits_of_a_part_of_the_targets_are_made_at_a_time(limit, mesh, positions, monkeypatch):
    monkeypatch.setattr(loss_module, "LOGITS_BYTES", limit)
    model, generator, shapes = tiny.model(), np.random.default_rng(0), set()
    kernel = generator.normal(size=(8, 128)).astype(np.float32)
    params = {"decoder": {"logits_dense": {"kernel": jnp.asarray(kernel)}}}
    hidden = generator.normal(size=(2, 5, 8)).astype(np.float32)
    targets = np.arange(10, dtype=np.int32).reshape(2, 5)

    def values(logits, targets):
        shapes.add((logits.shape, targets.shape))
        return {"sum": logits.sum(-1), "targets": targets}

    def found():
        return map_targets(model, params, jnp.asarray(hidden), jnp.asarray(targets), values)

    mesh = AbstractMesh(mesh, ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    with jax.sharding.use_abstract_mesh(mesh):
        program = str(jax.make_jaxpr(found)())
    # What was made in parts is rebuilt in the backward pass.
    assert ("prevent_cse=False" in program) == (positions < 5)
    assert shapes == {((2, positions, 128), (2, positions))}
    of = found()
    np.testing.assert_allclose(of["sum"], (hidden @ kernel).sum(-1), rtol=1e-5, atol=1e-4)
    np.testing.assert_array_equal(of["targets"], targets)


@pytest.mark.parametrize("tied", [False, True], ids=["own logits", "tied"])
def test_a_loss_made_of_parts_of_the_logits_is_the_whole_ones(tied, monkeypatch):
    """And so are its gradients: z_loss, smoothing, padding of the last part and all."""
    model = tiny.model(label_smoothing=0.1, z_loss=1e-2, logits_from_embedding=tied)
    params, (batch,) = initial_parameters(model, jax.random.key(0)), tiny.batches(1)

    def found():
        function = jax.jit(jax.value_and_grad(lambda p: loss_of(model, p)))
        return function(params), str(jax.make_jaxpr(lambda p: loss_of(model, p))(params))

    def loss_of(model, p):
        return training_loss(model, p, batch, denominator=20.0)

    whole, whole_program = found()
    # Four rows of 128 logits: two of the five positions at a time.
    monkeypatch.setattr(loss_module, "LOGITS_BYTES", 4 * 4 * 128 * 2)
    parts, program = found()
    assert "f32[4,2,128]" in program and "f32[4,5,128]" not in program
    assert "f32[4,5,128]" in whole_program
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-6), parts, whole)


def test_a_large_batch_never_has_all_its_logits_in_memory():
    """By the compiled program's own figures; nothing is run."""
    model = tiny.model(vocab_size=32128)
    params = jax.eval_shape(lambda: initial_parameters(model, jax.random.key(0)))
    tokens = jax.ShapeDtypeStruct((64, 128), np.int32)
    batch = {"inputs": jax.ShapeDtypeStruct((64, 1), np.int32), "targets": tokens}
    function = jax.jit(jax.grad(lambda p, b: training_loss(model, p, b, denominator=1.0)))
    temporary = function.lower(params, batch).compile().memory_analysis().temp_size_in_bytes
    assert temporary < 64 * 128 * 32128 * 4
