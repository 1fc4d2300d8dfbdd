"""The PyTorch side of rank_eval.py, in its own process: T0's way and lm-eval.

rank_eval.py starts it with a Python that has torch, transformers and lm-eval, and passes a folder
with weights and configuration. Each request is the name of a harness on standard input.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy as np
from rank_eval import LENGTHS, VOCABULARY, peak_memory

EXAMPLES_A_BATCH = 8  # Hugging Face's per_device_eval_batch_size
PAIRS_A_BATCH = 16  # lm-eval's batch size


def torch_worker(folder: Path) -> None:
    """Answers each harness name with seconds and peak GB, until standard input ends."""
    answers = sys.stdout
    sys.stdout = sys.stderr  # keep what libraries print out of the answers
    model = torch_model(folder)
    harnesses = {"pytorch": torch_scores, "lm_eval": lm_eval_scores}
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        work = json.loads((folder / "work.json").read_text())
        score = harnesses[line.strip()]
        score(model, work[:1])  # warm-up, not timed
        started = time.perf_counter()
        scores = score(model, work)
        seconds = time.perf_counter() - started
        np.save(folder / "scores.npy", np.array(scores))
        print(seconds, peak_memory(), file=answers, flush=True)


def torch_model(folder: Path):
    import torch
    from transformers import T5Config, T5ForConditionalGeneration

    size = json.loads((folder / "config.json").read_text())
    config = T5Config(
        vocab_size=VOCABULARY,
        num_layers=size["layers"],
        d_model=size["d_model"],
        d_ff=size["d_ff"],
        num_heads=size["num_heads"],
        d_kv=size["d_kv"],
        feed_forward_proj="gated-gelu",
        tie_word_embeddings=False,
        decoder_start_token_id=0,
        dropout_rate=0.0,
    )
    model = T5ForConditionalGeneration(config).eval()
    # transformers 5 ties the logits to the embedding whatever the configuration says
    model.lm_head.weight = torch.nn.Parameter(torch.empty_like(model.lm_head.weight))
    weights = np.load(folder / "weights.npz")
    state = {}
    for name in weights.files:
        value = torch.from_numpy(weights[name])
        for key, transposed in torch_names(name.removeprefix("target/")):
            state[key] = value.T.contiguous() if transposed else value
    model.load_state_dict(state, strict=True)
    return model.to(getattr(torch, size["dtype"]))


def torch_names(path: str) -> list[tuple[str, bool]]:
    """Names in transformers of a T5X parameter, and whether it is transposed there."""
    if path == "token_embedder/embedding":
        names = ("shared", "encoder.embed_tokens", "decoder.embed_tokens")
        return [(f"{name}.weight", False) for name in names]
    if path == "decoder/logits_dense/kernel":
        return [("lm_head.weight", True)]
    tower, *rest = path.split("/")
    if rest[0] == "relpos_bias":
        name = f"{tower}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        return [(name, True)]
    if rest[0].endswith("_norm"):
        return [(f"{tower}.final_layer_norm.weight", False)]
    block, part = f"{tower}.block.{rest[0].removeprefix('layers_')}.layer", rest[1]
    last = 1 if tower == "encoder" else 2
    norms = {
        "pre_attention_layer_norm": 0,
        "pre_self_attention_layer_norm": 0,
        "pre_cross_attention_layer_norm": 1,
        "pre_mlp_layer_norm": last,
    }
    if part in norms:
        return [(f"{block}.{norms[part]}.layer_norm.weight", False)]
    if part == "mlp":
        return [(f"{block}.{last}.DenseReluDense.{rest[2]}.weight", True)]
    place = "1.EncDecAttention" if part == "encoder_decoder_attention" else "0.SelfAttention"
    letter = {"query": "q", "key": "k", "value": "v", "out": "o"}[rest[2]]
    return [(f"{block}.{place}.{letter}.weight", True)]


def torch_scores(model, work: list[dict]) -> list[float]:
    """As T0's run_eval: batches of examples of one task, with inputs repeated per choice."""
    scores: list[float] = []
    start = 0
    while start < len(work):
        end = start
        while (
            end < len(work)
            and end - start < EXAMPLES_A_BATCH
            and work[end]["task"] == work[start]["task"]
        ):
            end += 1
        inputs = [e["inputs"] for e in work[start:end] for _ in e["choices"]]
        targets = [choice for e in work[start:end] for choice in e["choices"]]
        scores += torch_batch(model, inputs, targets)
        start = end
    return scores


def torch_batch(model, inputs: list[list[int]], targets: list[list[int]]) -> list[float]:
    import torch

    def padded(rows: list[list[int]]):
        length = max(map(len, rows))
        return torch.tensor([row + [0] * (length - len(row)) for row in rows])

    ids, labels = padded(inputs), padded(targets)
    with torch.no_grad():
        logits = model(
            input_ids=ids,
            attention_mask=(ids > 0).long(),
            labels=labels,
            decoder_attention_mask=(labels > 0).long(),
        ).logits
        log_p = torch.log_softmax(logits.float(), dim=-1).gather(-1, labels[..., None])[..., 0]
        return (log_p * (labels > 0)).sum(-1).tolist()


_harness: dict[str, object] = {}


def lm_eval_scores(model, work: list[dict]) -> list[float]:
    """lm-eval's own loop over (context, continuation) pairs of tokens."""
    if "model" not in _harness:
        from lm_eval.models.huggingface import HFLM
        from tokenizers import Tokenizer
        from tokenizers.models import WordLevel
        from transformers import PreTrainedTokenizerFast

        # A dummy: it never tokenizes anything, because the pairs are tokens already.
        words = Tokenizer(WordLevel({"<pad>": 0, "</s>": 1}, unk_token="<pad>"))
        tokens = PreTrainedTokenizerFast(
            tokenizer_object=words, pad_token="<pad>", eos_token="</s>"
        )
        logits = model.lm_head.weight
        _harness["model"] = HFLM(
            pretrained=model,
            tokenizer=tokens,
            backend="seq2seq",
            batch_size=PAIRS_A_BATCH,
            max_length=LENGTHS["inputs"],
            device="cpu",
        )
        model.lm_head.weight = logits  # undo lm-eval's tying of it to the embedding
    requests = [(("", ""), e["inputs"], choice) for e in work for choice in e["choices"]]
    harness = _harness["model"]
    return [score for score, _ in harness._loglikelihood_tokens(requests, disable_tqdm=True)]


if __name__ == "__main__":
    torch_worker(Path(sys.argv[1]))
