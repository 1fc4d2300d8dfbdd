"""What full fine-tuning, LoRA and (IA)3 learn from one checkpoint: the tables of docs/adapters.md.

    .venv/bin/python -P scripts/bench/adapters.py demo runs/adapters_demo
    T0REPRO_DATA_DIR=DIR T0REPRO_VOCAB=vocabulary.model \
      .venv/bin/python -P scripts/bench/adapters.py real runs/adapters_real

A small T5 1.1 is trained on prompts of several datasets. Each method then tunes it on another
dataset with each seed, and ranks answers on held-out prompts of that dataset. Each line or row is
printed as soon as it is computed. scripts/small_vocabulary.py makes the vocabulary of the second
command.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from t0repro.config.run import TrainRun
from t0repro.config.t5x import gin_files
from t0repro.config.t5x.run import read_train_run
from t0repro.converters.restoring import open_start
from t0repro.data.choice_batches import Choices, make_choice_batch, read_choices
from t0repro.evaluation.engine import score_examples
from t0repro.evaluation.rank import RankResult, rank_classification
from t0repro.evaluation.task_scores import TaskScores
from t0repro.model.t5 import T5
from t0repro.reports.page_markdown import markdown_table
from t0repro.reports.statistics import (
    Bootstrap,
    DatasetMean,
    Outcomes,
    mean_over_datasets,
    reweighted,
)
from t0repro.runs.train import train
from t0repro.storage import write_atomically
from t0repro.tasks.demo.datasets import DEMO, FOLDER, VOCABULARY
from t0repro.tasks.prompted_examples import prompted_examples
from t0repro.tasks.registration import add_prompted_task, describing
from t0repro.tasks.registry import task_descriptions
from t0repro.tasks.source import Split
from t0repro.tasks.task import TaskDescription
from t0repro.tasks.templates import task_name
from t0repro.tasks.vocabulary import VocabularyFile
from t0repro.training.train_state import TrainState

LENGTHS = {"inputs": 64, "targets": 8}
ROWS, BASE_STEPS, STEPS, TRAIN_ROWS = 16, 400, 150, 500
RATE = 0.01
SEEDS = (1, 2, 3)
# What the demo and the real rows have in common is tuned on another dataset than the base's.
TARGETS = {"demo": "synthetic_rotten_tomatoes", "real": "ag_news"}
LORA = """train_script.train.adapter = @adapters.lora()
adafactor.Adafactor.multiply_by_parameter_scale = False
"""
IA3 = "train_script.train.adapter = @adapters.ia3()\n"
METHODS = {
    "full fine-tuning": "",
    "LoRA, rank 8": LORA,
    "(IA)3": IA3,
    "(IA)3, learning rate 0.1": IA3
    + "utils.create_learning_rate_scheduler.base_learning_rate = 0.1\n",
}
HEAD = """from __gin__ import dynamic_registration
import __main__ as train_script
from t0repro import adapters
from t5x import adafactor
from t5x import utils
include 't5x/examples/t5/t5_1_1/examples/small_texts_model.gin'
include 't5x/configs/runs/{run}.gin'
MIXTURE_OR_TASK_NAME = 'a_mixture'
TASK_FEATURE_LENGTHS = {lengths}
MODEL_DIR = '{model_dir}'
TRAIN_STEPS = {steps}
BATCH_SIZE = {rows}
DROPOUT_RATE = 0.0
USE_CACHED_TASKS = False
LOSS_NORMALIZING_FACTOR = 'NUM_REAL_TARGET_TOKENS'
train_script.train:
  train_eval_dataset_cfg = None
  infer_eval_dataset_cfg = None
train/utils.DatasetConfig.pack = False
utils.SaveCheckpointConfig.period = 100000
utils.create_learning_rate_scheduler:
  factors = 'constant'
  base_learning_rate = {rate}
"""


@dataclasses.dataclass(frozen=True)
class Tuned:
    """A model tuned with one seed.

    Attributes:
      parameters: Trained parameters.
      saved: Bytes of its checkpoint.
      step_seconds: Median processor seconds of a step; wall time depends on what else runs.
      ranked: Its answers to each held-out prompt.
    """

    parameters: int
    saved: int
    step_seconds: float
    ranked: Sequence[RankResult]

    @property
    def accuracy(self) -> float:
        """Mean over prompts, in percent."""
        return statistics.fmean(of.accuracy for of in self.ranked)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("rows", choices=TARGETS)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    # The seeds of a method share one program.
    jax.config.update("jax_compilation_cache_dir", str(options.folder.resolve() / "programs"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    base_tasks, tuned_tasks, held_out = registered(options.rows)

    random = np.random.default_rng(0)
    config = configured(options.folder / "base", BASE_STEPS, "pretrain")
    base = train(config, plain(sampled([examples(each) for each in base_tasks], random)), seed=0)
    before = [answers(base, config, each) for each in held_out]
    rows = [row("untuned", TARGETS[options.rows], before, [])]
    print(about(TARGETS[options.rows], before), *rows, sep="\n", flush=True)
    of_target = [examples(each) for each in tuned_tasks]
    for method in METHODS:
        models = tuned_with(method, options.folder, of_target, held_out)
        ranked = [each for model in models for each in model.ranked]
        rows.append(row(method, TARGETS[options.rows], ranked, models))
        print(rows[-1], flush=True)
    print(markdown_table(HEADER, rows))


def registered(rows: str) -> tuple[list[TaskDescription], ...]:
    """Tasks that the base is trained on, that it is tuned on, and that it is evaluated on."""
    base, target, held_out = [], [], []
    with describing():  # without SeqIO
        if rows == "demo":
            root, vocabulary, datasets = FOLDER, VocabularyFile(str(VOCABULARY)), DEMO
        else:
            from t0repro.tasks.examples.learning import TRAINED

            root, vocabulary, datasets = None, None, TRAINED
        for entry in datasets:
            is_target = entry.dataset == TARGETS[rows]
            uses = [(target if is_target else base, entry.train, Split("train", TRAIN_ROWS))]
            uses += [(held_out, entry.evaluate, entry.validation)] if is_target else []
            for tasks, templates, split in uses:
                for template in templates:
                    of = task_name(entry.dataset, entry.subset, template)
                    use = "validation" if tasks is held_out else "train"
                    name = add_prompted_task(
                        entry.dataset,
                        entry.subset,
                        template,
                        {use: split},
                        root=root,
                        vocabulary=vocabulary,
                        name=f"adapters_{use}_{of}",
                    ).name
                    tasks.append(task_descriptions()[name])
    return base, target, held_out


def configured(model_dir: Path, steps: int, run: str, more: str = "") -> TrainRun:
    """The run that gin describes, in a file beside its folder."""
    text = HEAD.format(
        run=run, lengths=LENGTHS, model_dir=model_dir, steps=steps, rows=ROWS, rate=RATE
    )
    file = model_dir.with_suffix(".gin")
    write_atomically(file, text + more)
    return read_train_run(gin_files.parse(gin_files.T5xInputs("train", (str(file),))))


# ---- Training ------------------------------------------------------------------------------------


def tuned_with(
    method: str,
    folder: Path,
    tasks: Sequence[Sequence[Choices]],
    held_out: Sequence[TaskDescription],
) -> list[Tuned]:
    """The models that a method of tuning makes of the base, one for each seed."""
    found = []
    for seed in SEEDS:
        model_dir = folder / f"{list(METHODS).index(method)}_seed_{seed}"
        # A run of an adapter counts its steps from 0.
        steps = STEPS if METHODS[method] else BASE_STEPS + STEPS
        base = f"INITIAL_CHECKPOINT_PATH = '{folder / 'base' / f'checkpoint_{BASE_STEPS}'}'\n"
        config = configured(model_dir, steps, "finetune", base + METHODS[method])
        rows = sampled(tasks, np.random.default_rng(seed))
        times: list[float] = []
        restored = lambda fresh, config=config: open_start(config, fresh)  # noqa: E731
        state = train(config, timed(plain(rows), times), seed=seed, restore_from=restored)
        saved = model_dir / f"checkpoint_{steps}"
        found.append(
            Tuned(
                sum(leaf.size for leaf in jax.tree.leaves(state.params)),
                sum(path.stat().st_size for path in saved.rglob("*") if path.is_file()),
                statistics.median(np.diff(times)),
                [answers(state, config, each) for each in held_out],
            )
        )
        print(f"{method}, seed {seed}: {found[-1].accuracy:.1f}", flush=True)
    return found


def examples(task: TaskDescription) -> list[Choices]:
    """A task's training examples."""
    return list(read_choices(task, "train", LENGTHS, choices=6))


def sampled(
    tasks: Sequence[Sequence[Choices]], random: np.random.Generator
) -> Iterator[list[Choices]]:
    """The examples of endless batches, each of a task sampled at random."""
    while True:
        chosen = [tasks[at] for at in random.integers(len(tasks), size=ROWS)]
        yield [task[random.integers(len(task))] for task in chosen]


def plain(rows: Iterator[list[Choices]]) -> Iterator[dict[str, np.ndarray]]:
    """Batches of inputs and right answers."""
    for each in rows:
        right = [dataclasses.replace(row, choices=row.choices[:1]) for row in each]
        batch = make_choice_batch(right, LENGTHS, 1)
        yield {name: batch[name] for name in LENGTHS}


def timed(batches: Iterator[Any], times: list[float]) -> Iterator[Any]:
    """The batches; notes when each was asked for."""
    for batch in batches:
        times.append(time.process_time())
        yield batch


# ---- Evaluation ----------------------------------------------------------------------------------


def answers(state: TrainState, config: TrainRun, task: TaskDescription) -> RankResult:
    """A model's answers to a held-out prompt."""
    rows = list(prompted_examples(task.twin(), "validation", LENGTHS))
    params = state.parameters_of(config.model)
    scores = score_examples(params, T5(config.model, config.dtypes), rows, LENGTHS)
    index = np.array([row["idx"] for row in rows])
    return rank_classification(
        TaskScores(
            task=task.prompt.name,
            step=int(state.step),
            input_index=index[:, 0],
            choice_index=index[:, 1],
            is_correct=np.array([row["is_correct"] for row in rows]),
            weight=np.ones(len(rows)),
            target_length=np.array([len(row["targets"]) for row in rows]),
            score=np.asarray(scores, np.float64),
        )
    )


HEADER = (
    "method", "accuracy", "of each seed", "95%, examples", "parameters trained", "bytes saved",
    "processor seconds per step",
)  # fmt: skip


def about(dataset: str, ranked: Sequence[RankResult]) -> str:
    """What is evaluated, with chance and the majority class."""
    chance = statistics.fmean(of.chance for of in ranked)
    majority = statistics.fmean(of.majority for of in ranked)
    examples = f"{len(ranked[0].example)} examples, {len(ranked)} held-out prompts"
    return f"{dataset}: {examples}, chance {chance:.1f}, majority class {majority:.1f}"


def row(
    method: str, dataset: str, ranked: Sequence[RankResult], models: Sequence[Tuned]
) -> list[str]:
    """A row of the table; `ranked` has each prompt for each seed."""
    outcomes = Outcomes.of(ranked)
    mean = DatasetMean.of(outcomes, reweighted(outcomes, dataset, Bootstrap()))
    interval = mean_over_datasets([mean], Bootstrap()).interval(Bootstrap())
    found = [
        method,
        f"{statistics.fmean(of.accuracy for of in ranked):.1f}",
        ", ".join(f"{of.accuracy:.1f}" for of in models),
        f"{interval.low:.1f} to {interval.high:.1f}",
    ]
    if not models:
        return [*found, "", "", ""]
    seconds = statistics.median(of.step_seconds for of in models)
    return [*found, f"{models[0].parameters:,}", f"{models[0].saved:,}", f"{seconds:.3f}"]


if __name__ == "__main__":
    main()
