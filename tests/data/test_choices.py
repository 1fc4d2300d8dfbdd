"""Batches of an example's answer choices: contents, order, resuming, refusals; few-shot splits."""

import collections
import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from t0repro.config.choices import ChoiceLoss
from t0repro.config.data import TrainDataConfig
from t0repro.data.choice_batches import ChoiceBatches, read_choices
from t0repro.errors import UserError
from t0repro.tasks.prompted_examples import prompted_examples
from t0repro.tasks.registration import add_mixture, describing
from t0repro.tasks.registry import task_descriptions

from ..helpers import tiny_models as tiny

with describing():
    import t0repro.tasks.demo  # noqa: F401

LENGTHS = {"inputs": 64, "targets": 16}
NEWS, PARAPHRASES = "demo_synthetic_ag_news_classify", "demo_synthetic_glue_mrpc_paraphrase"


def batches(name, *, seed=1, shuffle=True, choices=4, rows=4):
    data = TrainDataConfig(name, "train", False, False, shuffle, seed, None, 0, False)
    model = tiny.MODEL.with_choice_loss(ChoiceLoss(choices=choices))
    config = tiny.run_config("", 1, model=model, batch_size=rows, sequence_length=LENGTHS)
    plan = dataclasses.replace(config.plan, train_data=data)
    return ChoiceBatches(dataclasses.replace(config, plan=plan))


def taken(source, count, saved=None):
    stream = source.open(0, saved)
    found = [next(stream) for _ in range(count)]
    stream.close()
    return found


def test_a_row_has_the_right_choice_first_and_then_the_wrong_ones():
    (batch,) = taken(batches(NEWS, shuffle=False, rows=8), 1)
    twin = task_descriptions()[NEWS].twin()
    examples = collections.defaultdict(list)
    for example in prompted_examples(twin, "train", LENGTHS):
        examples[int(example["idx"][0])].append(example)
    assert batch["targets"].shape == batch["targets_segmentation"].shape == (8, 4 * 16)
    for number in range(8):
        rows = sorted(examples[number], key=lambda row: not row["is_correct"])
        targets = batch["targets"][number].reshape(4, 16)
        for at, row in enumerate(rows):
            assert np.trim_zeros(targets[at]).tolist() == row["targets"].tolist()
        inputs = np.trim_zeros(batch["inputs"][number])
        assert inputs.tolist() == rows[0]["inputs"].tolist()
        segments = batch["targets_segmentation"][number].reshape(4, 16)
        assert (segments == (targets > 0) * np.arange(1, 5)[:, None]).all()


def test_each_pass_has_each_example_once_in_a_new_order_that_the_seed_decides():
    count = len(list(read_choices(task_descriptions()[NEWS], "train", LENGTHS, 4)))
    assert count == 640
    orders = [
        [
            row.tobytes()
            for batch in taken(batches(NEWS, rows=64, seed=seed), 20)
            for row in batch["inputs"]
        ]
        for seed in (1, 1, 2)
    ]
    first, second = orders[0][:count], orders[0][count:]
    assert collections.Counter(first) == collections.Counter(second) and first != second
    assert orders[0] == orders[1] != orders[2]


def test_tasks_of_a_mixture_are_drawn_by_their_rates():
    with describing():
        add_mixture("choices_of_two", {NEWS: 3.0, PARAPHRASES: 1.0})
    found = np.concatenate(
        [batch["targets_segmentation"].max(-1) for batch in taken(batches("choices_of_two"), 100)]
    )
    # Four sections of news, two answers about a paraphrase: of 400 rows, 300 give or take 35.
    assert set(found.tolist()) == {2, 4} and 265 < (found == 4).sum() < 335


def test_a_resumed_run_goes_on_after_its_last_batch(tmp_path):
    source = batches(NEWS)
    stream = source.open(0, None)
    expected = [next(stream) for _ in range(3)]
    (tmp_path / "data").mkdir()
    source.save(tmp_path)
    expected = [next(stream) for _ in range(3)]
    found = taken(batches(NEWS), 3, tmp_path)
    for one, two in zip(expected, found, strict=True):
        assert all((one[name] == two[name]).all() for name in one)


def test_an_example_with_more_choices_than_a_row_has_room_for_is_refused():
    with pytest.raises(UserError, match="4 answer choices, and a row has room for 3") as refused:
        next(read_choices(task_descriptions()[NEWS], "train", LENGTHS, 3))
    assert "ChoiceLoss.choices = 4" in refused.value.fix


def test_a_task_that_is_no_prompted_one_is_refused_by_name():
    with pytest.raises(UserError, match="'absent'"):
        batches("absent")


# ---- Few-shot splits -----------------------------------------------------------------------------

FEW = """
import collections, json
from t0repro.tasks.registration import describing
with describing():
    import t0repro.tasks.few_shot
from t0repro.tasks.registry import prompted_mixtures, prompted_tasks, task_descriptions
mixtures = prompted_mixtures()
of_cb = mixtures["few_shot_super_glue_cb_32_seed_42"].tasks
rows = {name: [at for at, _ in task_descriptions()[name].rows.rows("train")] for name in of_cb}
print(json.dumps([sorted(mixtures), rows, [prompted_tasks()[n].original_task for n in of_cb]]))
"""


def test_held_out_datasets_have_few_shot_mixtures_of_the_rows_that_t_few_drew(shared_data):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FEW],
        env={**os.environ, "T0REPRO_DATA_DIR": str(shared_data)},
        cwd=Path(__file__).resolve().parents[2],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    mixtures, rows, original = json.loads(done.stdout)
    assert len(mixtures) == 50 and all(original)
    assert {name.rpartition("_seed_")[2] for name in mixtures} == {"0", "1", "32", "42", "1024"}
    # `idx` of data/few_shot/cb/32_shot/42_seed.jsonl in r-three/t-few.
    drawn = "6 9 10 15 19 24 30 33 45 55 60 67 68 97 104 112 114 120"
    drawn += " 142 176 177 181 184 194 197 200 201 216 224 236 240 247"
    assert rows and all(found == [*map(int, drawn.split())] for found in rows.values())
