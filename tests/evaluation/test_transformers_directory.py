"""A directory that transformers wrote, evaluated: its scores are PyTorch's."""

import numpy as np
import pytest

from t0repro.evaluation.engine import score_examples
from t0repro.evaluation.opened import open_checkpoint

torch = pytest.importorskip("torch", reason="needs the extra hf")
transformers = pytest.importorskip("transformers", reason="needs the extra hf")

pytestmark = pytest.mark.hf

EXAMPLES = [
    {"inputs": [5, 9, 77, 300], "targets": [8, 44, 1]},
    {"inputs": [5, 9, 77, 300], "targets": [12, 1]},
    {"inputs": [401, 2, 17], "targets": [8, 44, 1]},
]


def log_likelihood(model, example):
    inputs, targets = (torch.tensor([example[name]]) for name in ("inputs", "targets"))
    with torch.no_grad():
        log_p = torch.log_softmax(model(input_ids=inputs, labels=targets).logits, -1)
    return float(log_p.gather(-1, targets[..., None]).sum())


def test_scores_of_a_saved_transformers_model_are_pytorchs(tmp_path):
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=512,
        num_layers=2,
        d_model=32,
        d_ff=64,
        num_heads=2,
        d_kv=16,
        feed_forward_proj="gated-gelu",
        tie_word_embeddings=False,
        decoder_start_token_id=0,
        dropout_rate=0.0,
    )
    model = transformers.T5ForConditionalGeneration(config).eval()
    # transformers 5 ties the logits to the embedding whatever the configuration says
    model.lm_head.weight = torch.nn.Parameter(0.1 * torch.randn_like(model.lm_head.weight))
    model.save_pretrained(tmp_path)
    opened = open_checkpoint(str(tmp_path), None, "float32")
    scores = score_examples(opened.params, opened.model, EXAMPLES, None)
    expected = [log_likelihood(model, example) for example in EXAMPLES]
    np.testing.assert_allclose(scores, expected, atol=1e-4)
