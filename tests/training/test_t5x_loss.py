"""T5X's choices in the loss, against numbers computed in float64 numpy; and microbatches."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tests.helpers.tiny_models as tiny
from t0repro.config.model import Arithmetic
from t0repro.model.t5 import T5, initial_parameters
from t0repro.training.metric_classes import compute_values, copy_to_host, fill_in_steps
from t0repro.training.t5_model import T5Model
from t0repro.training.t5x_metrics import loss_and_sums
from t0repro.training.token_losses import (
    add_loss_weights,
    cross_entropy,
    evaluation_sums,
    loss_denominator,
    token_weights,
    training_loss,
)
from t0repro.training.train_state import TrainState
from t0repro.training.train_step import accumulate_grads_microbatched

T5X = Arithmetic(smoothing_spares_target=True, z_loss_in_evaluation=True)
PACKED = {
    "inputs": [[5, 1, 6, 1, 0, 0], [9, 8, 7, 6, 5, 1]],
    "inputs_segmentation": [[1, 1, 2, 2, 0, 0], [1, 1, 1, 1, 1, 1]],
    "targets": [[4, 3, 1, 2, 0], [7, 1, 5, 5, 1]],
    "targets_segmentation": [[1, 1, 1, 2, 0], [1, 1, 2, 2, 2]],
}
PACKED = {name: np.asarray(rows, np.int32) for name, rows in PACKED.items()}


def log_softmax(logits):
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def smoothed_by_hand(logits, targets, smoothing):
    """Cross entropy to the smoothed one-hot targets less that distribution's entropy, float64."""
    vocab = logits.shape[-1]
    soft = np.full(logits.shape, smoothing / (vocab - 1))
    np.put_along_axis(soft, targets[..., None], 1.0 - smoothing, -1)
    entropy = -np.sum(soft * np.log(np.where(soft > 0, soft, 1.0)), -1)
    return -np.sum(soft * log_softmax(logits), -1) - entropy


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.4])
def test_smoothing_that_spares_the_target_is_as_by_hand(smoothing):
    generator = np.random.default_rng(0)
    logits, targets = generator.normal(size=(3, 5, 17)) * 4, generator.integers(0, 17, (3, 5))
    ours = cross_entropy(
        jnp.asarray(logits, jnp.float32),
        jnp.asarray(targets, jnp.int32),
        label_smoothing=smoothing,
        spares_target=True,
    )
    expected = smoothed_by_hand(logits, targets, smoothing)
    np.testing.assert_allclose(ours, expected, rtol=2e-6, atol=2e-6)


def test_the_least_smoothed_loss_is_zero():
    soft = np.full((1, 1, 8), 0.2 / 7)
    soft[..., 3] = 0.8
    logits = jnp.log(jnp.asarray(soft, jnp.float32))
    loss = cross_entropy(logits, jnp.array([[3]]), label_smoothing=0.2, spares_target=True)
    assert abs(loss[0, 0]) < 1e-6


def config_of(denominator, **changes):
    return tiny.model_config(
        d_model=8, d_ff=12, loss_denominator=denominator, arithmetic=T5X, **changes
    )


def by_hand(model, params, batch, *, denominator, z_loss):
    """The loss in float64 numpy from the model's logits: token losses over a divisor by name."""
    logits = np.asarray(jax.jit(model.apply)({"params": params}, batch), np.float64)
    targets = np.asarray(batch["targets"])
    loss = smoothed_by_hand(logits, targets, model.config.label_smoothing)
    log_z = -log_softmax(logits)[..., 0] + logits[..., 0]
    loss = (loss + z_loss * log_z**2) * (targets > 0)
    if denominator == "AVERAGE_PER_SEQUENCE":
        segments = batch.get("targets_segmentation", (targets > 0) * 1)
        means = [
            loss[row][(segments[row] == segment) & (targets[row] > 0)].mean()
            for row in range(len(targets))
            for segment in sorted(set(segments[row]) - {0})
        ]
        return np.mean(means)
    divisor = {None: targets.size, "NUM_REAL_TARGET_TOKENS": (targets > 0).sum()}
    return loss.sum() / divisor.get(denominator, denominator)


def measured(model, params, batch, microbatches=1):
    """T5X's metrics of one step without dropout, and its gradients."""

    @jax.jit
    def step(params, batch):
        state = TrainState(step=jnp.int32(0), params=params, slots=None)
        return accumulate_grads_microbatched(T5Model(model), state, batch, None, microbatches)[:2]

    gradients, metrics = step(params, batch)
    return compute_values(fill_in_steps(copy_to_host(metrics), 1, 1.0)), gradients


DENOMINATORS = [1.0, 262144.0, None, "NUM_REAL_TARGET_TOKENS", "AVERAGE_PER_SEQUENCE"]


@pytest.fixture(scope="module")
def params():
    return tiny.new_state().params


@pytest.mark.always
@pytest.mark.parametrize(
    ("denominator", "batch"),
    # Whether rows are packed matters to two of them.
    [
        *((name, "packed") for name in DENOMINATORS),
        *((name, "unpacked") for name in DENOMINATORS[2::2]),
    ],
)
def test_each_way_to_normalize_is_as_by_hand_whole_and_in_microbatches(params, denominator, batch):
    rows = PACKED if batch == "packed" else tiny.batches(1)[0]
    config = config_of(denominator, z_loss=1e-2, label_smoothing=0.1)
    model = T5(config, tiny.FLOAT32)
    expected = by_hand(model, params, rows, denominator=denominator, z_loss=1e-2)
    whole, gradients = measured(model, params, rows)
    split, summed = measured(model, params, rows, 2)
    assert whole["loss"] == pytest.approx(expected, rel=1e-5)
    assert split["loss"] == pytest.approx(expected, rel=1e-5)
    for one, other in zip(jax.tree.leaves(gradients), jax.tree.leaves(summed), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5 * np.abs(one).max() + 1e-12)
    for name in whole:
        assert whole[name] == pytest.approx(split[name], rel=1e-5), name


def test_weights_of_packed_examples_are_the_reciprocal_of_their_length():
    batch = add_loss_weights(config_of("AVERAGE_PER_SEQUENCE"), PACKED)
    weights = token_weights(config_of("AVERAGE_PER_SEQUENCE"), batch)
    third = 1 / 3
    expected = [[third, third, third, 1, 0], [0.5, 0.5, third, third, third]]
    np.testing.assert_allclose(weights, expected, rtol=1e-6)
    assert loss_denominator(config_of("AVERAGE_PER_SEQUENCE"), batch) == pytest.approx(4.0)


def test_training_draws_dropout_from_its_key_and_smooths_as_the_arithmetic_says():
    config = config_of(
        None, model_type="lm", num_encoder_layers=0, dropout_rate=0.5, label_smoothing=0.1
    )
    model, key = T5(config, tiny.FLOAT32), jax.random.key(7)
    params, batch = initial_parameters(model, jax.random.key(0)), tiny.batches(1)[0]

    @jax.jit
    def made(batch):
        options = {"deterministic": False, "rngs": {"dropout": key}}
        logits = model.apply({"params": params}, batch, **options)
        return logits, training_loss(model, params, batch, denominator=20.0, dropout_key=key)

    logits, loss = jax.device_get(made(batch))
    losses = smoothed_by_hand(np.asarray(logits, np.float64), batch["targets"], 0.1)
    assert loss == pytest.approx((losses * (batch["targets"] > 0)).sum() / 20, rel=1e-5)
    # Without a key, Flax would refuse to draw.
    jax.eval_shape(lambda p: training_loss(model, p, batch, denominator=20.0), params)


def test_t5xs_evaluation_has_the_z_loss_and_mesh_tensorflows_has_not(params):
    batch = tiny.batches(1)[0]
    ours = T5(config_of(None, z_loss=0.5), tiny.FLOAT32)
    mesh = T5(dataclasses.replace(ours.config, arithmetic=Arithmetic()), tiny.FLOAT32)
    with_z, sums = loss_and_sums(ours, params, batch, denominator=20.0)
    without = evaluation_sums(mesh, params, batch, denominator=20.0)["loss"]
    assert float(with_z - sums["z_loss"]) == pytest.approx(float(without), rel=1e-5)
    assert float(sums["z_loss"]) > 0.1


def test_metrics_have_t5xs_names_and_values(params):
    model = T5(config_of("NUM_REAL_TARGET_TOKENS", z_loss=1e-2), tiny.FLOAT32)
    metrics, _ = measured(model, params, PACKED)
    loss = by_hand(model, params, PACKED, denominator="NUM_REAL_TARGET_TOKENS", z_loss=1e-2)
    logits = np.asarray(model.apply({"params": params}, PACKED))
    real = PACKED["targets"] > 0
    hits = ((logits.argmax(-1) == PACKED["targets"]) & real).sum()
    assert metrics["accuracy"] == pytest.approx(hits / 9)
    assert metrics["loss"] == pytest.approx(loss, rel=1e-5)
    assert metrics["loss_per_nonpadding_target_token"] == pytest.approx(loss / 9, rel=1e-5)
    assert metrics["loss_per_all_target_tokens"] == pytest.approx(loss / 10, rel=1e-5)
    assert metrics["cross_ent_loss"] + metrics["z_loss"] == pytest.approx(metrics["loss"])
    assert metrics["non_padding_fraction/encoder"] == pytest.approx(10 / 12)
    assert metrics["non_padding_fraction/decoder"] == pytest.approx(9 / 10)
    assert metrics["non_padding_fraction/overall"] == pytest.approx(19 / 22)
    assert metrics["effective_batch_size/encoder"] == 3
    assert metrics["effective_batch_size/decoder"] == 4
    assert metrics["examples_per_row/encoder"] == 1.5
    assert metrics["timing/real_input_tokens_per_second"] == 10


@pytest.mark.parametrize("packed", [False, True])
def test_a_language_model_is_trained_on_texts_alone(packed):
    model = T5(config_of(20.0, model_type="lm", num_encoder_layers=0), tiny.FLOAT32)
    params = initial_parameters(model, jax.random.key(0))
    batch = {name: x for name, x in PACKED.items() if name.startswith("targets")}
    if not packed:
        del batch["targets_segmentation"]
    features = T5Model(model).features(batch)
    metrics, gradients = measured(model, params, features, microbatches=2)
    whole, expected = measured(model, params, batch)
    # What inputs there are is not read: metrics of them are all that they add.
    both, _ = measured(model, params, PACKED if packed else {**batch, "inputs": PACKED["inputs"]})
    assert metrics["loss"] == pytest.approx(whole["loss"]) == pytest.approx(both["loss"])
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), gradients, expected
    )
    assert metrics["non_padding_fraction/overall"] == pytest.approx(9 / 10)
    assert {name for name in both if name not in metrics} == {
        "timing/real_input_tokens_per_second",
        *(name for name in both if "encoder" in name),
    }


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("on_targets_only", [False, True])
def test_inputs_that_become_targets_are_counted_as_targets(on_targets_only, packed):
    shape = {"model_type": "delimited_lm", "num_encoder_layers": 0}
    model = T5(config_of(20.0, **shape, loss_on_targets_only=on_targets_only), tiny.FLOAT32)
    rows = {"inputs": [[9, 8, 7, 6, 1, 0]], "targets": [[7, 1, 0, 0, 0]]}
    if packed:
        rows = {
            "inputs": [[5, 1, 6, 1, 0, 0], *rows["inputs"]],
            "inputs_segmentation": [[1, 1, 2, 2, 0, 0], [1, 1, 1, 1, 1, 0]],
            "targets": [[4, 3, 1, 2, 1], *rows["targets"]],
            "targets_segmentation": [[1, 1, 1, 2, 2], [1, 1, 0, 0, 0]],
        }
    batch = {name: np.asarray(x, np.int32) for name, x in rows.items()}
    metrics, _ = measured(model, initial_parameters(model, jax.random.key(0)), batch)
    size, real, scored = (22, 16, 7) if packed else (11, 7, 2)
    scored = scored if on_targets_only else real
    assert metrics["non_padding_fraction/loss_weights"] == pytest.approx(scored / size)
    assert metrics["loss_per_all_target_tokens"] == pytest.approx(metrics["loss"] / size)
    assert metrics["non_padding_fraction/overall"] == pytest.approx(real / size)
    assert metrics["timing/target_tokens_per_second"] == size
    assert not any("encoder" in name for name in metrics)


def test_the_loss_of_a_target_token_is_the_same_whatever_the_dialect_divides_by():
    shown = []
    # Mesh TensorFlow's divisor (padding too), T5X's sum, and T5X's count of target tokens.
    for denominator in (None, 1.0, "NUM_REAL_TARGET_TOKENS"):
        model = T5(dataclasses.replace(tiny.T5_1_1, loss_denominator=denominator), tiny.FLOAT32)
        parameters = initial_parameters(model, jax.random.key(0))
        trained = T5Model(model)
        loss, metrics = trained.loss_fn(parameters, PACKED, None)
        shown.append(trained.loss_per_target_token(float(loss), 9, PACKED))
        values = {"loss": float(loss)} | {
            name: float(metrics[name].compute())
            for name in ("loss_per_nonpadding_target_token", "loss_per_all_target_tokens")
        }
        shown.append(trained.summary_loss_per_target_token(values))
    np.testing.assert_allclose(shown, shown[0], rtol=1e-6)
