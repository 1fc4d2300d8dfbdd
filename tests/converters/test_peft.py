"""Adapters in PEFT's format: with PEFT itself, and with files that it wrote."""

from __future__ import annotations

import dataclasses
import json
import runpy
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from t0repro.adapters import ia3, lora
from t0repro.converters import finding, sources
from t0repro.converters.adapter_files import open_adapter
from t0repro.converters.convert import convert
from t0repro.converters.safetensors_files import SafetensorsFile
from t0repro.errors import UserError
from t0repro.evaluation.opened import open_checkpoint

from . import peft_side
from .peft_side import MODELS, PATTERNS, forget_hash, save_adapter, save_base, tokens

# PEFT 0.21.0 asks transformers 5.23 for a property under its former name.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated")

LOGITS_TOLERANCE = 1e-5

ADAPTERS = {
    "lora": lora(rank=2, alpha=3.0),
    "lora of other kernels": lora(
        rank=2, targets=[r"decoder/layers_1/.*/(key|out)/kernel", r".*/mlp/wo/kernel"]
    ),
    "ia3": ia3(),
    "ia3 of T-Few": ia3(targets=[r".*/(key|value)/kernel", r".*/mlp/wi(_1)?/kernel"]),
}


def our_logits(path) -> np.ndarray:
    opened = open_checkpoint(str(path), None, "float32")
    return np.asarray(opened.model.apply({"params": opened.params}, tokens()))


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """Each model's checkpoint as ours and for transformers."""
    return {
        name: save_base(tmp_path_factory.mktemp("base"), model) for name, model in MODELS.items()
    }


# ---- With PEFT itself ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def peft():
    pytest.importorskip("torch", reason="needs the extra hf")
    pytest.importorskip("transformers", reason="needs the extra hf")
    return pytest.importorskip("peft", reason="needs the extra hf")


@pytest.mark.hf
@pytest.mark.parametrize(
    ("model", "adapter"),
    [
        *((model, kind) for model in MODELS for kind in ("lora", "ia3")),
        ("gated, untied", "lora of other kernels"),
        ("gated, untied", "ia3 of T-Few"),
    ],
)
def test_peft_loads_our_adapter_onto_the_same_base(peft, bases, model, adapter, tmp_path):
    base, hf = bases[model]
    own = save_adapter(tmp_path / "own", MODELS[model], ADAPTERS[adapter], base)
    report = convert(own, tmp_path / "peft", "peft")
    # The base is in another format, which PEFT does not load.
    assert any("--to hf" in note for note in report.notes)
    assert not convert(own, tmp_path / "of_hf", "peft", base=hf).notes
    before, expected = our_logits(base), our_logits(own)
    assert np.abs(expected - before).max() > 0.05
    np.testing.assert_allclose(peft_side.logits(hf), before, atol=LOGITS_TOLERANCE, rtol=0)
    found = peft_side.logits(hf, tmp_path / "peft")
    np.testing.assert_allclose(found, expected, atol=LOGITS_TOLERANCE, rtol=0)


@pytest.mark.hf
@pytest.mark.parametrize("kind", ["lora", "rslora", "patterns", "rslora with patterns", "ia3"])
@pytest.mark.parametrize("model", ["gated, untied", "relu, tied"])
def test_an_adapter_that_peft_trained_is_read_here(peft, bases, model, kind, tmp_path):
    _, hf = bases[model]
    configs = {
        "lora": peft.LoraConfig(r=2, lora_alpha=3, target_modules=["q", "o"]),
        "rslora": peft.LoraConfig(r=2, lora_alpha=3, use_rslora=True),
        "patterns": peft.LoraConfig(r=2, lora_alpha=3, **PATTERNS),
        "rslora with patterns": peft.LoraConfig(r=2, lora_alpha=3, use_rslora=True, **PATTERNS),
        "ia3": peft.IA3Config(),
    }
    trained = tmp_path / "trained"
    expected = peft_side.trained(hf, trained, configs[kind])
    assert np.abs(expected - peft_side.logits(hf)).max() > 0.05
    np.testing.assert_allclose(our_logits(trained), expected, atol=LOGITS_TOLERANCE, rtol=0)
    convert(trained, tmp_path / "whole", "jax")
    np.testing.assert_allclose(
        our_logits(tmp_path / "whole"), expected, atol=LOGITS_TOLERANCE, rtol=0
    )
    # Through a checkpoint of ours and back, bit for bit.
    convert(trained, tmp_path / "own", "adapter")
    convert(tmp_path / "own", tmp_path / "back", "peft")
    names = ("trained", "back")
    before, after = (open_adapter(finding.find_checkpoint(tmp_path / name)) for name in names)
    assert before.tensors.keys() == after.tensors.keys()
    for key in before.tensors:
        np.testing.assert_array_equal(before.read(key), after.read(key), err_msg=key)
    found = peft_side.logits(hf, tmp_path / "back")
    np.testing.assert_allclose(found, expected, atol=LOGITS_TOLERANCE, rtol=0)


@pytest.mark.hf
def test_t_fews_vectors_become_a_folder_of_pefts(peft, bases, tmp_path, monkeypatch):
    import torch

    base, hf = bases["gated, untied"]
    own = save_adapter(tmp_path / "own", MODELS["gated, untied"], ADAPTERS["ia3 of T-Few"], base)
    convert(own, tmp_path / "peft", "peft")
    written = SafetensorsFile(str(tmp_path / "peft" / "adapter_model.safetensors"))
    names = {name: name.removeprefix("base_model.model.") for name in written.tensors}
    vectors = {
        short.replace("ia3_l", "multi_lora_b"): torch.tensor(written.read(name))
        for name, short in names.items()
    }
    monkeypatch.chdir(tmp_path)
    torch.save(vectors, "t03b_ia3_finish.pt")
    words = ["t_few_to_peft.py", "t03b_ia3_finish.pt", "t_few_pretrained", str(hf)]
    monkeypatch.setattr("sys.argv", words)
    runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "demo" / words[0]))
    found, expected = (
        open_adapter(finding.find_checkpoint(tmp_path / name))
        for name in ("t_few_pretrained", "own")
    )
    found.check_continues(expected.note.adapter, MODELS["gated, untied"].shape)
    for key in found.tensors.keys() - {"state/step"}:
        np.testing.assert_array_equal(found.read(key), expected.read(key), err_msg=key)


# ---- Files that PEFT wrote, without PEFT ---------------------------------------------------------


@pytest.fixture(params=peft_side.GOLDENS)
def golden(request, tmp_path):
    """A folder that PEFT wrote, its base at hand, and the logits that PEFT computed."""
    model = peft_side.GOLDENS[request.param]
    _, hf = save_base(tmp_path, MODELS[model])
    folder = tmp_path / "peft"
    shutil.copytree(peft_side.GOLDEN_FILES / request.param, folder)
    edit(folder, base_model_name_or_path=str(hf))
    return folder, np.array(json.loads((folder / "logits.json").read_text()), np.float32)


def edit(folder: Path, **changes) -> None:
    """Writes other values into adapter_config.json."""
    file = folder / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def test_logits_over_a_golden_are_peft_s(golden, tmp_path):
    folder, expected = golden
    np.testing.assert_allclose(our_logits(folder), expected, atol=LOGITS_TOLERANCE, rtol=0)


@pytest.mark.parametrize("golden", ["lora", "ia3"], indirect=True)  # patterns get one rank
def test_a_golden_comes_back_as_peft_wrote_it(golden, tmp_path):
    folder, _ = golden
    convert(folder, tmp_path / "own", "adapter")
    convert(tmp_path / "own", tmp_path / "back", "peft")
    before, after = (
        SafetensorsFile(str(place / "adapter_model.safetensors"))
        for place in (folder, tmp_path / "back")
    )
    assert before.tensors == after.tensors
    for name in before.tensors:
        np.testing.assert_array_equal(before.read(name), after.read(name), err_msg=name)
    configs = [
        json.loads((place / "adapter_config.json").read_text())
        for place in (folder, tmp_path / "back")
    ]
    for field, value in configs[1].items():
        then = configs[0][field]
        if field == "base_model_name_or_path":
            assert Path(value).resolve() == Path(then).resolve()
        else:
            assert value == (sorted(then) if isinstance(then, list) else then), field


def rename(folder: Path, name_of) -> None:
    """Writes the tensors under other names."""
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    save_file({each: a for name, a in tensors.items() for each in name_of(name)}, file)


@pytest.mark.parametrize(
    "name_of",
    [
        lambda name: [name.removeprefix("base_model.model.")],
        lambda name: [name.replace(".weight", ".default.weight")],
        lambda name: [f"module.{name}"],
    ],
    ids=["without PEFT's modules", "with the adapter's name", "DataParallel"],
)
def test_names_of_a_state_dict_that_a_program_saved_itself_are_read(lora_folder, name_of):
    expected = our_logits(lora_folder)
    rename(lora_folder, name_of)
    np.testing.assert_array_equal(our_logits(lora_folder), expected)


def test_two_tensors_of_one_name_are_refused(lora_folder):
    rename(lora_folder, lambda name: [name, f"module.{name}"])
    with pytest.raises(UserError, match="There are two tensors"):
        sources.open_any(lora_folder)


# ---- Refusals ------------------------------------------------------------------------------------


@pytest.fixture
def lora_folder(bases, tmp_path):
    """A LoRA in PEFT's format."""
    base, _ = bases["gated, untied"]
    own = save_adapter(tmp_path / "own", MODELS["gated, untied"], ADAPTERS["lora"], base)
    convert(own, tmp_path / "peft", "peft")
    return tmp_path / "peft"


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("use_dora", True),
        ("bias", "lora_only"),
        ("lora_bias", True),
        ("rank_pattern", {"q": 4.0}),
        ("alpha_pattern", {"q": 0}),
        ("alpha_pattern", ["q"]),
        ("rank_pattern", {"(": 2}),
        ("modules_to_save", ["lm_head"]),
        ("fan_in_fan_out", True),
        ("init_lora_weights", "pissa"),
        ("layer_replication", [[0, 2]]),
        ("an_option_of_tomorrow", 3),
        ("peft_type", "PREFIX_TUNING"),
        ("r", 0),
    ],
)
def test_an_option_without_meaning_here_is_refused_by_name(lora_folder, option, value):
    edit(lora_folder, **{option: value})
    with pytest.raises(UserError, match=f"{option} is") as refused:
        sources.open_any(lora_folder)
    assert f"adapter_config.json, {option}" in str(refused.value)


def test_another_base_is_refused_with_both_hashes(bases, lora_folder, tmp_path):
    _, other = save_base(tmp_path / "other", MODELS["gated, untied"], seed=5)
    digests = [
        open_checkpoint(str(path), None, "float32").digest
        for path in (bases["gated, untied"][0], other)
    ]
    with pytest.raises(UserError, match="another base") as refused:
        convert(lora_folder, tmp_path / "out", "jax", base=other)
    assert all(digest in str(refused.value) for digest in digests)
    # What PEFT saves has the base's name alone; the checkpoint of that name is hashed.
    forget_hash(lora_folder)
    with pytest.raises(UserError, match="another base") as refused:
        convert(lora_folder, tmp_path / "out", "jax", base=other)
    assert all(digest in str(refused.value) for digest in digests)
    edit(lora_folder, base_model_name_or_path="google/t5-v1_1-small")
    with pytest.raises(UserError, match="is not there") as refused:
        sources.open_any(lora_folder)
    assert "google/t5-v1_1-small" in str(refused.value) and "--base" in str(refused.value)
    convert(lora_folder, tmp_path / "out", "jax", base=bases["gated, untied"][1])


def test_an_adapter_for_another_size_is_refused(lora_folder, tmp_path):
    smaller = dataclasses.replace(MODELS["gated, untied"], d_kv=2)
    _, other = save_base(tmp_path / "other", smaller)
    # Otherwise the hash says it first.
    forget_hash(lora_folder)
    edit(lora_folder, base_model_name_or_path=str(other))
    with pytest.raises(
        UserError, match=r"lora_b is of shape \[2, 8\] in the checkpoint and of shape \[2, 4\]"
    ):
        sources.open_any(lora_folder)


def test_a_rank_that_no_pattern_gives_is_refused(lora_folder):
    edit(lora_folder, rank_pattern={"decoder.*EncDecAttention.v": 1})
    with pytest.raises(UserError, match=r"EncDecAttention\.v.* has rank 2; r and .* say 1"):
        sources.open_any(lora_folder)


def test_patterns_of_which_peft_lost_the_order_are_refused(lora_folder):
    edit(lora_folder, alpha_pattern={"EncDecAttention.v": 2, "v": 2})  # one value
    sources.open_any(lora_folder)
    edit(lora_folder, alpha_pattern={"EncDecAttention.v": 2, "v": 3})
    with pytest.raises(UserError, match="several values for .*EncDecAttention.v: ") as refused:
        sources.open_any(lora_folder)
    assert "adapter_config.json, alpha_pattern" in str(refused.value)


def test_what_is_no_adapter_is_not_written_as_one(bases, lora_folder, tmp_path):
    base, _ = bases["gated, untied"]
    with pytest.raises(UserError, match="a whole model"):
        convert(base, tmp_path / "out", "peft")
    with pytest.raises(UserError, match="not an adapter's"):
        convert(base, tmp_path / "out", "hf", base=base)
    with pytest.raises(UserError, match="dtype changes nothing"):
        convert(lora_folder, tmp_path / "out", "adapter", dtype="bfloat16")


def test_weights_that_are_pickled_are_refused(lora_folder):
    (lora_folder / "adapter_model.safetensors").rename(lora_folder / "adapter_model.bin")
    with pytest.raises(UserError, match="safe_serialization"):
        sources.open_any(lora_folder)
