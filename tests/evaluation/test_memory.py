"""What an evaluation holds in memory, by the number of its pairs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np

TASKS = 18
FEW, MANY = 30, 100  # rows of each task, of two choices each

MEASURE = """
import gc, pathlib, sys, tracemalloc, warnings
warnings.simplefilter("ignore")
model_dir, root, out, tasks, rows = *sys.argv[1:4], *map(int, sys.argv[4:])
from t0repro.evaluation.evaluation_folder import EvaluationSettings
from t0repro.evaluation.opened import open_checkpoint
from t0repro.runs import rank_eval
from t0repro.tasks.demo.datasets import VOCABULARY
from t0repro.tasks.registration import add_mixture, add_prompted_task, describing
from t0repro.tasks.vocabulary import VocabularyFile

vocabulary = VocabularyFile(str(VOCABULARY))
names = []
for number in range(tasks):
    data = pathlib.Path(root) / str(number)
    with describing():
        task = add_prompted_task("super_glue", "copa", "best_option", ["validation"], root=data,
                                 vocabulary=vocabulary, name=f"copa_{number}")
    names.append(task.twin().name)
with describing():
    add_mixture("copas", names, lambda rows: 1.0)
checkpoint = open_checkpoint(model_dir, None, "float32")
rank_eval.PAIRS_IN_MEMORY = 400
settings = EvaluationSettings(lengths={"inputs": 512, "targets": 32})
# What is compiled and imported once is paid before.
rank_eval.rank_eval(checkpoint, "copas", out + "/first", settings)
tracemalloc.start()
outcome = rank_eval.rank_eval(checkpoint, "copas", out + "/all", settings)
assert outcome.pairs == outcome.scored == tasks * rows * 2, outcome
gc.collect()
print("BYTES", *tracemalloc.get_traced_memory())
"""


def spelled(*numbers: int) -> str:
    """Numbers in letters: the demo's vocabulary has no digits."""
    return " ".join("".join("abcdefghij"[int(digit)] for digit in str(n)) for n in numbers)


def write_rows(root: Path, count: int) -> None:
    """Rows with long premises for each task, no two of them alike."""
    for task in range(TASKS):
        folder = root / str(task) / "super_glue" / "copa"
        folder.mkdir(parents=True)
        rows = [
            {
                "premise": f"{spelled(task, number)} " + "the market fell and rose again. " * 20,
                "choice1": f"it rose {spelled(task, number)}",
                "choice2": f"it fell {spelled(task, number)}",
                "question": "cause",
                "idx": number,
                "label": number % 2,
            }
            for number in range(count)
        ]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / "validation.jsonl").write_text(text)


def held(model_dir: Path, folder: Path, rows: int) -> np.ndarray:
    """Bytes at the end and at the peak of an evaluation of tasks with so many rows each."""
    write_rows(folder / "data", rows)
    arguments = [model_dir, folder / "data", folder / "out", str(TASKS), str(rows)]
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, *arguments],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return np.array(done.stdout.split("BYTES")[1].split(), int)


def test_memory_stays_flat_as_pairs_grow(model_dir, tmp_path):
    few, many = (held(model_dir, tmp_path / str(rows), rows) for rows in (FEW, MANY))
    at_end, at_peak = (many - few) / (2 * (MANY - FEW) * TASKS)
    print(f"{few} bytes with {FEW} rows a task, {many} with {MANY}: {at_end:.0f} and {at_peak:.0f}")
    assert at_end < 15  # 6 when written; 45 while scores were kept for the report
    # At the peak a window is read: the texts of one larger task more. 169 when written; 2,500
    # before evaluations worked in windows.
    assert at_peak < 250
