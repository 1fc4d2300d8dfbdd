"""Encoders alone: read with PyTorch's outputs, verified, converted to hf and refused elsewhere."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from t0repro.converters.convert import convert
from t0repro.converters.inspection import inspect_checkpoint, verify
from t0repro.errors import UserError
from t0repro.evaluation.opened import open_checkpoint
from t0repro.parameters.shape import ModelShape
from t0repro.runs.encode import encode
from t0repro.tasks.demo.datasets import VOCABULARY
from t0repro.tasks.vocabulary import VocabularyFile

from .encoders import FAMILIES, IDS, save_encoder, weights

GOLDENS = Path(__file__).parent / "encoder_goldens.json"
ROWS = [row[row > 0] for row in IDS]


def relative_difference(outputs: list[np.ndarray], expected: list[list]) -> float:
    largest = max(np.abs(np.array(each)).max() for each in expected)
    pairs = zip(outputs, expected, strict=True)
    return max(float(np.abs(ours - np.array(theirs)).max()) for ours, theirs in pairs) / largest


@pytest.mark.parametrize("family", FAMILIES)
def test_outputs_agree_with_transformers_to_1e_5(family, tmp_path):
    outputs = encode(save_encoder(tmp_path, family), ROWS)
    expected = json.loads(GOLDENS.read_text())[family]
    assert [each.shape for each in outputs] == [(5, 8), (3, 8)]
    assert relative_difference(outputs, expected) < 1e-5


@pytest.mark.hf
@pytest.mark.parametrize("family", FAMILIES)
def test_the_recorded_outputs_are_those_of_transformers(family, tmp_path):
    assert (
        relative_difference(
            torch_outputs(save_encoder(tmp_path, family)), json.loads(GOLDENS.read_text())[family]
        )
        < 1e-6
    )


def torch_outputs(folder: Path) -> list[np.ndarray]:
    torch = pytest.importorskip("torch", reason="needs the extra hf")
    transformers = pytest.importorskip("transformers", reason="needs the extra hf")
    name = json.loads((folder / "config.json").read_text())["architectures"][0]
    model = getattr(transformers, name).from_pretrained(folder).eval()
    ids = torch.tensor(IDS)
    with torch.no_grad():
        hidden = model(input_ids=ids, attention_mask=(ids > 0).long()).last_hidden_state.numpy()
    return [row[: len(tokens)] for row, tokens in zip(hidden, ROWS, strict=True)]


def test_an_encoder_is_inspected_and_verified(tmp_path):
    inspection = inspect_checkpoint(save_encoder(tmp_path, "t5_1_1"))
    assert inspection.family.encoder_only
    assert inspection.family.name == "encoder of T5 1.1"
    assert inspection.parameters == sum(array.size for array in weights("t5_1_1").values())
    assert verify(tmp_path).problems == ()


@pytest.mark.parametrize("family", FAMILIES)
def test_it_converts_to_an_encoder_of_hf_with_the_same_bits(family, tmp_path):
    source = save_encoder(tmp_path / "source", family)
    convert(source, tmp_path / "target", "hf")
    assert json.loads((tmp_path / "target/config.json").read_text())["architectures"] == [
        # mT5 and T5 1.1 differ in their vocabularies alone.
        "UMT5EncoderModel" if family == "umt5" else "T5EncoderModel"
    ]
    assert not (tmp_path / "target/generation_config.json").exists()
    written = load_file(tmp_path / "target/model.safetensors")
    assert {name: array.tobytes() for name, array in written.items()} == {
        name: array.tobytes() for name, array in weights(family).items()
    }
    before, after = encode(source, ROWS), encode(tmp_path / "target", ROWS)
    assert all(np.array_equal(*pair) for pair in zip(before, after, strict=True))


@pytest.mark.parametrize("to", ["mtf", "t5x", "jax"])
def test_formats_that_need_a_decoder_refuse_it(to, tmp_path):
    with pytest.raises(UserError, match="is an encoder alone; .* with a decoder"):
        convert(save_encoder(tmp_path / "source"), tmp_path / "target", to)
    assert not (tmp_path / "target").exists()


def test_it_can_neither_be_scored_nor_generated_from(tmp_path):
    with pytest.raises(UserError, match="neither score nor generate"):
        open_checkpoint(str(save_encoder(tmp_path)), None, "float32")


def test_a_whole_model_that_lost_its_decoder_is_no_encoder(tmp_path):
    folder = save_encoder(tmp_path, architectures=["T5ForConditionalGeneration"])
    with pytest.raises(UserError, match="decoder's tensors are missing"):
        verify(folder)


def test_a_decoder_beside_an_encoders_class_is_left_out(tmp_path):
    folder = save_encoder(tmp_path)
    whole = weights("t5") | {"decoder.final_layer_norm.weight": np.ones(8, np.float32)}
    save_file(whole, folder / "model.safetensors", {"format": "pt"})
    assert inspect_checkpoint(folder).family.encoder_only


def test_a_sharded_bfloat16_encoder_in_a_pipelines_folder_is_read(tmp_path):
    import ml_dtypes

    folder = save_encoder(tmp_path / "pipeline/text_encoder_2")
    arrays = {name: x.astype(ml_dtypes.bfloat16) for name, x in weights("t5").items()}
    names = sorted(arrays)
    (folder / "model.safetensors").unlink()
    index = {}
    for shard, part in enumerate((names[:5], names[5:]), 1):
        file = f"model-{shard:05d}-of-00002.safetensors"
        save_file({name: arrays[name] for name in part}, folder / file, {"format": "pt"})
        index |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    rounded = {name: array.astype(np.float32) for name, array in arrays.items()}
    full = save_encoder(tmp_path / "float32")
    save_file(rounded, full / "model.safetensors", {"format": "pt"})
    pairs = zip(encode(folder, ROWS), encode(full, ROWS), strict=True)
    assert all(np.array_equal(*pair) for pair in pairs)


def test_float8_weights_are_refused_by_name(tmp_path):
    import ml_dtypes

    folder = save_encoder(tmp_path)
    arrays = weights("t5")
    name = "encoder.block.0.layer.0.SelfAttention.q.weight"
    arrays[name] = arrays[name].astype(ml_dtypes.float8_e4m3fn)
    arrays[name.replace("weight", "scale_weight")] = np.ones((), np.float32)
    save_file(arrays, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match="SelfAttention.q.weight is of the type F8_E4M3"):
        verify(folder)


def test_a_model_with_a_head_for_classes_is_refused(tmp_path):
    folder = save_encoder(tmp_path, architectures=["T5ForSequenceClassification"])
    with pytest.raises(UserError, match="a head for classes"):
        encode(folder, ROWS)


def test_a_decoder_alone_has_nothing_to_encode_with(
    mesh_variables, write_mesh_checkpoint, tmp_path
):
    shape = ModelShape(0, 1, 8, 12, 2, 4, 128, 8, ("wi",), True)
    folder = write_mesh_checkpoint(tmp_path / "lm", mesh_variables(shape))
    with pytest.raises(UserError, match="The model has no encoder"):
        encode(folder, ROWS)


def test_a_checkpoint_of_mesh_tensorflow_without_its_decoder_is_incomplete(
    mesh_variables, write_mesh_checkpoint, tmp_path
):
    variables = mesh_variables(ModelShape(1, 1, 8, 12, 2, 4, 128, 8, ("wi",), True))
    cut = {name: value for name, value in variables.items() if not name.startswith("decoder/")}
    folder = write_mesh_checkpoint(tmp_path / "cut", cut)
    with pytest.raises(UserError, match="decoder are missing, for instance decoder/block_000/"):
        encode(folder, ROWS)


@pytest.mark.parametrize("place", ["text_encoder_2", "tokenizer_2"])
def test_texts_are_encoded_with_the_checkpoints_own_vocabulary(place, tmp_path):
    folder = save_encoder(tmp_path / "text_encoder_2", rows=1408)
    (tmp_path / place).mkdir(exist_ok=True)
    shutil.copy(VOCABULARY, tmp_path / place / "spiece.model")
    (output,) = encode(folder, ["It rained."])
    vocabulary = VocabularyFile(str(VOCABULARY))
    ids = [*vocabulary.encode("It rained."), vocabulary.eos_id]
    assert output.tobytes() == encode(folder, [ids])[0].tobytes()


def test_texts_of_an_encoder_of_bytes_are_bytes(tmp_path):
    folder = save_encoder(tmp_path, rows=384)
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "ByT5Tokenizer"}')
    (output,) = encode(folder, ["aé"])
    assert output.tobytes() == encode(folder, [[100, 198, 172, 1]])[0].tobytes()


def test_another_vocabulary_than_the_checkpoints_own_is_refused(tmp_path):
    folder = save_encoder(tmp_path, rows=1408)
    pieces = [["<pad>", 0.0], ["</s>", 0.0], ["<unk>", 0.0], ["a", -1.0]]
    model = {"model": {"type": "Unigram", "vocab": pieces}}
    (folder / "tokenizer.json").write_text(json.dumps(model))
    with pytest.raises(UserError, match="is not the checkpoint's: id 3"):
        encode(folder, ["It rained."], vocabulary=VOCABULARY)
    with pytest.raises(UserError, match="more|rows"):
        encode(save_encoder(tmp_path / "small"), ["It rained."], vocabulary=VOCABULARY)
