"""Reads and writes Mesh TensorFlow's checkpoints: tf.train.Saver files."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from t0repro import storage
from t0repro.converters.tensor_bundle import BundleReader, BundleWriter
from t0repro.converters.tensors import CheckpointRef, Output, TensorInfo
from t0repro.converters.witnesses import Manifest, check_manifest
from t0repro.errors import UserError
from t0repro.parameters import naming
from t0repro.parameters.shape import unknown_variable
from t0repro.storage import write_atomically

STATE_FILE = "checkpoint"  # names the latest checkpoint of a directory
OPERATIVE_CONFIG = "operative_config.gin"


class MtfReader:
    """Reads a Mesh TensorFlow checkpoint as T5X's tree.

    Args:
      prefix: Path without `.index`, for instance `model_dir/model.ckpt-1000`.
      manifest: The conversion manifest; its names are compared with the checkpoint's.

    Raises:
      UserError: If a file is missing, damaged or truncated, or a variable is not in the layout
        table.
    """

    def __init__(self, prefix: str, manifest: Manifest | None = None):
        self._bundle = BundleReader(prefix)
        if manifest is not None:
            directory = os.path.dirname(prefix)
            check_manifest(manifest, self._bundle.entries, directory, lambda _: prefix)
        self._names = _flat_keys(self._bundle, prefix)
        self.tensors: Mapping[str, TensorInfo] = {
            key: TensorInfo(_add_heads(key, entry.shape), entry.dtype)
            for key, name in self._names.items()
            if (entry := self._bundle.entries[name]).dtype is not None
        }
        self.norm_names: naming.NormNames = "rms_norm"
        # Either all names are old or none is, so one is enough.
        if any(naming.modern_norm_name(name) != name for name in self._bundle.entries):
            self.norm_names = "layer_norm"
        shared = any(map(naming.names_shared_layer, self._bundle.entries))
        if naming.has_shared_towers(self.tensors) and not shared:
            raise UserError(
                "The encoder's variables are missing, and the decoder's names are not those of a"
                " model whose towers share parameters (bi_v1_shared).",
                where=prefix,
                fix="The checkpoint is incomplete; get it again from where it came from.",
            )
        step = int(self._bundle.read(naming.MTF_STEP)) if naming.STEP in self._names else None
        self.ref = CheckpointRef("mtf", prefix, step)

    def read(self, key: str) -> np.ndarray:
        """Reads one tensor as stored, in its shape in `tensors`; the step is an int64."""
        return self._bundle.read(self._names[key]).reshape(self.tensors[key].shape)

    def reshape_as_stored(self, key: str, array: np.ndarray) -> np.ndarray:
        """Returns the array that `read` returned, in the shape stored in the file."""
        return array.reshape(self._bundle.entries[self._names[key]].shape)

    def native_name(self, key: str) -> str:
        """Returns Mesh TensorFlow's name of a flat key."""
        return self._names.get(key) or mtf_name(key, self.tensors, self.norm_names)


# With a single head, Mesh TensorFlow omits the axis of heads: the position bias of such a model and
# its slots are vectors in its files, and matrices of one row here.


def _is_position_bias(key: str) -> bool:
    """Whether a key belongs to a position bias, or to a slot of the same shape."""
    if key == naming.STEP:
        return False
    path, slot = naming.split_key(key)
    return path.endswith(naming.RELATIVE_BIAS) and slot not in ("v_row", "v_col")


def _add_heads(key: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a variable with its axis of heads."""
    return (1, *shape) if _is_position_bias(key) and len(shape) == 1 else shape


def _drop_head(key: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The inverse of `_add_heads`."""
    return shape[1:] if _is_position_bias(key) and len(shape) == 2 and shape[0] == 1 else shape


def _flat_keys(bundle: BundleReader, prefix: str) -> dict[str, str]:
    """Flat key -> variable name, for every variable."""
    names: dict[str, str] = {}
    unknown = []
    bias_per_layer = naming.has_bias_per_layer(map(naming.mtf_to_path, bundle.entries))
    for name, entry in bundle.entries.items():
        key = _flat_key(name, bundle, bias_per_layer)
        if key is None or entry.dtype is None:
            unknown.append(name)
        else:
            names[key] = name
    if unknown:
        raise unknown_variable(unknown, _list_known_names(bundle), prefix)
    return names


def _flat_key(name: str, bundle: BundleReader, bias_per_layer: bool) -> str | None:
    if name == naming.MTF_STEP:
        return naming.STEP
    variable, slot = naming.split_mtf_slot(name)
    path = naming.mtf_to_path(variable, bias_per_layer)
    if path is None:
        return None
    if slot is None:
        return naming.PARAMETERS + path
    if variable not in bundle.entries:
        return None  # a slot without its parameter
    shape = bundle.entries[variable].shape
    # Only matrices are factored, so no T5 has such a slot.
    if slot in ("vr", "vc") and len(shape) < 2:
        return None
    return naming.slot_key(path, naming.slot_from_mtf(slot, shape))


def _list_known_names(bundle: BundleReader) -> list[str]:
    """Names that such a checkpoint may have, to suggest the nearest ones to an unknown name."""
    numbers = [int(n) for name in bundle.entries for n in re.findall(r"/block_(\d+)/", name)]
    decoder_only = any(name.startswith("transformer/") for name in bundle.entries)
    known = naming.known_names("mtf", numbers, decoder_only)
    slots = [
        naming.join_mtf_slot(name, slot)
        for name in known
        for slot in ("v", "vr", "vc", "m", *naming.ADAM_SLOTS)
    ]
    return [*known, *slots, naming.MTF_STEP]


def mtf_name(
    key: str, tensors: Mapping[str, TensorInfo], norm_names: naming.NormNames = "rms_norm"
) -> str:
    """Returns Mesh TensorFlow's name of a flat key.

    Args:
      key: The flat key of a parameter, a slot or the step.
      tensors: The checkpoint's tensors; a factored slot's name depends on its parameter's shape.
      norm_names: Today's names of the norms, or those of T5 1.0's released checkpoints.

    Raises:
      KeyError: If the path is not in the table of names.
    """
    if key == naming.STEP:
        return naming.MTF_STEP
    path, slot = naming.split_key(key)
    shared = naming.has_shared_towers(tensors)
    name = naming.path_to_mtf(path, norm_names, naming.is_decoder_only(tensors), shared)
    if name is None:
        raise KeyError(key)
    if slot is None:
        return name
    parameter = tensors.get(naming.PARAMETERS + path)
    shape = parameter.shape if parameter else ()
    # If the checkpoint lacks the slot's matrix, use the slot's own name.
    return naming.join_mtf_slot(name, naming.slot_to_mtf(slot, shape) if len(shape) > 1 else slot)


def mtf_outputs(
    tensors: Mapping[str, TensorInfo], norm_names: naming.NormNames
) -> Iterator[Output]:
    """Yields the variables to write for these tensors; the step becomes an int64.

    Args:
      tensors: Flat key -> shape and type.
      norm_names: See `mtf_name`.
    """
    for key, info in tensors.items():
        name = mtf_name(key, tensors, norm_names)
        if key == naming.STEP:
            # TensorFlow's global step is an int64, and a Saver restores no other type into it.
            step = TensorInfo((), np.dtype(np.int64))
            yield Output(name, step, (key,), lambda arrays: next(arrays).astype(np.int64))
        else:
            shape = _drop_head(key, info.shape)
            variable = TensorInfo(shape, info.dtype)
            yield Output(name, variable, (key,), lambda a, shape=shape: next(a).reshape(shape))


class MtfWriter:
    """Writes `model.ckpt-<step>.*` and the state file into a directory, one tensor at a time.

    Args:
      directory: An existing directory or an address that nobody reads yet.
      step: The global step, for the file names.
      operative_config: Text of an operative_config.gin to write beside them.
    """

    def __init__(self, directory: str, step: int, operative_config: str | None = None):
        self._directory, self._step, self._config = directory, step, operative_config
        # Continue the shard where an interrupted conversion stopped.
        self._bundle = BundleWriter(storage.join(directory, f"model.ckpt-{step}"), resume=True)

    def read_back(self, output: Output) -> np.ndarray | None:
        """Returns an interrupted writer's bytes for the next tensor, or None."""
        data = self._bundle.read_back(output.info.nbytes)
        if data is None:
            return None
        return np.frombuffer(data, output.info.dtype).reshape(output.info.shape)

    def keep(self, output: Output, array: np.ndarray) -> None:
        """Accepts the bytes in the tensor's place as written."""
        self._bundle.keep(output.name, array)

    def add(self, output: Output, array: np.ndarray) -> None:
        """Writes a tensor."""
        self._bundle.add(output.name, array)

    def close(self) -> None:
        """Writes the configuration and the index, which makes the data a checkpoint; names it."""
        if self._config is not None:
            storage.write_atomically(storage.join(self._directory, OPERATIVE_CONFIG), self._config)
        self._bundle.close()
        # Names relative to the directory, so that it can be moved.
        storage.write_atomically(
            storage.join(self._directory, STATE_FILE), _state_text([self._step])
        )

    def abandon(self) -> None:
        """Closes the data file without writing an index."""
        self._bundle.abandon()


def publish_mtf(staged: Path, directory: Path, step: int) -> None:
    """Moves a checkpoint by `MtfWriter` into a directory that others read."""
    # Data without an index is not a checkpoint, so the old index is removed first and the new one
    # moved last.
    (directory / f"model.ckpt-{step}.index").unlink(missing_ok=True)
    # Its data may be in more shards than the new one's, and the rest would stay.
    for stale in directory.glob(f"model.ckpt-{step}.*"):
        stale.unlink()
    for name in (
        f"model.ckpt-{step}.data-00000-of-00001",
        OPERATIVE_CONFIG,
        f"model.ckpt-{step}.index",
    ):
        if (staged / name).exists():
            os.replace(staged / name, directory / name)
    steps = {*mtf_steps(directory), step}
    write_atomically(directory / STATE_FILE, _state_text(sorted(steps)))


def mtf_steps(directory: str | Path) -> list[int]:
    """Returns the steps of a directory's checkpoints that have an index, ascending."""
    names = storage.list_names(str(directory))
    matches = (re.fullmatch(r"model\.ckpt-(\d+)\.index", name) for name in names)
    return sorted(int(match[1]) for match in matches if match)


def _state_text(steps: list[int]) -> str:
    lines = [f'model_checkpoint_path: "model.ckpt-{steps[-1]}"']
    lines += [f'all_model_checkpoint_paths: "model.ckpt-{step}"' for step in steps]
    return "\n".join(lines) + "\n"


def latest_mtf_prefix(directory: str | Path) -> str | None:
    """Returns the prefix that the state file names, else the highest step's, else None.

    Raises:
      UserError: If the checkpoint that the state file names is missing, or if it names none.
    """
    directory = str(directory)
    steps = mtf_steps(directory)
    named = _read_state_file(directory)
    if named is None:
        if steps and storage.is_file(state_file := storage.join(directory, STATE_FILE)):
            raise UserError(
                "This file should name the latest checkpoint, and names none.",
                where=state_file,
                fix="Name the checkpoint itself (.../model.ckpt-<step>), or remove this file: the"
                " latest is then the one of the highest step.",
            )
        return storage.join(directory, f"model.ckpt-{steps[-1]}") if steps else None
    # Of a run whose model_dir was an absolute path, the state file names absolute paths. In a
    # copied or moved directory they lead elsewhere, and mean the checkpoint of that name here.
    prefix = storage.join(directory, storage.base_name(named))
    if not storage.is_file(f"{prefix}.index"):
        raise UserError(
            f"The checkpoint {named} that this file names is not there.",
            where=storage.join(directory, STATE_FILE),
            fix="Restore its files, or name the checkpoint itself (.../model.ckpt-<step>).",
        )
    return prefix


def check_state_file(directory: str | Path) -> None:
    """Checks that TensorFlow finds a directory's latest checkpoint in that directory.

    TensorFlow follows an absolute path wherever it leads. If nothing is there, it finds no
    checkpoint, and training would start from step 0.

    Raises:
      UserError: If the state file names a checkpoint in another directory.
    """
    directory = str(directory)
    named = _read_state_file(directory)
    if named is None or storage.is_address(directory):
        return
    # Joining an absolute name replaces the directory; a relative name does not.
    holder = os.path.dirname(storage.join(directory, named))
    if storage.real(holder) != storage.real(directory):
        raise UserError(
            f"This file points to {named}, outside its directory, and TensorFlow would look there.",
            where=storage.join(directory, STATE_FILE),
            fix="If the directory was copied or moved, write"
            f' "{storage.base_name(named)}" in the file, without a directory.',
        )


def _read_state_file(directory: str) -> str | None:
    """The path of the latest checkpoint in a directory's state file, if it has one."""
    state_file = storage.join(directory, STATE_FILE)
    if not storage.is_file(state_file):
        return None
    state = storage.read(state_file).decode(errors="replace")
    # A CheckpointState as protobuf's text; the paths of older checkpoints follow the first line.
    match = re.search(r'^model_checkpoint_path:\s*"(.+)"', state, re.MULTILINE)
    return match and match[1]
