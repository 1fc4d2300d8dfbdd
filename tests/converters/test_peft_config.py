"""Which modules adapter_config.json chooses, against PEFT; files with parts missing or damaged."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401 (bfloat16 for numpy)
import numpy as np
import pytest

from t0repro.adapters import ia3, lora
from t0repro.converters import finding
from t0repro.converters.adapter_files import AdapterCheckpoint, open_adapter
from t0repro.converters.convert import convert
from t0repro.converters.inspection import verify
from t0repro.converters.merging import merge
from t0repro.errors import UserError
from t0repro.evaluation.opened import attach_adapter, open_adapter_at, open_checkpoint

from .peft_side import MODELS, Header, rewrite, save_adapter, save_base

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
SHAPE = MODELS["gated, untied"].shape


def opened(folder: Path) -> AdapterCheckpoint:
    """An adapter's checkpoint, compared with the model of SHAPE."""
    own = open_adapter(finding.find_adapter(folder))
    own.check_shape(own.note.adapter, SHAPE)
    return own


def edit(folder: Path, **changes: Any) -> None:
    """Writes other values into adapter_config.json."""
    file = folder / CONFIG
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def without(folder: Path, names: set[str]) -> None:
    """Removes tensors, as an interrupted download that was repaired by hand has them removed."""

    def cut(header: Header, values: bytearray) -> None:
        kept, offset = bytearray(), 0
        for name, entry in list(header.items()):
            if name in names:
                del header[name]
            elif name != "__metadata__":
                begin, end = entry["data_offsets"]
                kept += values[begin:end]
                entry["data_offsets"] = [offset, offset := offset + end - begin]
        values[:] = kept

    rewrite(folder, cut)


def names_in(folder: Path) -> list[str]:
    """The tensors of adapter_model.safetensors."""
    content = (folder / WEIGHTS).read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    return [name for name in header if name != "__metadata__"]


# ---- With PEFT itself ----------------------------------------------------------------------------

_PARTS = ["q", "k", "v", "o", "wi_0", "wi_1", "wo", "SelfAttention.q", "EncDecAttention.v"]
_PATTERNS = [
    r".*\.(q|v)",
    r"decoder\..*(SelfAttention|EncDecAttention)\.[kv]$",
    r".*block\.1\..*(q|wi_\d|wo)",
    r"(?!encoder).*\.o",
    "all-linear",
    "ALL-LINEAR",
]


def _configurations(count: int) -> Iterator[dict[str, Any]]:
    """Arguments for PEFT's configurations, of both kinds, from one seed."""
    chance = random.Random(5)
    for number in range(count):
        targets: Any = chance.sample(_PARTS, chance.randint(1, 4))
        if chance.random() < 0.3:
            targets = chance.choice([*_PATTERNS, None])
        config = {"target_modules": targets}
        if chance.random() < 0.4:
            config["exclude_modules"] = chance.choice(
                [["k"], ["encoder.block.0.layer.0.SelfAttention.q"], r"encoder\..*", ["wo", "o"]]
            )
        if number % 3 == 0:
            listed = isinstance(targets, list)
            reads = chance.choice([[], [t for t in targets if t == "wo"], ".*wo"]) if listed else []
            yield {"kind": "IA3", **config, "feedforward_modules": reads}
            continue
        if isinstance(targets, list) and chance.random() < 0.6:
            config["layers_to_transform"] = chance.choice([0, [1], [0, 1], [7], []])
            config["layers_pattern"] = chance.choice([None, "block", "layer", ["h", "block"], []])
        if config.get("layers_to_transform") is None:
            config.pop("layers_pattern", None)
        yield {"kind": "LORA", **config, "use_rslora": chance.random() < 0.2}


@pytest.mark.hf
@pytest.mark.filterwarnings("ignore")  # PEFT's, about targets that match nothing
def test_the_tensors_are_those_of_a_model_that_peft_adapts_and_none_may_be_missing(tmp_path):
    peft = pytest.importorskip("peft", reason="needs the extra hf")
    transformers = pytest.importorskip("transformers", reason="needs the extra hf")
    _, hf = save_base(tmp_path, MODELS["gated, untied"])
    tried = 0
    for number, config in enumerate(_configurations(60)):
        kind, given = config.pop("kind"), f"{number}: {config}"
        made = {"LORA": peft.LoraConfig, "IA3": peft.IA3Config}[kind]
        base = transformers.T5ForConditionalGeneration.from_pretrained(hf)
        try:
            model = peft.get_peft_model(
                base, made(**({"r": 2} if kind == "LORA" else {}), **config)
            )
        except ValueError:  # it chooses nothing, or too much
            continue
        folder = tmp_path / str(number)
        model.save_pretrained(folder)
        # What the user wrote, rather than what PEFT made of it (it writes the names out).
        edit(folder, **config)
        wanted = names_in(folder)
        assert sorted(wanted) == sorted(peft.get_peft_model_state_dict(model)), given
        if kind == "IA3" and any(
            name.endswith("wo.ia3_l") != (entry.shape[0] == 1)
            for name, entry in peft.get_peft_model_state_dict(model).items()
        ):
            with pytest.raises(UserError, match="feedforward_modules"):
                opened(folder)
            continue
        opened(folder)
        tried += 1
        for name in random.Random(number).sample(wanted, min(6, len(wanted))):
            cut = Path(shutil.copytree(folder, tmp_path / "cut", dirs_exist_ok=True))
            module = name.partition(".lora_")[0]
            for gone in {name}, {each for each in wanted if each.startswith(module)}:
                if gone == set(wanted):
                    continue
                shutil.copy(folder / WEIGHTS, cut / WEIGHTS)
                without(cut, gone)
                with pytest.raises(UserError, match="missing: ") as refused:
                    opened(cut)
                assert min(gone) in refused.value.what, given
    assert tried >= 30


# ---- Without PEFT --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A base, and each kind of adapter of it: our checkpoint and a folder of PEFT's."""
    folder = tmp_path_factory.mktemp("whole")
    base, _ = save_base(folder, MODELS["gated, untied"])
    for kind, adapter in {"lora": lora(rank=2, alpha=3.0), "ia3": ia3()}.items():
        own = save_adapter(folder / f"own_{kind}", MODELS["gated, untied"], adapter, base)
        convert(own, folder / kind, "peft")
    return folder, base


@pytest.fixture(params=["lora", "ia3"])
def peft_folder(request, whole, tmp_path):
    return Path(shutil.copytree(whole[0] / request.param, tmp_path / "peft"))


def test_every_command_names_the_tensors_that_are_missing(whole, peft_folder, tmp_path):
    base = str(whole[1])
    module = "base_model.model.decoder.block.1.layer.1.EncDecAttention.v."
    gone = {name for name in names_in(peft_folder) if name.startswith(module)}
    without(peft_folder, gone)
    for command in (
        lambda: verify(peft_folder),
        lambda: convert(peft_folder, tmp_path / "out", "jax"),
        lambda: convert(peft_folder, tmp_path / "out", "adapter"),
        lambda: merge(peft_folder, tmp_path / "out", "hf"),
        # rank-eval and eval, of the adapter and of --adapter.
        lambda: open_checkpoint(str(peft_folder), None, "float32"),
        lambda: attach_adapter(
            open_checkpoint(base, None, "float32"), open_adapter_at(str(peft_folder))
        ),
    ):
        with pytest.raises(UserError, match="missing: ") as refused:
            command()
        assert all(name in refused.value.what for name in gone)
    assert not (tmp_path / "out").exists()


def test_tensors_that_peft_would_not_use_are_refused(peft_folder):
    edit(peft_folder, exclude_modules=["encoder.block.1.layer.0.SelfAttention.v"])
    with pytest.raises(UserError, match=r"PEFT would not use base_model.*encoder.block.1") as error:
        opened(peft_folder)
    assert "target_modules" in str(error.value)


@pytest.mark.parametrize(
    ("version", "accepted"), [(None, True), ("0.19.1", True), ("0.20.0", False)]
)
def test_layers_were_numbered_by_a_names_last_number_up_to_peft_0_19(
    whole, tmp_path, version, accepted
):
    adapter = lora(rank=2, targets=[r".*/layers_\d/(self_)?attention/(query|value)/kernel"])
    own = save_adapter(tmp_path / "own", MODELS["gated, untied"], adapter, whole[1])
    convert(own, tmp_path / "peft", "peft")
    # `layer.0` of every block: its self-attention.
    edit(tmp_path / "peft", target_modules=["q", "v"], layers_to_transform=[0])
    edit(tmp_path / "peft", peft_version=version)
    if accepted:
        opened(tmp_path / "peft")
        without(tmp_path / "peft", set(names_in(tmp_path / "peft")[:2]))
    with pytest.raises(UserError, match="missing: "):
        opened(tmp_path / "peft")


@pytest.mark.parametrize("stored", ["I32", "I64"])
def test_integers_are_no_parameters_of_an_adapter(peft_folder, stored):
    name = names_in(peft_folder)[0]

    def as_integers(header: Header, values: bytearray) -> None:
        if stored == "I64":
            # The same bytes hold half as many numbers.
            header[name]["shape"] = [size // (1 + (size > 1)) for size in header[name]["shape"]]
            values[: header[name]["data_offsets"][1]] = bytes(header[name]["data_offsets"][1])
        header[name]["dtype"] = stored

    rewrite(peft_folder, as_integers)
    with pytest.raises(UserError, match=r"lora_A|ia3_l|bytes"):
        opened(peft_folder)


def put(folder: Path, name: str, value: float) -> None:
    """Writes a tensor's first value."""

    def change(header: Header, values: bytearray) -> None:
        begin = header[name]["data_offsets"][0]
        values[begin : begin + 4] = np.float32(value).tobytes()

    rewrite(folder, change)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_value_that_is_not_finite_is_refused_by_the_tensors_name(peft_folder, value):
    put(peft_folder, name := names_in(peft_folder)[-1], value)
    with pytest.raises(UserError, match="1 value that is NaN or infinite") as refused:
        verify(peft_folder)
    assert name in refused.value.what


def test_a_merged_kernel_that_is_not_finite_is_refused_by_its_name(whole, tmp_path):
    folder = Path(shutil.copytree(whole[0] / "lora", tmp_path / "peft"))
    name = next(name for name in names_in(folder) if "encoder.block.1" in name)
    put(folder, name, 3e38)
    edit(folder, lora_alpha=2e9)
    with pytest.raises(UserError, match=r"encoder/layers_1/attention/\w+/kernel, merged"):
        convert(folder, tmp_path / "out", "jax")


# ---- Damage --------------------------------------------------------------------------------------

VALUES = [
    *(0, -1, 2.5, True, None, float("nan"), float("inf"), 1e21, 10**400),
    *("", "8", "false", "a(b", "\x00x", [], {}, [1], ["q"], [None], {"q": 4}),
]
# Whatever these say, the adapter is the same: for whom, by whom and how it was started.
HARMLESS = {
    "lora": {"inference_mode", "task_type"},
    "ia3": {"inference_mode", "task_type", "init_ia3_weights"},
}
# What PEFT takes for the value that was there, by field.
SAME: dict[str, list[Any]] = {
    "fan_in_fan_out": [0, None, [], {}],
    "modules_to_save": [0, None, [], {}],
    "use_dora": [0, None, [], {}],
    "use_rslora": [None],
    "init_lora_weights": [0, True, None],
    "target_modules": [None],
    "feedforward_modules": [None],
    "lora_dropout": [0],
}
# Values of the right type.
OTHER = {
    "lora_alpha": [2.5],
    "use_rslora": [True],
    "base_model_name_or_path": [None, "", "8", "false", "a(b"],
}


@pytest.mark.parametrize("kind", ["lora", "ia3"])
def test_no_value_of_a_wrong_type_passes_for_another(whole, tmp_path, kind):
    folder = Path(shutil.copytree(whole[0] / kind, tmp_path / "peft"))
    config = json.loads((folder / CONFIG).read_text())
    before, passed = opened(folder).note, set()
    ours = Path(shutil.copytree(whole[0] / f"own_{kind}/checkpoint_4", tmp_path / "own"))
    note = json.loads((ours / "adapter.json").read_text())
    for field in config.keys() - HARMLESS[kind]:
        for value in VALUES:
            (folder / CONFIG).write_text(json.dumps({**config, field: value}))
            try:
                own = opened(folder)
            except UserError as error:
                assert field in str(error)
                continue
            passed.add((field, repr(value)))
            assert own.note == before or field in OTHER, (field, value)
    assert passed <= {
        (field, repr(value))
        for field, values in [*SAME.items(), *OTHER.items()]
        for value in values
    }
    for field in note["adapter"]:
        for value in VALUES:
            changed = {**note, "adapter": {**note["adapter"], field: value}}
            (ours / "adapter.json").write_text(json.dumps(changed))
            try:
                opened(ours)
                assert (field, value) in [("alpha", 2.5), ("dropout", 0), ("rank", 0), ("rank", -1)]
            except UserError as error:
                assert "adapter.json" in str(error) or field in ("targets", "rank")


@pytest.mark.parametrize("kind", ["lora", "ia3"])
def test_no_damage_of_the_header_ends_in_another_error(whole, tmp_path, kind):
    folder = Path(shutil.copytree(whole[0] / kind, tmp_path / "peft"))
    content = (folder / WEIGHTS).read_bytes()
    name = names_in(folder)[0]
    more = ["F64", "I32", "U8", [0, 0], [4, 2, 1], [1] * 70, [-1, -1], [2**40, 2**40], [True, 8.0]]

    def damaged() -> Iterator[Callable[[Header, bytearray], None]]:
        for value in (*VALUES, *more):
            for field in ("dtype", "shape", "data_offsets"):
                yield lambda head, _, field=field, value=value: head[name].update({field: value})
            yield lambda head, _, value=value: head.update({name: value})
            if value not in (None, {}):
                yield lambda head, _, value=value: head.update(__metadata__=value)
            if not isinstance(value, str):  # a string is the hash of some other base
                yield lambda head, _, value=value: head["__metadata__"].update(base_hash=value)
        for step in ("-1", "4e1", "2147483648", "9" * 5000, "\u0663", " 4"):
            yield lambda head, _, step=step: head["__metadata__"].update(step=step)
        for new in ("", "x", f"{name}\x00", name.replace("block.0", "block.00")):
            yield lambda head, _, new=new: head.update({new: head.pop(name)})

    for change in damaged():
        (folder / WEIGHTS).write_bytes(content)
        rewrite(folder, change)
        with pytest.raises(UserError, match=WEIGHTS):
            opened(folder)
