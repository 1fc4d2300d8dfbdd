"""Released checkpoints: the catalog, fetching from servers on loopback, and what they need."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from t0repro.cli import checkpoint
from t0repro.converters import released
from t0repro.converters.convert import convert
from t0repro.converters.finding import find_checkpoint
from t0repro.converters.sources import check_checkpoint, open_checkpoint
from t0repro.errors import UserError

from .checkpoint_files import assert_same_bits, read_variables
from .released_servers import serving

LM, T0, T5X = "t5.1.1.lm100k.xl", "bigscience/T0_3B", "t5_1_1_lm100k_xl"
FOLDER = "pretrained_models/t5.1.1.lm100k.xl"


@pytest.fixture
def server(tmp_path, tiny_checkpoint, monkeypatch):
    """The tiny checkpoint under the addresses of three released ones."""
    root = tmp_path / "served"
    shutil.copytree(tiny_checkpoint, root / FOLDER)
    (root / FOLDER / "operative_config.gin").write_text("# as it was trained\n")
    (root / FOLDER / "model.ckpt-3.index").write_bytes(b"an older step")
    convert(tiny_checkpoint, root / "bigscience" / "T0_3B" / "main", "hf", slots=False)
    (root / "bigscience" / "T0_3B" / "main" / "pytorch_model.bin").write_bytes(b"pickled" * 99)
    convert(tiny_checkpoint, tmp_path / "t5x", "t5x")
    t5x = root / "pretrained_models" / "t5x" / T5X
    shutil.copytree(tmp_path / "t5x" / "checkpoint_7", t5x / "checkpoint_1100000")
    monkeypatch.setenv(released.OPT_IN, "1")
    with serving(root) as server:
        yield server


def fetch(server, name, to, **options):
    found = released.find(name)
    return released.fetch(found, to, base_url=server.url, delays=(0.01, 0.01), **options)


# --- The catalog -------------------------------------------------------------------------------


def test_the_catalog_has_every_family_in_its_sizes():
    families = {entry.family for entry in released.catalog().values()}
    assert families == released.families().keys()
    assert len(families) == 16
    assert len(released.catalog()) > 110
    for entry in released.catalog().values():
        assert entry.address.startswith(("gs://t5-data/", "gs://scenic-bucket/", "hf://"))
        assert entry.source.startswith("https://")
        family = released.families()[entry.family]
        assert entry.shape.gated == family.feed_forward.startswith("gated-")
        # An encoder alone has no logits.
        assert entry.shape.encoder_only or entry.shape.tied == (family.logits == "the embedding")
        assert entry.shape.position_bias_per_layer == (family.position_bias == "one per layer")
        assert (entry.format == "hf") == entry.address.startswith("hf://") == ("/" in entry.name)


def test_the_page_has_the_table_of_families():
    header = (
        "family | config.json says | logits | position biases | ids of padding, EOS | vocabulary"
    )
    rows = [f"| {header} | checked against | notes |"]
    rows.append("|" + "---|" * rows[0].count(" | ") + "---|")
    for family in released.families().values():
        config = f"`{family.model_type}`, `{family.feed_forward}`"
        cells = (family.name, config, family.logits, family.position_bias)
        cells += (f"{family.pad}, {family.eos}", family.vocabulary, family.checked_against)
        rows.append(f"| {' | '.join((*cells, family.to_know))} |")
    table = "\n".join(rows)
    page = Path(__file__).parents[2] / "docs" / "formats.md"
    assert table in page.read_text(), f"docs/formats.md lacks this table:\n{table}"


@pytest.mark.parametrize(
    ("name", "family", "count"),
    [
        # Sizes of the released model files in float32 divided by 4, as the hub shows them.
        ("bigscience/T0_3B", "T5 1.1 XL", 11.4e9 / 4),
        ("bigscience/T0", "T5 1.1 XXL", 44.5e9 / 4),
        ("google/umt5-small", None, 1.23e9 / 4),
        ("google/umt5-base", None, 2.37e9 / 4),
        ("google/flan-t5-xl", "T5 1.1 XL", 11.4e9 / 4),
        ("byt5_xl", "ByT5 XL", 14.951e9 / 4),
        ("google/madlad400-3b-mt", "MADLAD-400 3B", 11.8e9 / 4),
        ("google/madlad400-7b-mt", "MADLAD-400 7B", 33.2e9 / 4),
        ("google/madlad400-10b-mt", "MADLAD-400 10B", 42.86e9 / 4),
        # As the model cards count them; Pile-T5's to the last one.
        ("google/flan-ul2", "T5 1.1 UL2", 19.5e9),
        ("google/t5-efficient-tiny", None, 15.58e6),
        ("google/t5-efficient-mini", None, 31.23e6),
        ("google/t5-efficient-small", "T5 1.0 small", 60.52e6),
        ("EleutherAI/pile-t5-base", "umT5 base", 247_586_304),
        ("EleutherAI/pile-t5-large", "umT5 large", 783_173_632),
        ("EleutherAI/pile-t5-xl", "umT5 XL", 2_849_804_288),
        ("EleutherAI/pile-t5-xxl", "umT5 XXL", 11_135_426_560),
    ],
)
def test_parameters_are_those_of_the_released_files(name, family, count):
    entry = released.find(name)
    assert entry.shape.parameter_count() == pytest.approx(count, rel=0.005)
    if family:
        assert entry.shape.name == family


def test_a_name_that_is_not_known_is_answered_with_the_nearest():
    with pytest.raises(UserError, match=r"'t5\.1\.1\.lm100k\.xl'"):
        released.find("t5.1.1.lm-100k.xl")


# --- Fetching ------------------------------------------------------------------------------------


def test_what_another_process_has_fetched_meanwhile_is_not_fetched_again(
    server, tmp_path, monkeypatch
):
    fetch(server, LM, tmp_path / "theirs")
    asked = len(server.asked)

    @contextlib.contextmanager
    def lock_after_them(folder, what):
        shutil.copytree(tmp_path / "theirs", folder)
        yield

    monkeypatch.setattr(released, "lock_folder", lock_after_them)
    assert fetch(server, LM, tmp_path / "ours").present
    assert len(server.asked) == asked


def test_without_the_opt_in_no_request_is_made(server, tmp_path, monkeypatch):
    monkeypatch.delenv(released.OPT_IN)
    with pytest.raises(UserError, match=r"(?s)needs the network.*T0REPRO_CHECKPOINT_HUB=1"):
        fetch(server, LM, tmp_path / "to")
    assert server.requests == 0
    assert not (tmp_path / "to").exists()


@pytest.mark.parametrize("composite", [False, True])
def test_a_mesh_tensorflow_checkpoint_comes_whole_in_its_latest_step(
    server, tiny_checkpoint, tmp_path, composite
):
    server.composite = composite
    done = fetch(server, LM, tmp_path / "to")
    assert done.path == tmp_path / "to" / "model.ckpt-7"
    assert (tmp_path / "to" / "operative_config.gin").is_file()
    assert not (tmp_path / "to" / "model.ckpt-3.index").exists()
    assert not (tmp_path / "to" / released.UNFINISHED).exists()
    assert_same_bits(read_variables(done.path), read_variables(tiny_checkpoint))


def test_a_hub_repository_comes_without_what_is_not_read(server, tmp_path):
    done = fetch(server, T0, tmp_path / "to")
    assert done.path == tmp_path / "to"
    assert not (tmp_path / "to" / "pytorch_model.bin").exists()
    check_checkpoint(open_checkpoint(find_checkpoint(done.path)))
    record = json.loads((tmp_path / "to" / released.SOURCE).read_text())
    assert record["license"] == "apache-2.0"
    assert record["address"] == "hf://bigscience/T0_3B"
    assert {"config.json", "model.safetensors"} <= record["files"].keys()


def test_a_repository_without_safetensors_comes_with_flax_s_weights(server, tmp_path):
    folder = tmp_path / "served" / "bigscience" / "T0" / "main"
    folder.mkdir(parents=True)
    for name in ("config.json", "flax_model.msgpack", "pytorch_model.bin"):
        (folder / name).write_bytes(name.encode())
    done = fetch(server, "bigscience/T0", tmp_path / "to")
    assert done.files == 2
    assert (tmp_path / "to" / "flax_model.msgpack").read_bytes() == b"flax_model.msgpack"


def test_a_t5x_checkpoint_comes_as_its_folder(server, tmp_path):
    done = fetch(server, T5X, tmp_path / "to")
    assert done.path == tmp_path / "to" / "checkpoint_1100000"
    check_checkpoint(open_checkpoint(find_checkpoint(done.path)))


@pytest.mark.parametrize("name", [LM, T0])
def test_a_fetch_that_was_cut_goes_on_at_the_byte_where_it_was(server, tmp_path, name):
    # One file comes; every attempt at the next breaks off before its first byte.
    server.faults = [None, *[("cut", 0)] * 20]
    with pytest.raises(UserError, match="breaks off repeatedly"):
        fetch(server, name, tmp_path / "to")
    assert not any((tmp_path / "to").glob("model*"))
    server.faults, server.asked = [("cut", 500)], []
    fetch(server, name, tmp_path / "to")
    assert any(asked == "bytes=500-" for _, asked in server.asked)


def test_wrong_bytes_are_fetched_once_more_and_then_refused(server, tmp_path):
    server.faults = ["wrong"]
    fetch(server, LM, tmp_path / "once")
    server.faults = ["wrong"] * 2
    with pytest.raises(UserError, match="not those that the server lists"):
        fetch(server, LM, tmp_path / "twice")
    assert not any((tmp_path / "twice").glob("model*"))


def test_what_is_there_needs_no_network_and_another_name_is_refused(server, tmp_path, monkeypatch):
    fetch(server, LM, tmp_path / "to")
    monkeypatch.delenv(released.OPT_IN)
    requests = server.requests
    assert fetch(server, LM, tmp_path / "to").present
    assert server.requests == requests
    with pytest.raises(UserError, match=rf"holds {LM}"):
        fetch(server, T0, tmp_path / "to")


def test_a_step_that_is_not_there_and_a_repository_without_safetensors_are_refused(
    server, tmp_path
):
    with pytest.raises(UserError, match="no checkpoint of step 5; it has 3, 7"):
        fetch(server, LM, tmp_path / "to", step=5)
    (server.root / "bigscience" / "T0_3B" / "main" / "model.safetensors").unlink()
    with pytest.raises(UserError, match="neither safetensors nor Flax"):
        fetch(server, T0, tmp_path / "hf")
    with pytest.raises(UserError, match="no such folder or repository"):
        fetch(server, T0, tmp_path / "hf", revision="refs/pr/9")


# --- Plans ---------------------------------------------------------------------------------------


def test_a_plan_counts_parameters_gradients_and_slots():
    entry = released.find("bigscience/T0_3B")
    needed = released.needs_of(entry)
    assert needed.evaluation == needed.disk == 4 * entry.shape.parameter_count()
    slots = needed.training_disk - needed.disk
    assert needed.training == 2 * needed.disk + slots
    # Adafactor's factored moments are a row and a column for each matrix: next to nothing.
    assert 0 < slots < needed.disk / 200


def test_a_plan_lists_gpus_that_have_memory_of_their_own(tmp_path, monkeypatch):
    command = tmp_path / "nvidia-smi"
    command.write_text("#!/bin/sh\necho 'NVIDIA H200, 143771'\necho 'NVIDIA GB10, [N/A]'\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert released.this_machine(tmp_path).accelerators == (("NVIDIA H200", 143771 << 20),)


def test_slots_are_counted_as_a_checkpoint_has_them(tiny_checkpoint):
    reader = open_checkpoint(find_checkpoint(tiny_checkpoint))
    entry = dataclasses.replace(released.find(LM), shape=check_checkpoint(reader))
    needed = released.needs_of(entry)
    slots = [info.nbytes for key, info in reader.tensors.items() if "param_states" in key]
    assert needed.training_disk - needed.disk == sum(slots)


def test_the_commands_print_names_and_needs(server, tmp_path):
    app = typer.Typer()
    for command in (checkpoint.released, checkpoint.plan, checkpoint.fetch):
        app.command()(command)
    runner = CliRunner()
    listed = runner.invoke(app, ["released", "--family", "T0"])
    assert listed.exit_code == 0
    assert "bigscience/T0_3B" in listed.output and "not stated" in listed.output
    planned = runner.invoke(app, ["plan", T0])
    assert planned.exit_code == 0, planned.output
    assert "2,849,757,184 parameters" in planned.output
    assert "11.40 GB" in planned.output and "fit" in planned.output
    arguments = ["fetch", LM, "--to", str(tmp_path / "to"), "--base-url", server.url]
    fetched = runner.invoke(app, arguments)
    assert fetched.exit_code == 0, fetched.output
    assert "model.ckpt-7" in fetched.output and "License: not stated" in fetched.output
