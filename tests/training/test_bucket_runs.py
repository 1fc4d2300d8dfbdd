"""A run in a bucket gives what one on a disk gives, bit for bit, and continues after a kill."""

import contextlib
import json
import signal
import subprocess
import sys

import numpy as np
import pytest

from t0repro import storage
from t0repro.errors import UserError
from t0repro.storage import buckets
from t0repro.training import checkpoints
from t0repro.training.checkpoint_retention import remove_checkpoint, remove_interrupted_saves
from t0repro.training.checkpoints import checkpoint_path, list_checkpoints, load_tree, save_tree

from . import resume_run
from .resume_run import LAST_STEP, run


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    """A run on a disk, never stopped."""
    model_dir = tmp_path_factory.mktemp("local")
    return model_dir, run(model_dir, seed=3)[0]


def losses(model_dir):
    rows = map(json.loads, buckets.read(f"{model_dir}/metrics.jsonl").splitlines())
    return [(row["step"], row["loss"]) for row in rows]


def assert_same(address, tree, local):
    storage.close_copies()
    assert losses(address) == list(resume_run.losses(local[0]).items())
    for name, expected in local[1].items():
        np.testing.assert_array_equal(tree[name], expected, err_msg=name)
    saved = load_tree(checkpoint_path(address, LAST_STEP))
    for name, expected in load_tree(checkpoint_path(local[0], LAST_STEP)).items():
        np.testing.assert_array_equal(saved[name], expected, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("bucket", ["gs", "s3"], indirect=True)
def test_a_killed_run_in_a_bucket_goes_on_without_a_gap_bit_for_bit(bucket, local):
    done = subprocess.run(
        [sys.executable, "-P", resume_run.__file__, bucket, str(LAST_STEP), "5", ""],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr[-2000:]
    assert list_checkpoints(bucket) in ([2], [2, 4])
    tree, said = run(bucket, seed=3)
    assert f"start: step {list_checkpoints(bucket)[0]}" not in said[0]
    assert any(line.startswith("data: after") for line in said)
    assert_same(bucket, tree, local)
    assert list_checkpoints(bucket) == [2, 4, 6, 7]


@pytest.mark.parametrize("bucket", ["gs", "s3"], indirect=True)
def test_a_save_that_was_cut_short_is_not_listed_and_is_removed(bucket, monkeypatch):
    tree = {"state/step": np.int32(2), "target/a": np.arange(6, dtype=np.float32)}
    save_tree(checkpoint_path(bucket, 2), tree)
    whole = buckets.objects(f"{bucket}/checkpoint_2")
    content = {name: buckets.read(f"{bucket}/checkpoint_2/{name}") for name in whole}
    vouching = ("integrity.json", "commit_success.txt", "_CHECKPOINT_METADATA", "_METADATA")
    for name in sorted(whole.keys() - set(vouching)):
        buckets.write(f"{bucket}/checkpoint_3/{name}", content[name])
        assert list_checkpoints(bucket) == [2]
    # Orbax's own description while it writes, before it commits.
    described = json.loads(content["_CHECKPOINT_METADATA"])
    described["commit_timestamp_nsecs"] = None
    place = f"{bucket}/checkpoint_3/_CHECKPOINT_METADATA"
    buckets.write(place, json.dumps(described).encode())
    assert list_checkpoints(bucket) == [2]
    remove_interrupted_saves(bucket)
    assert buckets.objects(f"{bucket}/checkpoint_3") == {}
    assert buckets.objects(f"{bucket}/checkpoint_2") == whole
    # What is there when the writer dies before Orbax's marker, and in a copy of a local checkpoint.
    for name in whole.keys() - {"integrity.json", "commit_success.txt"}:
        buckets.write(f"{bucket}/checkpoint_4/{name}", content[name])
    assert list_checkpoints(bucket) == [2, 4]
    assert load_tree(checkpoint_path(bucket, 4)).keys() == tree.keys()
    remove_checkpoint(checkpoint_path(bucket, 4))
    with pytest.raises(UserError, match="There is a checkpoint already"):
        save_tree(checkpoint_path(bucket, 2), tree)
    remove_checkpoint(checkpoint_path(bucket, 2))
    assert list_checkpoints(bucket) == [] and buckets.objects(f"{bucket}/checkpoint_2") == {}


@pytest.mark.parametrize("bucket", ["gs", "s3"], indirect=True)
def test_a_checkpoint_whose_upload_or_removal_is_cut_is_listed_only_if_it_is_whole(
    bucket, monkeypatch
):
    tree = {"state/step": np.int32(2), "target/a": np.arange(6, dtype=np.float32)}
    path = checkpoint_path(f"{bucket}/cut", 2)
    left = 99

    def cut(function):
        def call(address, *args):
            nonlocal left
            if "/checkpoint_2/" in str(address) + str(args[:1]) and ".t0repro" not in str(address):
                left -= 1
                if left < 0:
                    raise KeyboardInterrupt
            return function(address, *args)

        return call

    monkeypatch.setattr(buckets, "remove", cut(buckets.remove))
    monkeypatch.setattr(buckets, "upload", cut(buckets.upload))
    steps = []
    # Each save and each removal is cut one object later than the one before.
    for number in range(12):
        for act in (save_tree, remove_checkpoint):
            left = number
            with contextlib.suppress(KeyboardInterrupt):
                act(path, tree) if act is save_tree else act(path)
            left = 99
            steps += list_checkpoints(f"{bucket}/cut")
            if steps and list_checkpoints(f"{bucket}/cut"):
                assert load_tree(path).keys() == tree.keys()
            elif act is save_tree:
                remove_interrupted_saves(f"{bucket}/cut")
                save_tree(path, tree)
        remove_checkpoint(path)
        remove_interrupted_saves(f"{bucket}/cut")
    assert steps.count(2) > 2


def assert_a_removal_while_reading_is_said(path, monkeypatch):
    save_tree(path, {"target/a": np.arange(6, dtype=np.float32)})
    monkeypatch.setattr(checkpoints, "check_contents", lambda *_: remove_checkpoint(path))
    with pytest.raises(UserError, match="was removed while it was being read"):
        load_tree(path)


@pytest.mark.parametrize("bucket", ["gs", "s3"], indirect=True)
def test_a_checkpoint_of_a_bucket_that_is_removed_while_it_is_read_is_named_so(bucket, monkeypatch):
    assert_a_removal_while_reading_is_said(checkpoint_path(bucket, 2), monkeypatch)


def test_a_checkpoint_that_is_removed_while_it_is_read_is_named_so(tmp_path, monkeypatch):
    assert_a_removal_while_reading_is_said(checkpoint_path(tmp_path, 2), monkeypatch)


@pytest.mark.parametrize("bucket", ["gs", "s3"], indirect=True)
def test_a_changed_file_of_a_checkpoint_in_a_bucket_is_reported(bucket):
    save_tree(checkpoint_path(bucket, 2), {"target/a": np.arange(6, dtype=np.float32)})
    name = next(name for name in buckets.objects(f"{bucket}/checkpoint_2") if "/d/" in name)
    content = bytearray(buckets.read(f"{bucket}/checkpoint_2/{name}"))
    content[0] ^= 1
    buckets.write(f"{bucket}/checkpoint_2/{name}", bytes(content))
    with pytest.raises(UserError, match="damaged: its CRC-32 differs"):
        load_tree(checkpoint_path(bucket, 2))
