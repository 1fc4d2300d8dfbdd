"""Conversions from bucket to bucket: a tensor or two in memory, nothing on this machine's disk."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from t0repro.converters.convert import convert
from t0repro.converters.inspection import compare
from t0repro.errors import UserError
from t0repro.storage import buckets

from ..cli.commands import run

in_each_store = pytest.mark.parametrize("bucket", ["gs", "s3"], indirect=True)
FEW = {"slots": False}  # an object for each array takes emulators long
KINDS = [
    ("gs", {"to": "mtf"}),
    ("s3", {"to": "hf"}),
    ("gs", {"to": "jax", **FEW}),
    ("gs", {"to": "t5x", **FEW}),
    ("gs", {"to": "t5x", "layout": "orbax", "scan": True, **FEW}),
]


def with_kinds(*kinds):
    """A store and the options of a conversion."""
    names = [f"{store}-{'-'.join(map(str, options.values()))}" for store, options in kinds]
    return pytest.mark.parametrize(("bucket", "options"), kinds, indirect=["bucket"], ids=names)


@pytest.fixture
def place(bucket, request, monkeypatch):
    """An address of this test alone. At gs:// an object is sent in several parts there."""
    if bucket.startswith("gs"):
        monkeypatch.setattr(buckets, "_PART_BYTES", 1 << 18)
    monkeypatch.setattr("time.time_ns", lambda: 1)  # Orbax's metadata has the time
    name = request.node.name.replace("[", "-").rstrip("]")
    return f"{bucket.rpartition('/')[0]}/{name}"


def objects(address):
    """Name -> content, without leases."""
    names = [name for name in buckets.objects(address) if not name.startswith(".t0repro.")]
    return {name: buckets.read(f"{address}/{name}") for name in names}


def files(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.fixture
def no_scratch(tmp_path, monkeypatch):
    """The folder of temporary files, which must stay empty."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    yield
    assert not os.listdir(tmp_path / "temporary")


def flags_of(options):
    """Options of `convert`, as its command takes them."""
    flags = [
        f"--{name}" if value is True else f"--{name}={value}" for name, value in options.items()
    ]
    return ["--no_slots" if flag == "--slots=False" else flag for flag in flags]


@with_kinds(*KINDS)
def test_a_conversion_writes_in_a_bucket_the_bytes_that_it_writes_on_a_disk(
    place, tiny_checkpoint, tmp_path, no_scratch, options, monkeypatch, capsys
):
    convert(tiny_checkpoint, tmp_path / "here", **options)
    # As a user types it: a command that wrote here first would fill the folder of temporary files.
    line = ["convert", str(tiny_checkpoint), f"{place}/there", *flags_of(options)]
    code, said, errors = run(monkeypatch, capsys, *line)
    assert code == 0 and f"Wrote {place}/there" in said, errors
    assert objects(f"{place}/there") == files(tmp_path / "here")
    # And on, from one address to another.
    convert(f"{place}/there", f"{place}/back", "mtf")
    slots = options.get("slots", True)
    assert not compare(f"{place}/back", tiny_checkpoint, slots=slots).differences


class Killed(BaseException):
    """Ends a conversion, as a signal does."""


@pytest.fixture
def cut_at(monkeypatch):
    """A function that lets objects be made until one of a number, and counts them."""
    made = []

    def set_limit(limit):
        made.clear()

        def counted(make):
            def call(*args, **kwargs):
                if "/.t0repro.lease/" in str(args[0]):
                    return make(*args, **kwargs)
                if len(made) == limit:
                    raise Killed
                made.append(args)
                return make(*args, **kwargs)

            return call

        monkeypatch.setattr(buckets, "write", counted(write))
        monkeypatch.setattr(buckets.NewObject, "finish", counted(finish))
        return made

    write, finish = buckets.write, buckets.NewObject.finish
    return set_limit


@with_kinds(KINDS[0], KINDS[1], KINDS[3])
def test_nothing_that_was_cut_is_a_checkpoint_and_the_same_command_starts_over(
    place, tiny_checkpoint, tmp_path, cut_at, options
):
    convert(tiny_checkpoint, tmp_path / "here", **options)
    made = cut_at(None)
    convert(tiny_checkpoint, f"{place}/all", **options)
    total, slots = len(made), options.get("slots", True)
    whole = []
    # In the middle, and before each of those that make it a checkpoint.
    for limit in sorted({total // 2, *range(max(total - 5, 1), total)}):
        cut_at(limit)
        with pytest.raises(Killed):
            convert(tiny_checkpoint, f"{place}/there", **options)
        cut_at(None)
        try:  # safetensors alone are found, and refused without config.json
            compared = compare(f"{place}/there", tiny_checkpoint, slots=slots)
        except UserError:
            assert not whole, limit
            continue
        assert not compared.differences, limit
        whole.append(limit)
    assert len(whole) < 5
    others = {**options, "to": "hf" if options["to"] == "mtf" else "mtf"}
    with pytest.raises(UserError, match="There are objects at this address already"):
        convert(tiny_checkpoint, f"{place}/there", **others)
    convert(tiny_checkpoint, f"{place}/there", **options)
    assert objects(f"{place}/there") == files(tmp_path / "here")
    with pytest.raises(UserError, match="There are objects at this address already"):
        convert(tiny_checkpoint, f"{place}/there", **options)


BENCH = Path(__file__).resolve().parents[2] / "scripts" / "bench"
# One layer and a whole vocabulary: the two largest tensors are most of the 0.15 GB.
WRITE = """
import pathlib, sys, convert
convert.SIZES["small"] = (1, 512, 1024, 6, 64)
convert.write_source(pathlib.Path(sys.argv[1]), "small")
"""


def peak_of(source, target, to):
    """Peak resident memory, in MB, of a conversion in its own process."""
    command = [sys.executable, "convert.py", "--convert", str(source), str(target), to]
    return int(subprocess.check_output(command, cwd=BENCH, text=True).split()[-1]) / 1000


@pytest.mark.slow
@pytest.mark.parametrize(("bucket", "to"), [("gs", "hf"), ("s3", "mtf")], indirect=["bucket"])
def test_a_conversion_between_addresses_takes_at_most_140_MB_more_than_one_between_folders(
    bucket, tmp_path, monkeypatch, to
):
    source, temporary = tmp_path / "source", tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    subprocess.run([sys.executable, "-c", WRITE, str(source)], cwd=BENCH, check=True)
    convert(source, f"{bucket}/source", "mtf")
    here = peak_of(source, tmp_path / to, to)
    there = peak_of(f"{bucket}/source", f"{bucket}/{to}", to)
    print(f"{to}: {here:.0f} MB between folders, {there:.0f} MB between addresses")
    # The clients' libraries take 40 to 65 MB, the part that is sent up to 50, those read 8.
    assert there < here + 140
    assert not os.listdir(temporary)
