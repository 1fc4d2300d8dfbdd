"""T5X's decoder-only network in float64 numpy, by its formulas, for models of two small layers.

Source: t5x/examples/decoder_only/network.py and layers.py; models.DecoderOnlyModel.
"""

import jax
import numpy as np


def norm(x, scale):
    return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + 1e-6) * scale


def gelu(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def bucket(distance):
    """Of 32 buckets, 16 hold one distance each; the others share those up to 128."""
    if distance < 16:
        return max(distance, 0)
    return min(31, 16 + int(np.log(distance / 16) / np.log(128 / 16) * 16))


def visible(batch, bidirectional):
    """Causal, or both in the inputs; never padding, never another example: [batch, query, key]."""
    length = batch["decoder_target_tokens"].shape[1]
    seen = np.tril(np.ones((length, length), bool))[None]
    if bidirectional:
        inputs = batch["decoder_causal_attention"] > 0
        seen = seen | (inputs[:, :, None] & inputs[:, None, :])
    tokens = batch["decoder_target_tokens"] > 0
    seen = seen & tokens[:, :, None] & tokens[:, None, :]
    if (segments := batch.get("decoder_segment_ids")) is not None:
        seen = seen & (segments[:, :, None] == segments[:, None, :])
    return seen


def logits_by_hand(params, batch, bidirectional):
    """T5X's decoder in float64."""
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), params)["decoder"]
    length = batch["decoder_target_tokens"].shape[1]
    places = np.arange(length)
    buckets = np.vectorize(bucket)(places[:, None] - places)
    bias = params["relpos_bias"]["rel_embedding"][:, buckets]
    mask = np.where(visible(batch, bidirectional), 0.0, -1e10)[:, None]
    table = params["token_embedder"]["embedding"]
    x = table[batch["decoder_input_tokens"]]
    for index in range(2):
        layer = params[f"layers_{index}"]
        normed = norm(x, layer["pre_self_attention_layer_norm"]["scale"])
        query, key, value = (
            (normed @ layer["self_attention"][name]["kernel"]).reshape(*x.shape[:2], 2, 4)
            for name in ("query", "key", "value")
        )
        scores = np.einsum("bqhd,bkhd->bhqk", query, key) + bias + mask
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        mixed = np.einsum("bhqk,bkhd->bqhd", weights, value).reshape(*x.shape[:2], 8)
        x = x + mixed @ layer["self_attention"]["out"]["kernel"]
        normed, mlp = norm(x, layer["pre_mlp_layer_norm"]["scale"]), layer["mlp"]
        hidden = gelu(normed @ mlp["wi_0"]["kernel"]) * (normed @ mlp["wi_1"]["kernel"])
        x = x + hidden @ mlp["wo"]["kernel"]
    return norm(x, params["decoder_norm"]["scale"]) @ table.T / np.sqrt(8)


def continue_by_hand(params, inputs, length, bidirectional, eos=1):
    """The likeliest token after the inputs and so on, to EOS or the length, without a cache."""
    tokens = [int(token) for token in inputs]
    while len(tokens) < length and (len(tokens) == len(inputs) or tokens[-1] != eos):
        # The tokens so far and the one to be found, of which the mask reads only that it is there.
        batch = {
            "decoder_input_tokens": np.array([[0, *tokens]]),
            "decoder_target_tokens": np.ones((1, len(tokens) + 1), int),
            "decoder_causal_attention": (np.arange(len(tokens) + 1) <= len(inputs))[None],
        }
        tokens.append(int(logits_by_hand(params, batch, bidirectional)[0, -1].argmax()))
    return tokens[len(inputs) :]


def score_by_hand(params, examples, bidirectional):
    """T5X's DecoderOnlyModel.score_batch of what seqio.DecoderFeatureConverter makes, float64."""
    length = max(len(each["inputs"]) + len(each["targets"]) for each in examples)
    names = ("target_tokens", "input_tokens", "causal_attention", "loss_weights")
    batch = {f"decoder_{name}": np.zeros((len(examples), length), np.int32) for name in names}
    for row, example in enumerate(examples):
        text, inputs = [*example["inputs"], *example["targets"]], len(example["inputs"])
        batch["decoder_target_tokens"][row, : len(text)] = text
        batch["decoder_input_tokens"][row, 1 : len(text)] = text[:-1]
        batch["decoder_causal_attention"][row, : inputs + 1] = 1
        batch["decoder_loss_weights"][row, inputs : len(text)] = 1
    logits = logits_by_hand(params, batch, bidirectional)
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    scores = np.take_along_axis(log_p, batch["decoder_target_tokens"][..., None], -1)[..., 0]
    return (scores * batch["decoder_loss_weights"]).sum(-1)
