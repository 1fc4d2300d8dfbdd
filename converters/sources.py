"""Opens checkpoints of any format, and checks what is in them."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from typing import Any

import numpy as np

from t0repro import storage
from t0repro.adapters import Adapter
from t0repro.converters import adapter_files, hf, jax_tree, mtf
from t0repro.converters.adapter_files import (
    AdapterNote,
    MergedReader,
    is_adapter,
    note_of,
    open_adapter,
)
from t0repro.converters.finding import CheckpointNotFound, find_adapter, find_checkpoint
from t0repro.converters.peft_config import PEFT_CONFIG
from t0repro.converters.tensors import (
    CheckpointReader,
    CheckpointRef,
    FlatTree,
    StoredTensor,
    TensorInfo,
    check_types,
)
from t0repro.converters.witnesses import MANIFEST, parameters_digest, read_manifest
from t0repro.errors import UserError
from t0repro.parameters import naming
from t0repro.parameters.shape import ModelShape, check_parameters
from t0repro.progress import say
from t0repro.words import counted, some

_NO_SLOTS = "Convert without slots: --no_slots, in Python slots=False."


def open_checkpoint(ref: CheckpointRef) -> CheckpointReader:
    """Opens a checkpoint; checks its files, names and shapes, but not yet its values.

    An adapter's is read as its base with the adapter merged into it. The base's values are read
    once more for that, to compare their hash.

    Raises:
      UserError: If it is damaged or holds an unknown variable; if it is an adapter's, and its base
        is gone or another one.
    """
    if is_adapter(ref):
        return _open_merged(ref)
    if ref.base is not None:
        raise UserError(
            "A base is given, but the checkpoint is not an adapter's.",
            where=ref.path,
            fix="Leave out --base (in Python base).",
        )
    manifest = read_manifest(ref.folder)
    norm_names = manifest.norm_names if manifest else None
    if manifest and not manifest.is_of(ref):
        manifest = None  # it describes another checkpoint of this directory
    if ref.format == "mtf":
        return mtf.MtfReader(ref.path, manifest)
    if ref.format == "hf":
        if adapter_files.peft_ref(ref.path):
            raise UserError(
                "The folder has a whole model and an adapter. transformers reads the model alone,"
                " or, with PEFT installed, the adapter and its own base.",
                where=storage.join(ref.path, PEFT_CONFIG),
                fix="Move the adapter's files to a folder of their own.",
            )
        return hf.HfReader(ref, norm_names, manifest)
    return jax_tree.JaxReader(ref, norm_names, manifest)


def _open_merged(ref: CheckpointRef) -> MergedReader:
    adapter = open_adapter(ref)
    base = open_checkpoint(base_of(ref))
    shape = check_checkpoint(base)
    digest = parameters_digest(base.tensors, base.read)
    check_base(adapter.note, digest, base.ref.path)
    where = storage.absolute(base.ref.path)
    note = dataclasses.replace(adapter.note, base=where, digest=digest)
    return MergedReader(adapter, base, shape, note)


def check_base(note: AdapterNote, digest: str, path: str) -> None:
    """Checks that a base is the one that an adapter was trained on.

    A folder that PEFT wrote has the base's name alone: if a checkpoint is there, its hash counts.

    Args:
      note: What the adapter's checkpoint says.
      digest: The hash of the base's parameters.
      path: Where the base is.

    Raises:
      UserError: With both hashes, if it is another.
    """
    named = storage.absolute(note.base) if note.base else None
    if note.digest is None and named not in (None, storage.absolute(path)):
        # The name is often the hub's (google/t5-v1_1-xl), with nothing here to compare with.
        with contextlib.suppress(CheckpointNotFound):
            base = open_checkpoint(find_checkpoint(note.base))
            note = dataclasses.replace(note, digest=parameters_digest(base.tensors, base.read))
    note.check_base(digest, path)


def read_adapter(
    path: str, adapter: Adapter, shape: ModelShape, digest: str, base: str
) -> FlatTree:
    """The parameters of another run's adapter, without its slots and step, to train on.

    Args:
      path: See `find_adapter`.
      adapter: The adapter that is about to be trained.
      shape: The shape of the base.
      digest: The hash of the base's parameters.
      base: Where the base is.

    Raises:
      UserError: If it has other sizes or another scale, or was trained on another base.
    """
    reader = open_adapter(find_adapter(path))
    reader.check_continues(adapter, shape)
    check_base(reader.note, digest, base)
    say(f"restore: {reader.ref.path}")
    return {key: reader.read(key) for key in reader.tensors if key.startswith(naming.PARAMETERS)}


def base_of(ref: CheckpointRef) -> CheckpointRef:
    """The base of an adapter's checkpoint."""
    base = ref.base or note_of(ref).base
    if not base:
        raise UserError(
            "The adapter does not name its base.",
            where=ref.path,
            fix="Write the base's path into base_model_name_or_path. Or name the base: `t0repro"
            " convert` and `t0repro adapters merge` take --base, `t0repro rank-eval` takes"
            f" --checkpoint BASE --adapter {ref.path}.",
        )
    try:
        return find_checkpoint(base)
    except CheckpointNotFound as error:
        raise UserError(
            f"The base of the adapter in {ref.path} is not there.",
            where=base,
            fix="Put it back, or a link to where it is now; `t0repro convert` and `t0repro adapters"
            " merge` also take --base.",
        ) from error


def files_of(ref: CheckpointRef) -> list[str]:
    """Lists the files that a checkpoint is read from; of an adapter's, those of its base too."""
    if is_adapter(ref):
        return [*sorted(storage.list_files(ref.path)), *files_of(base_of(ref))]
    if ref.format == "mtf":
        directory, _, prefix = ref.path.rpartition("/")
        directory = directory or "."
        names = [n for n in storage.list_names(directory) if n.startswith(f"{prefix}.")]
        return [storage.join(directory, name) for name in names]
    if ref.format == "hf":
        ends = (".safetensors", ".msgpack", ".index.json")
        names = [n for n in storage.list_names(ref.path) if n == hf.CONFIG or n.endswith(ends)]
        return [storage.join(ref.path, name) for name in names]
    return sorted(storage.list_files(ref.path))


def fingerprint(ref: CheckpointRef) -> dict[str, Any]:
    """Sizes and modification times of a checkpoint's files, to detect changes to it."""
    # Remote file systems cache listings, which would hide the change.
    storage.refresh(ref.path)
    files = files_of(ref)
    return dict(zip(files, storage.call_at_once(storage.stamp, files), strict=True))


def check_checkpoint(reader: CheckpointReader) -> ModelShape:
    """Checks that a checkpoint contains one complete T5, with all of its slots if it has any.

    Returns:
      The model's shape.

    Raises:
      UserError: Naming what is missing or has the wrong shape.
    """
    where = reader.ref.path
    keys = (key for key in reader.tensors if key.startswith(naming.PARAMETERS))
    shapes = {naming.split_key(key)[0]: reader.tensors[key].shape for key in keys}
    family = check_parameters(
        shapes, where, lambda path: reader.native_name(naming.PARAMETERS + path)
    )
    if naming.STEP not in reader.tensors:
        raise UserError(
            f"1 variable is missing: {reader.native_name(naming.STEP)}.",
            where=where,
            fix="The checkpoint is incomplete; get it again from where it came from.",
        )
    if family.encoder_only and reader.ref.format != "hf":
        norm = f"{naming.PARAMETERS}decoder/layers_0/pre_self_attention_layer_norm/scale"
        raise UserError(
            f"All variables of the decoder are missing, for instance {reader.native_name(norm)}.",
            where=where,
            fix="The checkpoint is incomplete; get it again from where it came from.",
        )
    check_types(reader)
    _check_slots(reader, shapes)
    return family


def check_step(reader: CheckpointReader, ref: CheckpointRef) -> None:
    """Checks that a checkpoint's step is the one in its name.

    Training may continue from a renamed checkpoint (--allow_changed); a conversion may not, because
    one of the two steps would name its output.

    Args:
      reader: A reader of the checkpoint.
      ref: The checkpoint as found; `reader.ref` may have the step in its content.

    Raises:
      UserError: If the two differ.
    """
    step = int(reader.read(naming.STEP))
    if ref.step not in (None, step):
        raise UserError(
            f"The name says step {ref.step}, but the checkpoint's own step is {step}.",
            where=ref.path,
            fix="Rename the checkpoint to the step that it holds.",
        )


def check_slots_step(reader: CheckpointReader) -> None:
    """Checks that the step of a Hugging Face model's slots is known; only the manifest has it.

    Raises:
      UserError: If there are slots but no manifest: they would count as those of step 0, where
        Adafactor discards what it has accumulated.
    """
    record = reader.ref.beside(MANIFEST)
    if reader.ref.format == "hf" and has_slots(reader) and not storage.is_file(record):
        slots = storage.join(reader.ref.path, hf.SLOTS_FILE)
        raise UserError(
            f"There are optimizer slots, but no {MANIFEST}, which holds their step.",
            where=slots,
            fix=f"Copy {MANIFEST} too. If the model was changed on purpose since it was converted,"
            f" remove {hf.SLOTS_FILE}; the step then counts as 0.",
        )


def check_optimizer(reader: CheckpointReader) -> None:
    """Checks that a T5X checkpoint has the state of an optimizer known here, and no other.

    Raises:
      UserError: If it has another's, or variables that are not trained, or if it was not copied.
    """
    if not isinstance(reader, jax_tree.JaxReader):
        return
    for names, what in (
        (reader.other_state, "has state that neither Adafactor nor Adam has"),
        (reader.lost_state, "names its optimizer's state, which is not there"),
    ):
        if names:
            raise UserError(
                f"The checkpoint {what}: {counted(len(names), 'variable')}, {some(names)}.",
                where=reader.ref.path,
                fix=f"{_NO_SLOTS} Training goes on from the result.",
            )


def _check_slots(reader: CheckpointReader, shapes: dict[str, tuple[int, ...]]) -> None:
    slots: dict[str, dict[str, TensorInfo]] = {path: {} for path in shapes}
    for key, info in reader.tensors.items():
        if key.startswith(naming.SLOTS):
            path, slot = naming.split_key(key)
            slots[path][slot or ""] = info
    if not has_slots(reader):
        return
    present_slots = {slot for present in slots.values() for slot in present}
    whole = next((each for each in naming.WHOLE_SLOTS if present_slots & {*each}), None)
    momentum = ("m",) if "m" in present_slots else ()
    # A matrix without any slot was excluded from training (utils.run.variable_filter), and vectors
    # without one are then fine too. If every matrix has its slots, a vector without one lost it.
    partly_trained = any(len(shapes[path]) > 1 and not slots[path] for path in shapes)
    for path, shape in shapes.items():
        present = slots[path]
        if partly_trained and not present:
            continue
        if len(shape) < 2 and (factored := sorted({"v_row", "v_col"} & present.keys())):
            name = reader.native_name(naming.slot_key(path, factored[0]))
            raise UserError(
                f"The slot {name} has the shape {list(present[factored[0]].shape)}, but only"
                f" matrices have such a slot, and its variable has the shape {list(shape)}.",
                where=reader.ref.path,
                fix=f"{_NO_SLOTS} Or get the whole checkpoint.",
            )
        # A parameter has both factored slots, or one unfactored second moment.
        adafactor = ("v_row", "v_col") if {"v_row", "v_col"} & present.keys() else ("v",)
        for slot in (*(whole or adafactor), *momentum):
            name = reader.native_name(naming.slot_key(path, slot))
            if slot not in present:
                raise UserError(
                    f"A slot is missing: {name}. Other variables have theirs.",
                    where=reader.ref.path,
                    fix=f"{_NO_SLOTS} Or get the whole checkpoint.",
                )
            expected = naming.slot_shape(slot, shape)
            if present[slot].shape != expected:
                raise UserError(
                    f"The slot {name} has the shape {present[slot].shape} where {expected} fits its"
                    f" variable of shape {shape}.",
                    where=reader.ref.path,
                    fix=_NO_SLOTS,
                )


def has_slots(reader: CheckpointReader) -> bool:
    """Returns whether a checkpoint holds optimizer slots."""
    return any(key.startswith(naming.SLOTS) for key in reader.tensors)


def load_any(
    path: str | os.PathLike[str], step: int | None = None, *, slots: bool = True
) -> dict[str, np.ndarray]:
    """Reads a whole checkpoint of any format into memory as T5X's flat tree.

    Args:
      path: See `find_checkpoint`.
      step: See `find_checkpoint`.
      slots: False omits the optimizer slots.

    Returns:
      Flat key -> array: `target/...`, `state/step` (int32) and, if the checkpoint has Adafactor
      slots, `state/param_states/...` with zeros of shape (1,) for unused slots, as T5X has them.
      Other dtypes are as stored.

    Raises:
      UserError: If there is no checkpoint, or it is damaged, incomplete or not a T5.
    """
    tree = {key: np.asarray(tensor) for key, tensor in open_any(path, step, slots=slots).items()}
    # Mesh TensorFlow's step is an int64, T5X's an int32.
    tree[naming.STEP] = tree[naming.STEP].astype(np.int32)
    return jax_tree.add_dummies(tree)


def open_any(
    path: str | os.PathLike[str], step: int | None = None, *, slots: bool = True
) -> dict[str, StoredTensor]:
    """Opens a checkpoint of any format as T5X's flat tree, whose tensors are read when used.

    Args:
      path: See `find_checkpoint`.
      step: See `find_checkpoint`.
      slots: False omits the optimizer slots.

    Returns:
      Flat key -> tensor, as `load_any` returns them, but without zeros for unused slots.

    Raises:
      UserError: If there is no checkpoint, or it is incomplete or not a T5.
    """
    return open_tree(find_checkpoint(path, step), slots=slots)


def open_tree(
    ref: CheckpointRef, *, slots: bool = True, encoder_only: bool = False
) -> dict[str, StoredTensor]:
    """Opens a checkpoint that was found, even an encoder alone if asked; see `open_any`."""
    reader = open_checkpoint(ref)
    family = check_checkpoint(reader)
    if family.encoder_only and not encoder_only:
        raise UserError(
            "The model is an encoder alone, which can neither score nor generate.",
            where=ref.path,
            fix="Compute its embeddings with `t0repro encode`, or give a model with a decoder.",
        )
    if slots:
        check_optimizer(reader)
        check_slots_step(reader)
    return {
        key: StoredTensor.open(reader, key)
        for key in reader.tensors
        if slots or not key.startswith(naming.SLOTS)
    }
