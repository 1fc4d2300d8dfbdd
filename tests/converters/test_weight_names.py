"""Weights under names that other programs give them: aliases, wrappers, old tensors, indexes."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from t0repro.converters import hf
from t0repro.converters.convert import convert
from t0repro.converters.inspection import compare, verify
from t0repro.converters.sources import load_any
from t0repro.errors import UserError
from t0repro.parameters.shape import ModelShape

from .checkpoint_files import assert_same_bits
from .logits import jax_logits, torch_logits

safetensors = pytest.importorskip("safetensors.numpy")

Tensors = dict[str, np.ndarray]
SHARED, ENCODER, DECODER = (
    "shared.weight",
    "encoder.embed_tokens.weight",
    "decoder.embed_tokens.weight",
)
HEAD = "lm_head.weight"
NORM = "encoder.block.0.layer.0.layer_norm.weight"


def under(name: str) -> Callable[[Tensors], Tensors]:
    """The embedding under another name alone."""
    return lambda tensors: {name if key == SHARED else key: tensors[key] for key in tensors}


def prefixed(prefix: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {f"{prefix}{name}": array for name, array in tensors.items()}


def with_copies(tensors: Tensors) -> Tensors:
    return tensors | {ENCODER: tensors[SHARED], DECODER: tensors[SHARED]}


def with_zero_biases(tensors: Tensors) -> Tensors:
    """As transformers saved a T5 before its layer norm was its own."""
    norms = [name for name in tensors if "layer_norm" in name]
    zeros = {name.replace(".weight", ".bias"): np.zeros_like(tensors[name]) for name in norms}
    return tensors | zeros


def with_compiled_layers(tensors: Tensors) -> Tensors:
    """As a model is saved of which torch.compile wrapped each block."""
    return {
        name.replace("block.0.", "block.0._orig_mod."): array for name, array in tensors.items()
    }


WRITTEN_BY_OTHERS = {
    "MADLAD-400 on the hub": under(DECODER),
    "the encoder's name": under(ENCODER),
    "all copies": with_copies,
    "zero biases": with_zero_biases,
    "torch.compile": prefixed("_orig_mod."),
    "compiled layers": with_compiled_layers,
    "DataParallel": prefixed("module."),
    "both": prefixed("module._orig_mod."),
    "Lightning": prefixed("model."),
    "PEFT, merged": prefixed("base_model.model."),
    "FSDP": prefixed("_fsdp_wrapped_module."),
    "Flax's variables": prefixed("params."),
    "Lightning with DeepSpeed": prefixed("_forward_module.model."),
    "ComfyUI": prefixed("text_encoders.t5xxl.transformer."),
    "a field of any name": prefixed("net."),
    "a field named as a tower": prefixed("encoder."),
}


@pytest.fixture
def directory(tmp_path, mesh_variables, write_mesh_checkpoint) -> Path:
    """A Hugging Face T5 1.1 without a record of its conversion."""
    shape = ModelShape(1, 2, 16, 24, 2, 8, 128, 32, ("wi_0", "wi_1"), False)
    return as_hf(write_mesh_checkpoint(tmp_path / "source", mesh_variables(shape)))


@pytest.fixture
def tied(tmp_path, mesh_variables, write_mesh_checkpoint) -> Path:
    """The same of a T5 1.0, whose logits come from the embedding."""
    shape = ModelShape(1, 2, 16, 24, 2, 8, 128, 32, ("wi",), True)
    return as_hf(write_mesh_checkpoint(tmp_path / "source", mesh_variables(shape)))


def as_hf(source: Path) -> Path:
    directory = source.parent / "hf"
    convert(source, directory, "hf", slots=False)
    (directory / "conversion.json").unlink()
    return directory


def change_config(directory: Path, **changes: object) -> None:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | changes))


def change(directory: Path, written: Callable[[Tensors], Tensors]) -> None:
    file = directory / "model.safetensors"
    safetensors.save_file(written(safetensors.load_file(file)), file, {"format": "pt"})


@pytest.mark.parametrize("kind", WRITTEN_BY_OTHERS)
def test_the_same_model_is_read_whatever_program_named_its_tensors(directory, kind, tmp_path):
    expected = load_any(directory)
    change(directory, WRITTEN_BY_OTHERS[kind])
    assert_same_bits(expected, load_any(directory))
    assert verify(directory).problems == ()
    for to in ("mtf", "t5x", "jax", "hf"):
        convert(directory, tmp_path / f"to_{to}", to)
        assert compare(directory, tmp_path / f"to_{to}").differences == ()


@pytest.mark.parametrize("name", [ENCODER, DECODER, HEAD])
def test_a_tied_model_is_read_from_any_of_its_embedding_s_names(tied, name):
    """safetensors' save_model keeps one of the names of a tensor, the first of the alphabet."""
    expected = load_any(tied)
    change(tied, under(name))
    assert_same_bits(expected, load_any(tied))


@pytest.mark.parametrize("name", [ENCODER, DECODER])
def test_two_embeddings_are_refused_by_name(directory, name):
    change(directory, lambda tensors: tensors | {name: tensors[SHARED] + 1})
    with pytest.raises(UserError, match=f"{name} differs from {SHARED}"):
        load_any(directory)


def test_a_model_without_an_embedding_is_refused_by_all_of_its_names(directory):
    change(directory, lambda tensors: {name: tensors[name] for name in tensors if name != SHARED})
    with pytest.raises(UserError, match=f"none of {SHARED}, {ENCODER}, {DECODER}"):
        load_any(directory)


def test_a_layer_norm_s_bias_that_is_not_zero_is_refused(directory):
    bias = NORM.replace("weight", "bias")
    change(directory, lambda tensors: tensors | {bias: tensors[NORM]})
    with pytest.raises(UserError, match=f"{bias} is not zero"):
        load_any(directory)


def test_two_tensors_of_one_name_are_refused(directory):
    change(directory, lambda tensors: tensors | {f"module.{NORM}": tensors[NORM]})
    with pytest.raises(UserError, match=f"two tensors {NORM}: "):
        load_any(directory)


def test_what_is_outside_of_the_field_that_held_the_model_is_named(directory):
    change(directory, prefixed("net."))
    change(directory, lambda tensors: tensors | {"v_head.weight": tensors[f"net.{NORM}"]})
    with pytest.raises(UserError, match="unknown variables: 'net"):
        load_any(directory)


def test_a_model_with_an_adapter_in_its_folder_is_refused(directory):
    (directory / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    with pytest.raises(UserError, match="a whole model and an adapter") as caught:
        load_any(directory)
    assert caught.value.where == str(directory / "adapter_config.json")


def test_a_fault_in_config_json_is_named_by_its_line(directory):
    config = (directory / "config.json").read_text()
    (directory / "config.json").write_text(config.rstrip().removesuffix("}").rstrip() + ",\n}")
    with pytest.raises(UserError, match=r"config.json is not a JSON object: .*\(line \d+, column"):
        load_any(directory)


@pytest.fixture
def shards(tmp_path, mesh_variables, write_mesh_checkpoint, monkeypatch) -> Path:
    monkeypatch.setattr(hf, "SHARD_BYTES", 20_000)
    shape = ModelShape(1, 2, 16, 24, 2, 8, 128, 32, ("wi_0", "wi_1"), False)
    return as_hf(write_mesh_checkpoint(tmp_path / "source", mesh_variables(shape)))


def change_index(directory: Path, added: dict[str, str]) -> str:
    """Adds names to the index, each in the file of another; returns the embedding's file."""
    index = json.loads((directory / hf.INDEX).read_text())
    files = index["weight_map"]
    file = files[SHARED]
    files |= {name: files[like] for name, like in added.items()}
    (directory / hf.INDEX).write_text(json.dumps(index))
    return file


def test_an_index_may_name_copies_of_the_embedding_that_no_shard_holds(shards):
    """As the hub's flan-t5-xl."""
    expected = load_any(shards)
    change_index(shards, {ENCODER: SHARED, DECODER: SHARED})
    assert_same_bits(expected, load_any(shards))


def test_a_shard_may_hold_copies_of_the_embedding_that_the_index_does_not_name(shards):
    expected = load_any(shards)
    file = shards / change_index(shards, {})
    safetensors.save_file(with_copies(safetensors.load_file(file)), file)
    assert_same_bits(expected, load_any(shards))


def test_an_index_that_names_logits_which_no_shard_holds_is_refused(shards):
    """transformers 5 ties such a model; the kernel that the index names is not the embedding."""
    change_config(shards, tie_word_embeddings=True, scale_decoder_outputs=False)
    index = json.loads((shards / hf.INDEX).read_text())
    file = shards / index["weight_map"][HEAD]
    tensors = safetensors.load_file(file)
    del tensors[HEAD]
    safetensors.save_file(tensors, file)
    with pytest.raises(UserError, match=f"missing: {HEAD}"):
        load_any(shards)


@pytest.mark.hf
@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("saved", ["save_model", *WRITTEN_BY_OTHERS])
def test_the_logits_are_those_of_the_model_that_was_saved(tmp_path, saved, tie):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from safetensors.torch import save_model

    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=128,
        d_model=16,
        d_kv=8,
        d_ff=24,
        num_layers=2,
        num_heads=2,
        feed_forward_proj="gated-gelu",
        decoder_start_token_id=0,
        tie_word_embeddings=True,
        scale_decoder_outputs=tie,
    )
    model = transformers.T5ForConditionalGeneration(config).eval()
    if not tie:
        model.lm_head.weight = torch.nn.Parameter(torch.randn(128, 16))
    model.save_pretrained(tmp_path)
    if saved == "save_model":
        save_model(model, str(tmp_path / "model.safetensors"))
    else:
        change(tmp_path, WRITTEN_BY_OTHERS[saved])
    tokens = {"inputs": np.arange(2, 12)[None], "targets": np.arange(5, 9)[None]}
    np.testing.assert_allclose(
        jax_logits(tmp_path, tokens), torch_logits(model, tokens), rtol=0, atol=1e-5
    )


# ---- A config.json without the activation --------------------------------------------------------


@pytest.fixture
def without_activation(directory) -> Path:
    config = json.loads((directory / "config.json").read_text())
    for name in ("feed_forward_proj", "dense_act_fn", "is_gated_act"):
        del config[name]
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def test_an_mt5_without_an_activation_is_read_with_a_note(without_activation, capsys):
    change_config(without_activation, model_type="mt5")
    for _ in range(2):
        load_any(without_activation)
    (note,) = [line for line in capsys.readouterr().err.splitlines() if "feed_forward_proj" in line]
    assert note.endswith(
        "config.json names no feed_forward_proj; taking gated-gelu, as transformers takes for a mt5"
    )


def test_a_gated_t5_without_an_activation_is_refused_with_that_cause(without_activation):
    with pytest.raises(UserError, match="names no feed_forward_proj, which stands for relu"):
        load_any(without_activation)


# ---- Weights in other programs' formats ----------------------------------------------------------


@pytest.mark.parametrize(
    "names",
    [
        ["pytorch_model.bin"],
        ["pytorch_model-00001-of-00002.bin", "pytorch_model.bin.index.json"],
        ["tf_model.h5"],
    ],
)
def test_weights_in_a_format_that_is_not_read_are_named(tmp_path, names):
    for name in names:
        (tmp_path / name).write_bytes(b"weights")
    for path in (tmp_path, tmp_path / names[0]):
        with pytest.raises(UserError, match=f"^{names[0]} is .*not read") as caught:
            load_any(path)
        assert caught.value.where == str(tmp_path / names[0])


def test_a_file_of_a_checkpoint_leads_to_its_directory(directory):
    with pytest.raises(UserError, match=f"Give its directory: {directory}."):
        load_any(directory / "model.safetensors")


@pytest.mark.hf
@pytest.mark.parametrize("files", [["pytorch_model.bin"], [f"pytorch_model-{n}.bin" for n in "12"]])
def test_the_command_for_pytorch_s_pickles_converts_them(directory, files):
    torch = pytest.importorskip("torch")
    expected = load_any(directory)
    moved = directory.rename(directory.with_name("its model's"))
    tensors = safetensors.load_file(moved / "model.safetensors")
    (moved / "model.safetensors").unlink()
    for file in files:
        part = {name: torch.tensor(tensors.pop(name)) for name in [*tensors][: 60 // len(files)]}
        torch.save(
            {**part, SHARED: torch.tensor(expected["target/token_embedder/embedding"])},
            moved / file,
        )
    with pytest.raises(UserError) as caught:
        load_any(moved)
    command = shlex.split((caught.value.fix or "").partition("run ")[2])
    subprocess.run([sys.executable, *command[1:]], check=True)
    assert_same_bits(expected, load_any(moved))
