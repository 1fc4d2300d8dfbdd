"""A run does not go on in other data than those that it was trained on."""

import dataclasses
import itertools
import json
import os
import re
import shutil

import pytest

from t0repro.config.data import SeqioDataConfig
from t0repro.data.cached import CachedBatches
from t0repro.data.described_batches import RenderedBatches
from t0repro.data.resuming import POSITION
from t0repro.data.train_data import SeqioTrainBatches
from t0repro.errors import UserError
from t0repro.progress import heard_by
from t0repro.tasks.demo.datasets import VOCABULARY
from t0repro.training.checkpoints import checkpoint_path, data_folder

from ..helpers import commands
from ..runs.tiny_gin import MODEL, SIZES
from ..tasks.prompt_caches import make
from . import resume_run
from .resume_run import TASK, run

NO_LONGER = "The training data are no longer those that the run was trained on"
LENGTHS = {"inputs": 64, "targets": 8}
MADE_AGAIN = f"Changed: {TASK} (shards 4 then, 7 now; files; seed 42 then, 5 now)."


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder of caches: SeqIO looks for a task's only once."""
    import t0repro.tasks.demo  # noqa: F401 (registers the task)

    folder = tmp_path_factory.mktemp("cache")
    resume_run.use_cache(folder)
    yield folder
    resume_run.use_cache("")


@pytest.fixture
def cache(folder):
    """The task's cache, which a test makes again."""
    make_again(folder, min_shards=4, seed=42)
    return folder


def make_again(folder, **settings):
    shutil.rmtree(folder / TASK, ignore_errors=True)
    make(folder, TASK, **settings)


def position(model_dir, step):
    return data_folder(checkpoint_path(model_dir, step)) / POSITION


def take(source, count, saved=None):
    """Opens a source, takes batches of it, and returns what it said."""
    said = []
    with heard_by(said.append):
        list(itertools.islice(source.open(0, saved), count))
    return said


@pytest.mark.parametrize("skip_seen_data", [None, True])
def test_mesh_tensorflows_dialect_refuses_a_cache_made_again(cache, tmp_path, skip_seen_data):
    options = {"use_cached": True, "seed": 3, "skip_seen_data": skip_seen_data}
    run(tmp_path / "run", last_step=2, **options)
    make_again(cache, min_shards=7, seed=5)
    with pytest.raises(UserError, match=f"{NO_LONGER}. After 2 batches") as caught:
        run(tmp_path / "run", last_step=3, **options)
    assert MADE_AGAIN in caught.value.what
    assert caught.value.where == str(position(tmp_path / "run", 2))
    assert "a seed other than 3: mesh_train_dataset_fn.seed." in caught.value.fix
    if skip_seen_data is None:
        _, said = run(tmp_path / "run", last_step=3, **(options | {"seed": 4}))
        assert "data: from the beginning, since seed changed" in said


@pytest.mark.parametrize("num_shards", [1, 2])
def test_t5xs_dialect_refuses_it_before_the_iterator_is_restored(cache, tmp_path, num_shards):
    data = SeqioDataConfig(
        TASK, LENGTHS, "train", 4, True, None, use_cached=True, pack=True, num_shards=num_shards
    )
    source = SeqioTrainBatches(data, save_dataset=True)
    take(source, 2)
    source.save(tmp_path)
    again = SeqioTrainBatches(data, save_dataset=True, resumed=True)
    assert take(again, 1, tmp_path)[0].startswith("data: after 2 batches")
    make_again(cache, min_shards=7, seed=5)
    with pytest.raises(UserError, match=re.escape(MADE_AGAIN)):
        take(SeqioTrainBatches(data, save_dataset=True, resumed=True), 1, tmp_path)
    # Without the position, the data start over, as they do in T5X.
    said = take(SeqioTrainBatches(data, save_dataset=False, resumed=True), 1, tmp_path)
    assert said == ["data: from the beginning, because save_dataset is False"]


def test_the_same_cache_made_again_and_one_of_seqio_alone_are_told_apart(cache, tmp_path):
    source = CachedBatches([cache / TASK], LENGTHS, 4, seed=7)
    take(source, 3)
    source.save(tmp_path)

    def resumed():
        return take(CachedBatches([cache / TASK], LENGTHS, 4, seed=7), 1, tmp_path)

    make_again(cache, min_shards=4, seed=42)
    assert resumed() == ["data: after 3 batches, which are rebuilt and skipped"]
    make_again(cache, min_shards=4, seed=5)
    with pytest.raises(UserError, match=rf"{TASK} \(seed 42 then, 5 now\)"):
        resumed()
    # As SeqIO's own: its sizes may be the same, and the last records' checksums are not.
    (cache / TASK / "provenance.json").unlink()
    source = CachedBatches([cache / TASK], LENGTHS, 4, seed=7)
    take(source, 3)
    source.save(tmp_path)
    resumed()
    shards = sorted((cache / TASK).glob("train.tfrecord-*"))
    for one in shards:
        content = one.read_bytes()
        one.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(UserError, match=rf"{TASK} \(ends\)"):
        resumed()


def test_rows_that_changed_are_refused(tmp_path):
    import t0repro.tasks.demo  # noqa: F401 (registers the task)
    from t0repro.tasks.registry import record_task, task_descriptions

    described = task_descriptions()[TASK]
    source = RenderedBatches(
        {TASK: 1.0}, LENGTHS, 4, split="train", pack=True, shuffle=True, seed=7, num_shards=1
    )
    take(source, 2)
    source.save(tmp_path)
    then = json.loads((tmp_path / POSITION).read_text())
    assert set(then["made_of"][TASK]) == {"rows", "template"}
    then["made_of"][TASK]["rows"] = "0" * 16
    (tmp_path / POSITION).write_text(json.dumps(then))
    with pytest.raises(UserError, match=rf"{NO_LONGER}(.|\n)*Changed: {TASK} \(rows\)"):
        take(source, 1, tmp_path)
    record_task(dataclasses.replace(described))


def test_a_position_of_an_earlier_version_is_resumed_with_a_note(cache, tmp_path):
    source = CachedBatches([cache / TASK], LENGTHS, 4, seed=7)
    take(source, 3)
    source.save(tmp_path)
    saved = json.loads((tmp_path / POSITION).read_text())
    del saved["made_of"]
    (tmp_path / POSITION).write_text(json.dumps(saved))
    note, passed_over = take(source, 1, tmp_path)
    assert note.startswith("note: an earlier version saved the position in the data, without a")
    assert passed_over == "data: after 3 batches, which are rebuilt and skipped"


PROMPTS = """dataset: my_rows
templates:
  one: !Template
    name: ask
    jinja: '{text} ||| {{{{answer_choices[label]}}}}'
    answer_choices: no ||| yes
mixtures:
  mine:
    my_rows_ask: {rate}
"""


def test_a_fine_tuning_on_other_rows_prompts_or_rates_is_refused_by_the_dry_run_too(tmp_path):
    rows = tmp_path / "rows" / "my_rows" / "default"
    rows.mkdir(parents=True)
    prompts = tmp_path / "mine.yaml"

    def write(text="{{text}} Good?", rate=1, row="Fine soup."):
        prompts.write_text(PROMPTS.format(text=text, rate=rate))
        lines = [json.dumps({"text": each, "label": 1}) for each in (row, "Cold tea.")]
        for split in ("train", "validation"):
            (rows / f"{split}.jsonl").write_text("\n".join(lines) + "\n")

    bindings = (
        *SIZES, "INITIAL_CHECKPOINT_PATH = []", "MIXTURE_OR_TASK_NAME = 'mine'",
        "TASK_FEATURE_LENGTHS = {'inputs': 32, 'targets': 8}", "USE_CACHED_TASKS = False",
        "DROPOUT_RATE = 0.0", "BATCH_SIZE = 2", "EVAL_PERIOD = 100", "RANDOM_SEED = 1",
        "utils.SaveCheckpointConfig.save_dataset = True",
        "train_script.train.infer_eval_dataset_cfg = None",
        f"MODEL_DIR = '{tmp_path / 'run'}'",
    )  # fmt: skip

    def train(steps, *more):
        files = (f"--gin_file={MODEL}", "--gin_file=t5x/configs/runs/finetune.gin")
        words = [*files, *(f"--gin_bindings={each}" for each in bindings), *more]
        variables = {
            "T0REPRO_DATA_DIR": str(tmp_path / "rows"),
            "T0REPRO_TEMPLATES": str(prompts),
            "T0REPRO_VOCAB": str(VOCABULARY),
        }
        done = commands.run(
            "t0repro", "train", *words, f"--gin.TRAIN_STEPS={steps}",
            "--module_import=t0repro.tasks.user_templates", env={**os.environ, **variables},
        )  # fmt: skip
        return done.returncode, done.stderr

    write()
    code, said = train(2)
    assert code == 0, said
    for change, named in (
        ({"text": "{{text}} Bad?"}, "my_rows_ask (template)"),
        ({"row": "Fine soap."}, "my_rows_ask (rows)"),
        ({"rate": 3}, "my_rows_ask (rate 1.0 then, 3.0 now)"),
    ):
        write(**change)
        for more in (["--dry_run"], []):
            code, said = train(4, *more)
            assert code == 2 and NO_LONGER in said and named in said, (change, more, said)
            assert "train/utils.DatasetConfig.seed" in said
    write()
    assert train(4, "--dry_run")[0] == 0
