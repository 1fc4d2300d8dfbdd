"""Measures which of T5X's factored slots correspond to which of Mesh TensorFlow's.

    python scripts/bench/t5x_slots.py

Compares one update of mesh_tensorflow.optimize.AdafactorOptimizer on random gradients, from zero
slots, with T5X's v_row and v_col for the same gradients (the means that t5x/adafactor.py takes; it
sorts the axes by np.argsort). Prints the largest relative difference under the straight mapping
(vr is v_row, vc is v_col, as in T5X's importer) and under the exchanged one, and the RMS error of
the next update if the slots are mapped straight. The gradients' rows have very different sizes.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[2]
SHAPES = ("256x640", "640x256", "256x256", "2048x2048")
DECAY = 1 - 1_100_001**-0.8  # at T0's first step, where the old slots have almost all the weight


def mesh_slots(names: tuple[str, ...]) -> dict[str, np.ndarray]:
    """Gradients and slots of Mesh TensorFlow's optimizer, computed in its own process."""
    script = ROOT / "tests" / "converters" / "run_mesh_adafactor.py"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "slots.npz"
        subprocess.run([sys.executable, script, file, *names], check=True, capture_output=True)
        with np.load(file) as arrays:
            return dict(arrays)


def t5x_slots(squares: np.ndarray) -> dict[str, np.ndarray]:
    """T5X's slots after the first update, at which the decay is 0."""
    *_, before_last, last = np.argsort(squares.shape, kind="stable")
    return {"v_row": squares.mean(axis=last), "v_col": squares.mean(axis=before_last)}


def t5x_update(gradient: np.ndarray, slots: dict[str, np.ndarray]) -> np.ndarray:
    """The next update's direction: the gradient over the root of its factored second moment."""
    *_, before_last, last = np.argsort(gradient.shape, kind="stable")
    new = t5x_slots(gradient**2)
    row, column = (DECAY * slots[name] + (1 - DECAY) * new[name] for name in ("v_row", "v_col"))
    row_factor = np.expand_dims((row / row.mean()) ** -0.5, last)
    return gradient * row_factor * np.expand_dims(column**-0.5, before_last)


def difference(a: np.ndarray, b: np.ndarray) -> float:
    """Largest relative difference, or infinity where the shapes differ."""
    return float(np.max(np.abs(a - b) / b)) if a.shape == b.shape else np.inf


def main() -> None:
    arrays = mesh_slots(SHAPES)
    print(f"{'shape':>10}  {'straight':>9}  {'exchanged':>9}  next update off by")
    for name in SHAPES:
        gradient = arrays[f"gradient/{name}"]
        mesh = {slot: arrays[f"{slot}/{name}"] for slot in ("vr", "vc")}
        t5x = t5x_slots(gradient**2)
        straight = max(difference(mesh["vr"], t5x["v_row"]), difference(mesh["vc"], t5x["v_col"]))
        exchanged = max(difference(mesh["vc"], t5x["v_row"]), difference(mesh["vr"], t5x["v_col"]))
        effect = "-"
        if mesh["vr"].shape == t5x["v_row"].shape:
            right = t5x_update(gradient, t5x)
            wrong = t5x_update(gradient, {"v_row": mesh["vr"], "v_col": mesh["vc"]})
            effect = f"{np.sqrt(np.mean((wrong - right) ** 2) / np.mean(right**2)):.1e} of its RMS"
        print(f"{name:>10}  {straight:9.1e}  {exchanged:9.1e}  {effect}")


if __name__ == "__main__":
    main()
