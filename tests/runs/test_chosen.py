"""By what eval and infer know a checkpoint again: its own path and what tells its files apart."""

import os
import shutil

import pytest

from t0repro import storage
from t0repro.config.checkpoints import RestoreConfig
from t0repro.config.t5x.run import read_eval_run
from t0repro.converters.convert import convert
from t0repro.converters.finding import find_checkpoint
from t0repro.errors import UserError
from t0repro.runs.restored_checkpoints import choose_checkpoints, identity, is_there

from .tiny_gin import parsed, save_checkpoint


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """Two checkpoints of step 3 whose files have the same names and sizes in every format."""
    folders = [tmp_path_factory.mktemp(name) for name in ("one", "other")]
    names = ("MIXTURE_OR_TASK_NAME", "CHECKPOINT_PATH", "EVAL_OUTPUT_DIR")
    plan = read_eval_run(parsed("eval", "eval", *(f"{name} = 'x'" for name in names)))
    return [save_checkpoint(folder, plan, 3, seed) for seed, folder in enumerate(folders)]


def make(kind, source, folder):
    """A checkpoint in another format in a folder, which is rebuilt."""
    shutil.rmtree(folder, ignore_errors=True)
    if kind == "trained":
        shutil.copytree(source, folder / "checkpoint_3")
    else:
        convert(source, folder, kind)
    return find_checkpoint(folder)


@pytest.mark.parametrize("kind", ["trained", "jax", "t5x", "mtf", "hf"])
def test_a_checkpoint_is_another_one_once_it_is_replaced_at_its_path(two, tmp_path, kind):
    one, other = two
    first = identity(make(kind, one, tmp_path / "model"))
    assert identity(find_checkpoint(tmp_path / "model")) == first
    assert identity(make(kind, other, tmp_path / "model")) != first


@pytest.mark.parametrize("kind", ["trained", "jax", "t5x"])
def test_a_copy_of_a_checkpoint_with_checksums_is_the_same_one(two, tmp_path, kind):
    ref = make(kind, two[0], tmp_path / "model")
    first = identity(ref)
    for file in storage.list_files(ref.path):
        os.utime(file, (0, 0))
    assert identity(ref) == first


@pytest.mark.parametrize("kind", ["trained", "mtf"])
def test_a_checkpoint_that_is_gone_has_no_identity(two, tmp_path, kind):
    ref = make(kind, two[0], tmp_path / "model")
    shutil.rmtree(tmp_path / "model")
    assert identity(ref) is None


@pytest.mark.parametrize("kind", ["mtf", "hf"])
def test_a_relative_path_leads_to_the_same_checkpoint(two, tmp_path, monkeypatch, kind):
    expected = identity(make(kind, two[0], tmp_path / "model"))
    monkeypatch.chdir(tmp_path / "model")
    for given in (".", "model.ckpt-3") if kind == "mtf" else (".", "../model/"):
        assert identity(find_checkpoint(given)) == expected, given


@pytest.mark.parametrize("kind", ["trained", "t5x", "mtf", "hf"])
def test_a_remote_checkpoint_is_known_by_what_its_store_says(two, tmp_path, kind):
    import fsspec

    system, address = fsspec.filesystem("memory"), f"memory://records/{kind}"
    found = []
    try:
        for source in two:
            make(kind, source, tmp_path / "model")
            system.put(str(tmp_path / "model"), f"/records/{kind}", recursive=True)
            found.append([identity(find_checkpoint(address)) for _ in range(2)])
            system.rm(f"/records/{kind}", recursive=True)
    finally:
        system.store.clear()
    assert found[0][0] == found[0][1] != found[1][0] == found[1][1]


def test_a_checkpoint_is_there_where_one_is_chosen(two, tmp_path):
    for path, expected in ((two[0], True), (two, True), ([*two, tmp_path], False)):
        paths = path if isinstance(path, list) else [path]
        restore = RestoreConfig(tuple(map(str, paths)), "specific", None, (), True, False)
        assert is_there(restore) is expected
        if expected:
            assert len(choose_checkpoints(restore)) == len(paths)
        else:
            with pytest.raises(UserError, match="no checkpoint"):
                choose_checkpoints(restore)
