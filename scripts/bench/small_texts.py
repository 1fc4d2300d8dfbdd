"""What pretraining brought, from what scripts/small_texts.sh left with SCRATCH=1 in a folder.

    .venv/bin/python -P scripts/bench/small_texts.py runs/small_texts docs/images/small_texts.png

Prints the fine-tunings' losses and the accuracies by rank classification, with chance and the
majority class, and draws the losses into the file given as the second argument.
"""

from __future__ import annotations

import collections
import json
import sys
from pathlib import Path

from t0repro.reports.markdown import markdown_table

LOSS = "loss_per_nonpadding_target_token"
STARTS = {"finetuned": "pretrained", "scratch": "from scratch"}


def main() -> None:
    """Prints the tables and draws the curves."""
    run = Path(sys.argv[1])
    curves = {name: losses(run / name, "train") for name in STARTS}
    # Each counts from where its own training began.
    firsts = {name: min(curve) - 50 for name, curve in curves.items()}
    curves = {
        name: {step - firsts[name]: loss for step, loss in curve.items()}
        for name, curve in curves.items()
    }
    rows = [
        [str(step), *(f"{curves[name][step]:.3f}" for name in STARTS)]
        for step in sorted(curves["finetuned"])
    ]
    print(markdown_table(["steps to", *STARTS.values()], rows), end="\n\n")
    print(accuracy_table(run))
    if len(sys.argv) > 2:
        draw(run, curves, Path(sys.argv[2]))


def losses(model_dir: Path, split: str) -> dict[int, float]:
    """Mean loss of a target token by the step at which its summary was written."""
    rows = map(json.loads, (model_dir / "metrics.jsonl").read_text().splitlines())
    return {row["step"]: row[LOSS] for row in rows if row["split"].split("/")[0] == split}


def accuracy_table(run: Path) -> str:
    """Accuracies of both models on each evaluated prompt, in percent."""
    names = sorted(path.name for path in (run / "finetuned/inference_eval").glob("*-metrics.jsonl"))
    rows = []
    for name in names:
        chance, majority, examples = baselines(run / "finetuned/inference_eval", name)
        found = [
            json.loads((run / start / "inference_eval" / name).read_text().splitlines()[-1])
            for start in STARTS
        ]
        task = name.removesuffix("_score_eval-metrics.jsonl").removeprefix("small_")
        values = [*(row["accuracy"] for row in found), chance, majority]
        rows.append([task, str(examples), *(f"{value:.1f}" for value in values)])
    means = [sum(float(row[i]) for row in rows) / len(rows) for i in range(2, 6)]
    rows.append(["mean", "", *(f"{value:.1f}" for value in means)])
    header = ["prompt", "examples", *STARTS.values(), "chance", "majority class"]
    return markdown_table(header, rows)


def baselines(folder: Path, metrics_name: str) -> tuple[float, float, int]:
    """Chance, the share of the most frequent right choice (both in percent), and the examples."""
    (path,) = folder.glob(metrics_name.replace("-metrics.jsonl", "-0*.jsonl"))
    pairs = [json.loads(line)["input"] for line in path.read_text().splitlines()]
    choices = collections.Counter(pair["idx"][0] for pair in pairs)
    answers = collections.Counter(p["idx"][1] for p in pairs if p["is_correct"])
    chance = sum(1 / count for count in choices.values()) / len(choices)
    return 100 * chance, 100 * max(answers.values()) / len(choices), len(choices)


def draw(run: Path, curves: dict[str, dict[int, float]], path: Path) -> None:
    """Draws pretraining's losses on the left and those of both fine-tunings on the right."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    for split, label in (("train", "training"), ("training_eval", "held-out texts")):
        curve = losses(run / "pretrained", split)
        left.plot(list(curve), list(curve.values()), label=label)
    left.set(title="span corruption", xlabel="step", ylabel="loss of a target token (nats)")
    for name, label in STARTS.items():
        right.plot(list(curves[name]), list(curves[name].values()), label=label)
    right.set(title="fine-tuning on prompts", xlabel="step of the fine-tuning")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
    FigureCanvasAgg(figure).print_png(str(path))


if __name__ == "__main__":
    main()
