"""T5X's decoder-only model: its network and loss against float64 numpy, from gin to steps."""

import dataclasses

import jax
import numpy as np
import pytest

from t0repro.config.model import DTypePolicy
from t0repro.errors import UserError
from t0repro.model.t5 import T5, initial_parameters
from t0repro.runs.precompile import length_assumptions
from t0repro.training.models import make_model
from t0repro.training.rematerialization import batch_shapes

from ..config.t5x_trainings import BIDIRECTIONAL, PASSED_THROUGH, decoder_only_config
from ..helpers.t5x_decoder import logits_by_hand

# Two packed examples, then one with padding. The second example of the first row has loss on its
# inputs too, as a task of its own may say.
BATCH = {
    "decoder_target_tokens": [[7, 8, 1, 3, 9, 5, 4, 1], [6, 5, 9, 1, 2, 1, 0, 0]],
    "decoder_input_tokens": [[0, 7, 8, 1, 3, 0, 5, 4], [0, 6, 5, 9, 1, 2, 1, 0]],
    "decoder_segment_ids": [[1, 1, 1, 1, 1, 2, 2, 2], [1, 1, 1, 1, 1, 1, 0, 0]],
    "decoder_causal_attention": [[1, 1, 1, 1, 0, 1, 1, 0], [1, 1, 1, 1, 1, 0, 0, 0]],
    "decoder_loss_weights": [[0, 0, 0, 1, 1, 1, 1, 1], [0, 0, 0, 0, 1, 1, 0, 0]],
}
BATCH = {name: np.asarray(rows, np.int32) for name, rows in BATCH.items()}


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("bidirectional", [True, False])
def test_logits_and_loss_are_those_of_t5xs_decoder(packed, bidirectional, tmp_path):
    batch = dict(BATCH)
    if not packed:
        # One example to a row, of which the batch keeps no segments.
        batch = {name: rows[1:] for name, rows in batch.items() if name != "decoder_segment_ids"}
    config = decoder_only_config(tmp_path, *[BIDIRECTIONAL] * bidirectional).model
    assert config.model_type == "lm" and config.input_full_attention is bidirectional
    model = make_model(T5(config, DTypePolicy("float32", "float32", "float32")))
    params = initial_parameters(model.module, jax.random.key(0))
    features = model.features(batch)
    logits = model.module.apply({"params": params}, features)
    expected, real = (
        logits_by_hand(params, batch, bidirectional),
        batch["decoder_target_tokens"] > 0,
    )
    np.testing.assert_allclose(np.asarray(logits)[real], expected[real], rtol=2e-4, atol=2e-5)

    log_z = np.log(np.exp(expected).sum(-1))
    at_target = np.take_along_axis(expected, batch["decoder_target_tokens"][..., None], -1)[..., 0]
    losses = (log_z - at_target + 0.01 * log_z**2) * batch["decoder_loss_weights"]
    loss, metrics = model.eval_fn(params, features)
    assert float(loss) == pytest.approx(losses.sum(), rel=1e-4)
    real_losses = batch["decoder_loss_weights"].sum()
    per_token = metrics["loss_per_nonpadding_target_token"].compute()
    assert float(per_token) == pytest.approx(losses.sum() / real_losses, rel=1e-4)


@pytest.mark.parametrize("bidirectional", [True, False])
def test_padding_inside_a_text_is_read_by_nobody(bidirectional, tmp_path):
    batch = {name: rows[1:] for name, rows in BATCH.items() if name != "decoder_segment_ids"}
    batch["decoder_target_tokens"] = batch["decoder_target_tokens"] * [[1, 1, 0, 1, 1, 1, 0, 0]]
    config = decoder_only_config(tmp_path, *[BIDIRECTIONAL] * bidirectional).model
    model = make_model(T5(config, DTypePolicy("float32", "float32", "float32")))
    params = initial_parameters(model.module, jax.random.key(0))
    features = model.features(batch)
    assert "targets_segmentation" not in features
    logits = np.asarray(model.module.apply({"params": params}, features))
    expected, real = (
        logits_by_hand(params, batch, bidirectional),
        batch["decoder_target_tokens"] > 0,
    )
    np.testing.assert_allclose(logits[real], expected[real], rtol=2e-4, atol=2e-5)


def test_metrics_sum_weights_that_are_fractions(tmp_path):
    config = decoder_only_config(tmp_path).model
    model = make_model(T5(config, DTypePolicy("float32", "float32", "float32")))
    params = initial_parameters(model.module, jax.random.key(0))
    halved = {**BATCH, "decoder_loss_weights": BATCH["decoder_loss_weights"] * np.float32(0.5)}
    (loss, whole), (half, metrics) = (
        model.eval_fn(params, model.features(batch)) for batch in (BATCH, halved)
    )
    assert float(half) == pytest.approx(float(loss) / 2, rel=1e-5)
    # T5X's accuracy reads the weights as a mask.
    ratios = {"accuracy": 1.0, "loss_per_nonpadding_target_token": 1.0}
    for name, ratio in (ratios | {"non_padding_fraction/loss_weights": 0.5}).items():
        expected = ratio * float(whole[name].compute())
        assert float(metrics[name].compute()) == pytest.approx(expected, rel=1e-5), name


def test_attention_in_both_directions_changes_what_only_inputs_see(tmp_path):
    config = decoder_only_config(tmp_path, BIDIRECTIONAL).model
    policy = DTypePolicy("float32", "float32", "float32")
    both = make_model(T5(config, policy))
    causal = make_model(T5(dataclasses.replace(config, input_full_attention=False), policy))
    params = initial_parameters(both.module, jax.random.key(0))
    logits = [
        np.asarray(model.module.apply({"params": params}, model.features(BATCH)))[0]
        for model in (both, causal)
    ]
    assert not np.allclose(logits[0][0], logits[1][0])


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda batch: batch.pop("decoder_causal_attention"), "has no decoder_causal_attention"),
        (
            lambda batch: batch.update(decoder_causal_attention=np.eye(2, 8, 1, dtype=np.int32)),
            "marks positions after others",
        ),
    ],
)
def test_a_batch_that_does_not_say_which_are_inputs_is_refused(change, why, tmp_path):
    model = make_model(
        T5(
            decoder_only_config(tmp_path, BIDIRECTIONAL).model,
            DTypePolicy("float32", "float32", "float32"),
        )
    )
    batch = dict(BATCH)
    change(batch)
    with pytest.raises(UserError, match=why):
        model.features(batch)


def test_the_compiled_steps_batch_has_the_features_that_are_trained_on(tmp_path):
    shapes = batch_shapes(decoder_only_config(tmp_path, BIDIRECTIONAL))
    model = make_model(
        T5(
            decoder_only_config(tmp_path, BIDIRECTIONAL).model,
            DTypePolicy("float32", "float32", "float32"),
        )
    )
    assert shapes.keys() == model.features(BATCH).keys() - {"decoder_inputs"}


@pytest.mark.parametrize(
    ("lengths", "rows"),
    [
        ("{'decoder_target_tokens': 12}", 12),
        ("{'inputs': 8, 'targets': 6}", 14),  # what the task reads
        ("{'my_feature': 6}", 512),
    ],
)
def test_passed_through_rows_are_as_long_as_the_runs_settings_say(lengths, rows, tmp_path):
    run = decoder_only_config(
        tmp_path, PASSED_THROUGH, "from t5x import utils",
        f"train/utils.DatasetConfig.task_feature_lengths = {lengths}",
    )  # fmt: skip
    assert batch_shapes(run)["targets"] == (4, rows)
    lines = list(length_assumptions(run))
    assert len(lines) == (rows == 512) and all("rows of 512 tokens" in line for line in lines)
