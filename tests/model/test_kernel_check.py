"""A kernel that computes something else than full matrices, or does not compile, is not used."""

import functools
import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from t0repro.errors import UserError
from t0repro.model import attention as attending
from t0repro.model import cpu_attention, gpu_attention, kernel_check, tpu_attention
from t0repro.progress import heard_by

MODULES = {"tpu": tpu_attention, "gpu": gpu_attention}
needs_compiler = pytest.mark.skipif(not cpu_attention.is_available(), reason="no C++ compiler here")


@pytest.fixture(autouse=True)
def small_cases(monkeypatch, tmp_path):
    """Cases that an interpreted kernel computes in seconds; no kernel has passed before."""
    sizes = {"_BATCH": 1, "_HEADS": 1, "_LENGTH": 140, "_KEYS": 70}
    for name, size in sizes.items():
        monkeypatch.setattr(kernel_check, name, size)
    monkeypatch.setattr(kernel_check, "_record", lambda *about: tmp_path / "passed")
    monkeypatch.delenv(attending.VARIABLE, raising=False)
    kernel_check._check.cache_clear()
    yield
    kernel_check._check.cache_clear()


def find_fault(name, *, float32=True):
    kernel = functools.partial(MODULES[name].attention, interpret=True)
    return kernel_check.find_fault(name, kernel, jax.devices()[0], float32=float32)


def wrap(monkeypatch, module, function, change):
    """Replaces a function of a kernel by one whose result `change` alters."""
    right = getattr(module, function)
    monkeypatch.setattr(module, function, lambda *a, **b: change(right(*a, **b)))


@pytest.mark.parametrize("name", MODULES)
def test_a_kernel_as_it_is_has_no_fault(name):
    assert find_fault(name, float32=False) == ""


# What a kernel's author, or its compiler, may get wrong: a function and what becomes of its result.
FAULTS = {
    "every key visible": ("gpu", "_rows", lambda ids: [jnp.zeros_like(x) for x in ids], "values"),
    "the bias's gradient one offset off": (
        "gpu",
        "_sum_along_diagonals",
        lambda sums: jnp.roll(sums, 1, axis=1),
        "gradient of position bias",
    ),
    "the last block of keys left out": (
        "gpu",
        "_bounds",
        lambda bounds: (bounds[0], bounds[1].at[..., 1].add(-1)),
        "values",
    ),
    "the bias one offset off": (
        "tpu",
        "_index_by_distance",
        lambda bias: jnp.roll(bias, 1, axis=-1),
        "values",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_a_kernel_is_found(fault, monkeypatch):
    name, function, change, result = FAULTS[fault]
    wrap(monkeypatch, MODULES[name], function, change)
    assert f"differs: {result} by" in find_fault(name)


@needs_compiler
@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("std::log(", "std::log1p("),
        ("queries - 1 - (first + i) + block", "queries - (first + i) + block"),
    ],
    ids=["normalizer", "gradient of the bias"],
)
def test_a_fault_in_the_source_of_the_cpus_kernel_is_found(right, wrong, tmp_path):
    source = Path(cpu_attention.__file__).with_name("attention.cc").read_text()
    assert right in source
    (tmp_path / "attention.cc").write_text(source.replace(right, wrong))
    script = f"""
from pathlib import Path
import jax
from t0repro.model import cpu_attention, kernel_check
cpu_attention._SOURCE = Path({str(tmp_path / "attention.cc")!r})
cpu_attention._FLAGS = ("-std=c++17", "-O1", "-fPIC", "-shared", "-pthread")  # compiles faster
assert cpu_attention.is_available()
print(kernel_check.find_fault("cpu", cpu_attention.attention, jax.devices()[0], float32=True))
"""
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "attention differs" in done.stdout


def choose():
    return attending.choose_implementation(8, 6, 512, 512, float32=True)


@needs_compiler
def test_a_kernel_is_used_once_it_has_passed_and_is_not_compared_again(monkeypatch, tmp_path):
    def fails(*arguments):
        raise AssertionError("compared again")

    assert choose() == "cpu"
    assert (tmp_path / "passed").exists()
    kernel_check._check.cache_clear()
    monkeypatch.setattr(kernel_check, "find_fault", fails)
    assert choose() == "cpu"


@needs_compiler
@pytest.mark.parametrize(
    ("broken", "words"),
    [
        (lambda query, *others: query * 2, "causal attention differs: values by"),
        (lambda *arguments: 1 / 0, "causal attention fails: ZeroDivisionError: division by zero"),
        (lambda query, *others: query * jnp.nan, "differs: values by nan"),
    ],
    ids=["wrong", "does not compile", "NaN"],
)
def test_one_line_says_why_a_kernel_is_not_used(broken, words, monkeypatch, tmp_path):
    monkeypatch.setattr(cpu_attention, "attention", broken)
    lines = []
    with heard_by(lines.append):
        assert [choose(), choose()] == ["full", "full"]
    assert len(lines) == 1 and words in lines[0] and "--attention kernel" in lines[0]
    assert not (tmp_path / "passed").exists()
    monkeypatch.setenv(attending.VARIABLE, "kernel")
    assert choose() == "cpu"


# Two processes trace one step; the kernel is wrong in those whose numbers are given.
TWO_PROCESSES = """
import pathlib, sys
import jax, jax.numpy as jnp
from t0repro.model import attention, kernel_check
from t0repro.model.attention_mask import AttentionMask
from t0repro.model.full_attention import full_matrix
from t0repro.partitioning.joining import ProcessFlags, join_processes

shape = jax.ShapeDtypeStruct((8, 6, 512, 64), jnp.float32)
with join_processes(ProcessFlags()):
    index = jax.process_index()
    wrong = str(index) in sys.argv[2:]
    kernel = lambda *x: full_matrix(*x) * (2 if wrong else 1)
    attention._find_kernel = lambda *about, float32: "cpu"
    attention._kernel = lambda way: kernel
    ways = []
    def step(x):
        ways.append(attention.choose_implementation(8, 6, 512, 512, float32=True))
        mask = AttentionMask(*[jnp.ones((8, 512), jnp.int32)] * 2)
        return attention.attention(x, x, x, None, mask)
    with jax.set_mesh(jax.make_mesh((2,), ("data",))):
        text = jax.jit(step).lower(shape).as_text()
    pathlib.Path(sys.argv[1], f"{index}.txt").write_text(f"{ways} {text}")
"""


@pytest.mark.parametrize(("wrong", "way"), [([], "cpu"), (["1"], "full")])
def test_processes_that_compute_together_use_a_kernel_if_all_have_seen_it_pass(
    wrong, way, tmp_path
):
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    started = []
    for index in range(2):
        told = {
            "T0REPRO_COORDINATOR_ADDRESS": address,
            "T0REPRO_PROCESS_COUNT": "2",
            "T0REPRO_PROCESS_INDEX": str(index),
            "XDG_CACHE_HOME": str(tmp_path / str(index)),
            "JAX_COMPILATION_CACHE_DIR": "",
        }
        command = [sys.executable, "-c", TWO_PROCESSES, str(tmp_path), *wrong]
        started.append(subprocess.Popen(command, env=os.environ | told))
    assert [process.wait() for process in started] == [0, 0]
    outputs = [(tmp_path / f"{index}.txt").read_text() for index in range(2)]
    assert outputs[0] == outputs[1] and outputs[0].startswith(f"['{way}']")


@needs_compiler
def test_a_kernel_is_compared_while_a_step_is_traced_on_a_device_mesh():
    ways = []

    def step(x):
        ways.append(choose())
        return x

    with jax.set_mesh(jax.make_mesh((1, 1), ("data", "model"))):
        jax.jit(step).lower(jnp.zeros(3))
    assert ways == ["cpu"]


def test_the_environment_chooses_the_implementation(monkeypatch):
    def fails(*arguments, **sizes):
        raise AssertionError("a kernel was looked for")

    monkeypatch.setattr(kernel_check, "find_fault", fails)
    monkeypatch.setenv(attending.VARIABLE, "full")
    assert attending.choose_implementation(64, 32, 1024, 1024, float32=True) == "full"
    monkeypatch.setenv(attending.VARIABLE, "blocks")
    assert attending.choose_implementation(64, 32, 1024, 1024, float32=True) == "blocks"
    monkeypatch.setenv(attending.VARIABLE, "kernel")
    monkeypatch.setattr(cpu_attention, "is_available", lambda: False)
    with pytest.raises(UserError, match="No attention kernel computes 1024 queries .* bfloat16"):
        attending.choose_implementation(64, 32, 1024, 1024, float32=False)
    # Small ones and decoding have none anywhere.
    assert attending.choose_implementation(1, 1, 8, 8, float32=False) == "full"


def test_where_attention_is_small_nothing_is_compared(monkeypatch):
    monkeypatch.setattr(kernel_check, "find_fault", None)
    assert attending.choose_implementation(8, 2, 24, 24, float32=True) == "full"
