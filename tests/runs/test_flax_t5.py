"""FlaxT5EncoderModel's call, as programs written for transformers 4 make it."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t0repro import FlaxT5EncoderModel
from t0repro.errors import UserError

from ..converters.encoders import FAMILIES, IDS, save_encoder
from ..converters.test_encoder_only import GOLDENS


def embed(encoder, ids, copies: int):
    """A diffusion pipeline's use of its text encoder: padded rows, no mask, several images each."""
    hidden = encoder(ids, attention_mask=None, output_hidden_states=False)["last_hidden_state"]
    hidden = jnp.tile(hidden, (1, copies, 1)).reshape(len(ids) * copies, ids.shape[1], -1)
    return hidden.astype(encoder.dtype)


@pytest.mark.parametrize("family", FAMILIES)
def test_masked_rows_agree_with_transformers(family, tmp_path):
    encoder = FlaxT5EncoderModel.from_pretrained(save_encoder(tmp_path, family))
    output = encoder(IDS, attention_mask=IDS > 0)
    assert output[0] is output.last_hidden_state is output["last_hidden_state"]
    for row, expected in zip(output[0], json.loads(GOLDENS.read_text())[family], strict=True):
        np.testing.assert_allclose(row[: len(expected)], expected, atol=1e-5)


@pytest.mark.hf
@pytest.mark.parametrize("mask", [None, IDS > 0], ids=["no mask", "mask"])
def test_outputs_at_padding_are_transformers_too(mask, tmp_path):
    torch = pytest.importorskip("torch", reason="needs the extra hf")
    transformers = pytest.importorskip("transformers", reason="needs the extra hf")
    theirs = transformers.T5EncoderModel.from_pretrained(save_encoder(tmp_path)).eval()
    with torch.no_grad():
        masked = None if mask is None else torch.tensor(mask).long()
        expected = theirs(input_ids=torch.tensor(IDS), attention_mask=masked)[0].numpy()
    ours = FlaxT5EncoderModel.from_pretrained(tmp_path)(IDS, attention_mask=mask)[0]
    np.testing.assert_allclose(ours, expected, atol=1e-5)


def test_a_program_of_a_pipelines_shape_runs(tmp_path):
    save_encoder(tmp_path / "text_encoder_2")
    encoder = FlaxT5EncoderModel.from_pretrained(
        tmp_path, subfolder="text_encoder_2", from_pt=True, dtype="bfloat16"
    )
    encoder.params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), encoder.params)
    encoder.params = jax.device_put(encoder.params, jax.devices()[0])
    assert embed(encoder, IDS, copies=3).shape == (6, 5, 8)
    assert embed(encoder, IDS, copies=3).dtype == encoder.dtype == jnp.bfloat16
    assert encoder.config.d_model == 8


def test_it_can_be_called_inside_jit_with_parameters_as_an_argument(tmp_path):
    encoder = FlaxT5EncoderModel.from_pretrained(save_encoder(tmp_path))
    call = jax.jit(lambda params, ids: encoder(ids, params=params).last_hidden_state)
    np.testing.assert_allclose(call({"params": encoder.params}, IDS), encoder(IDS)[0], atol=1e-6)
    assert encoder(IDS, return_dict=False)[0].shape == (2, 5, 8)


def test_what_it_does_not_compute_is_refused(tmp_path):
    encoder = FlaxT5EncoderModel.from_pretrained(save_encoder(tmp_path))
    for option in ("output_hidden_states", "output_attentions", "train"):
        with pytest.raises(UserError, match="Only the last hidden state"):
            encoder(IDS, **{option: True})
    with pytest.raises(UserError, match="dtype float16 is not supported"):
        FlaxT5EncoderModel.from_pretrained(tmp_path, dtype=jnp.float16)


def test_a_name_of_the_hub_is_looked_up_on_this_machine_only(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.delenv("T0REPRO_CHECKPOINT_HUB", raising=False)
    with pytest.raises(UserError, match="hub's cache on this machine does not have"):
        FlaxT5EncoderModel.from_pretrained("somebody/some-t5")
