"""Files are written whole or not at all, and a disk's error says what to do."""

import errno
import os

import pytest

from t0repro.storage import disk, write_atomically


@pytest.mark.parametrize(
    ("error", "what", "where"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "/a/b"), "disk is full", "/a/b"),
        (OSError(errno.EROFS, "Read-only file system", "/a"), "cannot be written to", "/a"),
        (FileNotFoundError(errno.ENOENT, "No such file", "/a/c"), "is not there", "/a/c"),
        (OSError(errno.EIO, "Input/output error"), "disk failed", None),
        # As TensorStore and TensorFlow put it.
        (
            ValueError(
                'RESOURCE_EXHAUSTED: Error writing "x/0.0" in OCDBT database at local file'
                ' "/a/out/": Failed writing: "/a/out/d/1": No space left on device'
            ),
            "disk is full",
            "/a/out/",
        ),
        (
            RuntimeError("{{function_node __wrapped__}} /a/out; Read-only file system"),
            "cannot be written to",
            "/a/out",
        ),
    ],
)
def test_an_error_of_the_disk_says_what_it_is_where_and_what_to_do(error, what, where):
    found = disk.disk_error(error)
    assert found is not None and found.fix
    assert what in found.what
    assert found.where == where


@pytest.mark.parametrize(
    "error", [ValueError("no"), OSError(errno.EPIPE, "Broken pipe"), KeyError()]
)
def test_another_error_is_not_taken_for_the_disks(error):
    assert disk.disk_error(error) is None


def test_a_file_that_cannot_be_written_whole_is_not_there_and_the_old_one_stays(
    tmp_path, monkeypatch
):
    path = tmp_path / "file"
    write_atomically(path, "old")

    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left") as caught:
        write_atomically(path, "new")
    assert caught.value.filename == str(path)
    assert [each.name for each in tmp_path.iterdir()] == ["file"]
    assert path.read_text() == "old"
