"""JAX lowers the GPU's kernels to Triton; their numbers are tested in test_pallas_attention.py.

On a machine with a GPU, `JAX_PLATFORMS=cuda,cpu pytest -m gpu` compares them there too.
"""

import re
import types

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from t0repro.model import attention as attending
from t0repro.model import gpu_attention, kernel_check
from t0repro.model.attention_mask import AttentionMask

KERNELS = ["_forward_kernel", "_query_kernel", "_key_kernel", "_bias_kernel"]


def lowered(dtype, depth, *, keys=300, ordered=False, biased=True, groups=()):
    """The module for CUDA that computes values and gradients; `groups` is one more axis of all."""

    def both(query, key, value, bias, of_queries, of_keys):
        orders = (of_queries, of_keys) if ordered else (None, None)
        visibility = AttentionMask(of_queries, of_keys, *orders)
        way = lambda *learned: gpu_attention.attention(*learned, visibility)  # noqa: E731
        y, pull_back = jax.vjp(way, query, key, value, bias)
        return y, pull_back(y)

    def shape(dtype, *sizes):
        return jax.ShapeDtypeStruct((*groups, *sizes), dtype)

    given = [shape(dtype, 2, 2, size, depth) for size in (300, keys, keys)]
    given.append(shape(jnp.float32, 2, 299 + keys) if biased else None)
    given += [shape(jnp.int32, 2, size) for size in (300, keys)]
    function = jax.vmap(both) if groups else both
    # From JAX 0.11 on, the lowering asks the mesh for the card. One without axes shards nothing.
    card = AbstractDevice(device_kind="NVIDIA A100-SXM4-40GB", num_cores=108, platform="gpu")
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=card)):
        return jax.jit(function).trace(*given).lower(lowering_platforms=("cuda",)).as_text()


def kernels_in(module):
    """Names of the kernels that a module calls; each has MLIR's bytecode of its Triton with it."""
    calls = re.findall(r"@__gpu\$xla\.gpu\.triton\(.*", module)
    assert all('ir = "ML' in call for call in calls)
    return [re.search(r'name = "(\w+)"', call)[1] for call in calls]


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize(("depth", "keys"), [(64, 300), (128, 300), (40, 70)])
def test_values_and_gradients_lower_for_cuda(dtype, depth, keys):
    module = lowered(dtype, depth, keys=keys, ordered=depth == 64)
    assert kernels_in(module) == KERNELS
    # Neither the bias nor the logits exist for all heads, queries and keys.
    assert not re.search(r"tensor<(\dx)+(300|320)x(70|96|300|320)xf32>", module)


def test_without_a_bias_no_kernel_computes_its_gradient():
    assert kernels_in(lowered(jnp.bfloat16, 64, biased=False)) == KERNELS[:3]


def test_groups_of_rows_lower_for_cuda():
    """t0repro.partitioning.devices.sum_over_groups adds an axis to all arrays."""
    assert kernels_in(lowered(jnp.bfloat16, 64, groups=(2,))) == KERNELS


@pytest.mark.parametrize(
    ("capability", "way"),
    [("8.0", "gpu"), ("9.0", "gpu"), ("12.0", "gpu"), ("7.5", "blocks"), ("gfx90a", "blocks")],
)
def test_it_serves_gpus_whose_tensor_cores_take_bfloat16(monkeypatch, capability, way):
    device = types.SimpleNamespace(
        platform="gpu", device_kind="a card", compute_capability=capability
    )
    chosen = lambda: attending.choose_implementation(8, 16, 1024, 1024, float32=False)  # noqa: E731
    monkeypatch.setattr(attending, "device_to_trace_for", lambda: device)
    assert chosen() == way
    # A device mesh knows only a device's kind; the devices here know the rest.
    abstract = types.SimpleNamespace(platform="gpu", device_kind="a card")
    monkeypatch.setattr(attending, "device_to_trace_for", lambda: abstract)
    assert chosen() == "blocks"
    monkeypatch.setattr(jax, "devices", lambda: [device])
    assert chosen() == way


@pytest.mark.gpu
@pytest.mark.parametrize("float32", [False, True], ids=["bfloat16", "float32"])
def test_on_a_gpu_they_compute_what_full_matrices_do(float32):
    device = jax.devices()[0]
    if not gpu_attention.supports(device):
        pytest.skip("JAX's first device is no GPU that the kernels support")
    fault = kernel_check.find_fault("gpu", gpu_attention.attention, device, float32=float32)
    assert fault == ""
