"""T5X's run modes in a bucket leave what they leave on a disk, and what reads runs reads them."""

import json
import re

import numpy as np
import pytest

from t0repro import storage
from t0repro.config.t5x.run import read_eval_run
from t0repro.storage import working_copies
from t0repro.training.checkpoints import load_tree

from ..runs.tiny_gin import MODEL, SIZES, parsed, save_checkpoint
from .commands import run
from .test_t5x_run import EVAL_MACROS, macros_of
from .test_train import RANKED, RUN

FIRST, LAST = 3, 5  # steps: of the checkpoint to start from, and of the last one


def t5x(mode, file, *arguments):
    """The command line of a run mode with the tiny model."""
    bindings = [f"--gin_bindings={binding}" for binding in (*SIZES, "DROPOUT_RATE = 0.0")]
    files = [f"--gin_file={MODEL}", f"--gin_file=t5x/configs/runs/{file}.gin"]
    return [mode, *files, *bindings, "--module_import=t0repro.tasks.demo", *arguments]


def lines_at(place, start):
    """What a user types, with all folders below a place."""
    checkpoint = f"{place}/model/checkpoint_{LAST}"
    train = (
        *RUN[1:],
        f"INITIAL_CHECKPOINT_PATH = '{place}/mtf/model.ckpt-{FIRST}'",
        f"MODEL_DIR = '{place}/model'",
        f"TRAIN_STEPS = {LAST}",
    )
    return [
        ["convert", str(start), f"{place}/mtf", "--to=mtf"],
        t5x("train", "finetune", *(f"--gin_bindings={binding}" for binding in train)),
        t5x("eval", "eval", *macros_of("eval", checkpoint, f"{place}/eval")),
        t5x("infer", "infer", *macros_of("infer", checkpoint, f"{place}/infer")),
        ["plot", f"{place}/model", "--out", f"{place}/plot"],
        ["compare", f"a={place}/model/metrics.jsonl", f"b={place}/model/metrics.jsonl"]
        + ["--tol=0", "--out", f"{place}/compare"],
        ["runs", place, "--json"],
    ]


_TIMES = re.compile(rb'"[^"]*(time|timing|second)[^"]*": [^,}]+')
# Leases and locks belong to places, event files' names have times in them, as a checkpoint's
# identity has, and checkpoints are compared by their arrays.
_OWN = re.compile(r"(^|/)\.|tfevents|checkpoint_|model\.ckpt|evaluated\.json|COMPLETED")
_SAME = re.compile(r"^(eval|infer|plot|compare)/|/metrics\.jsonl$|model-info")


def left_by(place):
    """Names of files, and the content of those that hold no more times and places than these."""
    with storage.fetch(place) as folder:
        files = {str(path.relative_to(folder)): path for path in folder.rglob("*")}
        names = {name for name, path in files.items() if path.is_file() and not _OWN.search(name)}
        return names, {
            name: _TIMES.sub(b"", files[name].read_bytes()).replace(place.encode(), b"PLACE")
            for name in names
            if _SAME.search(name)
        }


@pytest.mark.slow
@pytest.mark.parametrize("bucket", ["gs", "s3"], indirect=True)
def test_train_eval_and_infer_from_a_mesh_checkpoint_give_in_a_bucket_what_they_give_on_a_disk(
    bucket, monkeypatch, capsys, tmp_path
):
    bindings = [f"{name} = 'x'" for name in EVAL_MACROS]
    start = save_checkpoint(tmp_path, read_eval_run(parsed("eval", "eval", *bindings)), FIRST)
    local = f"{tmp_path}/local"
    shown = {}
    for place in (local, bucket):
        for line in lines_at(place, start):
            code, shown[place], said = run(monkeypatch, capsys, *line)
            assert code == 0, (line, said)
            assert not working_copies._copies  # all is uploaded
    (here,), (there,) = (json.loads(shown[place]) for place in (local, bucket))
    assert (here["folder"], there["folder"]) == (f"{local}/model", f"{bucket}/model")
    assert here["step"] == there["step"] == LAST and here["loss"] == there["loss"]
    (names, content), (expected_names, expected) = left_by(bucket), left_by(local)
    assert names == expected_names and f"inference_eval/{RANKED}-metrics.jsonl" in str(names)
    assert content == expected and len(content) > 10
    saved, on_disk = (load_tree(f"{p}/model/checkpoint_{LAST}") for p in (bucket, local))
    assert saved.keys() == on_disk.keys()
    for name, value in on_disk.items():
        np.testing.assert_array_equal(saved[name], value, err_msg=name)
