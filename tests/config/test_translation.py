"""The same training in the other dialect's words, and what it says it cannot express."""

import dataclasses

import tests.tiny_models as tiny
from t0repro.config.run_config import Arithmetic
from t0repro.config.translation import translated

from .t5x_trainings import config


def test_t5xs_bindings_of_a_run_make_the_same_run_again():
    ours = config("adafactor.Adafactor.beta1 = 0.0", "LOSS_NORMALIZING_FACTOR = 7")
    translation = translated(ours, "t5x")
    assert translation.missing == ()
    lines = [line for line in translation.bindings if not line.startswith("train_script")]
    again = config(*lines)
    assert dataclasses.replace(again, provenance={}) == dataclasses.replace(ours, provenance={})


def test_mesh_tensorflow_is_told_what_it_cannot_express():
    translation = translated(config("LOSS_NORMALIZING_FACTOR = 'AVERAGE_PER_SEQUENCE'"), "mtf")
    assert "d_model = 512" in translation.bindings
    assert "run.batch_size = ('sequences_per_batch', 128)" in translation.bindings
    words = "; ".join(translation.missing)
    for part in ("AVERAGE_PER_SEQUENCE", "z_loss_in_evaluation", "rsqrt_decay", "train_eval_data"):
        assert part in words
    assert "smoothing_spares_target" not in words  # nothing is smoothed


def test_a_run_of_mesh_tensorflows_in_t5xs_words():
    translation = translated(tiny.run_config("runs/a", 5), "t5x")
    expected = {
        "network.T5Config.emb_dim = 8",
        "models.EncoderDecoderModel.loss_normalizing_factor = 'NUM_TOTAL_TARGET_TOKENS'",
        "adafactor.Adafactor.beta1 = None",
        "utils.create_learning_rate_scheduler.base_learning_rate = 0.01",
        "network.T5Config.float32_attention_logits = True",
    }
    assert expected <= set(translation.bindings)
    assert len(translation.missing) == len(dataclasses.fields(Arithmetic)) - 2
