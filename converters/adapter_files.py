"""Checkpoints of adapters, ours and PEFT's: the adapter alone, with a note of its base.

A run that trains an adapter saves it as T5X's tree, with the note in a file beside it.
`sources.open_checkpoint` reads such a checkpoint as the base with the adapter merged into it.
"""

from __future__ import annotations

import abc
import dataclasses
import json
import math
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from t0repro import storage
from t0repro.adapters import (
    IA3_INPUT,
    IA3_OUTPUT,
    LORA_A,
    LORA_B,
    NAMES,
    Adapter,
    check_adapter,
    kernels,
)
from t0repro.converters.jax_tree import Renamed
from t0repro.converters.orbax_dir import OrbaxArrays
from t0repro.converters.peft_config import PEFT_CONFIG, PeftConfig
from t0repro.converters.safetensors_files import SafetensorsFile
from t0repro.converters.tensors import (
    CheckpointReader,
    CheckpointRef,
    Output,
    TensorInfo,
    check_types,
    compare_shapes,
    transpose,
)
from t0repro.converters.witnesses import ADAPTER
from t0repro.errors import UserError
from t0repro.parameters import naming
from t0repro.parameters.shape import ModelShape
from t0repro.storage import write_atomically
from t0repro.words import counted, some


@dataclasses.dataclass(frozen=True)
class AdapterNote:
    """The content of ADAPTER.

    Attributes:
      adapter: Its settings.
      base: The path of the base's checkpoint.
      digest: Hash of the base's parameters (`ParametersDigest`); None in a folder that PEFT wrote.
    """

    adapter: Adapter
    base: str
    digest: str | None

    @classmethod
    def read(cls, folder: str | os.PathLike[str]) -> AdapterNote:
        """Reads ADAPTER from a folder.

        Raises:
          UserError: If it is missing or damaged.
        """
        path = storage.join(os.fspath(folder), ADAPTER)
        if not storage.is_file(path):
            raise UserError(
                "This is not an adapter's checkpoint.",
                where=os.fspath(folder),
                fix="Name a checkpoint of a run that trains an adapter.",
            )
        try:
            content = json.loads(storage.read(path))
            # JSON gives a list, which would not equal the tuple of a run's own Adapter.
            adapter = {**content["adapter"], "targets": tuple(content["adapter"]["targets"])}
            note = cls(check_adapter(Adapter(**adapter)), content["base"], content["digest"])
            if not isinstance(note.base, str) or not isinstance(note.digest, str):
                raise TypeError("base and digest are strings")
            return note
        except (ValueError, TypeError, KeyError, RecursionError, UserError) as error:
            why = error.what.rstrip(".") if isinstance(error, UserError) else error
            raise UserError(
                f"The adapter's description cannot be read: {why}.",
                where=path,
                fix="Copy the whole checkpoint again.",
            ) from error

    def write(self, folder: Path) -> None:
        """Writes ADAPTER into a folder."""
        write_atomically(folder / ADAPTER, self.to_json())

    def to_json(self) -> str:
        """The content of ADAPTER."""
        return json.dumps(dataclasses.asdict(self), indent=1) + "\n"

    def check_base(self, digest: str, path: str) -> None:
        """Raises a UserError, with both hashes, unless the base here is the adapter's."""
        if self.digest not in (None, digest):
            raise UserError(
                f"The adapter was trained on another base: the hash of its parameters is"
                f" {self.digest} ({self.base}), and here it is {digest}.",
                where=path,
                fix="Give the base that the adapter was trained on.",
            )


def is_adapter(ref: CheckpointRef) -> bool:
    """Whether a checkpoint is an adapter's."""
    # A run saves an adapter in a model's format; only the note in its folder tells them apart.
    return ref.format == "peft" or storage.is_file(storage.join(ref.path, ADAPTER))


def check_is_adapter(ref: CheckpointRef) -> None:
    """Raises a UserError unless a checkpoint is an adapter's."""
    if not is_adapter(ref):
        raise UserError(
            "The checkpoint is a whole model's, not an adapter's.",
            where=ref.path,
            fix="Name a checkpoint of a run that trains an adapter, or a folder of PEFT's.",
        )


class AdapterCheckpoint(abc.ABC):
    """An adapter's open checkpoint; its tensors are named as those of a model, `target/...`.

    It has no norms, so its `norm_names` are None.
    """

    ref: CheckpointRef
    note: AdapterNote
    tensors: Mapping[str, TensorInfo]
    norm_names: naming.NormNames | None = None

    def read(self, key: str) -> np.ndarray:
        """Reads one tensor; see CheckpointReader.

        Raises:
          UserError: If it is damaged, or a parameter is NaN or infinite.
        """
        array = self._values(key)
        if key.startswith(naming.PARAMETERS):
            _check_finite(array, f"{self.native_name(key)} of the adapter", self.ref.path)
        return array

    @abc.abstractmethod
    def _values(self, key: str) -> np.ndarray:
        """Reads one tensor."""

    @abc.abstractmethod
    def native_name(self, key: str) -> str:
        """The key's name in the checkpoint's own format."""

    def check_shape(self, adapter: Adapter, shape: ModelShape) -> None:
        """Raises a UserError unless the parameters are those of an adapter of a model."""
        check_types(self)
        shapes = {
            key.removeprefix(naming.PARAMETERS): info.shape
            for key, info in self.tensors.items()
            if key.startswith(naming.PARAMETERS)
        }
        expected = adapter.parameter_shapes(shape, self.ref.path)
        for path, then, now in compare_shapes(shapes, expected):
            raise UserError(
                f"The checkpoint is of another adapter, or for another model: {path} is {then} in"
                f" the checkpoint and {now} in the run.",
                where=self.ref.path,
                fix="Give the model and the adapter as they were.",
            )

    def check_continues(self, adapter: Adapter, shape: ModelShape) -> None:
        """Raises a UserError unless an adapter's training can start from this one."""
        self.check_shape(adapter, shape)
        then, now = self.note.adapter.scale, adapter.scale
        # The shapes do not show the scale, and the same parameters change the kernels by it.
        if not math.isclose(then, now, rel_tol=1e-6):
            raise UserError(
                f"The adapter was trained with alpha / rank = {then:g}, and here it is {now:g}.",
                where=self.ref.path,
                fix=f"Bind adapters.lora.alpha = {then * adapter.rank:g}.",
            )


def open_adapter(ref: CheckpointRef) -> AdapterCheckpoint:
    """Opens an adapter's checkpoint.

    Raises:
      UserError: If it is damaged, or has an option or a tensor that is not supported.
    """
    return _PeftReader(ref) if ref.format == "peft" else AdapterReader(ref)


def note_of(ref: CheckpointRef) -> AdapterNote:
    """The note in an adapter's checkpoint.

    Raises:
      UserError: See `open_adapter`.
    """
    return _PeftReader(ref).note if ref.format == "peft" else AdapterNote.read(ref.path)


class AdapterReader(AdapterCheckpoint):
    """Reads an adapter's checkpoint that a run saved.

    Args:
      ref: The checkpoint.

    Raises:
      UserError: If it is damaged.
    """

    def __init__(self, ref: CheckpointRef):
        self.ref, self.note = ref, AdapterNote.read(ref.path)
        self._arrays = Renamed(OrbaxArrays(ref.path))
        self.tensors = self._arrays.tensors

    def _values(self, key: str) -> np.ndarray:
        return self._arrays.read(key)

    def native_name(self, key: str) -> str:
        """The key itself."""
        return key


class MergedReader:
    """Reads a base with an adapter merged into it: parameters in float32, without slots.

    Args:
      adapter: The adapter's checkpoint, whose step the merged model has.
      base: The base.
      shape: The base's shape.
      note: The adapter, and its base's path and hash.

    Raises:
      UserError: If the adapter's checkpoint is not for a model of this shape.
    """

    def __init__(
        self,
        adapter: AdapterCheckpoint,
        base: CheckpointReader,
        shape: ModelShape,
        note: AdapterNote,
    ):
        adapter.check_shape(note.adapter, shape)
        self.ref, self.note, self.shape = adapter.ref, note, shape
        self.norm_names: naming.NormNames | None = base.norm_names
        # The base's slots are left out: they are statistics of the base's own updates.
        self.base, self.adapter = base, adapter
        self.tensors: Mapping[str, TensorInfo] = {
            key: TensorInfo(info.shape, np.dtype(np.float32))
            for key, info in base.tensors.items()
            if key.startswith(naming.PARAMETERS)
        } | {naming.STEP: adapter.tensors[naming.STEP]}

    def read(self, key: str) -> np.ndarray:
        """Reads one tensor; a kernel that has an adapter is merged."""
        if key == naming.STEP:
            return self.adapter.read(key)
        # The adapter was trained on values of this type.
        base_dtype = np.dtype(self.note.adapter.base_dtype)
        value = self.base.read(key).astype(base_dtype).astype(np.float32)
        owner, _, name = key.rpartition("/")
        params = {
            each: self.adapter.read(f"{owner}/{each}")
            for each in NAMES
            if name == "kernel" and f"{owner}/{each}" in self.adapter.tensors
        }
        if not params:
            return value
        kernel = merge_kernel(value, params, self.note.adapter.scale)
        _check_finite(kernel, f"{self.native_name(key)}, merged with the adapter,", self.ref.path)
        return kernel

    def native_name(self, key: str) -> str:
        """The name of a tensor in the base's format."""
        return self.base.native_name(key)


def merge_kernel(kernel: np.ndarray, params: Mapping[str, np.ndarray], scale: float) -> np.ndarray:
    """A kernel plus an adapter's change, computed in float64 and rounded once, to float32.

    Args:
      kernel: [in, out].
      params: The adapter's parameters for it, by their names.
      scale: `Adapter.scale`.
    """
    total = kernel.astype(np.float64)
    if LORA_A in params:
        first = params[LORA_A].astype(np.float64) * scale
        second = params[LORA_B].astype(np.float64)
        # One column at a time: how a matmul orders its sums depends on the machine.
        for column in range(first.shape[1]):
            total += first[:, column, None] * second[None, column]
    if IA3_INPUT in params:
        total *= params[IA3_INPUT].astype(np.float64)[:, None]
    if IA3_OUTPUT in params:
        total *= params[IA3_OUTPUT].astype(np.float64)
    with np.errstate(over="ignore"):  # the caller refuses what is infinite then
        return total.astype(np.float32)


def _check_finite(array: np.ndarray, name: str, where: str) -> None:
    if bad := int(np.count_nonzero(~np.isfinite(array))):
        raise UserError(
            f"{name} has {counted(bad, 'value')} that {'is' if bad == 1 else 'are'} NaN or"
            " infinite.",
            where=where,
            fix="Take an earlier checkpoint of the adapter, or copy it again.",
        )


# PEFT names a module as transformers does, below `base_model.model.`, and stores [out, in] as torch
# does. So `lora_a` is the transpose of lora_A.weight. `ia3_l` is [out, 1] where it multiplies a
# module's outputs and [1, in] where it multiplies its inputs (feedforward_modules).
#
# The file's tensors give the adapter's targets. Which modules they have to be of, target_modules
# and the options like it say (peft_config.py), for PEFT adapts those, tensors or none.
# Facts of PEFT 0.21.0 (peft/tuners/ia3/layer.py).

_PEFT_WEIGHTS = "adapter_model.safetensors"
_PICKLED = "adapter_model.bin"
# In the metadata of _PEFT_WEIGHTS, which PEFT neither reads nor keeps when it saves.
_BASE_HASH, _STEP = "base_hash", "step"

_BELOW = "base_model.model."
_MODULE = re.compile(
    rf"{re.escape(_BELOW)}(?P<module>.+)\.(?P<part>lora_A\.weight|lora_B\.weight|ia3_l)"
)
# PEFT saves no adapter's name; a state_dict that a program saved itself has `default`, the first
# adapter's, and may begin below PEFT's modules or above them.
_OTHERS_BEGIN = re.compile(rf"(?:module\.)?(?:{re.escape(_BELOW)})?")
_ADAPTER_NAME = re.compile(r"\.default(?=\.weight$|$)")
_LORA_PARTS = {LORA_A: "lora_A.weight", LORA_B: "lora_B.weight"}


def peft_ref(path: str) -> CheckpointRef | None:
    """The adapter in a folder that PEFT loads; None if it holds none."""
    has_config = storage.is_file(storage.join(path, PEFT_CONFIG))
    return CheckpointRef("peft", path, None) if has_config else None


class _PeftReader(AdapterCheckpoint):
    """Reads a folder that PEFT loads; its parameters are read in float32.

    Args:
      ref: The folder.

    Raises:
      UserError: If a file is missing or damaged; naming an option or a tensor that no adapter here
        has.
    """

    def __init__(self, ref: CheckpointRef):
        self.ref, self._config = ref, PeftConfig.read(ref.path)
        self._path = storage.join(ref.path, _PEFT_WEIGHTS)
        if not storage.is_file(self._path):
            pickled = storage.is_file(storage.join(ref.path, _PICKLED))
            raise UserError(
                f"The adapter has no {_PEFT_WEIGHTS}{f', but a {_PICKLED}' if pickled else ''}.",
                where=ref.path,
                fix="Load it in PEFT and save it with safe_serialization=True."
                if pickled
                else "Copy the whole folder again.",
            )
        self._file = SafetensorsFile(self._path)
        step = self._file.metadata.get(_STEP, "0")
        if not re.fullmatch(r"[0-9]{1,10}", step) or int(step) > np.iinfo(np.int32).max:
            raise UserError(
                f"The step in the file's metadata is {step!r}, not a whole number below 2**31.",
                where=self._path,
                fix="Copy the file again.",
            )
        # PEFT has no step: it is 0 unless a conversion noted one in the file.
        self._step = int(step)
        self._stored = self._by_peft_name()
        self._names = {self._tree_path(name): name for name in self._stored}
        adapter = self._config.adapter(_targets(self._names), self._modules())
        tensors = {}
        for path, name in self._names.items():
            shape = self._file.tensors[self._stored[name]].shape
            # torch keeps a kernel as [out, in], and PEFT a vector of (IA)3 as a matrix.
            shape = (math.prod(shape),) if name.endswith("ia3_l") else shape[::-1]
            if self._config.has_patterns:
                shape = self._check_rank(name, shape, adapter.rank)
            tensors[naming.PARAMETERS + path] = TensorInfo(shape, np.dtype(np.float32))
        self.tensors = {**tensors, naming.STEP: TensorInfo((), np.dtype(np.int32))}
        digest = self._file.metadata.get(_BASE_HASH)
        self.note = AdapterNote(adapter, self._config.base, digest)

    def check_shape(self, adapter: Adapter, shape: ModelShape) -> None:
        """Also raises a UserError unless PEFT would adapt the same modules."""
        self._check_complete(shape)
        super().check_shape(adapter, shape)

    def native_name(self, key: str) -> str:
        """PEFT's name of a tensor."""
        return self._names.get(key.removeprefix(naming.PARAMETERS), key)

    def _values(self, key: str) -> np.ndarray:
        if key == naming.STEP:
            return np.asarray(self._step, np.int32)
        name = self._names[key.removeprefix(naming.PARAMETERS)]
        # A float64 beyond float32 becomes infinite, which `read` refuses.
        with np.errstate(over="ignore"):
            array = self._file.read(self._stored[name]).astype(np.float32)
        if name.endswith("ia3_l"):
            return array.reshape(-1)
        if self._config.has_patterns:
            array = self._pad_rank(name, array, self.tensors[key].shape[::-1])
        return transpose(array)

    # rank_pattern and alpha_pattern give modules of one adapter other ranks and scales. Zeros make
    # each rank the largest one, and a factor in lora_A each scale: the products stay the same.

    def _check_rank(self, name: str, shape: tuple[int, ...], largest: int) -> tuple[int, ...]:
        """The shape of a part of LoRA's with the largest rank.

        Raises:
          UserError: If its own rank is not that of its module.
        """
        axis = 1 if name.endswith(_LORA_PARTS[LORA_A]) else 0
        rank = self._config.rank_of(self._module_of(name))
        if shape[axis] != rank:
            raise UserError(
                f"{name} has rank {shape[axis]}; r and rank_pattern say {rank}.",
                where=self._config.where,
                fix="Copy the whole folder again. If several patterns match, which PEFT saves in"
                " alphabetical order, leave the one that was first in training.",
            )
        return (*shape[:axis], largest, *shape[axis + 1 :])

    def _pad_rank(self, name: str, array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        """A part of LoRA's in a shape with the largest rank, and with its module's scale in A."""
        padded = np.zeros(shape, np.float32)
        padded[: array.shape[0], : array.shape[1]] = array
        if name.endswith(_LORA_PARTS[LORA_A]):
            padded *= self._config.scale_of(self._module_of(name)) / self.note.adapter.scale
        return padded

    def _module_of(self, name: str) -> str:
        match = _MODULE.fullmatch(name)
        assert match is not None, name  # `_tree_path` has refused other names
        return match["module"]

    def _modules(self) -> set[str]:
        return set(map(self._module_of, self._stored))

    def _check_complete(self, shape: ModelShape) -> None:
        """Raises a UserError unless the file has the tensors of a model that PEFT would adapt."""
        parts = ["ia3_l"] if self._config.kind == "ia3" else list(_LORA_PARTS.values())
        chosen = self._config.chosen([_module(path) for path in kernels(shape)], self._modules())
        wanted = {f"{_BELOW}{module}.{part}" for module in chosen for part in parts}
        if missing := sorted(wanted - self._stored.keys()):
            raise UserError(
                f"{counted(len(missing), 'tensor')} of the adapter"
                f" {'is' if len(missing) == 1 else 'are'} missing: {some(missing)}.",
                where=self._path,
                fix=f"Copy the whole folder again. Which modules have an adapter is in"
                f" {PEFT_CONFIG}: target_modules and the fields like it.",
            )
        if extra := sorted(self._stored.keys() - wanted):
            raise UserError(
                f"PEFT would not use {some(extra)}: target_modules and the fields like it do not"
                " choose this part of the model.",
                where=self._config.where,
                fix="Copy the whole folder again, and give the base that the adapter was trained"
                " on.",
            )

    def _by_peft_name(self) -> dict[str, str]:
        """PEFT's name of each tensor -> its name in the file."""
        names: dict[str, str] = {}
        for stored in self._file.tensors:
            below = _OTHERS_BEGIN.sub("", stored, count=1)
            name = _BELOW + _ADAPTER_NAME.sub("", below)
            if name in names:
                raise UserError(
                    f"There are two tensors {name}: {names[name]} and {stored}.",
                    where=self._path,
                    fix="Save the adapter again with PEFT's save_pretrained.",
                )
            names[name] = stored
        return names

    def _tree_path(self, name: str) -> str:
        """A tensor's path in T5X's tree.

        Raises:
          UserError: If it is not a tensor of a kernel's adapter.
        """
        info = self._file.tensors[self._stored[name]]
        match = _MODULE.fullmatch(name)
        row = match and naming.find_row(f"{match['module']}.weight", "hf")
        if not match or not row or row[1] is None or not row[0].t5x.endswith("/kernel"):
            raise UserError(
                f"{name} is not a parameter of a LoRA or (IA)3 on a kernel of a T5's layer.",
                where=self._path,
                fix="Train the adapter without modules_to_save and on layers alone: not on shared,"
                " embed_tokens or lm_head.",
            )
        kind = "ia3" if match["part"] == "ia3_l" else "lora"
        if len(info.shape) != 2 or info.dtype.kind in "iu" or kind != self._config.kind:
            raise UserError(
                f"{name} has dtype {info.dtype.name} and shape {list(info.shape)}; expected a"
                f" float {'vector' if self._config.kind == 'ia3' else 'matrix'} of peft_type"
                f" {self._config.kind.upper()}.",
                where=self._path,
                fix="Copy the folder again.",
            )
        owner = naming.name_of(*row, "t5x").removesuffix("kernel")
        if kind == "lora":
            return owner + (LORA_A if "lora_A" in match["part"] else LORA_B)
        return owner + self._ia3_name(match["module"], info.shape, owner.endswith("mlp/wo/"))

    def _ia3_name(self, module: str, shape: tuple[int, ...], is_wo: bool) -> str:
        """The name of (IA)3's vector on a module: IA3_INPUT or IA3_OUTPUT."""
        reads = self._config.multiplies_input(module)
        what = "reads" if reads else "gives"
        if reads != is_wo:
            raise UserError(
                f"feedforward_modules: (IA)3 multiplies what {module} {what}. Here it multiplies"
                " what wo reads and what other modules give.",
                where=self._config.where,
                fix="Train it with wo as the only module of feedforward_modules, as PEFT's default"
                " for T5 does.",
            )
        if shape[1 - reads] != 1:
            raise UserError(
                f"{module}: by feedforward_modules, (IA)3 multiplies what the module {what}, but"
                f" its vector is of shape {list(shape)}.",
                where=self._config.where,
                fix="Copy the whole folder again.",
            )
        return IA3_INPUT if reads else IA3_OUTPUT


def _targets(paths: Iterable[str]) -> tuple[str, ...]:
    """Regular expressions for exactly the kernels of an adapter's parameters."""
    layers: dict[str, set[int]] = {}
    for path in paths:
        before, layer, after = re.split(r"layers_(\d+)", f"{path.rpartition('/')[0]}/kernel")
        layers.setdefault(f"{before}layers_({{}}){after}", set()).add(int(layer))
    return tuple(
        pattern.format("|".join(map(str, sorted(numbers)))) for pattern, numbers in layers.items()
    )


def peft_outputs(tensors: Mapping[str, TensorInfo]) -> list[Output]:
    """The tensors of the folder's file.

    Args:
      tensors: Flat key -> shape and type of an adapter's parameters; slots and the step are left
        out.
    """
    return [
        _output(key, info)
        for key, info in sorted(tensors.items())
        if key.startswith(naming.PARAMETERS)
    ]


def peft_metadata(step: int, digest: str | None) -> dict[str, str]:
    """The file's metadata: the global step, and the hash of the base."""
    return {"format": "pt", _STEP: str(step), **({_BASE_HASH: digest} if digest else {})}


def _output(key: str, info: TensorInfo) -> Output:
    owner, _, name = key.removeprefix(naming.PARAMETERS).rpartition("/")
    stem = _BELOW + _module(f"{owner}/kernel")
    if name in _LORA_PARTS:
        return Output(
            f"{stem}.{_LORA_PARTS[name]}",
            TensorInfo(info.shape[::-1], info.dtype),
            (key,),
            lambda arrays: transpose(next(arrays)),
            _PEFT_WEIGHTS,
        )
    shape = (1, *info.shape) if name == IA3_INPUT else (*info.shape, 1)
    return Output(
        f"{stem}.ia3_l",
        TensorInfo(shape, info.dtype),
        (key,),
        lambda arrays: next(arrays).reshape(shape),
        _PEFT_WEIGHTS,
    )


def _module(kernel: str) -> str:
    """Transformers' module of a kernel in T5X's tree."""
    row = naming.find_row(kernel, "t5x")
    assert row is not None
    return naming.name_of(*row, "hf").removesuffix(".weight")


def peft_config_text(adapter: Adapter, shape: ModelShape, base: str) -> str:
    """The text of adapter_config.json.

    Args:
      adapter: The adapter.
      shape: The model's shape.
      base: What PEFT loads the base from.
    """
    modules = {_module(path) for path in adapter.adapted_kernels(shape)}
    # For PEFT, a name in the list stands for every module whose name ends with it: the chosen
    # modules' last names do where they match no other.
    ends = {name.rpartition(".")[2] for name in modules}
    known = {_module(path) for path in kernels(shape)}
    covered = {name for name in known if name.rpartition(".")[2] in ends}
    targets = sorted(ends if covered == modules else modules)
    config: dict[str, Any] = {
        "peft_type": {"lora": "LORA", "ia3": "IA3"}[adapter.kind],
        # PEFT 0.21.0's class for SEQ_2_SEQ_LM asks the model for a method that transformers 5.23
        # renamed; its plain class computes the same.
        "task_type": None,
        "base_model_name_or_path": base,
        "inference_mode": True,
        "target_modules": targets,
        "modules_to_save": None,
        "fan_in_fan_out": False,
    }
    if adapter.kind == "ia3":
        reads = [name for name in targets if name.rpartition(".")[2] == "wo"]
        config |= {"feedforward_modules": reads, "init_ia3_weights": True}
    else:
        alpha = adapter.alpha
        config |= {
            "r": adapter.rank,
            # PEFT declares an int; a run's alpha may be a fraction.
            "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
            "lora_dropout": adapter.dropout,
            "bias": "none",
            "init_lora_weights": True,
            "use_rslora": False,
            "use_dora": False,
        }
    return json.dumps(config, indent=2, sort_keys=True) + "\n"
