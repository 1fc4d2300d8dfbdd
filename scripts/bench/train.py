"""Times the training steps of three programs on the same packed real batches, one after the other.

    T0REPRO_DATA_DIR=DIR T0REPRO_VOCAB=FILE .venv/bin/python -P scripts/bench/train.py RUNS

T5 1.1 small (or --size), 8 packed rows of 512 and 114 tokens, float32, Adafactor, in one process
each:

    jax, cold      t5_mesh_transformer --backend=jax, with an empty compilation cache
    jax, warm      the same again, with the compilation cache of the first
    mtf            t5_mesh_transformer --backend=mtf
    step           scripts/bench/train_step.py, for accelerators, without a data pipeline
    pytorch        transformers, as it is (the extra hf)
    compiled       transformers by torch.compile

A machine with a GPU needs only what "step", "pytorch" and "compiled" need. Write the files here and
copy RUNS and this checkout there:

    train.py RUNS --prepare --size xl --rows 32 --inputs 1024 --targets 256 --param \
        "get_variable_dtype.activation_dtype = 'bfloat16'" \
        "t0repro.jax_model.recompute = 'minimal'" \
        "serialize_num_microbatches.tokens_per_microbatch_per_replica = 8192"
    train.py RUNS --only step pytorch compiled         # there

Each program's output is kept in RUNS/NAME.json; an interrupted benchmark continues with the next
program. Prints a table: seconds to the first step with start-up, seconds per step (the median),
tokens per second, FLOP/s counted alike for all (t0repro/partitioning/flops.py), MFU against
this machine's matmul throughput, and peak memory. Below it are the figures that NVIDIA published
for T5X on GPUs, with FLOPs counted the same way.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from t0repro import compat

HERE = Path(__file__).parent
MODULE, MIXTURE = "t0repro.tasks.examples.small", "small_train"
SIZES = ("small", "base", "large", "xl", "xxl")
# Rows per second per GPU, 512 inputs and 128 targets each, AdamW, no dropout, as NVIDIA measured
# its fork of T5X (JAX-Toolbox, rosetta/projects/t5x/README.md, section on performance, 2023).
# The peaks are NVIDIA's too, dense, of bfloat16 (A100) and of fp8 (H100).
T5X_512_128 = (
    ("large", "64 A100, bfloat16", 75.8, 312e12),
    ("xl", "144 A100, bfloat16", 21.0, 312e12),
    ("large", "64 H100, fp8", 158.7, 1979e12),
    ("xl", "144 H100, fp8", 50.4, 1979e12),
)
# As in t5's gin files, which a machine with a GPU may not have.
SHAPES = {
    "large": {"d_model": 1024, "d_ff": 2816, "num_heads": 16, "d_kv": 64},
    "xl": {"d_model": 2048, "d_ff": 5120, "num_heads": 32, "d_kv": 64},
}


def main() -> None:
    """Runs the remaining programs, then prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--steps", type=int, default=8, help="steps of each program after the first"
    )
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--inputs", type=int, default=512)
    parser.add_argument("--targets", type=int, default=114)
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--param", nargs="*", default=[], help="more gin overrides")
    parser.add_argument(
        "--prepare", action="store_true", help="write run.json and batches.npz alone"
    )
    parser.add_argument("--only", nargs="+", help="these programs alone")
    options = parser.parse_args()
    # Before JAX is imported, which sets another level; also for the processes started here.
    compat.quiet_native_logs()
    options.folder.mkdir(parents=True, exist_ok=True)
    if not (options.folder / "batches.npz").exists():
        prepare(options)
    programs = ["jax, cold", "jax, warm", "mtf", "step", "pytorch", "compiled"]
    if options.prepare:
        return
    for name in options.only or programs:
        path = options.folder / f"{name}.json"
        if name in ("pytorch", "compiled") and importlib.util.find_spec("torch") is None:
            print(f"{name}: left out, torch is not installed (the extra hf)")
        elif not path.exists():
            print(f"{name} ...", flush=True)
            path.write_text(json.dumps(outcome(name, options)))
    print(table(options.folder, programs))
    print(published(options.folder))
    print(ratios(options.folder))


def overrides(options: argparse.Namespace) -> list[str]:
    """The run, in Mesh TensorFlow's dialect."""
    lengths = {"inputs": options.inputs, "targets": options.targets}
    return [
        f"MIXTURE_NAME = '{MIXTURE}'",
        f"run.sequence_length = {lengths}",
        f"run.batch_size = {options.rows}",
        f"run.train_steps = {options.steps + 1}",
        f"run.save_checkpoints_steps = {10 * options.steps}",
        "mesh_train_dataset_fn.use_cached = False",
        "mesh_train_dataset_fn.seed = 17",
        "pack_dataset.use_custom_ops = False",
        "serialize_num_microbatches.tokens_per_microbatch_per_replica = None",
        "utils.run.mesh_shape = []",
        "dropout_rate = 0.0",
        *options.param,
    ]


def gin_files(options: argparse.Namespace) -> tuple[str, ...]:
    """t5's own gin files of the run."""
    model = f"models/t5.1.1.{options.size}.gin"
    return ("dataset.gin", model, "learning_rate_schedules/constant_0_001.gin")


def prepare(options: argparse.Namespace) -> None:
    """Writes the run's JSON and the batches that train_step.py and PyTorch take."""
    from t0repro.config.mtf.dialect import load
    from t0repro.config.mtf.parser import MeshInputs
    from t0repro.data.train_data import TrainBatches

    files, params = gin_files(options), tuple(overrides(options))
    inputs = MeshInputs("unused", files, params, module_imports=(MODULE,))
    # An accelerator follows the dtypes that gin binds, and so do the programs measured here.
    config = load(inputs, float32_activations=False).run
    batches = iter(TrainBatches(config).open(0, None))
    kept = [next(batches) for _ in range(options.steps + 1)]
    (options.folder / "run.json").write_text(config.to_json())
    np.savez(
        options.folder / "batches.npz",
        **{name: np.stack([b[name] for b in kept]) for name in kept[0]},
    )


def outcome(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """The figures of one program, run in a separate process."""
    folder = options.folder
    inputs = [str(folder / "run.json"), str(folder / "batches.npz")]
    if name == "step":
        return printed([str(HERE / "train_step.py"), *inputs, "--steps", str(options.steps)])
    if name in ("pytorch", "compiled"):
        return printed([str(HERE / "train_torch.py"), *inputs, name, str(options.steps)])
    command = [str(Path(sys.executable).with_name("t5_mesh_transformer"))]
    command += [f"--module_import={MODULE}"]
    command += [f"--model_dir={folder / name}", f"--backend={'mtf' if name == 'mtf' else 'jax'}"]
    command += [f"--gin_file={file}" for file in gin_files(options)]
    command += [f"--gin_param={each}" for each in overrides(options)]
    return watched(command, folder / name, {"JAX_COMPILATION_CACHE_DIR": str(folder / "programs")})


def printed(command: list[str]) -> dict[str, Any]:
    """The JSON of a process's last line."""
    done = subprocess.run([sys.executable, "-P", *command], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    return json.loads(done.stdout.splitlines()[-1])


def watched(command: list[str], model_dir: Path, env: dict[str, str]) -> dict[str, Any]:
    """Times a training run by when the lines of its metrics.jsonl appear."""
    started, at, memory = time.perf_counter(), [], 0
    log = model_dir.with_suffix(".log")
    with log.open("w") as output:
        process = subprocess.Popen(
            command, env={**os.environ, **env}, stdout=output, stderr=subprocess.STDOUT
        )
        metrics = model_dir / "metrics.jsonl"
        while process.poll() is None:
            lines = metrics.read_text().count("\n") if metrics.exists() else 0
            at += [time.perf_counter() - started] * (lines - len(at))
            memory = max(memory, peak_memory(process.pid))
            time.sleep(0.02)
    if process.returncode or len(at) < 3:
        raise SystemExit(f"{' '.join(command)}\n{log.read_text()[-3000:]}")
    # The last line comes with the end of the training, the first with the first step.
    seconds = statistics.median(np.diff(at[:-1]).tolist())
    return {"first_step": at[0], "step": seconds, "memory": memory}


def peak_memory(process: int) -> int:
    """Peak memory of a process in bytes; 0 once it has ended."""
    try:
        status = Path(f"/proc/{process}/status").read_text()
    except OSError:
        return 0
    sizes = [line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")]
    return int(sizes[0]) * 1024 if sizes else 0


def table(folder: Path, names: list[str]) -> str:
    """One line for each program that has run."""
    found = {n: json.loads(p.read_text()) for n in names if (p := folder / f"{n}.json").exists()}
    tokens = sum(np.load(folder / "batches.npz")[name][0].size for name in ("inputs", "targets"))
    own = found.get("step", {})
    lines = [
        "| program | first step | a step | tokens/s | rate | MFU | memory |",
        "|---|---" * 3 + "|---|",
    ]
    for name, each in found.items():
        rate = own["flops"] / each["step"] if own else float("nan")
        share = rate / own["peak"] if own else float("nan")
        lines.append(
            f"| {name} | {each['first_step']:.1f} s | {each['step']:.3f} s"
            f" | {tokens / each['step']:,.0f} | {rate:.3g} | {share:.0%}"
            f" | {each['memory'] / 2**30:.2f} GiB |"
        )
    if own:
        lines.append(
            f"{own['device']}; a batch takes the host {own['input'] / own['step']:.2%} of a step"
        )
    return "\n".join(lines)


def ratios(folder: Path) -> str:
    """One line: how many times as fast as the others our step is."""
    seconds = {
        name: json.loads(path.read_text())["step"]
        for name in ("jax, warm", "mtf", "pytorch", "compiled")
        if (path := folder / f"{name}.json").exists()
    }
    own = seconds.pop("jax, warm", float("nan"))
    return f"ours: {', '.join(f'{x / own:.2f} x {name}' for name, x in seconds.items())}"


def published(folder: Path) -> str:
    """T5X's published speeds, with FLOP/s counted as in the table above."""
    sys.path.append(str(HERE))  # python -P leaves it out
    from train_step import model_of, operations

    values = json.loads((folder / "run.json").read_text())
    row = {name: np.ones((1, n), np.int32) for name, n in (("inputs", 512), ("targets", 128))}
    flops = {}
    for size, shape in SHAPES.items():
        layers = {"num_encoder_layers": 24, "num_decoder_layers": 24}
        sized = values | {"model": values["model"] | shape | layers}
        flops[size] = operations(model_of(sized), sized, row)
    lines = [
        "| T5X, as published | time per row | tokens/s per GPU | FLOP/s | MFU |",
        "|---|---|---|---|---|",
    ]
    for size, machine, rows, peak in T5X_512_128:
        rate = rows * flops[size]
        lines.append(
            f"| {size}, {machine} | {1 / rows:.4f} s | {rows * 640:,.0f} | {rate:.3g}"
            f" | {rate / peak:.0%} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
