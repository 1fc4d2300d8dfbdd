"""Every family of the catalog: random models of its form, converted, computed as by PyTorch."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from t0repro.converters import released
from t0repro.converters.convert import convert
from t0repro.converters.inspection import verify
from t0repro.errors import UserError
from t0repro.evaluation.opened import open_checkpoint

from .logits import jax_logits, torch_logits

torch = pytest.importorskip("torch", reason="needs the extra hf")
transformers = pytest.importorskip("transformers", reason="needs the extra hf")

pytestmark = pytest.mark.hf

LOGITS_TOLERANCE = 1e-5

# What a family's form has besides the facts in its table.
FORMS = {
    "ByT5": {"vocab_size": 384, "num_layers": 3, "num_decoder_layers": 1},
    "UL2": {"d_kv": 32, "num_heads": 2},
    "T5-efficient": {"num_layers": 4, "num_decoder_layers": 2, "d_kv": 8},
    "MADLAD-400": {"d_kv": 32, "num_layers": 3},
}


def forms() -> list[str]:
    """A family of each form: T0 and Flan-T5, for instance, have T5 1.1's."""
    first: dict[tuple, str] = {}
    for name, family in released.families().items():
        facts = dataclasses.asdict(family)
        for field in ("name", "vocabulary", "checked_against", "to_know"):
            del facts[field]
        first.setdefault((*facts.values(), *FORMS.get(name, {}).items()), name)
    return list(first.values())


def random_model(name: str, directory: Path, dtype: str = "float32"):
    """A model of a family as the installed transformers makes it, saved as transformers 4 did.

    All of the catalog was saved by transformers 4, which has no tied model with a kernel.
    """
    family = released.families()[name]
    kind = family.model_type.replace("mt5", "MT5").replace("u", "U").replace("t5", "T5")
    sizes = {"vocab_size": 256, "d_model": 32, "d_kv": 16, "d_ff": 48, "num_layers": 2}
    facts = {
        "feed_forward_proj": family.feed_forward,
        "tie_word_embeddings": not has_kernel(name),
        "pad_token_id": family.pad,
        "eos_token_id": family.eos,
        "decoder_start_token_id": 0,
    }
    config = getattr(transformers, f"{kind}Config")(
        **{**sizes, "num_heads": 4, **facts, **FORMS.get(name, {})}
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config).eval()
    for path, parameter in model.named_parameters():
        if parameter.ndim > 1:
            std = 0.5 if "bias" in path else 0.3 if "shared" in path else 0.1
            torch.nn.init.normal_(parameter, std=std)
    if has_kernel(name):
        kernel = torch.randn(config.vocab_size, config.d_model) / 10
        model.lm_head.weight = torch.nn.Parameter(kernel)
        model.config.tie_word_embeddings = False  # before its logits: a umT5 obeys it
    model = model.to(getattr(torch, dtype))
    model.save_pretrained(directory)
    file = directory / "config.json"
    saved = json.loads(file.read_text())
    saved.pop("scale_decoder_outputs", None)
    saved |= {"tie_word_embeddings": not has_kernel(name), "transformers_version": "4.57.1"}
    file.write_text(json.dumps(saved))
    return model.float()


def has_kernel(name: str) -> bool:
    return released.families()[name].logits == "a kernel"


@pytest.fixture(scope="module")
def tokens() -> dict[str, np.ndarray]:
    """Two pairs without padding."""
    generator = np.random.default_rng(1)
    return {
        name: generator.integers(3, 250, (2, length)).astype(np.int32)
        for name, length in (("inputs", 24), ("targets", 9))
    }


@pytest.mark.parametrize("name", forms())
def test_every_family_is_computed_as_pytorch_computes_it_converted_and_back(name, tokens, tmp_path):
    expected = torch_logits(random_model(name, tmp_path / "hf"), tokens)
    assert np.std(expected) > 0.05
    umt5 = released.families()[name].model_type == "umt5"
    steps = (("jax", {}), ("t5x", {"scan": umt5}), ("mtf", {}), ("hf", {}))
    source = tmp_path / "hf"
    for to, choices in steps:
        report = convert(source, tmp_path / to / "out", to, **choices)
        source = tmp_path / to / "out"
        assert verify(source).problems == ()
        difference = np.abs(jax_logits(source, tokens)[..., :256] - expected[..., :256]).max()
        assert difference < LOGITS_TOLERANCE, to
    assert report.family.num_encoder_layers == FORMS.get(name, {}).get("num_layers", 2)
    loaded = transformers.AutoModelForSeq2SeqLM.from_pretrained(source).eval()
    if umt5:
        loaded.config.tie_word_embeddings = False
    assert np.abs(torch_logits(loaded, tokens) - expected).max() < LOGITS_TOLERANCE


@pytest.mark.parametrize("name", ["T5 1.0", "UL2", "Pile-T5"])
def test_a_family_in_bfloat16_converts_without_rounding(name, tmp_path):
    random_model(name, tmp_path / "hf", "bfloat16")
    convert(tmp_path / "hf", tmp_path / "jax", "jax")
    convert(tmp_path / "jax", tmp_path / "again", "hf")
    first, again = (
        transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / folder).state_dict()
        for folder in ("hf", "again")
    )
    for key, tensor in first.items():
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor, again[key]), key


def test_ids_of_padding_and_end_stay_from_hugging_face_to_hugging_face(tmp_path):
    random_model("MADLAD-400", tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "again", "hf", dtype="bfloat16")
    for name in ("config.json", "generation_config.json"):
        saved = json.loads((tmp_path / "again" / name).read_text())
        ids = {key: saved[f"{key}_token_id"] for key in ("pad", "eos", "decoder_start")}
        assert ids == {"pad": 1, "eos": 2, "decoder_start": 0}
    report = convert(tmp_path / "hf", tmp_path / "jax", "jax")
    assert any("pads with id 1 and ends with id 2" in note for note in report.notes)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("T5ForSequenceClassification", "a head for classes"),
        ("T5ForQuestionAnswering", "a head for spans"),
    ],
)
@pytest.mark.parametrize("to", ["jax", "hf"])
def test_a_model_without_logits_is_refused_by_its_class(kind, message, to, tmp_path):
    sizes = {"vocab_size": 64, "d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1}
    config = transformers.T5Config(**sizes, num_heads=2, decoder_start_token_id=0)
    model = getattr(transformers, kind)(config)
    model.save_pretrained(tmp_path / "hf")
    with pytest.raises(UserError, match=message):
        convert(tmp_path / "hf", tmp_path / "out", to)
    assert not (tmp_path / "out").exists()
    with pytest.raises(UserError, match=message):
        open_checkpoint(str(tmp_path / "hf"), None, "float32")


@pytest.mark.parametrize(
    ("kind", "family"), [("LongT5", "LongT5"), ("SwitchTransformers", "Switch Transformer")]
)
def test_a_relative_of_t5_is_refused_by_its_name(kind, family, tmp_path):
    sizes = {"vocab_size": 64, "d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2}
    config = getattr(transformers, f"{kind}Config")(**sizes)
    getattr(transformers, f"{kind}ForConditionalGeneration")(config).save_pretrained(
        tmp_path / "hf"
    )
    with pytest.raises(UserError, match=family):
        convert(tmp_path / "hf", tmp_path / "out", "jax")


def test_a_vocabulary_with_ids_of_its_own_becomes_a_tokenizer_with_the_same(tmp_path):
    """MADLAD-400's has SentencePiece's usual ids: unknown, begin and end, none for padding."""
    import sentencepiece

    (tmp_path / "text").write_text("the quick brown fox jumps over the lazy dog\n" * 20)
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "text"),
        model_prefix=str(tmp_path / "pieces"),
        vocab_size=40,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    vocabulary = tmp_path / "pieces.model"
    pieces = sentencepiece.SentencePieceProcessor(str(vocabulary))
    assert (pieces.unk_id(), pieces.eos_id(), pieces.pad_id()) == (0, 2, -1)
    random_model("MADLAD-400", tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "jax", "jax")
    convert(tmp_path / "jax", tmp_path / "again", "hf", vocabulary=vocabulary)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "again")
    for text in ("the fox", "the lazy 東 dog"):
        assert tokenizer(text).input_ids == [*pieces.encode(text), 2], text
    assert tokenizer.pad_token_id == 1
    config = json.loads((tmp_path / "again" / "config.json").read_text())
    assert (config["pad_token_id"], config["eos_token_id"]) == (1, 2)


def test_a_vocabulary_of_byte_pairs_is_refused(tmp_path):
    """Pile-T5's is Llama's."""
    import sentencepiece

    (tmp_path / "text").write_text("the quick brown fox jumps over the lazy dog\n" * 20)
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "text"),
        model_prefix=str(tmp_path / "pieces"),
        vocab_size=60,
        model_type="bpe",
        minloglevel=2,
    )
    random_model("Pile-T5", tmp_path / "hf")
    with pytest.raises(UserError, match="byte pairs"):
        convert(tmp_path / "hf", tmp_path / "out", "hf", vocabulary=tmp_path / "pieces.model")


# --- flax_model.msgpack, which transformers 4 could save -----------------------------------------


def flax_tree(model) -> dict:
    """The tree that transformers 4's Flax T5 has of a PyTorch model's weights."""
    tree: dict = {}
    for name, tensor in model.state_dict().items():
        if name.endswith("embed_tokens.weight") or (
            name == "lm_head.weight" and tensor is model.shared.weight
        ):
            continue
        *parents, _ = name.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        array = tensor.float().numpy()
        if parents[-1] in ("shared", "relative_attention_bias"):
            node["embedding"] = array
        elif parents[-1].endswith("layer_norm"):
            node["weight"] = array
        else:
            node["kernel"] = array.T
    return tree


def as_flax(directory: Path, model, tied: bool, shards: int = 1) -> None:
    """Replaces a directory's weights by Flax's."""
    from flax import serialization, traverse_util

    tree = flax_tree(model)
    if tied:
        tree.pop("lm_head", None)
    (directory / "model.safetensors").unlink()
    flat = traverse_util.flatten_dict(tree, sep="/")
    if shards == 1:
        (directory / "flax_model.msgpack").write_bytes(serialization.to_bytes(tree))
        return
    places = {}
    for number in range(shards):
        file = f"flax_model-{number + 1:05d}-of-{shards:05d}.msgpack"
        part = dict(list(flat.items())[number::shards])
        places |= dict.fromkeys(part, file)
        content = serialization.to_bytes(traverse_util.unflatten_dict(part, sep="/"))
        (directory / file).write_bytes(content)
    index = {"metadata": {"total_size": 0}, "weight_map": places}
    (directory / "flax_model.msgpack.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("name", ["T5 1.0", "T5 1.1", "mT5"])
def test_a_flax_model_is_read_bit_for_bit(name, shards, tokens, tmp_path):
    model = random_model(name, tmp_path / "hf")
    expected = torch_logits(model, tokens)
    as_flax(tmp_path / "hf", model, not has_kernel(name), shards)
    convert(tmp_path / "hf", tmp_path / "again", "hf")
    loaded = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "again").eval()
    for key, tensor in model.state_dict().items():
        assert torch.equal(tensor, loaded.state_dict()[key]), key
    assert verify(tmp_path / "again").problems == ()
    for directory in ("hf", "again"):
        difference = np.abs(jax_logits(tmp_path / directory, tokens) - expected).max()
        assert difference < LOGITS_TOLERANCE


def test_a_cut_flax_model_and_one_without_a_shard_are_refused_by_their_files(tmp_path):
    model = random_model("T5 1.0", tmp_path / "whole")
    as_flax(tmp_path / "whole", model, tied=True)
    file = tmp_path / "whole" / "flax_model.msgpack"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(UserError, match=r"flax_model\.msgpack"):
        convert(tmp_path / "whole", tmp_path / "out", "jax")
    model = random_model("T5 1.0", tmp_path / "shards")
    as_flax(tmp_path / "shards", model, tied=True, shards=2)
    (tmp_path / "shards" / "flax_model-00002-of-00002.msgpack").unlink()
    with pytest.raises(UserError, match=r"missing(?s:.*)flax_model-00002-of-00002\.msgpack"):
        convert(tmp_path / "shards", tmp_path / "out", "jax")
