from __future__ import annotations

import os
import shutil
import subprocess
import sys

import numpy as np
import pytest

from t0repro.converters import mtf
from t0repro.converters.convert import convert
from t0repro.converters.finding import find_checkpoint
from t0repro.errors import UserError
from t0repro.storage.locks import LOCK_FILE

from .checkpoint_files import assert_same_bits, read_variables


@pytest.mark.parametrize("to", ["mtf", "jax", "t5x", "hf"])
@pytest.mark.parametrize("there", [False, True])
def test_an_exception_in_the_middle_leaves_nothing_that_looks_whole_and_is_gone_on_from(
    tiny_checkpoint, tmp_path, monkeypatch, to, there
):
    out = tmp_path / "out"
    if there:
        out.mkdir()
    read, count = mtf.MtfReader.read, 0

    def failing_read(self, key):
        nonlocal count
        count += 1
        if count == 21:
            raise KeyboardInterrupt
        return read(self, key)

    monkeypatch.setattr(mtf.MtfReader, "read", failing_read)
    with pytest.raises(KeyboardInterrupt):
        convert(tiny_checkpoint, out, to)
    # What is there is hidden: no checkpoint is found.
    visible = [name for name in os.listdir(out if there else tmp_path) if not name.startswith(".")]
    assert visible == ([] if there else ["source"])
    with pytest.raises(UserError):
        find_checkpoint(out)

    report = convert(tiny_checkpoint, out, to)
    assert report.resumed == 18  # the step was read twice before, to be checked
    left = [name for name in os.listdir(tmp_path) + os.listdir(out) if name.startswith(".")]
    assert left == ([LOCK_FILE] if there else [])  # of a directory that others may hold as well
    convert(out, tmp_path / "back", "mtf")
    assert_same_bits(read_variables(tiny_checkpoint), read_variables(tmp_path / "back"))


def test_another_conversion_does_not_go_on_from_an_interrupted_one(
    tiny_family, mesh_variables, write_mesh_checkpoint, tmp_path, monkeypatch
):
    for seed in (0, 1):
        write_mesh_checkpoint(tmp_path / f"source_{seed}", mesh_variables(tiny_family, seed=seed))
    with monkeypatch.context() as patch:
        patch.setattr(mtf.MtfWriter, "close", lambda self: (_ for _ in ()).throw(OSError))
        with pytest.raises(OSError):
            convert(tmp_path / "source_0", tmp_path / "out", "mtf")
    report = convert(tmp_path / "source_1", tmp_path / "out", "mtf")
    assert report.resumed == 0
    assert_same_bits(read_variables(tmp_path / "source_1"), read_variables(tmp_path / "out"))


@pytest.mark.parametrize("to", ["mtf", "jax", "t5x", "hf"])
@pytest.mark.parametrize("lost", ["files", "a part of the files", "request.json", "digests.jsonl"])
def test_a_staging_directory_that_was_half_cleaned_is_gone_on_from_or_begun_anew(
    tiny_checkpoint, tmp_path, monkeypatch, to, lost
):
    read, count = mtf.MtfReader.read, 0

    def failing_read(self, key):
        nonlocal count
        count += 1
        if count == 21:
            raise KeyboardInterrupt
        return read(self, key)

    with monkeypatch.context() as patch:
        patch.setattr(mtf.MtfReader, "read", failing_read)
        with pytest.raises(KeyboardInterrupt):
            convert(tiny_checkpoint, tmp_path / "out", to)
    root = tmp_path / ".out.conversion"
    if lost == "files":
        shutil.rmtree(root / "files")
    elif lost == "a part of the files":
        for path in sorted(path for path in root.glob("files/**/*") if path.is_file())[::2]:
            path.unlink()
    else:
        (root / lost).unlink()
    convert(tiny_checkpoint, tmp_path / "out", to)
    convert(tmp_path / "out", tmp_path / "back", "mtf")
    assert_same_bits(read_variables(tiny_checkpoint), read_variables(tmp_path / "back"))


# Forks a conversion for each moment and kills it there: before the n-th of the calls that change
# names on the disk, at one in 100 of those that sync, at one tensor in 20. Ends with the first that
# comes through.
KILLED = """
import os, shutil, signal, sys
from t0repro.converters import convert, staging
source, base, to = sys.argv[1:]
def converts_until(moment, out):
    calls = 0
    def count(weight):
        nonlocal calls
        calls += weight
        if calls >= moment:
            os.kill(os.getpid(), signal.SIGKILL)
    def killing(original, weight):
        def call(*arguments, **keywords):
            # With dir_fd it is rmtree, of what nobody looks at any more.
            count(weight / 50 if "dir_fd" in keywords else weight)
            return original(*arguments, **keywords)
        return call
    for name, weight in {"replace": 1, "rename": 1, "unlink": 1, "fsync": 0.01}.items():
        setattr(os, name, killing(getattr(os, name), weight))
    staging.describe = killing(staging.describe, 0.05)
    convert.convert(source, out, to, force=True)
for moment in range(1, 1000):
    out = f"{base}_{moment}"
    if os.path.isdir(base):
        shutil.copytree(base, out)
    child = os.fork()
    if child == 0:
        try:
            converts_until(moment, out)
        except BaseException as error:
            print(repr(error), file=sys.stderr)
            os._exit(1)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status == 0:
        break
    assert status == -signal.SIGKILL, status
print(moment)
"""


# T5X's writer is JAX's with one more file.
KILLED_FORMATS = ["mtf", "jax", "hf", pytest.param("t5x", marks=pytest.mark.slow)]


REPLACED_FORMATS = [
    "mtf",
    "hf",
    *(pytest.param(to, marks=pytest.mark.slow) for to in ("jax", "t5x")),
]


def killed_at_many_moments(source, base, to) -> int:
    """Converts to base_1, base_2, ..., each killed later than the last; returns their number."""
    arguments = [sys.executable, "-c", KILLED, str(source), str(base), to]
    process = subprocess.run(arguments, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    return int(process.stdout)


def content(directory, root):
    """The tensors that are found in a directory, as Mesh TensorFlow's variables; None if none."""
    try:
        shutil.rmtree(root / "read", ignore_errors=True)
        convert(directory, root / "read", "mtf")
    except UserError:
        return None
    return read_variables(root / "read")


@pytest.mark.always
@pytest.mark.parametrize("to", KILLED_FORMATS)
def test_killed_at_any_moment_a_new_destination_is_absent_or_whole_and_can_be_finished(
    tiny_checkpoint, tmp_path, to
):
    expected = read_variables(tiny_checkpoint)
    count = killed_at_many_moments(tiny_checkpoint, tmp_path / "out", to)
    assert count > 5
    resumed = 0
    for moment in range(1, count):
        out = tmp_path / f"out_{moment}"
        if out.exists():
            assert (out / "conversion.json").exists()
        else:
            resumed = max(resumed, convert(tiny_checkpoint, out, to).resumed)
        if moment % 4 == 0:
            assert_same_bits(expected, content(out, tmp_path))
        assert not list(tmp_path.glob(f".out_{moment}.*")) or (out / "conversion.json").exists()
    assert resumed > 0


@pytest.mark.parametrize("to", REPLACED_FORMATS)
def test_killed_at_any_moment_a_checkpoint_that_is_replaced_is_the_old_the_new_or_an_error(
    tiny_family, mesh_variables, write_mesh_checkpoint, tmp_path, to
):
    for seed in (0, 1):
        write_mesh_checkpoint(tmp_path / f"source_{seed}", mesh_variables(tiny_family, seed=seed))
    convert(tmp_path / "source_0", tmp_path / "out", to)
    count = killed_at_many_moments(tmp_path / "source_1", tmp_path / "out", to)
    sources = [read_variables(tmp_path / f"source_{seed}") for seed in (0, 1)]
    for moment in range(1, count + 1):
        out = tmp_path / f"out_{moment}"
        found = content(out, tmp_path)
        if found is not None:
            name = "shared/embedding"
            old = np.array_equal(found[name], sources[0][name])
            assert_same_bits(found, sources[0 if old else 1])
        if moment % 4 == 0:
            convert(tmp_path / "source_1", out, to, force=True)
            assert_same_bits(content(out, tmp_path), sources[1])
