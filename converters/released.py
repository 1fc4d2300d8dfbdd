"""Finds released checkpoints by name, lists their requirements, and fetches them."""

from __future__ import annotations

import csv
import dataclasses
import functools
import importlib.resources
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

from t0repro.config.optimizer import AdafactorConfig
from t0repro.errors import UserError, nearest_names
from t0repro.hub_files import (
    DELAYS_SECONDS,
    HUB,
    Bucket,
    HubFile,
    HubRepository,
    RemoteFiles,
    check_room,
)
from t0repro.parameters.shape import ModelShape
from t0repro.partitioning.memory import slot_bytes
from t0repro.progress import byte_progress
from t0repro.storage import lock_folder, make_folder, write_atomically
from t0repro.storage.access import google_storage
from t0repro.storage.disk import name_in_errors

OPT_IN = "T0REPRO_CHECKPOINT_HUB"
UNFINISHED = ".fetching"
"""Folder, inside the destination, for incomplete files."""
SOURCE = "fetched.json"

# The files that conversions and transformers read; repositories also hold other forms of weights.
_HUB_FILES = re.compile(
    r"model(-\d+-of-\d+)?\.safetensors|model\.safetensors\.index\.json|config\.json"
    r"|generation_config\.json|spiece\.model|tokenizer\.json|tokenizer_config\.json"
    r"|special_tokens_map\.json|added_tokens\.json|README\.md"
)

_FLAX_FILES = re.compile(r"flax_model(-\d+-of-\d+)?\.msgpack|flax_model\.msgpack\.index\.json")


@dataclasses.dataclass(frozen=True)
class Released:
    """A released checkpoint.

    Attributes:
      name: The name users give it: the Mesh TensorFlow or T5X folder, or the hub repository.
      family: For instance "T5 1.1 LM-adapted".
      format: mtf, t5x or hf.
      address: gs://bucket/folder or hf://owner/name.
      step: None if the source does not state it; then the latest is fetched.
      license: The checkpoint's license; empty if the source does not state it.
      shape: The model's sizes.
      source: The page that lists the checkpoint.
    """

    name: str
    family: str
    format: Literal["mtf", "t5x", "hf"]
    address: str
    step: int | None
    license: str
    shape: ModelShape
    source: str


@dataclasses.dataclass(frozen=True)
class Family:
    """What the checkpoints of a family have in common, besides what their sizes show.

    Attributes:
      name: For instance "T5 1.1 LM-adapted".
      model_type: In transformers' config.json.
      feed_forward: feed_forward_proj in config.json.
      logits: What they come from: "the embedding", scaled, or "a kernel".
      position_bias: "one a tower", or "one a layer".
      pad: Id of padding in config.json; T5X and this project pad with 0.
      eos: Id of the end.
      vocabulary: Whose it is.
      checked_against: Where the sizes and these facts were compared.
      to_know: What to know before using one; may be empty.
    """

    name: str
    model_type: Literal["t5", "mt5", "umt5"]
    feed_forward: str
    logits: Literal["the embedding", "a kernel"]
    position_bias: Literal["one a tower", "one a layer"]
    pad: int
    eos: int
    vocabulary: str
    checked_against: str
    to_know: str


@functools.cache
def families() -> dict[str, Family]:
    """Returns the family of every released checkpoint, by name."""
    return {
        row["family"]: Family(
            row.pop("family"), pad=int(row.pop("pad")), eos=int(row.pop("eos")), **row
        )
        for row in _rows("families.csv")
    }


def _rows(name: str) -> list[dict[str, Any]]:
    text = importlib.resources.files("t0repro.converters").joinpath(name).read_text()
    return list(csv.DictReader(text.splitlines()))


@functools.cache
def catalog() -> dict[str, Released]:
    """Returns every known released checkpoint, by name."""
    return {row["name"]: _parse_row(row) for row in _rows("released.csv")}


def _parse_row(row: dict[str, Any]) -> Released:
    yes = {"yes": True, "no": False}
    depths = ("num_encoder_layers", "num_decoder_layers")
    names = (*depths, "d_model", "d_ff", "num_heads", "d_kv", "vocab_size")
    sizes: dict[str, Any] = {name: int(row[name]) for name in names}
    shape = ModelShape(
        **sizes,
        # The same in every released T5, so the table has no column for it.
        relative_attention_num_buckets=32,
        wi_kernels=("wi_0", "wi_1") if yes[row["gated"]] else ("wi",),
        tied=yes[row["tied"]],
        position_bias_per_layer=yes[row["position_bias_per_layer"]],
    )
    texts = ("name", "family", "format", "address", "license", "source")
    step = int(row["step"]) if row["step"] else None
    return Released(step=step, shape=shape, **{name: row[name] for name in texts})


def names_like(name: str) -> list[str]:
    """Released checkpoints that differ from a name in their owner, capitals or dashes only."""

    def plain(name: str) -> str:
        return name.rpartition("/")[2].casefold().replace("-", "_")

    return [each for each in catalog() if plain(each) == plain(name)]


def find(name: str) -> Released:
    """Returns the released checkpoint of this name.

    Raises:
      UserError: If there is none; the message lists the nearest names.
    """
    known = catalog()
    if name not in known:
        raise UserError(
            f"No released checkpoint is called {name!r}.",
            fix=f"Nearest: {', '.join(map(repr, names_like(name))) or nearest_names(name, known)};"
            " 't0repro checkpoint released' lists all.",
        )
    return known[name]


@dataclasses.dataclass(frozen=True)
class Fetched:
    """The result of a fetch.

    Attributes:
      path: Path of the checkpoint, as `convert` takes it.
      files: Number of files.
      bytes: Their total size.
      present: Whether everything was already there.
    """

    path: Path
    files: int
    bytes: int
    present: bool


def fetch(
    released: Released,
    to: Path,
    *,
    base_url: str | None = None,
    revision: str = "main",
    step: int | None = None,
    delays: Sequence[float] = DELAYS_SECONDS,
) -> Fetched:
    """Fetches a checkpoint into a folder; an interrupted fetch resumes when called again.

    The checkpoint appears in `to` only once it is complete and every checksum has been verified.

    Args:
      released: A checkpoint of the catalog.
      to: The folder, created if missing.
      base_url: A mirror of the hub or of Google Cloud Storage.
      revision: Revision of a hub repository.
      step: Step of a Mesh TensorFlow checkpoint, if the folder has several; defaults to the latest.
      delays: Seconds to wait before each retry.

    Raises:
      UserError: Without the opt-in; if the server cannot be reached, lists no checkpoint or sends
        wrong bytes; if the disk is too small; or if `to` holds another checkpoint.
    """
    wanted = {"name": released.name, "revision": revision if released.format == "hf" else None}
    if (done := _done(to, wanted, step)) is not None:
        return done
    # Check existing files first: a complete folder needs no network and no opt-in.
    if os.environ.get(OPT_IN) != "1":
        raise UserError(
            f"Fetching {released.name} needs the network, which is used only if you ask for it.",
            where=released.address,
            fix=f"Set {OPT_IN}=1 and start the command again.",
        )
    server, folder = _server(released, base_url, revision, delays)
    with lock_folder(to, "fetching"):
        # Another process may have fetched it since.
        if (done := _done(to, wanted, step)) is not None:
            return done
        chosen = _list_files(released, server, folder, step)
        total = sum(file.size for file in chosen.values())
        partial = to / UNFINISHED
        fix = "Choose another folder, or free some space."
        check_room(to, total, [partial / name for name in chosen], fix)
        with byte_progress(f"fetching {released.name}", total) as advance:
            # The lock excludes a second fetch; existing files are resumed or skipped.
            for name, file in chosen.items():
                make_folder((partial / name).parent)
                server.download(file, partial / name, advance)
        _publish(partial, to, chosen)
        record = {
            **wanted,
            "address": released.address,
            "fetched_from": server.base_url,
            "license": released.license or None,
            "files": {
                name: {"bytes": file.size, "checksum": file.checksum}
                for name, file in chosen.items()
            },
        }
        # Written last, since `_done` takes it as completeness.
        write_atomically(to / SOURCE, json.dumps(record, indent=1) + "\n")
    return Fetched(_checkpoint_path(to, chosen), len(chosen), total, present=False)


def bytes_to_fetch(
    released: Released, to: Path, *, base_url: str | None = None, revision: str = "main"
) -> int:
    """Bytes that `fetch` has still to download; asks the server for its list of files.

    Raises:
      UserError: See `fetch`; but no opt-in is needed for the list.
    """
    wanted = {"name": released.name, "revision": revision if released.format == "hf" else None}
    if _done(to, wanted, None) is not None:
        return 0
    chosen = _list_files(released, *_server(released, base_url, revision, DELAYS_SECONDS), None)
    partial = [to / UNFINISHED / name for name in chosen]
    arrived = sum(path.stat().st_size for path in partial if path.is_file())
    return sum(file.size for file in chosen.values()) - arrived


def _list_files(
    released: Released, server: RemoteFiles, folder: str, step: int | None
) -> dict[str, HubFile]:
    listed = server.files(folder)
    if not listed:
        raise UserError(
            "The server has no such folder or repository.",
            where=f"{released.address}, asked of {server.base_url}",
            fix="Check --revision and --base_url.",
        )
    return _choose_files(released, listed, folder, step)


def _server(
    released: Released, base_url: str | None, revision: str, delays: Sequence[float]
) -> tuple[RemoteFiles, str]:
    kind, _, place = released.address.partition("://")
    if kind == "hf":
        # Hugging Face's own clients take a mirror from HF_ENDPOINT.
        address = base_url or os.environ.get("HF_ENDPOINT") or HUB
        return HubRepository(address, place, revision, delays, kind="models"), ""
    bucket, _, folder = place.partition("/")
    return Bucket(base_url or google_storage(), bucket, delays), folder


def _choose_files(
    released: Released, listed: Sequence[HubFile], folder: str, step: int | None
) -> dict[str, HubFile]:
    """Chooses the files to fetch: path in the destination folder -> file."""
    if released.format == "hf":
        chosen = {file.path: file for file in listed if _HUB_FILES.fullmatch(file.path)}
        if not any(name.endswith(".safetensors") for name in chosen):
            # transformers 5 does not load Flax's weights, so they only stand in for safetensors.
            chosen |= {file.path: file for file in listed if _FLAX_FILES.fullmatch(file.path)}
        if not any(name.endswith((".safetensors", ".msgpack")) for name in chosen):
            raise UserError(
                "At this revision the repository has neither safetensors nor Flax's weights.",
                where=released.address,
                fix="Name a revision that has them, if there is one: --revision refs/pr/1.",
            )
        return chosen
    names = {file.path.removeprefix(f"{folder}/"): file for file in listed}
    if released.format == "t5x":
        # The folder is one checkpoint. Keep its name, which holds the step.
        return {f"{folder.rpartition('/')[2]}/{name}": file for name, file in names.items()}
    matches = [re.fullmatch(r"model\.ckpt-(\d+)\.index", name) for name in names]
    steps = sorted(int(match[1]) for match in matches if match)
    if not steps or (step is not None and step not in steps):
        raise UserError(
            f"The folder has no checkpoint{f' of step {step}' if step is not None else ''};"
            f" it has {', '.join(map(str, steps)) or 'none'}.",
            where=released.address,
            fix="Choose one of these with --step.",
        )
    prefix = f"model.ckpt-{steps[-1] if step is None else step}."
    return {
        name: file
        for name, file in names.items()
        # The gin file shows what the sizes do not, such as the activation.
        if name.startswith(prefix) or name == "operative_config.gin"
    }


def _publish(partial: Path, to: Path, chosen: dict[str, HubFile]) -> None:
    """Moves files into place; those by which readers recognize a checkpoint come last."""
    last = ("config.json", ".index", "/checkpoint", "/.zmetadata", "/_METADATA")
    # False sorts before True: the files in `last` come after all others.
    for name in sorted(chosen, key=lambda name: (name.endswith(last), name)):
        # After a power failure, a file renamed before its contents were synced may be empty.
        with name_in_errors(to / name), open(partial / name, "rb") as file:
            os.fsync(file.fileno())
        make_folder((to / name).parent)
        os.replace(partial / name, to / name)
    shutil.rmtree(partial)


def _done(to: Path, wanted: dict[str, str | None], step: int | None) -> Fetched | None:
    """Returns an earlier fetch of the same checkpoint, or None if it is incomplete.

    Raises:
      UserError: If the folder holds another checkpoint.
    """
    if not (to / SOURCE).is_file():
        return None
    record = json.loads((to / SOURCE).read_text())
    files = {name: int(entry["bytes"]) for name, entry in record["files"].items()}
    has_step = step is None or f"model.ckpt-{step}.index" in files
    if not has_step or any(record.get(key) != value for key, value in wanted.items()):
        raise UserError(
            f"The folder holds {record['name']}, fetched from {record['address']}.",
            where=str(to),
            fix="Choose another folder.",
        )
    for name, size in files.items():
        # Sizes only: checksums were checked on arrival, and mean reading the whole model.
        if not (to / name).is_file() or (to / name).stat().st_size != size:
            return None  # fetch everything again
    return Fetched(_checkpoint_path(to, files), len(files), sum(files.values()), present=True)


def _checkpoint_path(to: Path, names: Iterable[str]) -> Path:
    for name in names:
        if name.endswith(".index"):
            return to / name.removesuffix(".index")
        if name.startswith("checkpoint_"):
            return to / name.partition("/")[0]
    return to


_FLOAT32 = 4


@dataclasses.dataclass(frozen=True)
class Needs:
    """Bytes that a model needs, without activations, which depend on batch size and length.

    Attributes:
      parameters: Number of parameters (a count, not bytes).
      disk: The checkpoint in float32, without slots.
      training_disk: One checkpoint of a training run: parameters and Adafactor's slots.
      evaluation: Memory for float32 parameters.
      training: Memory for float32 parameters, gradients and Adafactor's slots.
    """

    parameters: int
    disk: int
    training_disk: int
    evaluation: int
    training: int


@dataclasses.dataclass(frozen=True)
class Machine:
    """This machine's resources, in bytes.

    Attributes:
      disk: Free space on the folder's disk.
      memory: Memory available to a new process.
      accelerators: Name and total memory of each.
    """

    disk: int
    memory: int
    accelerators: tuple[tuple[str, int], ...]


def needs_of(released: Released) -> Needs:
    """Computes what a released checkpoint needs, from its shapes.

    Parameters and Adafactor's slots count as float32, the dtype in which both stacks train and
    evaluate.
    """
    weights = _FLOAT32 * released.shape.parameter_count()
    slots = slot_bytes(released.shape.parameters(), AdafactorConfig())
    return Needs(
        parameters=released.shape.parameter_count(),
        disk=weights,
        training_disk=weights + slots,
        evaluation=weights,
        # Gradients are as large as the parameters, and both exist at the same time.
        training=2 * weights + slots,
    )


def this_machine(folder: Path) -> Machine:
    """Returns this machine's resources and the free space on the disk of a folder.

    The folder need not exist yet.
    """
    import psutil

    # The folder need not exist; its nearest existing parent is on the same disk.
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    return Machine(
        disk=shutil.disk_usage(there).free,
        # Not `free`: Linux gives up its page cache when a process needs the memory.
        memory=psutil.virtual_memory().available,
        accelerators=tuple(_accelerators()),
    )


def _accelerators() -> list[tuple[str, int]]:
    query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        lines = subprocess.check_output(query, text=True, stderr=subprocess.DEVNULL).splitlines()
    except (OSError, subprocess.CalledProcessError):
        # No driver or no GPU: nothing to list.
        return []
    gpus = (line.rpartition(", ") for line in lines)
    # In MiB; a GPU that shares the machine's memory gives "[N/A]".
    return [(name, int(memory) << 20) for name, _, memory in gpus if memory.isdigit()]
