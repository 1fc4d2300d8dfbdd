"""Random damage to checkpoints of six layouts, with and without the files of checksums.

Damage to structure (which tensors there are, of which shape and type) is told by its file, always.
Damage to values is told where there are checksums; without them nothing can tell a flipped value
from a right one, and `verify` has to say that it could not check the values.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import random
import shutil
from collections.abc import Callable, Generator
from pathlib import Path

import numpy as np
import pytest

from t0repro.converters import hf
from t0repro.converters.convert import convert
from t0repro.converters.inspection import verify
from t0repro.converters.sources import load_any
from t0repro.errors import UserError
from t0repro.parameters.shape import ModelShape
from t0repro.training.checkpoints import save_tree

from .older_t5x import write_by_older_t5x
from .t5x_writer import write_by_t5x_manager

FAMILY = ModelShape(1, 1, 8, 12, 2, 4, 16, 4, ("wi_0", "wi_1"), False)
LAYOUTS = ("mtf", "zarr", "ocdbt", "msgpack", "hf", "hf_shards")
CHECKSUMS = ("integrity.json", "conversion.json")
# Of the six only Mesh TensorFlow's own files have checksums of every value.
HAS_CHECKSUMS = {"mtf"}
OCDBT_CASES = 25  # of 3 kinds of files, with and without them: 150
CASES = 42  # of 6 layouts, with and without the files of checksums: 504


@pytest.fixture(scope="module")
def wholes(mesh_variables, write_mesh_checkpoint, tmp_path_factory) -> Callable[[str, bool], Path]:
    """Makes a directory with an undamaged checkpoint of a layout, with slots."""
    root = tmp_path_factory.mktemp("wholes")
    variables = mesh_variables(FAMILY, factor_at=4)
    source = write_mesh_checkpoint(root / "source", variables)
    # `kernel` slots of small models are factored here, which Hugging Face's format leaves as it is.
    tree = load_any(source)

    @functools.cache
    def make(layout: str, checksums: bool) -> Path:
        directory = root / f"{layout}_{checksums}"
        if layout == "ocdbt" and checksums:
            directory.mkdir()
            save_tree(directory / "checkpoint_7", tree)
        elif layout == "ocdbt":
            write_by_t5x_manager(directory, tree)
        elif layout == "msgpack" and not checksums:
            write_by_older_t5x(directory / "checkpoint_7", tree)
        elif layout in ("hf", "hf_shards"):
            with pytest.MonkeyPatch.context() as patch:
                if layout == "hf_shards":
                    patch.setattr(hf, "SHARD_BYTES", 2000)
                convert(source, directory, "hf")
        elif layout == "msgpack":
            convert(source, directory, "t5x", layout="legacy")
        else:
            convert(source, directory, {"zarr": "jax"}.get(layout, layout))
        if not checksums:
            for file in [file for file in directory.rglob("*") if file.name in CHECKSUMS]:
                file.unlink()
            # These hold a step only together with conversion.json.
            (directory / hf.SLOTS_FILE).unlink(missing_ok=True)
        return directory

    return make


@dataclasses.dataclass
class Damage:
    """Damages a directory in one place at random, and repairs it."""

    directory: Path
    random: random.Random
    only: str = "*"  # a pattern of paths: which files are damaged

    def __post_init__(self) -> None:
        self._files = {
            file: file.read_bytes() for file in sorted(self.directory.rglob("*")) if file.is_file()
        }
        self._damaged = [file for file in self._files if file.match(self.only)]

    def __iter__(self) -> Generator[str, None, None]:
        kinds = (self._delete, self._delete_folder, self._cut, self._append, self._flip)
        kinds += (self._overwrite, self._exchange, self._flip)
        kinds += (self._flip_text,) if self.only == "*" else (self._flip,)
        while True:
            file = self.random.choice(self._damaged)
            what = self.random.choice(kinds)(file, self._files[file])
            try:
                yield what
            finally:
                for path, content in self._files.items():
                    if not path.is_file() or path.read_bytes() != content:
                        path.parent.mkdir(parents=True, exist_ok=True)
                        path.write_bytes(content)

    def _delete(self, file: Path, content: bytes) -> str:
        file.unlink()
        return f"{file} is gone"

    def _delete_folder(self, file: Path, content: bytes) -> str:
        if file.parent == self.directory:
            return self._delete(file, content)
        shutil.rmtree(file.parent)
        return f"{file.parent} is gone"

    def _cut(self, file: Path, content: bytes) -> str:
        size = self.random.randrange(len(content)) if content else 0
        file.write_bytes(content[:size])
        return f"{file} is cut to {size}"

    def _append(self, file: Path, content: bytes) -> str:
        file.write_bytes(content + self.random.randbytes(self.random.randrange(1, 9)))
        return f"{file} is longer"

    def _flip(self, file: Path, content: bytes) -> str:
        place = self.random.randrange(len(content)) if content else 0
        bit = 1 << self.random.randrange(8)
        changed = bytes([content[place] ^ bit]) if content else b"\1"
        file.write_bytes(content[:place] + changed + content[place + 1 :])
        return f"bit {bit} of byte {place} of {file} is flipped"

    def _flip_text(self, file: Path, content: bytes) -> str:
        """Flips a bit of a small file: most of them describe arrays or name them."""
        small = [
            path for path in self._files if path.suffix in (".json", "") or path.name[0] == "."
        ]
        file = self.random.choice(small)
        return self._flip(file, self._files[file])

    def _overwrite(self, file: Path, content: bytes) -> str:
        start = self.random.randrange(len(content)) if content else 0
        run = self.random.choice([bytes(8), self.random.randbytes(4)])
        file.write_bytes(content[:start] + run + content[start + len(run) :])
        return f"{file} is overwritten from {start}"

    def _exchange(self, file: Path, content: bytes) -> str:
        other = self.random.choice(list(self._files))
        file.write_bytes(self._files[other])
        return f"{file} holds what belongs in {other}"


def outcome(directory: Path, original: dict[str, np.ndarray]) -> str:
    """told, harmless, or changed: the values alone, of the same tensors."""
    try:
        tree = load_any(directory)
    except UserError as error:
        assert str(directory) in (error.where or ""), f"names no file: {error}"
        return "told"
    assert tree.keys() == original.keys(), "tensors were lost or added in silence"
    for name, array in tree.items():
        expected = original[name]
        assert (array.dtype, array.shape) == (expected.dtype, expected.shape), name
    same = all(array.tobytes() == original[name].tobytes() for name, array in tree.items())
    return "harmless" if same else "changed"


def check_verify_does_not_vouch(directory: Path) -> None:
    """Checks that verify finds the damage, or says that it could not check the values."""
    try:
        verification = verify(directory)
    except UserError:
        return
    assert verification.problems or any("flipped bits" in gap for gap in verification.unchecked)


def check_damages(
    wholes, layout: str, checksums: bool, cases: int, seed: int, only: str = "*"
) -> dict[str, int]:
    directory = wholes(layout, checksums)
    original = load_any(directory)
    counts = {"told": 0, "harmless": 0, "changed": 0}
    with contextlib.closing(iter(Damage(directory, random.Random(seed), only))) as damages:
        for case, what in zip(range(cases), damages, strict=False):
            try:
                found = outcome(directory, original)
                if found == "changed":
                    has_sums = checksums or layout in HAS_CHECKSUMS
                    assert not has_sums, "a value changed in silence"
                    check_verify_does_not_vouch(directory)
            except Exception as error:
                raise AssertionError(f"case {case}: {what}") from error
            counts[found] += 1
    return counts


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("checksums", [True, False], ids=["checksums", "bare"])
def test_damage_to_structure_is_told_and_to_values_if_checksums_exist(wholes, layout, checksums):
    counts = check_damages(wholes, layout, checksums, CASES, seed=1)
    assert sum(counts.values()) == CASES


# OCDBT, in which Orbax writes by default: a manifest, trees of nodes that name values, and values.
# The manifest and the nodes have checksums of their own; values have none.
OCDBT = ("manifest.ocdbt", "d/*", "_METADATA")


@pytest.mark.parametrize("only", OCDBT)
@pytest.mark.parametrize("checksums", [True, False], ids=["checksums", "bare"])
def test_each_kind_of_ocdbts_files_is_damaged_and_its_structure_always_told(
    wholes, checksums, only
):
    counts = check_damages(wholes, "ocdbt", checksums, OCDBT_CASES, seed=2, only=only)
    assert sum(counts.values()) == OCDBT_CASES and counts["told"]
    # What only describes can change no value.
    assert only == "d/*" or not counts["changed"]


@pytest.mark.slow
@pytest.mark.parametrize("only", OCDBT)
@pytest.mark.parametrize("checksums", [True, False], ids=["checksums", "bare"])
def test_many_damages_of_each_kind_of_ocdbts_files(wholes, checksums, only):
    check_damages(wholes, "ocdbt", checksums, 500, seed=3, only=only)


def test_each_byte_of_ocdbts_manifest_that_is_changed_is_told(wholes):
    """Without integrity.json: the manifest has a checksum of its own."""
    directory = wholes("ocdbt", False)
    (manifest,) = directory.glob("*/state/manifest.ocdbt")  # not those of single processes
    content, original = manifest.read_bytes(), load_any(directory)
    silent = []
    for place in range(len(content)):
        manifest.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        if outcome(directory, original) != "told":
            silent.append(place)
    manifest.write_bytes(content)
    assert not silent
