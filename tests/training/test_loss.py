import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from t0repro.model.t5 import initial_parameters
from t0repro.training import loss as loss_module
from t0repro.training.loss import (
    count_examples,
    count_targets,
    cross_entropy,
    evaluation_metrics,
    evaluation_sums,
    loss_denominator,
    training_loss,
)

from .. import tiny_models as tiny

loss = jax.jit(training_loss, static_argnums=0)
evaluate = jax.jit(evaluation_sums, static_argnums=0)


@settings(deadline=None, max_examples=20)
@given(
    seed=st.integers(0, 1000),
    smoothing=st.sampled_from([0.0, 0.1, 0.5]),
    z_loss=st.sampled_from([0.0, 1e-4, 0.1]),
)
def test_cross_entropy_is_that_of_smoothed_one_hot_targets(seed, smoothing, z_loss):
    generator = np.random.default_rng(seed)
    logits = generator.normal(size=(2, 3, 7), scale=3).astype(np.float32)
    targets = generator.integers(0, 7, (2, 3)).astype(np.int32)
    soft = np.where(np.eye(7)[targets] == 1, 1 - smoothing + smoothing / 7, smoothing / 7)
    log_z = np.log(np.exp(logits.astype(np.float64)).sum(-1))
    expected = -(soft * (logits - log_z[..., None])).sum(-1) + z_loss * log_z**2
    ours = cross_entropy(
        jnp.asarray(logits), jnp.asarray(targets), label_smoothing=smoothing, z_loss=z_loss
    )
    np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-5)


def test_denominator_counts_padding_unless_the_model_has_its_own():
    batch = tiny.batches(1)[0]
    assert loss_denominator(tiny.MODEL, batch) == 20.0
    assert loss_denominator(tiny.model(loss_denominator=7.0).config, batch) == 7.0


def test_negative_targets_and_padding_carry_no_loss():
    model, params = tiny.model(z_loss=0.0), tiny.new_state().params
    batch = {"inputs": np.array([[5, 1]]), "targets": np.array([[-9, 0]])}
    assert float(loss(model, params, batch, denominator=2.0)) == 0.0


def test_z_loss_enters_the_gradient_of_training_and_not_the_loss_of_evaluation():
    batch, params = tiny.batches(1)[0], tiny.new_state().params

    def gradient(model):
        return jax.jit(jax.grad(lambda p: training_loss(model, p, batch, denominator=20.0)))(params)

    without, with_ = tiny.model(z_loss=0.0), tiny.model(z_loss=0.1)
    name = "logits_dense"
    difference = (
        gradient(with_)["decoder"][name]["kernel"] - gradient(without)["decoder"][name]["kernel"]
    )
    assert np.abs(difference).max() > 1e-3
    for model in (with_, without):
        sums = evaluate(model, params, batch, denominator=20.0)
        expected = loss(without, params, batch, denominator=20.0)
        np.testing.assert_allclose(sums["loss"], expected, rtol=1e-6)


def test_losses_and_sums_are_those_of_the_logits():
    """In float64, with a row that is predicted, one in part, and one of padding alone."""
    smoothing, z_loss, denominator = 0.1, 0.5, 20.0
    model = tiny.model(label_smoothing=smoothing, z_loss=z_loss)
    shapes = jax.eval_shape(lambda: initial_parameters(model, jax.random.key(0)))
    random = np.random.default_rng(0)
    params = jax.tree.map(lambda x: jnp.asarray(random.normal(size=x.shape), x.dtype), shapes)

    @jax.jit
    def computed(batch):
        return (
            model.apply({"params": params}, batch),
            evaluation_sums(model, params, batch, denominator=denominator),
            training_loss(model, params, batch, denominator=denominator),
        )

    batch = {"inputs": np.full((3, 2), 7, np.int32), "targets": np.full((3, 4), 5, np.int32)}
    targets = batch["targets"]
    for position in range(4):
        targets[0, position] = computed(batch)[0][0, position].argmax()
    targets[1] = [targets[0, 0], targets[0, 1] % 127 + 1, -9, 0]
    targets[2] = 0
    logits, sums, loss = jax.device_get(computed(batch))
    assert (targets[0] > 0).all()

    log_z = np.log(np.exp(logits.astype(np.float64)).sum(-1))
    at_target = np.take_along_axis(logits, np.maximum(targets, 0)[..., None], -1)[..., 0]
    plain = log_z - at_target
    smoothed = (1 - smoothing) * plain + smoothing * (log_z - logits.mean(-1))
    counted = targets > 0
    assert loss == pytest.approx(((smoothed + z_loss * log_z**2) * counted).sum() / 20, rel=1e-5)
    assert sums == {
        "batches": 1,
        "loss": pytest.approx((smoothed * counted).sum() / 20, rel=1e-5),
        "cross_entropy": pytest.approx((plain * counted).sum(), rel=1e-5),
        "correct_tokens": 5,
        "correct_rows": 1,
        "tokens": 6,
        "rows": 2,
        "labels": (targets * counted).sum(),
    }


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


@pytest.mark.parametrize(
    ("batch", "examples", "targets"),
    [
        ({"targets": np.array([[3, 1, 0], [0, 0, 0], [-4, 1, 0]])}, 2, 3),
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
