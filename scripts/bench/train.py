"""Training steps of three programs on the same packed real batches, one after the other.

    T0REPRO_DATA_DIR=DIR T0REPRO_VOCAB=FILE .venv/bin/python -P scripts/bench/train.py RUNS

T5 1.1 small, 8 packed rows of 512 and 114 tokens, float32, Adafactor, in one process each:

    jax, cold      t5_mesh_transformer --backend=jax, with an empty folder of compiled programs
    jax, warm      the same again, which finds them
    mtf            t5_mesh_transformer --backend=mtf
    step           scripts/bench/train_step.py, the entry for accelerators, without a data pipeline
    pytorch        transformers, as it is (the extra hf)
    compiled       transformers by torch.compile

What a program printed is kept in RUNS/NAME.json; a bench that was stopped goes on with the next
one. Prints a table: seconds to the first step with start-up, seconds of a step (the median),
tokens a second, operations a second by one count (t0repro/partitioning/flops.py) for all, as a
share of what a product of matrices reaches on this machine, and the most memory.
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

HERE = Path(__file__).parent
MODULE, MIXTURE = "t0repro.tasks.small", "small_train"


def main() -> None:
    """Runs what has not been run, then prints the table."""
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
    parser.add_argument("--param", nargs="*", default=[], help="more gin overrides: another size")
    parser.add_argument("--only", nargs="+", help="these programs alone")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    if not (options.folder / "batches.npz").exists():
        prepare(options)
    programs = ["jax, cold", "jax, warm", "mtf", "step", "pytorch", "compiled"]
    for name in options.only or programs:
        path = options.folder / f"{name}.json"
        if name in ("pytorch", "compiled") and importlib.util.find_spec("torch") is None:
            print(f"{name}: left out, torch is not installed (the extra hf)")
        elif not path.exists():
            print(f"{name} ...", flush=True)
            path.write_text(json.dumps(outcome(name, options)))
    print(table(options.folder, programs))


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


FILES = ("dataset.gin", "models/t5.1.1.small.gin", "learning_rate_schedules/constant_0_001.gin")


def prepare(options: argparse.Namespace) -> None:
    """Writes the run's JSON and the batches that train_step.py and PyTorch take."""
    from t0repro.config.mtf.dialect import load
    from t0repro.config.mtf.parser import MeshInputs
    from t0repro.data.train_data import TrainBatches

    inputs = MeshInputs("unused", FILES, tuple(overrides(options)), module_imports=(MODULE,))
    config = load(inputs).run
    batches = iter(TrainBatches(config).open(0, None, print))
    kept = [next(batches) for _ in range(options.steps + 1)]
    (options.folder / "run.json").write_text(config.to_json())
    np.savez(
        options.folder / "batches.npz",
        **{name: np.stack([b[name] for b in kept]) for name in kept[0]},
    )


def outcome(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """What one program takes, each in a process of its own."""
    folder = options.folder
    inputs = [str(folder / "run.json"), str(folder / "batches.npz")]
    if name == "step":
        return printed([str(HERE / "train_step.py"), *inputs, "--steps", str(options.steps)])
    if name in ("pytorch", "compiled"):
        return printed([str(HERE / "train_torch.py"), *inputs, name, str(options.steps)])
    command = [str(Path(sys.executable).with_name("t5_mesh_transformer"))]
    command += [f"--module_import={MODULE}"]
    command += [f"--model_dir={folder / name}", f"--backend={'mtf' if name == 'mtf' else 'jax'}"]
    command += [f"--gin_file={file}" for file in FILES]
    command += [f"--gin_param={each}" for each in overrides(options)]
    return watched(command, folder / name, {"JAX_COMPILATION_CACHE_DIR": str(folder / "programs")})


def printed(command: list[str]) -> dict[str, Any]:
    """The JSON of a process's last line."""
    done = subprocess.run([sys.executable, "-P", *command], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    return json.loads(done.stdout.splitlines()[-1])


def watched(command: list[str], model_dir: Path, env: dict[str, str]) -> dict[str, Any]:
    """Times a training by when the lines of its metrics.jsonl appear."""
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
    """Most bytes that a process has had in memory; 0 once it has ended."""
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


if __name__ == "__main__":
    main()
