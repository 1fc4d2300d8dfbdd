"""Operations are counted as in the compiled program, loops and recomputation included."""

import jax
import jax.numpy as jnp
import pytest

from t0repro.model import attention, cpu_attention
from t0repro.model.t5 import T5, initial_parameters
from t0repro.partitioning.flops import count_flops
from t0repro.training.train_step import loss_and_gradients

from ..helpers.tiny_models import FLOAT32, batches, model_config

WIDE = {"d_model": 128, "d_ff": 256, "num_heads": 4, "d_kv": 32, "vocab_size": 512}


def test_a_product_in_a_loop_counts_as_often_as_it_runs():
    def function(x, y):
        return jax.lax.scan(lambda carry, _: (carry @ y, None), x, None, length=5)[0]

    jaxpr = jax.make_jaxpr(function)(jnp.zeros((2, 3)), jnp.zeros((3, 3)))
    assert count_flops(jaxpr.jaxpr) == 5 * 2 * (2 * 3) * 3


def gradients_of(config, rows=8, microbatches=1):
    model = T5(config, FLOAT32)
    params = initial_parameters(model, jax.random.key(0))
    (batch,) = batches(1, rows=rows)
    function = jax.jit(
        lambda p, b: loss_and_gradients(model, p, b, num_microbatches=microbatches)[1]
    )
    return function.trace(params, batch)


def test_the_count_is_the_compiled_programs_within_a_few_percent():
    traced = gradients_of(model_config(**WIDE))
    compiled = traced.lower().compile().cost_analysis()
    # The compiler counts everything else too: norms, softmax, activations.
    assert compiled["flops"] == pytest.approx(count_flops(traced.jaxpr.jaxpr), rel=0.06)


def test_microbatches_leave_the_count_as_it_is_and_recomputation_adds_a_forward_pass():
    plain, parts, recomputed = (
        count_flops(gradients_of(model_config(**WIDE, **changes), microbatches=n).jaxpr.jaxpr)
        for changes, n in (({}, 1), ({}, 4), ({"recompute": "full"}, 1))
    )
    assert parts == plain
    assert 1.1 < recomputed / plain < 4 / 3 + 0.01


def test_an_attention_kernel_counts_as_whole_matrices_do(monkeypatch):
    if not cpu_attention.is_available():
        pytest.skip("no C++ compiler here")
    whole = gradients_of(model_config(**WIDE)).jaxpr.jaxpr
    monkeypatch.setattr(attention, "KERNEL_FROM", 0)
    kernel = gradients_of(model_config(**WIDE)).jaxpr.jaxpr
    assert "t0repro_attention_gradients" in str(kernel)
    assert count_flops(kernel) == count_flops(whole)
