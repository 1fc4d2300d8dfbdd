"""T5's pretraining task on C4, by its name, from prepared TFDS data and without a network."""

import json
import subprocess
import sys

import pytest

TASK = "c4_v220_span_corruption"
# The features of C4 in TFDS; the task reads only the text.
COLUMNS = ("content-length", "content-type", "text", "timestamp", "url")
SENTENCE = "The quick brown fox jumps over the lazy dog near the river bank, again and again. "


@pytest.fixture(scope="module")
def tfds_data(tmp_path_factory):
    """A folder in which TFDS finds c4/en:2.2.0, with a few texts."""
    import tensorflow as tf
    import tensorflow_datasets as tfds

    folder = tmp_path_factory.mktemp("tfds")

    def split(count):
        texts = [f"Text {number}. {SENTENCE * 4}" for number in range(count)]
        columns = {name: texts if name == "text" else [""] * count for name in COLUMNS}
        return tf.data.Dataset.from_tensor_slices(columns)

    tfds.dataset_builders.TfDataBuilder(
        name="c4",
        config="en",
        version="2.2.0",
        data_dir=folder,
        split_datasets={"train": split(24), "validation": split(8)},
        features=tfds.features.FeaturesDict(dict.fromkeys(COLUMNS, tfds.features.Text())),
        description="",
    ).download_and_prepare()
    return folder


@pytest.mark.slow
def test_t5s_pretraining_task_is_trained_on_by_its_name(tmp_path, tfds_data, shared_vocab):
    files = ("t5x/examples/t5/t5_1_1/tiny.gin", "t5x/configs/runs/pretrain.gin")
    bindings = (
        "import t5.data.mixtures",
        f"MIXTURE_OR_TASK_NAME = '{TASK}'",
        "TASK_FEATURE_LENGTHS = {'inputs': 32, 'targets': 12}",
        f"MODEL_DIR = '{tmp_path}'",
        "TRAIN_STEPS = 2",
        "DROPOUT_RATE = 0.0",
        "BATCH_SIZE = 2",
        "USE_CACHED_TASKS = False",
        "train_script.train.eval_steps = 1",
    )
    done = subprocess.run(
        [sys.executable, "-P", "-m", "t0repro.cli", "train", f"--tfds_data_dir={tfds_data}"]
        + [f"--gin_file={name}" for name in files]
        + [f"--gin_bindings={binding}" for binding in bindings],
        env={"T0REPRO_VOCAB": str(shared_vocab), "PATH": "", "TFDS_DATA_DIR": "/nowhere"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    # Both splits were read: the run's, and the validation's at the end.
    assert {row["split"]: row["step"] for row in rows} == {
        "train": 2,
        f"training_eval/{TASK}": 2,
    }
    assert all(0 < row["loss_per_nonpadding_target_token"] < 20 for row in rows)
