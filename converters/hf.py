"""Reads and writes Hugging Face's format: a directory of safetensors that transformers loads.

A directory with flax_model.msgpack, which transformers 4 could save, is read too.

Kernels are [out, in] and relative position biases [buckets, heads], the transposes of Mesh
TensorFlow's and T5X's. The format has no place for optimizer slots; they are in a file beside the
weights, which `HfReader` reads and transformers ignores.
"""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import numpy as np

from t0repro import storage
from t0repro.converters import hf_config, tensors
from t0repro.converters.safetensors_files import SafetensorsFile, shard_names
from t0repro.converters.t5x_msgpack import FlaxFile, torch_name
from t0repro.converters.tensors import CheckpointRef, Output, TensorInfo
from t0repro.converters.witnesses import MANIFEST, Manifest, check_names, describe, read_manifest
from t0repro.errors import UserError
from t0repro.parameters import naming
from t0repro.parameters.shape import recognize, unknown_variable
from t0repro.progress import say
from t0repro.storage.names import is_inside
from t0repro.words import json_fault

INDEX = "model.safetensors.index.json"
WEIGHTS = "model.safetensors"
FLAX_WEIGHTS = "flax_model.msgpack"
FLAX_INDEX = "flax_model.msgpack.index.json"
CONFIG = "config.json"
SLOTS_FILE = "optimizer_slots.safetensors"
SHARD_BYTES = 5_000_000_000  # transformers' own default size of a file is 5 GB

_File = SafetensorsFile | FlaxFile
_SHARD = re.compile(r".*-\d{5}-of-(\d{5})\.(?:safetensors|msgpack)")
_LOGITS = naming.PARAMETERS + "decoder/logits_dense/kernel"

# The names of the one embedding. A file may have any of them: safetensors' save_model keeps one,
# older transformers wrote all.
_EMBEDDINGS = ("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
_HEAD = "lm_head.weight"
# transformers before 4.0 gave cross-attention a bias of its own, which T5 has not and none reads.
_UNREAD = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
# What torch.compile, DataParallel, FSDP and PyTorch's checkpoint_wrapper insert into the names of a
# model that was saved while wrapped, and the fields of Lightning's, PEFT's and TRL's modules.
_WRAPPERS = re.compile(
    r"(?<![^.])(?:_orig_mod|module|_fsdp_wrapped_module|_checkpoint_wrapped_module"
    r"|base_model|model|params|pretrained_model|transformer)\."
)


def hf_ref(path: str) -> CheckpointRef | None:
    """Returns the Hugging Face checkpoint in a directory, or None if it has none."""
    names = (INDEX, WEIGHTS, FLAX_INDEX, FLAX_WEIGHTS)
    if not any(storage.is_file(storage.join(path, name)) for name in names):
        return None
    # Only a conversion's manifest has a global step.
    manifest = read_manifest(path)
    return CheckpointRef("hf", path, manifest.step if manifest else 0)


class HfReader:
    """Reads a Hugging Face T5 as T5X's tree, with its optimizer slots if they are beside it.

    Args:
      ref: The directory.
      norm_names: Mesh TensorFlow's spelling of the norms, from the conversion manifest.
      manifest: The conversion manifest; every tensor read is compared with it.

    Raises:
      UserError: If a file is missing or damaged, the model is not a T5, or a tensor is not in the
        table of names.
    """

    def __init__(
        self,
        ref: CheckpointRef,
        norm_names: naming.NormNames | None = None,
        manifest: Manifest | None = None,
    ):
        self._manifest = manifest
        self.norm_names: naming.NormNames | None = norm_names
        self.ref = ref
        self.config = read_config(ref.path)
        # For its errors: settings that no stack here computes are refused before weights are read.
        file = storage.join(ref.path, CONFIG)
        hf_config.arithmetic_of(self.config, file)
        if assumed := hf_config.describe_assumed_activation(self.config):
            _note(f"{file} names no feed_forward_proj; taking {assumed}")
        self._files: dict[str, _File] = {}
        self._places: dict[str, tuple[_File, str]] = {}
        self.tensors: dict[str, TensorInfo] = {naming.STEP: TensorInfo((), np.dtype(np.int32))}
        # Keys whose tensor is, in the file, another key's too.
        self.copies: frozenset[str] = frozenset()
        self._enter_weights()
        slots = storage.join(ref.path, SLOTS_FILE)
        if storage.is_file(slots):
            slots_file = SafetensorsFile(slots)
            self.tensors |= slots_file.tensors
            self._places |= {key: (slots_file, key) for key in slots_file.tensors}
        self._check_complete()
        self._check_sizes()

    def read(self, key: str) -> np.ndarray:
        """Reads one tensor, transposed if its layout row says so; the step as an int32."""
        if key not in self._places:
            return np.asarray(self.ref.step or 0, np.int32)
        file, name = self._places[key]
        array = file.read(name)
        if self._manifest:
            self._manifest.check(name, array, self.ref.path)
        return tensors.transpose(array) if is_transposed(key) else array

    def native_name(self, key: str) -> str:
        """Returns Hugging Face's name of a flat key, or the key itself if there is none."""
        if key in self._places:
            return self._places[key][1]
        return hf_name(key) or key

    def _enter_weights(self) -> None:
        config_file = storage.join(self.ref.path, CONFIG)
        encoder_only = hf_config.is_encoder(self.config)
        scaled = not encoder_only and hf_config.is_scaled(self.config, config_file)
        places = _weights(self.ref.path, scaled)
        if encoder_only:
            # As transformers' encoder classes do: a file may hold the whole model.
            others = ("decoder.block.", "decoder.final", _HEAD)
            places = {name: place for name, place in places.items() if not name.startswith(others)}
        unknown = []
        # With one layer, umT5's bias equals one that all layers share.
        several = any(".block.1." in name for name in places)
        bias_per_layer = several and self.config.get("model_type") == "umt5"
        for name in list(places):
            if name == _UNREAD or self._is_zero_bias(name, *places[name]):
                del places[name]
            elif name not in _EMBEDDINGS and not naming.find_row(
                name, "hf", bias_per_layer=bias_per_layer
            ):
                unknown.append(name)
        if unknown:
            numbers = [int(n) for name in unknown for n in re.findall(r"\.block\.(\d+)\.", name)]
            raise unknown_variable(unknown, naming.known_names("hf", numbers), self.ref.path)
        logits = None
        if not encoder_only:
            logits = hf_config.logits_of(self.config, _HEAD in places, config_file)
        self._keep_one_embedding(places, logits)
        for name, (file, stored) in places.items():
            row = naming.find_row(name, "hf", bias_per_layer=bias_per_layer)
            assert row is not None, name
            key = naming.PARAMETERS + naming.name_of(*row, "t5x")
            info = file.tensors[stored]
            shape = info.shape[::-1] if row[0].transposed_in_hf else info.shape
            self.tensors[key] = TensorInfo(shape, info.dtype)
            self._places[key] = file, stored
        if logits == "embedding":
            # T5 1.0's tied logits are scaled and these are not: Mesh TensorFlow and T5X need a
            # kernel for that.
            # The table's first row is the embedding.
            embedding = self.tensors[naming.PARAMETERS + naming.TABLE[0].t5x]
            self.tensors[_LOGITS] = TensorInfo(embedding.shape[::-1], embedding.dtype)
            self.copies = frozenset({_LOGITS})
            self._places[_LOGITS] = places[_EMBEDDINGS[0]]

    def _is_zero_bias(self, name: str, file: _File, stored: str) -> bool:
        """Whether a tensor is the zero bias that the oldest transformers gave every layer norm.

        Raises:
          UserError: If it is such a bias, but not zero.
        """
        if not name.endswith("layer_norm.bias"):
            return False
        if file.read(stored).any():
            raise UserError(
                f"{stored} is not zero, but a T5's layer norm has no bias.",
                where=self.ref.path,
                fix="Give a model that was trained with T5's own layer norm.",
            )
        return True

    def _keep_one_embedding(
        self, places: dict[str, tuple[_File, str]], logits: hf_config.Logits | None
    ) -> None:
        """Keeps the embedding under its first name; every other name must hold the same."""
        names = (*_EMBEDDINGS, _HEAD) if logits == "scaled embedding" else _EMBEDDINGS
        copies = [(name, *places.pop(name)) for name in names if name in places]
        if not copies and _HEAD in places and hf_config.is_tied(self.config):
            copies = [(_HEAD, *places[_HEAD])]
        if not copies:
            raise UserError(
                f"The embedding is missing: the weights have none of {', '.join(_EMBEDDINGS)}.",
                where=self.ref.path,
                fix="Copy all of the model's files again.",
            )
        (first, file, stored), *others = copies
        places[_EMBEDDINGS[0]] = file, stored
        embedding = describe(file.read(stored)) if others else None
        for name, other, stored in others:
            if describe(other.read(stored)) != embedding:
                raise self._differs(name, first)

    def _differs(self, name: str, first: str) -> UserError:
        if name == _HEAD:
            return UserError(
                f"{CONFIG} says that the logits come from the embedding, but {name} differs"
                f" from {first}.",
                where=self.ref.path,
                fix='If the model is a T5 1.1 or a umT5, set "tie_word_embeddings": false in'
                ' config.json (and "scale_decoder_outputs": false, if it is there). If it is a T5'
                " 1.0 that got a kernel of its own in transformers 5, which scales its logits, also"
                f" multiply {name} by d_model**-0.5.",
            )
        return UserError(
            f"{name} differs from {first}, but a T5 has one embedding for both towers.",
            where=self.ref.path,
            fix="Save the model again with the embedding that it was trained with alone.",
        )

    def _check_complete(self) -> None:
        """Checks that everything a conversion wrote still exists, slots in their own file too."""
        present = {name for _, name in self._places.values()}
        if gone := [
            name
            for name in (self._manifest.tensors if self._manifest else ())
            if name not in present
        ]:
            raise UserError(
                f"{len(gone)} of the tensors that the conversion wrote are gone, for instance"
                f" {gone[0]}.",
                where=self.ref.path,
                fix=f"Copy all of the directory's files, {SLOTS_FILE} too if it had one. If they"
                f" were left out on purpose, remove {MANIFEST}; the step then counts as 0.",
            )

    def _check_sizes(self) -> None:
        """Checks that the weights have the sizes in config.json."""
        try:
            family = recognize({key: info.shape for key, info in self.tensors.items()})
        except UserError:
            return  # not a complete T5: `sources.check_checkpoint` names what is missing
        hf_config.check_sizes(self.config, family, storage.join(self.ref.path, CONFIG))


@functools.cache
def _note(text: str) -> None:
    """Reports what was assumed, once however often a checkpoint is opened."""
    say(f"note: {text}")


def is_transposed(key: str) -> bool:
    """Whether Hugging Face stores the transpose of a flat key's tensor."""
    if not key.startswith(naming.PARAMETERS):
        return False
    row = naming.find_row(key.removeprefix(naming.PARAMETERS), "t5x")
    return bool(row) and row[0].transposed_in_hf


def hf_name(key: str) -> str | None:
    """Hugging Face's name of a parameter's flat key; None for a slot or the step."""
    if not key.startswith(naming.PARAMETERS):
        return None
    row = naming.find_row(key.removeprefix(naming.PARAMETERS), "t5x")
    return row and naming.name_of(*row, "hf")


def read_arithmetic(path: str) -> hf_config.Computation:
    """The arithmetic in a directory's config.json; see `hf_config.arithmetic_of`."""
    return hf_config.arithmetic_of(read_config(path), storage.join(path, CONFIG))


def read_token_ids(ref: CheckpointRef) -> hf_config.TokenIds:
    """The ids in a checkpoint's config.json; T5's if it is of another format."""
    return (
        hf_config.token_ids(read_config(ref.path)) if ref.format == "hf" else hf_config.TokenIds()
    )


def read_config(path: str) -> Mapping[str, Any]:
    """The content of a directory's config.json.

    Raises:
      UserError: If there is none, or it is not a JSON object.
    """
    file = storage.join(path, CONFIG)
    try:
        config = _json(file)
    except OSError:
        raise UserError(
            f"The directory has weights but no {CONFIG}.",
            where=path,
            fix="Copy all of its files. If a program saved the weights alone, as accelerate does,"
            f" copy the {CONFIG} of the model that it began with.",
        ) from None
    except (ValueError, TypeError) as error:
        fault = f": {json_fault(error)}" if isinstance(error, ValueError) else ""
        raise UserError(
            f"{CONFIG} is not a JSON object{fault}.", where=file, fix="Copy the file again."
        ) from None
    hf_config.check_field_types(config, file)
    return config


def _json(path: str) -> dict[str, Any]:
    """A JSON object in a file.

    Raises:
      OSError: if it cannot be read.
      ValueError: if it is not JSON, or is nested deeper than Python can follow.
      TypeError: if it is JSON of another kind.
    """
    try:
        content = json.loads(storage.read(path))
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not isinstance(content, dict):
        raise TypeError(type(content).__name__)
    return content


def _weights(path: str, scaled: bool) -> dict[str, tuple[_File, str]]:
    """PyTorch's name of each tensor -> its file and its name there; safetensors before Flax's.

    Args:
      path: the directory.
      scaled: whether the logits come from the embedding, so that lm_head.weight is a copy of it.
    """
    safe = any(storage.is_file(storage.join(path, name)) for name in (INDEX, WEIGHTS))
    open_file, name_of = (SafetensorsFile, str) if safe else (FlaxFile, torch_name)
    weights, index_name = (WEIGHTS, INDEX) if safe else (FLAX_WEIGHTS, FLAX_INDEX)
    whole, index = storage.join(path, weights), storage.join(path, index_name)
    # Looked for first, as transformers does: it leaves the index of shards that a single file
    # has replaced.
    if storage.is_file(whole) or not storage.is_file(index):
        return _unwrap({whole: open_file(whole)})
    try:
        content = _json(index)["weight_map"].items()
        names = {name_of(str(name)): str(file) for name, file in content}
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(
            f"{index_name} is not an index of tensors.", where=index, fix="Copy the file again."
        ) from None
    if outside := [file for file in names.values() if not is_inside(file)]:
        raise UserError(
            f"{index_name} names the file {outside[0]!r}, which is not in its own directory.",
            where=index,
            fix="Do not trust this model; get it again from where it came from.",
        )
    files = {name: open_file(storage.join(path, name)) for name in sorted(set(names.values()))}
    _check_index(index, names, files, (*_EMBEDDINGS, _HEAD) if scaled else _EMBEDDINGS)
    return _unwrap(files)


def _unwrap(files: Mapping[str, _File]) -> dict[str, tuple[_File, str]]:
    """The tensors of all files by their names in a model that nothing wraps."""
    places: dict[str, tuple[_File, str]] = {}
    field = _field_of([_WRAPPERS.sub("", name) for file in files.values() for name in file.tensors])
    for path, file in files.items():
        for stored in file.tensors:
            name = _WRAPPERS.sub("", stored).removeprefix(field)
            if name in places:
                raise UserError(
                    f"There are two tensors {name}: {stored} and {places[name][1]}.",
                    where=path,
                    fix="Save the model again, without what torch.compile or DataParallel wrapped.",
                )
            places[name] = file, stored
    return places


def _field_of(names: Collection[str]) -> str:
    """What all names begin with if a field of another module held the model: "net."; or ""."""
    known = "encoder.block.0.layer.0.SelfAttention.q.weight"
    fields = (name.removesuffix(known) for name in names if name.endswith(known))
    return next((field for field in fields if all(n.startswith(field) for n in names)), "")


def _check_index(
    index: str, names: Mapping[str, str], files: Mapping[str, _File], copies: Collection[str]
) -> None:
    """Checks that an index names every tensor of its files, and a file of every number.

    Names of `copies` are left out: an index may name all of the embedding's, of which a file keeps
    one (the hub's flan-t5-xl), or the one of which a file has copies.
    """

    def drop_copies(names: Iterable[str]) -> list[str]:
        return [name for name in names if _WRAPPERS.sub("", name) not in copies]

    for file, content in files.items():
        check_names(
            drop_copies(content.tensors),
            drop_copies(name for name, holder in names.items() if holder == file),
            index,
            lambda _, file=file: storage.join(os.path.dirname(index), file),
        )
    # Each shard's name says how many there are (-00001-of-00003), so a cut index shows.
    counts = {match[1] for match in map(_SHARD.fullmatch, files) if match}
    if counts and counts != {f"{len(files):05d}"}:
        raise UserError(
            f"{os.path.basename(index)} names {len(files)} files of {', '.join(sorted(counts))}.",
            where=index,
            fix="Copy the file again.",
        )


def hf_outputs(tensors: Mapping[str, TensorInfo]) -> list[Output]:
    """The tensors of the directory's files: weights in shards, slots and step in a separate file.

    Args:
      tensors: flat key -> shape and type.
    """
    weights = [(key, info) for key, info in tensors.items() if key.startswith(naming.PARAMETERS)]
    files = shard_names([info.nbytes for _, info in weights], SHARD_BYTES)
    outputs = [_weight(key, info, file) for (key, info), file in zip(weights, files, strict=True)]
    slots = {key: info for key, info in tensors.items() if key.startswith(naming.SLOTS)}
    for key, info in slots.items():
        # Slots keep T5X's names and axes: no other program reads this file.
        outputs.append(Output(key, info, (key,), next, SLOTS_FILE))
    return outputs


def _weight(key: str, info: TensorInfo, file: str) -> Output:
    name = hf_name(key)
    assert name is not None
    if not is_transposed(key):
        return Output(name, info, (key,), next, file)
    transposed = TensorInfo(info.shape[::-1], info.dtype)
    return Output(name, transposed, (key,), lambda arrays: tensors.transpose(next(arrays)), file)
