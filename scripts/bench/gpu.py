"""All figures of a GPU in one run of bounded time; scripts/bench/gpu.sh prepares a machine for it.

    python -P scripts/bench/gpu.py OUT --minutes 8
    python -P scripts/bench/gpu.py OUT --tiny        # the same parts on a CPU, to try them

The parts run one after the other, the most valuable first, each in a process of its own that is
stopped at its limit. After each, OUT/gpu.json and OUT/gpu.md are written and its row is printed.
All else is in WORK, also the figures again: a part that is there is not run again, whatever OUT.

    kernels       whether attention's kernels agree with full matrices here (model/kernel_check.py)
    large, xl     a training step of T5 1.1 in bfloat16 (train_step.py), and PyTorch's, compiled, on
                  the same packed rows (train_torch.py)
    parity        a step in float32 here and on this machine's CPU
    lora          a step of LoRA on the XL, and PEFT's
    score         T0-3B's rank evaluation (score_step.py), extrapolated to all pairs
    bits          whether scores have one hash, compiled by two processes, with other batches
    attention     each implementation's time and memory in a layer (gpu_attention.py)
    encode        texts per second of an encoder, and transformers' (encode.py)
    measured      the rank evaluation with the kernels that XLA measures to be fastest
    tests         pytest -m gpu
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
WHEELS = (
    "beartype", "dacite", "gin-config", "google-crc32c", "hypothesis", "iniconfig", "jaxtyping",
    "pluggy", "pytest-timeout", "setuptools", "sortedcontainers", "wadler-lindig",
)  # fmt: skip
"""What such a machine lacks, in the versions of .ci/jax-0.11.lock."""

XL = {"num_layers": 24, "d_model": 2048, "d_ff": 5120, "num_heads": 32}
SIZES = {
    "large": {"num_layers": 24, "d_model": 1024, "d_ff": 2816, "num_heads": 16},
    "xl": XL,
    "lora": XL,
    "parity": {"num_layers": 2, "d_model": 512, "d_ff": 1024, "num_heads": 8, "vocab_size": 4096},
}
TINY = {"num_layers": 2, "d_model": 16, "d_ff": 32, "num_heads": 2, "d_kv": 8, "vocab_size": 128}
ROWS = {"large": (32, 4), "xl": (16, 4), "lora": (32, 4), "parity": (4, 1)}
"""Rows of a batch, and the microbatches in which they are computed."""
PEER = ", PyTorch"
HEAD = "| part | took | figures |\n|---|---:|---|\n"
PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def main() -> None:
    """Runs the parts that are missing while there is time, and prints a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("--work", type=Path, help="default: build/gpu-run, or -tiny")
    parser.add_argument("--minutes", type=float, default=8)
    parser.add_argument("--suite", type=Path, help="what score_step.py --prepare has written")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--only", nargs="+", help="these parts alone")
    parser.add_argument("--wheels", action="store_true", help="print the list for pip and end")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.wheels:
        print(wheels(), end="")
    elif options.part:
        print(json.dumps(PARTS[options.part](options.work)))
    elif options.out is None:
        parser.error("OUT is missing")
    else:
        run_all(options)


def wheels() -> str:
    """The lines of the lock that WHEELS names, with their hashes."""
    lock = (ROOT / ".ci" / "jax-0.11.lock").read_text()
    entries = re.findall(r"^[\w.-]+==[^\n]*(?:\n {4}[^\n]*)*\n", lock, re.M)
    return "".join(entry for entry in entries if entry.partition("==")[0] in WHEELS)


def run_all(options: argparse.Namespace) -> None:
    """Runs each part and writes what it gave."""
    started = time.monotonic()
    work = options.work or ROOT / "build" / ("gpu-tiny" if options.tiny else "gpu-run")
    work = work.resolve()
    for folder in (work, options.out):
        folder.mkdir(parents=True, exist_ok=True)
    path = work / "figures.json"
    figures = json.loads(path.read_text()) if path.exists() else {}
    env = {
        "JAX_COMPILATION_CACHE_DIR": str(work / "programs"),
        "JAX_PLATFORMS": "cpu" if options.tiny else "cuda,cpu",
        **os.environ,
    }
    beside = os.pathsep.join([str(HERE), env.get("PYTHONPATH", "")])
    print(HEAD, end="")
    for name, (command, share) in parts(options, work).items():
        left = 60 * options.minutes - (time.monotonic() - started)
        if options.only and name not in options.only:
            continue
        if name not in figures or "error" in figures[name]:
            limit = min(left - 5, 60 * options.minutes * share)
            # Not for all: HERE has names of packages, such as coverage.
            changed = {"PYTHONPATH": beside} if name in BESIDE else {}
            figures[name] = outcome(command, limit, env | changed)
        text = json.dumps(figures, indent=1) + "\n"
        write(path, text)
        write(options.out / "gpu.json", text)
        write(options.out / "gpu.md", HEAD + "".join(row(part, figures) for part in figures))
        print(row(name, figures), end="", flush=True)


def parts(options: argparse.Namespace, work: Path) -> dict[str, tuple[list[str], float]]:
    """The command of each part, and the share of all time at which it is stopped."""
    for name in SIZES:
        prepare(work, name, options.tiny)
    suite, steps = options.suite or work / "suite.npz", "2" if options.tiny else "8"
    if not suite.exists():
        np.savez(suite, **drawn_lengths(20 if options.tiny else 105_000))

    def script(name: str, *arguments: object) -> list[str]:
        return [str(HERE / name), *map(str, arguments)]

    def files(name: str) -> tuple[Path, Path]:
        return work / f"{name}.json", work / f"{name}.npz"

    def ours(name: str) -> list[str]:
        return script("train_step.py", *files(name), "--steps", steps)

    def torch(name: str) -> list[str]:
        # On a CPU, compiling takes a minute, also of a tiny model.
        way = "pytorch" if options.tiny else "compiled"
        return script("train_torch.py", *files(name), way, steps)

    seconds = 0 if options.tiny else min(300, 60 * options.minutes * 0.15)
    layer = ("--rows", 1, "--length", 64, "--segments", 2) if options.tiny else ()
    texts = ("--size", "small", "--batch", 1, "--length", 16, "--rounds", 1)
    texts = texts if options.tiny else ("--size", "base", "--batch", 64, "--dtype", "bfloat16")
    score = ("--seconds", seconds, *(("--tokens_per_batch", 256) if options.tiny else ()))
    return {
        "kernels": (script("gpu.py", "--part", "kernels"), 0.15),
        "large": (ours("large"), 0.2),
        "large, PyTorch": (torch("large"), 0.2),
        "xl": (ours("xl"), 0.25),
        "xl, PyTorch": (torch("xl"), 0.25),
        "parity": (script("gpu.py", "--part", "parity", "--work", work), 0.15),
        "lora": (ours("lora"), 0.15),
        "lora, PyTorch": (torch("lora"), 0.15),
        "score": (script("score_step.py", work / "xl.json", suite, *score), 0.35),
        "attention": (script("gpu_attention.py", *layer), 0.1),
        "bits": (script("gpu.py", "--part", "bits", "--work", work), 0.15),
        "encode": (script("encode.py", "--torch-python", sys.executable, *texts), 0.15),
        "measured": (["-c", MEASURED, str(work / "xl.json"), str(suite), *map(str, score)], 0.35),
        "tests": (["-m", "pytest", "-q", "-m", "gpu", "tests/model/test_gpu_attention.py"], 0.15),
    }


def prepare(work: Path, name: str, tiny: bool) -> None:
    """Writes a run and its batches: packed rows of random tokens without padding."""
    from t0repro.adapters import lora
    from t0repro.config.recipe import t5_1_1, training_config

    lengths = {"inputs": 24, "targets": 16} if tiny else {"inputs": 1024, "targets": 256}
    rows, parts = (4, 2) if tiny else ROWS[name]
    model = t5_1_1(**(TINY if tiny else SIZES[name]), recompute="none")
    if name == "lora":
        model = model.with_adapter(lora(base_dtype="bfloat16"))
    dtype = "float32" if name == "parity" else "bfloat16"
    run = training_config(
        "unused", model, train_steps=100, batch_size=rows, sequence_length=lengths,
        activation=dtype, num_microbatches=parts,
    )  # fmt: skip
    write(work / f"{name}.json", run.to_json())
    rng, arrays = np.random.default_rng(0), {}
    for feature, length in lengths.items():
        shape = (2, rows, length)  # two batches
        arrays[feature] = rng.integers(2, model.vocab_size, shape, dtype=np.int32)
        segments = 1 + np.arange(length, dtype=np.int32) * 4 // length
        arrays[f"{feature}_segmentation"] = np.broadcast_to(segments, shape)
    np.savez(work / f"{name}.npz", **arrays)


def drawn_lengths(count: int) -> dict[str, np.ndarray]:
    """Lengths with the means of T0's held-out suite (docs/evidence/benchmarks.md), if it is absent.

    Three choices for each input.
    """
    rng = np.random.default_rng(0)
    return {
        "inputs": np.clip(rng.lognormal(4.77, 0.6, count), 8, 1024).astype(np.uint16),
        "targets": np.clip(rng.lognormal(2.11, 1.0, 3 * count), 2, 256).astype(np.uint16),
        "input_of": np.repeat(np.arange(count, dtype=np.uint32), 3),
    }


def outcome(command: list[str], limit: float, env: dict[str, str]) -> dict[str, Any]:
    """What a part prints: its JSON, or its lines; an error with the end of its output.

    The part is killed, with what it started, at its limit or if this process is interrupted or
    terminated; if this process is killed, the part alone is.
    """
    if limit <= 0:
        return {"error": "no time left"}
    # Else what it started would hold the GPU.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    started, error, libc = time.monotonic(), None, ctypes.CDLL(None)
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [sys.executable, "-P", *command], cwd=ROOT, env=env, text=True,
            stdout=output, stderr=errors, start_new_session=True,
            preexec_fn=lambda: libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL),
        )  # fmt: skip
        try:
            if process.wait(limit):
                error = f"exit code {process.returncode}"
        except subprocess.TimeoutExpired:
            error = f"stopped after {limit:.0f} s"
        finally:  # with the processes that it started
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0), errors.seek(0)
        lines, complaints = output.read().splitlines(), errors.read().splitlines()
    try:
        found = json.loads(lines[-1])
    except (IndexError, ValueError):
        found = {"lines": lines}
    if odd := [k for k, x in found.items() if isinstance(x, float) and not math.isfinite(x)]:
        error = error or f"not finite: {', '.join(odd)}"
    found["took"] = round(time.monotonic() - started, 1)
    return found | ({"error": error, "output": complaints[-20:]} if error else {})


def check_kernels(work: Path) -> dict[str, Any]:
    """What is wrong with each kernel for this device's platform, by dtype; "" if nothing."""
    del work
    import jax

    from t0repro.model import cpu_attention, gpu_attention, kernel_check

    device = jax.devices()[0]
    on_cpu = device.platform == "cpu" and cpu_attention.is_available()
    name, module = ("cpu", cpu_attention) if on_cpu else ("gpu", gpu_attention)
    found: dict[str, Any] = {"device": device.device_kind, "jax": jax.__version__}
    for float32 in (True,) if on_cpu else (False, True):
        fault = kernel_check.find_fault(name, module.attention, device, float32=float32)
        found["float32" if float32 else "bfloat16"] = fault
    return found


def parity(work: Path) -> dict[str, Any]:
    """How far a step's loss and update are from those of the CPU, in float32."""
    import jax
    from train_step import made, model_of

    from t0repro.config.model import Layout
    from t0repro.partitioning.devices import choose

    values = json.loads((work / "parity.json").read_text())
    batch = {name: x[0] for name, x in np.load(work / "parity.npz").items()}
    model, layout, results = model_of(values), Layout(**values["layout"]), []
    for device in (jax.devices("cpu")[0], jax.devices()[0]):
        with jax.default_device(device), jax.default_matmul_precision("highest"):
            partitioning = choose(layout, model.config, devices=[device])
            _, state, loss = made(model, values, partitioning, batch)
            results.append((loss, [np.asarray(x) for x in jax.tree.leaves(state.params)]))
    (loss, params), (other, others) = results
    pairs = zip(params, others, strict=True)
    apart = float(np.max([np.abs(x - y).max() / np.abs(x).max() for x, y in pairs]))
    return {"loss": loss, "loss_difference": abs(other / loss - 1), "parameters": apart}


def bits(work: Path) -> dict[str, Any]:
    """Number of hashes of the scores of two processes, each with its own compilation."""
    suite, found = work / "bits.npz", []
    lengths = drawn_lengths(200)
    # Each class of lengths has programs of its own, compiled twice here.
    short = {"inputs": lengths["inputs"].clip(max=128), "targets": lengths["targets"].clip(max=8)}
    np.savez(suite, **lengths | short)
    env = os.environ | {"JAX_ENABLE_COMPILATION_CACHE": "0"}
    for tokens in (512, 4096):
        arguments = (work / "parity.json", suite, "--tokens_per_batch", tokens)
        command = [sys.executable, "-P", HERE / "score_step.py", *arguments]
        done = subprocess.run(map(str, command), check=True, stdout=subprocess.PIPE, env=env)
        found.append(json.loads(done.stdout))
    hashes = len({each["sha256"] for each in found})
    return {"hashes": hashes} | {name: found[0][name] for name in ("pairs", "programs", "rate")}


PARTS = {"kernels": check_kernels, "parity": parity, "bits": bits}
BESIDE = ("parity", "score", "bits", "encode", "measured")
"""Parts that import what lies beside this file."""
MEASURED = """from t0repro.model.matmuls import FIXED_KERNELS
FIXED_KERNELS.clear()
import score_step
score_step.main()"""


def row(name: str, figures: dict[str, dict[str, Any]]) -> str:
    """A part's line of the table."""
    found = figures[name]
    shown = [
        f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}"
        for key, value in found.items()
        if key not in ("took", "lines", "output", "peak", "flops")
    ]
    shown = shown or found.get("lines", [])[-3:]
    ours, theirs = (figures.get(x, {}).get("step") for x in (name.removesuffix(PEER), name))
    if name.endswith(PEER) and ours and theirs:
        shown.append(f"**ours is {theirs / ours:.2f} times as fast**")
    return f"| {name} | {found.get('took', 0)} s | {'; '.join(shown)} |\n"


def write(path: Path, text: str) -> None:
    """Replaces a file at once, so that a cut leaves the old one or the new one."""
    beside = path.with_name(f"{path.name}.new")
    beside.write_text(text)
    beside.replace(path)


if __name__ == "__main__":
    main()
