"""Prints t0repro/runs/held_out_tokens.csv: how long T0's held-out prompts are in T5's tokens.

    T0REPRO_DATA_DIR=DIR python scripts/bench/held_out_tokens.py

Quantiles over up to 150 inputs of each prompt, and over their answer choices. Prompts whose rows
are not in the folder get Story Cloze's, estimated from the lengths of its sentences: its rows may
not be redistributed.
"""

import numpy as np

from t0repro.errors import UserError
from t0repro.evaluation.reading import TaskReader, group_by_input
from t0repro.reports.prompts import load_prompts
from t0repro.tasks.registry import find_tasks

INPUT_QUANTILES, TARGET_QUANTILES = np.linspace(0, 1, 11), np.linspace(0, 1, 5)
STORY_CLOZE = [2, *np.linspace(65, 115, 11), *np.linspace(6, 16, 5)]

load_prompts(["t0repro.tasks.t0"])
print("task,choices,input_tokens,target_tokens")
for task in sorted(find_tasks("t0_eval_score_eval"), key=lambda task: task.name):
    reader = TaskReader(task.name, "validation", {"inputs": 1024, "targets": 256}, 150)
    try:
        inputs = [rows for _, rows in group_by_input(reader.examples())]
    except UserError:
        values = STORY_CLOZE
    else:
        values = [
            np.mean([len(choices) for choices in inputs]),
            *np.quantile([len(choices[0]["inputs"]) for choices in inputs], INPUT_QUANTILES),
            *np.quantile([len(row["targets"]) for row in sum(inputs, [])], TARGET_QUANTILES),
        ]
    choices, *lengths = (f"{value:.0f}" for value in values)
    print(task.name, choices, " ".join(lengths[:11]), " ".join(lengths[11:]), sep=",")
