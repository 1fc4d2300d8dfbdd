"""Prints the table of docs/what_fits.md: which card holds a training step of T5 1.1.

    .venv/bin/python -P scripts/bench/cards.py

Nothing is compiled. The memory is the estimate that `t0repro precompile` and every training run
print: parameters, slots and gradients by their shapes, and the activations that the traced step
keeps, times 1.1 for what compilers need beyond it. A batch has 8 rows of 256 and 64 tokens, in
bfloat16. A row is printed as soon as it is known.
"""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path

import jax

from t0repro.config.model import Recompute
from t0repro.config.run import TrainRun
from t0repro.config.t5x import gin_files
from t0repro.config.t5x.run import read_train_run
from t0repro.model.t5 import T5
from t0repro.partitioning.devices import choose
from t0repro.training.optimizers import make_optimizer
from t0repro.training.rematerialization import IN_ALL, batch_shapes, step_bytes
from t0repro.training.train_state import stacked_shapes

SIZES = {
    "small": "T5 1.1 small",
    "base": "T5 1.1 base",
    "large": "T5 1.1 large",
    "xl": "T5 1.1 XL (T0-3B)",
    "xxl": "T5 1.1 XXL (T0, 11B)",
}
CARDS = (16, 24, 40, 80)  # GB
BASE = "\nadapters.{kind}.base_dtype = 'bfloat16'\n"
METHODS = {
    "full fine-tuning": "",
    "LoRA, rank 8": "train_script.train.adapter = @adapters.lora()" + BASE.format(kind="lora"),
    "(IA)3": "train_script.train.adapter = @adapters.ia3()" + BASE.format(kind="ia3"),
}
RECOMPUTE: tuple[Recompute, ...] = ("none", "minimal", "full")
TEXT = """from __gin__ import dynamic_registration
import __main__ as train_script
from t0repro import adapters
from t5x import utils
include 't5x/examples/t5/t5_1_1/{size}.gin'
include 't5x/configs/runs/finetune.gin'
MIXTURE_OR_TASK_NAME = 'a_mixture'
INITIAL_CHECKPOINT_PATH = 'a_checkpoint'
MODEL_DIR = 'a_folder'
TASK_FEATURE_LENGTHS = {{'inputs': 256, 'targets': 64}}
TRAIN_STEPS = 1000
BATCH_SIZE = 8
USE_CACHED_TASKS = False
train/utils.DatasetConfig.pack = False
train_script.train.train_eval_dataset_cfg = None
{more}"""


def main() -> None:
    titles = ["model", "trained", *(f"{card} GB" for card in CARDS)]
    print(f"| {' | '.join(titles)} |\n|{'---|' * len(titles)}", flush=True)
    for size, title in SIZES.items():
        for method in METHODS:
            print(
                f"| {' | '.join([title, method, *cells(configured(size, method))])} |", flush=True
            )


def cells(config: TrainRun) -> list[str]:
    """For each card the least that has to be recomputed, and the GB that a step then takes."""
    needed: dict[Recompute, float] = {}
    found = []
    for card in CARDS:
        for recompute in RECOMPUTE:
            if recompute not in needed:
                needed[recompute] = IN_ALL * bytes_of(config, recompute) / 1e9
            if needed[recompute] <= card:
                found.append(f"{recompute}, {needed[recompute]:.1f}")
                break
        else:
            found.append(f"no ({needed['full']:.1f})")
    return found


def bytes_of(config: TrainRun, recompute: Recompute) -> int:
    """What a step needs on one device, by its shapes."""
    model = dataclasses.replace(config.model, recompute=recompute)
    config = dataclasses.replace(config, model=model)
    rows = config.batch_size
    assert config.optimizer is not None
    held = stacked_shapes(T5(model, config.dtypes), make_optimizer(config.optimizer))
    devices = choose(config.layout, model, rows=rows, devices=jax.devices()[:1])
    return step_bytes(config, devices.shapes_with_shardings(held), batch_shapes(config), devices)


def configured(size: str, method: str) -> TrainRun:
    """The training run of a size."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "card.gin"
        file.write_text(TEXT.format(size=size, more=METHODS[method]))
        return read_train_run(gin_files.parse(gin_files.T5xInputs("train", (str(file),))))


if __name__ == "__main__":
    main()
