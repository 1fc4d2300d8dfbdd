"""The command of docs/trainer.md trains the extension that the page ports, and a user's parts."""

import json
import re
import shlex
from pathlib import Path

from ..helpers import commands
from ..runs.tiny_gin import SIZES

ROOT = Path(__file__).resolve().parents[2]
DOCS = (ROOT / "docs/trainer.md").read_text()
EXAMPLE = ROOT / "scripts/demo/t5x_extension"
PARTS = '''
import jax.numpy as jnp

from t0repro.training import metric_classes, partitioner, trainer


class NotingPartitioner(partitioner.Partitioner):
    """Leaves a line for each function that is compiled for the devices."""

    def __init__(self, *args, note, **kwargs):
        super().__init__(*args, **kwargs)
        self._note = note

    def partition(self, fn, *args, **kwargs):
        with open(self._note, "a") as file:
            file.write(f"{fn.__name__}\\n")
        return super().partition(fn, *args, **kwargs)


class Largest(trainer.WeightMetricsComputer):
    def __init__(self, scale=1.0):
        super().__init__()
        self._scale = scale

    def compute_metrics(self, gradients, old_train_state, new_train_state):
        kernel = new_train_state.params["decoder"]["logits_dense"]["kernel"]
        largest = self._scale * jnp.max(jnp.abs(kernel))
        return {"largest_logit_weight": metric_classes.AveragePerStep.from_model_output(largest)}
'''
BOUND = """
train_script.train.partitioner = @my_parts.NotingPartitioner()
my_parts.NotingPartitioner:
  num_partitions = 1
  note = 'partitioned.txt'
my_extension.CarefulTrainer.weight_metrics_computer = @my_parts.Largest()
my_parts.Largest.scale = 1000.0
"""


def test_the_docs_command_trains_the_extension_with_a_partitioner_and_weight_metrics(tmp_path):
    extension = (EXAMPLE / "my_extension.py").read_text()
    gin = (EXAMPLE / "my_run.gin").read_text()
    (command,) = re.findall(r"`(t0repro train --gin_file=my_run.gin .*?)`", DOCS)
    (tmp_path / "my_extension.py").write_text(extension)
    (tmp_path / "my_parts.py").write_text(PARTS)
    gin = gin.replace(
        "import my_extension\n", "import my_extension\nimport my_parts\nimport seqio\n"
    )
    (tmp_path / "my_run.gin").write_text("\n".join([gin, *SIZES, BOUND]))
    done = commands.run(*shlex.split(command), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "an action on the training run's metrics" in done.stderr
    run = tmp_path / "runs/robust"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    trained, after = [row for row in rows if row["split"] == "train" and "loss" in row]
    # The action sees the summary while the next step runs, and the fourth is not taken.
    assert (trained["step"], after["step"]) == (2, 3) and (run / "checkpoint_3").is_dir()
    # Of the model, of the trainer, and of the computer, which replaces T5X's.
    assert trained["lowest_log_prob"] < 0 and trained["updates_left_out"] == 0
    assert trained["largest_logit_weight"] > 100
    assert not any(name.startswith("weight_gradient") for name in trained)
    assert (tmp_path / "partitioned.txt").read_text().split().count("train_step") == 1
    assert "my_parts.Largest" in (run / "config.gin").read_text()
