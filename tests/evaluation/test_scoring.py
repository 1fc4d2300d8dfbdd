import jax
import numpy as np
import pytest

from t0repro.config.run_config import DTypePolicy, ModelConfig
from t0repro.evaluation.scoring import score_batches
from t0repro.model.t5 import T5, initial_parameters

CONFIG = ModelConfig(
    num_encoder_layers=1,
    num_decoder_layers=1,
    d_model=8,
    d_ff=12,
    num_heads=2,
    d_kv=4,
    vocab_size=128,
    activations=("gelu", "linear"),
    logits_from_embedding=False,
    relative_attention_num_buckets=8,
    dropout_rate=0.5,
    label_smoothing=0.1,
    z_loss=0.1,
    loss_denominator=None,
)
MODEL = T5(CONFIG, DTypePolicy("float32", "float32", "float32"))
BATCH = {
    "inputs": np.array([[5, 6, 1, 0], [7, 0, 0, 0]], np.int32),
    "targets": np.array([[9, 4, 1], [3, 1, 0]], np.int32),
}


@pytest.fixture(scope="module")
def params():
    return initial_parameters(MODEL, jax.random.key(0))


def test_a_score_is_the_sum_of_log_probabilities_of_targets_with_eos(params):
    """Neither label smoothing nor z_loss nor dropout, which the model has, is in a score."""
    logits = jax.jit(MODEL.apply)({"params": params}, BATCH)
    logits = np.asarray(logits, np.float64)
    log_p = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    expected = [
        sum(log_p[row, place, token] for place, token in enumerate(targets) if token > 0)
        for row, targets in enumerate(BATCH["targets"])
    ]
    scores = score_batches(params, MODEL, [BATCH])
    assert scores.dtype == np.float32 and scores.shape == (2,)
    np.testing.assert_allclose(scores, expected, atol=1e-5)


def test_scores_do_not_depend_on_padding_or_on_the_other_rows(params):
    scores = score_batches(params, MODEL, [BATCH])
    wider = {name: np.pad(x, ((0, 0), (0, 3))) for name, x in BATCH.items()}
    alone = {name: x[1:] for name, x in wider.items()}
    np.testing.assert_allclose(score_batches(params, MODEL, [wider]), scores, atol=1e-5)
    np.testing.assert_allclose(score_batches(params, MODEL, [alone]), scores[1:], atol=1e-5)


def test_segmentation_is_not_read(params):
    packed = BATCH | {f"{name}_segmentation": np.full_like(x, 3) for name, x in BATCH.items()}
    np.testing.assert_array_equal(
        score_batches(params, MODEL, [packed]), score_batches(params, MODEL, [BATCH])
    )


def test_negative_targets_are_context_without_a_score(params):
    masked = {"inputs": BATCH["inputs"], "targets": np.array([[-9, 0, 0]] * 2, np.int32)}
    np.testing.assert_array_equal(score_batches(params, MODEL, [masked]), [0.0, 0.0])


def test_scores_of_all_batches_come_in_order(params):
    swapped = {name: x[::-1] for name, x in BATCH.items()}
    scores = score_batches(params, MODEL, iter([BATCH, swapped]))
    np.testing.assert_allclose(scores[:2], scores[:1:-1], atol=1e-6)
    assert score_batches(params, MODEL, []).shape == (0,)


def test_scores_under_bfloat16_are_near_those_of_float32(params):
    half = T5(CONFIG, DTypePolicy("float32", "float32", "bfloat16"))
    exact = score_batches(params, MODEL, [BATCH])
    np.testing.assert_allclose(score_batches(params, half, [BATCH]), exact, rtol=0.05)
