"""Parameters of a model whose likeliest tokens hang on rounding."""

import jax
import numpy as np


def near_ties(params):
    """Three times as large kernels, and an output layer with two tokens for each direction."""
    params = jax.tree.map(lambda x: x * 3 if x.ndim > 1 else x, params)
    kernel = np.array(params["decoder"]["logits_dense"]["kernel"])
    half = kernel.shape[1] // 2
    rounding = np.random.default_rng(0).normal(size=kernel[:, :half].shape)
    kernel[:, half : 2 * half] = kernel[:, :half] * (1 + 1e-7 * rounding)
    logits = {"kernel": jax.numpy.asarray(kernel)}
    return {**params, "decoder": {**params["decoder"], "logits_dense": logits}}
