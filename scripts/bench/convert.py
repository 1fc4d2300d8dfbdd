"""Time and memory of converting a synthetic T5 1.1, beside the machine's own copy of its bytes.

    python scripts/bench/convert.py                # XL: 2.85e9 parameters, 11.4 GB in float32
    python scripts/bench/convert.py --size base --to jax hf

Each conversion runs in its own process; its peak resident memory is the kernel's figure (VmHWM).
The copy is `cp` of the source's files followed by `fsync`, timed before each conversion because a
machine's first writes may be slower than later ones. Copies and conversions all start with their
source out of the page cache. The target is at most 2.5 times the copy's time and at most 2.5 GB.
Files go to a temporary directory, which needs four times the model's size, and are removed.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SIZES = {
    "small": (8, 512, 1024, 6, 64),
    "base": (12, 768, 2048, 12, 64),
    "large": (24, 1024, 2816, 16, 64),
    "XL": (24, 2048, 5120, 32, 64),
}
FORMATS = ("jax", "hf", "t5x", "t5x-scanned", "mtf")
VOCABULARY, BUCKETS = 32128, 32


def write_source(directory: Path, size: str) -> int:
    """Writes a Mesh TensorFlow checkpoint with random values, without slots; returns its bytes."""
    import numpy as np

    from t0repro.converters.tensor_bundle import BundleWriter
    from t0repro.parameters import naming
    from t0repro.parameters.shape import ModelShape

    layers, d_model, d_ff, heads, d_kv = SIZES[size]
    sizes = (d_model, d_ff, heads, d_kv, VOCABULARY, BUCKETS)
    family = ModelShape(layers, layers, *sizes, ("wi_0", "wi_1"), False)
    directory.mkdir()
    writer = BundleWriter(directory / "model.ckpt-1000")
    writer.add("global_step", np.asarray(1000, np.int64))
    generator = np.random.default_rng(0)
    for path, shape in family.parameters().items():
        writer.add(str(naming.path_to_mtf(path)), generator.standard_normal(shape, np.float32))
    writer.close()
    return sum(file.stat().st_size for file in directory.iterdir())


def measure_copy(source: Path, target: Path) -> float:
    """Seconds that `cp` of a directory takes until everything is on disk."""
    forget(source)
    started = time.perf_counter()
    subprocess.run(["cp", "-r", source, target], check=True)
    for file in files_below(target):
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    seconds = time.perf_counter() - started
    shutil.rmtree(target)
    return seconds


def measure_conversion(source: Path, target: Path, to: str) -> tuple[float, float]:
    """Seconds and peak resident memory in GB of one conversion in its own process."""
    forget(source)
    started = time.perf_counter()
    command = [sys.executable, __file__, "--convert", str(source), str(target), to]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return time.perf_counter() - started, int(output.split()[-1]) / 1e6


def files_below(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if path.is_file()]


def forget(directory: Path) -> None:
    """Drops a directory's files, which must be on disk already, from the page cache."""
    for file in files_below(directory):
        descriptor = os.open(file, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def report(name: str, root: Path, source: str, target: str, to: str) -> None:
    """Copies and converts a directory, and prints both times."""
    copy = measure_copy(root / source, root / "copy")
    seconds, peak = measure_conversion(root / source, root / target, to)
    print(
        f"{name}: {seconds:.1f} s, {seconds / copy:.2f} times the copy ({copy:.1f} s);"
        f" peak memory {peak:.2f} GB",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="XL")
    parser.add_argument("--to", nargs="+", default=FORMATS, choices=FORMATS)
    parser.add_argument("--directory", help="where the temporary directory goes")
    parser.add_argument("--convert", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.convert:
        from t0repro.converters.convert import convert

        source, target, to = arguments.convert
        convert(source, target, to.removesuffix("-scanned"), scan=to.endswith("-scanned"))
        # Not ru_maxrss, which begins with the memory of the process that starts this one.
        status = Path("/proc/self/status").read_text().splitlines()
        print(next(line.split()[1] for line in status if line.startswith("VmHWM")))  # kB
        return
    root = Path(tempfile.mkdtemp(dir=arguments.directory))
    try:
        nbytes = write_source(root / "source", arguments.size)
        print(
            f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, load"
            f" {os.getloadavg()[0]:.1f}; T5 1.1 {arguments.size}, {nbytes / 1e9:.2f} GB"
        )
        for to in arguments.to:
            report(f"mtf to {to}", root, "source", to, to)
            if to != "mtf":
                report(f"{to} to mtf", root, to, "back", "mtf")
                shutil.rmtree(root / "back")
            shutil.rmtree(root / to)
    finally:
        shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    main()
