"""The models under T5X's names: one loss by three ways, generation, scores, feature names."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t0repro.config.decoding import DecodingPlan
from t0repro.config.model import Arithmetic
from t0repro.model.features import rename_features, t5x_features
from t0repro.model.t5x_decoding import generate, temperature_sample
from t0repro.training import losses, trainer
from t0repro.training.metric_classes import AveragePerStep
from t0repro.training.models import BaseTransformerModel, EncoderDecoderModel
from t0repro.training.t5_model import T5Model
from t0repro.training.train_state import TrainState

from ..helpers import tiny_models as tiny

OPTIONS = {
    "label_smoothing": 0.1,
    "z_loss": 1e-3,
    "loss_normalizing_factor": "AVERAGE_PER_SEQUENCE",
}
PACKED = {
    "inputs": [[5, 1, 6, 1, 0, 0], [9, 8, 7, 6, 5, 1]],
    "inputs_segmentation": [[1, 1, 2, 2, 0, 0], [1, 1, 1, 1, 1, 1]],
    "targets": [[4, 3, 1, 2, 0], [7, 1, 5, 5, 1]],
    "targets_segmentation": [[1, 1, 1, 2, 0], [1, 1, 2, 2, 2]],
}
PACKED = {name: np.asarray(rows, np.int32) for name, rows in PACKED.items()}


class FromLogits(EncoderDecoderModel):
    """T5X's usual extension: one method, which here leaves the logits as they are."""

    def _compute_logits(self, params, batch, dropout_rng=None):
        assert batch["decoder_target_tokens"].ndim == 2
        return super()._compute_logits(params, batch, dropout_rng)


class Weighted(EncoderDecoderModel):
    """A loss of its own, written with T5X's functions and T5X's feature names."""

    def loss_fn(self, params, batch, dropout_rng):
        logits = self._compute_logits(params, batch, dropout_rng)
        weights = batch["decoder_loss_weights"] * (batch["decoder_positions"] > 0)
        loss, _, _ = losses.compute_weighted_cross_entropy(
            logits, batch["decoder_target_tokens"], weights
        )
        return loss, {"loss": AveragePerStep.from_model_output(loss)}


def made(kind=EncoderDecoderModel, **options):
    module = tiny.model(arithmetic=Arithmetic(smoothing_spares_target=True))
    return kind(module, None, None, tiny.OPTIMIZER, **options)


@pytest.fixture(scope="module")
def params():
    return tiny.new_state().params


def test_padding_inside_a_text_is_read_by_nobody(params):
    batch = {
        "encoder_input_tokens": [[5, 0, 6, 1]],
        "encoder_segment_ids": [[1, 1, 1, 1]],
        "decoder_target_tokens": [[4, 0, 3, 1]],
        "decoder_input_tokens": [[0, 4, 0, 3]],
        "decoder_segment_ids": [[1, 1, 1, 1]],
    }
    batch = {name: np.asarray(rows, np.int32) for name, rows in batch.items()}
    hidden = {name: rows * [[1, 0, 1, 1]] for name, rows in batch.items() if "segment" in name}
    model = made()
    logits, expected = (
        model.module.apply({"params": params}, rename_features(rows))
        for rows in (batch, batch | hidden)
    )
    np.testing.assert_array_equal(logits, expected)
    unread = {
        name: rows for name, rows in rename_features(batch).items() if name != "decoder_inputs"
    }
    read = model.module.apply({"params": params}, unread)
    assert not np.allclose(read[0, 0], logits[0, 0])


@pytest.mark.parametrize("factor", ["AVERAGE_PER_SEQUENCE", "NUM_REAL_TARGET_TOKENS", 3.5, None])
def test_one_loss_by_three_ways(params, factor):
    """The model's own, under either set of names; the one from logits; and T5Model's."""
    options = {**OPTIONS, "loss_normalizing_factor": factor}
    own, logits = made(**options), made(FromLogits, **options)
    named = logits.features(PACKED)
    assert set(named) == set(t5x_features(PACKED))
    assert own.features(PACKED) == PACKED
    loss, metrics = own.loss_fn(params, PACKED, None)
    same, _ = own.loss_fn(params, rename_features(named), None)
    from_logits, theirs = logits.loss_fn(params, named, None)
    plain, _ = T5Model(own.module).loss_fn(params, PACKED, None)
    np.testing.assert_allclose([same, from_logits, plain], [loss] * 3, rtol=1e-6)
    # T5X sums weights where the model's own metrics count tokens.
    for name in theirs.keys() & metrics.keys() if factor != "AVERAGE_PER_SEQUENCE" else ():
        if not name.startswith("timing"):
            np.testing.assert_allclose(theirs[name].compute(), metrics[name].compute(), rtol=1e-6)


def test_a_subclass_trains_and_is_evaluated_with_its_own_loss(params):
    model = made(Weighted)
    # A copy, for the trainer reuses the buffers.
    state = TrainState.create(tiny.OPTIMIZER, {"params": jax.tree.map(jnp.copy, params)})
    options = (model, state, None, ["eval"], None, None, jax.random.key(0), lambda step: 0.1, 2)
    with trainer.Trainer(*options) as training:
        values = training.eval({"eval": [PACKED]})["eval"]
        trained = training.train(iter([PACKED]), 1).result()
    log_p = jax.nn.log_softmax(model.module.apply({"params": params}, PACKED))
    taken = jnp.take_along_axis(log_p, jnp.asarray(PACKED["targets"])[..., None], -1)[..., 0]
    counted = (PACKED["targets"] > 0) * (t5x_features(PACKED)["decoder_positions"] > 0)
    assert values["loss"] == pytest.approx(float(-jnp.sum(taken * counted)), rel=1e-5)
    # In two microbatches, whose losses add up.
    assert trained["loss"] == pytest.approx(values["loss"], rel=1e-5)


def test_it_generates_and_scores_what_the_commands_do(params):
    model = made(decode_fn=temperature_sample)
    inputs, targets = PACKED["inputs"], PACKED["targets"]
    batch, key = {"inputs": inputs, "targets": targets}, jax.random.PRNGKey(1)
    plan = DecodingPlan("temperature_sample", 3, True, topk=0)
    expected = generate(model.module, params, inputs, targets, plan, key)
    for given in (batch, t5x_features(batch)):
        tokens, aux = model.predict_batch_with_aux(
            params, given, key, {"topk": 0}, return_all_decodes=True, num_decodes=3
        )
        np.testing.assert_array_equal(tokens, expected.tokens)
        np.testing.assert_allclose(aux["scores"], expected.scores, rtol=1e-6)
    prompted = model.predict_batch_with_aux(params, batch, key, prompt_with_targets=True)[0]
    shown = np.where(targets[:, :-1] == 1, 0, targets[:, :-1])
    np.testing.assert_array_equal(np.where(shown > 0, prompted[:, :-1], 0), shown)
    with pytest.raises(ValueError, match="one in decoder_params"):
        model.predict_batch_with_aux(params, batch, key, {"decode_rng": key})
    scores, parts = model.score_batch(params, batch, return_intermediates=True)
    loss, _ = made().loss_fn(params, batch, None)
    np.testing.assert_allclose(jnp.sum(scores), -loss + 0.0, rtol=1e-5)
    np.testing.assert_allclose(parts["decoder"]["token_scores"][0].sum(-1), scores, rtol=1e-6)


# Without padding, so that one pair of sequences is all that a row says.
TOKENS = {
    "encoder_input_tokens": [[5, 1, 6, 1], [9, 8, 7, 1]],
    "decoder_input_tokens": [[0, 9, 9, 2], [0, 4, 5, 6]],
    "decoder_target_tokens": [[4, 3, 2, 1], [7, 5, 6, 1]],
}
TOKENS = {name: np.asarray(rows, np.int32) for name, rows in TOKENS.items()}


def test_the_decoder_reads_the_batchs_own_inputs(params):
    """In the loss, the scores and as a prompt, under T5X's names, whatever the targets are."""
    read, targets = TOKENS["decoder_input_tokens"], TOKENS["decoder_target_tokens"]
    model = made()
    # The decoder reads the same where these are the targets.
    last = np.ones((2, 1), np.int32)
    equivalent = {
        "inputs": TOKENS["encoder_input_tokens"],
        "targets": np.concatenate([read[:, 1:], last], axis=1),
    }
    log_p = np.asarray(jax.nn.log_softmax(model.module.apply({"params": params}, equivalent)))
    expected = np.take_along_axis(log_p, targets[..., None], -1)[..., 0].sum(axis=-1)
    for batch in (TOKENS, t5x_features(TOKENS), rename_features(TOKENS)):
        scores = model.score_batch(params, batch)
        np.testing.assert_allclose(scores, expected, rtol=1e-5)
        loss, _ = model.loss_fn(params, batch, None)
        assert loss == pytest.approx(-float(np.sum(scores)), rel=1e-5)
        from_logits, _ = made(FromLogits).loss_fn(params, t5x_features(batch), None)
        assert from_logits == pytest.approx(float(loss), rel=1e-5)
        tokens = model.predict_batch_with_aux(params, batch, prompt_with_targets=True)[0]
        np.testing.assert_array_equal(tokens[:, :3], read[:, 1:])


def test_two_of_t5xs_features_are_enough_to_generate(params):
    model, alone = made(), dict(TOKENS)
    targets = alone.pop("decoder_target_tokens")
    expected = model.predict_batch(
        params, {"inputs": alone["encoder_input_tokens"], "targets": targets}
    )
    np.testing.assert_array_equal(model.predict_batch(params, alone), expected)


def test_a_trainer_takes_batches_under_either_names():
    losses = []
    for batch in (PACKED, t5x_features(PACKED)):
        # The trainer reuses the state's buffers.
        state = TrainState.create(tiny.OPTIMIZER, {"params": tiny.new_state().params})
        options = (made(), state, None, ["eval"], None, None, jax.random.key(0), lambda _: 0.1, 2)
        with trainer.Trainer(*options) as training:
            evaluated = training.eval({"eval": [batch]})["eval"]
            trained = [training.train(iter([batch]), 1).result()["loss"] for _ in range(2)]
        losses.append([evaluated["loss"], *trained])
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-6)


def test_an_evaluation_has_z_loss_as_t5xs_has(params):
    model = EncoderDecoderModel(
        tiny.model(), None, None, tiny.OPTIMIZER, label_smoothing=0.1, z_loss=0.1
    )
    (loss, metrics), (evaluated, same) = (
        model.loss_fn(params, PACKED, None),
        model.eval_fn(params, PACKED),
    )
    assert evaluated == pytest.approx(float(loss), rel=1e-6) and metrics["z_loss"].total > 0
    assert same["z_loss"].total == pytest.approx(float(metrics["z_loss"].total), rel=1e-6)
    # T5X's own way to the same loss.
    from_logits, _ = BaseTransformerModel.loss_fn(model, params, t5x_features(PACKED), None)
    assert evaluated == pytest.approx(float(from_logits), rel=1e-6)


def test_the_network_takes_t5xs_call(params):
    module, batch = tiny.model(), t5x_features(PACKED)
    expected = module.apply({"params": params}, PACKED)
    names = ("encoder_input_tokens", "decoder_input_tokens", "decoder_target_tokens")
    others = {name: x for name, x in batch.items() if name.endswith(("segment_ids", "positions"))}
    options = {**others, "decode": False, "enable_dropout": False, "rngs": None, "mutable": False}
    tokens = [batch[name] for name in names]
    np.testing.assert_array_equal(module.apply({"params": params}, *tokens, **options), expected)
    by_name = dict(zip(names, tokens, strict=True)) | options
    np.testing.assert_array_equal(module.apply({"params": params}, **by_name), expected)
    ones = [jnp.ones((1, 2), jnp.float32)] * 3
    made = module.init(jax.random.key(0), *ones, decode=False, enable_dropout=False)
    assert jax.tree.structure(made["params"]) == jax.tree.structure(params)
    with pytest.raises(TypeError, match="t5x_decoding"):
        module.apply({"params": params}, *tokens, decode=True)


def test_logits_take_t5xs_arguments(params):
    logits, variables = made()._compute_logits(params, PACKED, None, ["intermediates"], {"a": {}})
    np.testing.assert_array_equal(logits, made()._compute_logits(params, PACKED))
    assert "params" not in variables


def test_it_is_a_transformer_model_with_vocabularies():
    model = EncoderDecoderModel(tiny.model(), "in", "out", tiny.OPTIMIZER)
    assert isinstance(model, BaseTransformerModel)
    assert (model.input_vocabulary, model.output_vocabulary) == ("in", "out")
    variables = model.get_initial_variables(jax.random.key(0), {"encoder_input_tokens": (2, 6)})
    assert set(variables) == {"params"}


def test_features_are_those_of_seqios_converter():
    from t0repro import compat

    compat.install()
    import seqio
    import tensorflow as tf

    rows = [([5, 1], [4, 3, 1]), ([6, 1], [2]), ([9, 8, 7, 6, 5, 1], [7, 1])]
    examples = tf.data.Dataset.from_generator(
        lambda: ({"inputs": i, "targets": t} for i, t in rows),
        output_signature={name: tf.TensorSpec([None], tf.int32) for name in ("inputs", "targets")},
    )
    lengths = {"inputs": 6, "targets": 5}
    converted = seqio.EncDecFeatureConverter(pack=True)(examples, lengths)
    theirs = list(converted.as_numpy_iterator())
    theirs = {name: np.stack([row[name] for row in theirs]) for name in theirs[0]}
    given = {name: x for name, x in rename_features(theirs).items() if name != "decoder_inputs"}
    ours = t5x_features(given)
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        np.testing.assert_array_equal(ours[name], value, err_msg=name)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("factor", [None, 7.0, 0.4])
def test_a_loss_of_logits_is_its_formula(factor, weighted):
    """With mass 1 - s at the target and s / (V - 1) elsewhere, less the least such loss."""
    random, smoothing, z_loss = np.random.default_rng(0), 0.1, 0.01
    logits = random.normal(size=(2, 5, 11)).astype(np.float32)
    targets = random.integers(0, 11, (2, 5)).astype(np.int32)
    weights = random.uniform(size=(2, 5)) if weighted else np.ones((2, 5))
    wanted = np.full((2, 5, 11), smoothing / 10)
    np.put_along_axis(wanted, targets[..., None], 1 - smoothing, axis=-1)
    log_z = np.log(np.exp(logits.astype(np.float64)).sum(-1))
    least = -(wanted * np.log(wanted)).sum(-1)
    z = z_loss * log_z**2
    entropy = (wanted * (log_z[..., None] - logits)).sum(-1) - least
    given = jnp.asarray(logits), jnp.asarray(targets), weights if weighted else None
    found = losses.compute_weighted_cross_entropy(*given, smoothing, z_loss, factor)
    expected = [((entropy + z) * weights).sum(), (z * weights).sum()]
    np.testing.assert_allclose(found[:2], np.array(expected) / (factor or 1), rtol=1e-5)
    assert found[2] == pytest.approx(weights.sum())
    by_distribution = losses.cross_entropy_with_logits(given[0], jnp.asarray(wanted), z_loss)
    np.testing.assert_allclose(by_distribution, (entropy + least + z, z), rtol=1e-5)
    plain = -np.log(np.exp(logits) / np.exp(logits).sum(-1, keepdims=True))
    own, z_part, _ = losses.compute_weighted_cross_entropy(*given[:2])
    at_targets = np.take_along_axis(plain, targets[..., None], axis=-1)
    np.testing.assert_allclose([own, z_part], [at_targets.sum(), 0], rtol=1e-5)


@pytest.mark.parametrize("kind", losses.SpecialLossNormalizingFactor)
def test_a_losss_divisor_has_a_name_in_any_case(kind):
    batch = {
        "decoder_target_tokens": np.array([[4, 3, 1, 0], [7, 0, 0, 0]], np.int32),
        "decoder_segment_ids": np.array([[1, 1, 1, 0], [1, 0, 0, 0]], np.int32),
    }
    expected = {"NUM_REAL_TARGET_TOKENS": 4, "NUM_TOTAL_TARGET_TOKENS": 8}.get(kind.name, 2)
    for name in (kind, kind.name, kind.name.lower()):
        divisor, weights = losses.get_loss_normalizing_factor_and_weights(name, batch)
        assert divisor == expected
        sums = np.sum(weights, axis=1)
        np.testing.assert_allclose(sums, [1, 1] if expected == 2 else [3, 1], rtol=1e-6)
