r"""Texts per second of a T5 encoder: ours beside transformers' in PyTorch, with SDPA.

    JAX_PLATFORMS=cpu python scripts/bench/encode.py --torch-python <a Python with transformers>

Both encode the same rows of random ids with the same random weights (T5 1.1 small or base-shaped)
in --dtype, and take turns, so that any other load on the machine affects both. Rows have --length
tokens: no row is padded, and PyTorch gets them in batches of --batch, on a GPU if there is one.
Prints the rates of every round, the ratio of their medians, and the largest difference relative to
the largest output.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from rank_eval import SIZES, VOCABULARY


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--torch-python", required=True, help="a Python with transformers")
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        measure(Path(folder), options)


def measure(folder: Path, options: argparse.Namespace) -> None:
    """Takes turns with PyTorch in a process of its own, and prints both rates."""
    import t0repro
    from t0repro.evaluation.opened import open_encoder

    shape = [options.dtype, folder, options.batch, options.length]
    peer = subprocess.Popen(
        [options.torch_python, __file__, "--serve", options.size, *map(str, shape)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert peer.stdin is not None and peer.stdout is not None
    attention = json.loads(peer.stdout.readline())["attention"]  # the model is saved then
    ids = np.load(folder / "ids.npy")
    checkpoint = open_encoder(str(folder / "model"), options.dtype)

    def ours() -> float:
        started = time.perf_counter()
        outputs = t0repro.encode(checkpoint, list(ids))
        seconds = time.perf_counter() - started
        np.save(folder / "ours.npy", np.stack(outputs))
        return seconds

    def theirs() -> float:
        print("run", file=peer.stdin, flush=True)
        return float(json.loads(peer.stdout.readline())["seconds"])

    ours(), theirs()  # compile, and warm up
    rounds = [(ours(), theirs()) for _ in range(options.rounds)]
    peer.stdin.close()
    peer.wait()
    expected, found = np.load(folder / "theirs.npy"), np.load(folder / "ours.npy")
    difference = np.abs(found - expected).max() / np.abs(expected).max()
    for mine, other in rounds:
        print(f"{len(ids) / mine:7.2f} texts/s here, {len(ids) / other:7.2f} in PyTorch")
    ratio = statistics.median(other for _, other in rounds) / statistics.median(
        mine for mine, _ in rounds
    )
    print(f"largest difference, relative: {difference:.1e}")
    print(
        f"{ratio:.2f} times PyTorch ({attention}), {options.batch} x {options.length},"
        f" T5 1.1 {options.size}"
    )


def serve(size: str, dtype: str, folder: str, batch: str, length: str) -> None:
    """PyTorch's side: saves a model and rows, then encodes them at each line of standard input."""
    import torch
    from transformers import T5Config, T5EncoderModel

    answers, sys.stdout = sys.stdout, sys.stderr
    sizes = SIZES[size]
    config = T5Config(
        vocab_size=VOCABULARY,
        num_layers=sizes["layers"],
        d_model=sizes["d_model"],
        d_ff=sizes["d_ff"],
        num_heads=sizes["num_heads"],
        d_kv=sizes["d_kv"],
        feed_forward_proj="gated-gelu",
        dropout_rate=0.0,
    )
    torch.manual_seed(0)
    T5EncoderModel(config).save_pretrained(Path(folder) / "model")
    try:
        model = T5EncoderModel.from_pretrained(
            Path(folder) / "model", attn_implementation="sdpa"
        ).eval()
        attention = "SDPA"
    except ValueError:
        model = T5EncoderModel.from_pretrained(Path(folder) / "model").eval()
        attention = "eager: this transformers has no SDPA for T5"
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = model.to(device, getattr(torch, dtype))
    ids = np.random.default_rng(0).integers(3, 32000, (2 * int(batch), int(length)))
    np.save(Path(folder) / "ids.npy", ids)
    print(json.dumps({"attention": attention}), file=answers, flush=True)
    for _ in sys.stdin:
        started = time.perf_counter()
        with torch.inference_mode():
            parts = [
                model(input_ids=part).last_hidden_state
                for part in torch.from_numpy(ids).to(device).split(int(batch))
            ]
            outputs = torch.cat(parts).float().cpu().numpy()
        seconds = time.perf_counter() - started
        np.save(Path(folder) / "theirs.npy", outputs)
        print(json.dumps({"seconds": seconds}), file=answers, flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(*sys.argv[2:])
    else:
        main()
