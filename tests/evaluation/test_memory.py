"""What an evaluation holds in memory, by the number of its pairs."""

import json
import os
import subprocess
import sys
from pathlib import Path

PREMISES = 100  # rows of each task
PAIRS = 2 * PREMISES
FEW, MANY = 6, 18  # tasks

MEASURE = """
import pathlib, sys, tracemalloc, warnings
warnings.simplefilter("ignore")
model_dir, root, out, tasks = *sys.argv[1:4], int(sys.argv[4])
import seqio
import t0repro.tasks.demo
from t0repro.evaluation import rank_eval
from t0repro.evaluation.evaluation_folder import Settings
from t0repro.evaluation.opened import open_checkpoint
from t0repro.tasks.registration import add_prompted_task

demo = seqio.MixtureRegistry.get("demo_eval_score_eval").tasks[0]
vocabulary = demo.output_features["targets"].vocabulary
names = []
for number in range(tasks):
    data = pathlib.Path(root) / str(number)
    task = add_prompted_task("super_glue", "copa", "best_option", ["validation"], root=data,
                             vocabulary=vocabulary, name=f"copa_{number}")
    names.append(task.twin().name)
seqio.MixtureRegistry.add("copas", names, default_rate=1)
checkpoint = open_checkpoint(model_dir, None, "float32")
rank_eval.PAIRS_IN_MEMORY = 400
settings = Settings(lengths={"inputs": 512, "targets": 32})
# What is compiled and imported once is paid before.
rank_eval.rank_eval(checkpoint, names[0], out + "/first", settings, lambda _: None)
tracemalloc.start()
outcome = rank_eval.rank_eval(checkpoint, "copas", out + "/all", settings, lambda _: None)
assert outcome.pairs == outcome.scored == tasks * 200, outcome
print("PEAK", tracemalloc.get_traced_memory()[1])
"""


def spelt(*numbers: int) -> str:
    """Numbers in letters: the demo's vocabulary has no digits."""
    return " ".join("".join("abcdefghij"[int(digit)] for digit in str(n)) for n in numbers)


def write_rows(root: Path) -> None:
    """Rows with long premises for each task, no two of them alike."""
    for task in range(MANY):
        folder = root / str(task) / "super_glue" / "copa"
        folder.mkdir(parents=True)
        rows = [
            {
                "premise": f"{spelt(task, number)} " + "the market fell and rose again. " * 20,
                "choice1": f"it rose {spelt(task, number)}",
                "choice2": f"it fell {spelt(task, number)}",
                "question": "cause",
                "idx": number,
                "label": number % 2,
            }
            for number in range(PREMISES)
        ]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / "validation.jsonl").write_text(text)


def peak(model_dir: Path, root: Path, out: Path, tasks: int) -> int:
    """Bytes at the peak of an evaluation of so many tasks."""
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, model_dir, root, out, str(tasks)],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout.split("PEAK")[1])


def test_memory_stays_flat_as_pairs_grow(model_dir, tmp_path):
    write_rows(tmp_path / "data")
    few, many = (
        peak(model_dir, tmp_path / "data", tmp_path / str(tasks), tasks) for tasks in (FEW, MANY)
    )
    growth = (many - few) / ((MANY - FEW) * PAIRS)
    print(f"peak {few} bytes for {FEW * PAIRS} pairs, {many} for {MANY * PAIRS}: {growth:.0f} each")
    # Scores, lengths and indices of every pair are kept for the report: 45 bytes.
    # Scores, answers, lengths and indices of all pairs are kept for the report: 45 bytes of each.
    assert growth < 250  # 170 when written; 2,500 before evaluations worked in windows
