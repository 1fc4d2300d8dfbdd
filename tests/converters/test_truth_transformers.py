"""Mesh TensorFlow's logits and PyTorch's, from the same weights, converted either way."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from t0repro.converters.convert import convert

from .logits import torch_logits

torch = pytest.importorskip("torch", reason="needs the extra hf")
transformers = pytest.importorskip("transformers", reason="needs the extra hf")

pytestmark = [pytest.mark.hf, pytest.mark.mtf]

LOGITS_TOLERANCE = 1e-4

BINDINGS = """
include 'defaults.gin'
include 'models/{model}.gin'
vocab_size = {vocab_size}
num_layers = 2
num_heads = 2
d_kv = 64
d_model = 128
d_ff = 256
dropout_rate = 0.0
"""


@pytest.fixture
def mesh_logits(run_script, tmp_path):
    """Mesh TensorFlow's logits for tokens, from a checkpoint."""

    def compute(prefix: Path, tokens: dict[str, np.ndarray], bindings: str):
        np.savez(tmp_path / "tokens.npz", **tokens)
        (tmp_path / "model.gin").write_text(bindings)
        names = ("tokens.npz", "logits.npy", "model.gin")
        run_script("mesh_logits.py", str(prefix), *(str(tmp_path / name) for name in names))
        return np.load(tmp_path / "logits.npy")

    return compute


@pytest.fixture(scope="module")
def tokens() -> dict[str, np.ndarray]:
    """Two pairs without padding."""
    generator = np.random.default_rng(1)
    return {
        "inputs": generator.integers(2, 250, (2, 12)).astype(np.int32),
        "targets": generator.integers(2, 250, (2, 7)).astype(np.int32),
    }


def pytorch_model(directory: Path):
    return transformers.T5ForConditionalGeneration.from_pretrained(directory).eval()


@pytest.mark.parametrize(
    ("checkpoint", "model"), [("t5_1_1", "t5.1.1.small"), ("t5_1_0", "t5.1.0.small")]
)
def test_pytorch_s_logits_agree_with_mesh_tensorflow_s_within_1e_4(
    mesh_checkpoints, mesh_logits, tokens, tmp_path, checkpoint, model
):
    # T5 1.0's masters are bfloat16 here; float32 holds them exactly, for both readers.
    convert(
        mesh_checkpoints[checkpoint],
        tmp_path / "float32",
        "mtf",
        dtype="float32",
        norm_names="rms_norm",
    )
    convert(tmp_path / "float32", tmp_path / "hf", "hf")
    expected = mesh_logits(
        tmp_path / "float32" / "model.ckpt-2",
        tokens,
        BINDINGS.format(model=model, vocab_size=250),
    )
    np.testing.assert_allclose(
        torch_logits(pytorch_model(tmp_path / "hf"), tokens),
        expected,
        rtol=0,
        atol=LOGITS_TOLERANCE,
    )
    assert np.std(expected) > 0.05  # the logits say something


@pytest.mark.parametrize("kind", ["own kernel", "unscaled embedding", "T5 1.0"])
def test_a_random_model_that_transformers_saved_gives_mesh_tensorflow_the_same_logits(
    mesh_logits, tokens, tmp_path, kind
):
    gated = kind != "T5 1.0"
    config = transformers.T5Config(
        vocab_size=256,
        d_model=128,
        d_kv=64,
        d_ff=256,
        num_layers=2,
        num_heads=2,
        feed_forward_proj="gated-gelu" if gated else "relu",
        tie_word_embeddings=not gated,
        decoder_start_token_id=0,
    )
    torch.manual_seed(0)
    model = transformers.T5ForConditionalGeneration(config)
    if kind == "own kernel":
        # transformers 5 makes every new T5 tied; a T5 1.1 that was loaded has its own.
        model.lm_head.weight = torch.nn.Parameter(torch.randn(256, 128) / 10)
    model.save_pretrained(tmp_path / "hf", max_shard_size="500KB")
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 1
    report = convert(tmp_path / "hf", tmp_path / "mtf", "mtf")
    assert report.family.name == ("T5 1.1" if gated else "T5 1.0")
    name = "t5.1.1.small" if gated else "t5.1.0.small"
    ours = mesh_logits(
        tmp_path / "mtf" / "model.ckpt-0", tokens, BINDINGS.format(model=name, vocab_size=256)
    )
    np.testing.assert_allclose(
        torch_logits(pytorch_model(tmp_path / "hf"), tokens), ours, rtol=0, atol=LOGITS_TOLERANCE
    )


SIZES = dict(d_model=128, d_kv=64, d_ff=256, num_layers=2, num_heads=2, decoder_start_token_id=0)

UNTIED = {"tie_word_embeddings": False}

# Class and fields of the configurations that transformers makes random models of.
MODELS = {
    "T5 1.0": ("T5", {}),
    "T5 1.1, unscaled tie": (
        "T5",
        {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    ),
    "gated silu": ("T5", {"feed_forward_proj": "gated-silu", **UNTIED}),
    "tanh gelu, not gated": ("T5", {"feed_forward_proj": "gelu_new"}),
    "epsilon": ("T5", {"layer_norm_epsilon": 1e-2}),
    "vocabulary without padding": ("T5", {"vocab_size": 250}),
    "mT5": ("MT5", {}),
    "mT5 of a vocabulary without padding": ("MT5", {"vocab_size": 250}),
}


def random_model(name: str, kernel: bool, directory: Path, dtype: str = "float32"):
    """A model with large random weights, as the installed transformers saves it in shards."""
    family, fields = MODELS[name]
    config = getattr(transformers, f"{family}Config")(**SIZES, **{"vocab_size": 256, **fields})
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForConditionalGeneration")(config).eval()
    for path, parameter in model.named_parameters():
        # Norms stay at one. Attention is not scaled: larger kernels would enlarge rounding errors.
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.1 if "shared" in path else 0.05)
    if kernel:
        model.lm_head.weight = torch.nn.Parameter(torch.randn(config.vocab_size, 128) / 10)
    model = model.to(getattr(torch, dtype))
    model.save_pretrained(directory, max_shard_size="300KB")
    assert len(list(directory.glob("*.safetensors"))) > 1
    return model.float()


def as_transformers_4_saves(directory: Path, tied: bool) -> None:
    """Rewrites config.json as transformers 4.57.1 has it; the weights' files are the same."""
    config = json.loads((directory / "config.json").read_text())
    config.pop("scale_decoder_outputs", None)
    config |= {"tie_word_embeddings": tied, "transformers_version": "4.57.1"}
    if tied and config["model_type"] == "t5":
        del config["tie_word_embeddings"]  # T5's default is not written
    (directory / "config.json").write_text(json.dumps(config))


def converted_logits(directory: Path, tokens, mesh_logits, tmp_path: Path) -> np.ndarray:
    """Mesh TensorFlow's, under the gin file that the conversion wrote."""
    convert(directory, tmp_path / "mtf", "mtf", dtype="float32")
    own = (tmp_path / "mtf" / "operative_config.gin").read_text()
    bindings = f"include 'defaults.gin'\nvocab_size = 256\n{own}\ndropout_rate = 0.0\n"
    return mesh_logits(tmp_path / "mtf" / "model.ckpt-0", tokens, bindings)


@pytest.mark.parametrize("name", MODELS)
def test_what_transformers_5_saves_computes_the_same_logits_under_the_gin_file_that_goes_with_it(
    name, tokens, mesh_logits, tmp_path
):
    expected = torch_logits(random_model(name, False, tmp_path / "hf"), tokens)
    ours = converted_logits(tmp_path / "hf", tokens, mesh_logits, tmp_path)
    np.testing.assert_allclose(
        ours[..., : expected.shape[-1]], expected, rtol=0, atol=LOGITS_TOLERANCE
    )
    assert np.std(expected) > 0.05


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["T5 1.1, unscaled tie", "mT5", "gated silu"])
@pytest.mark.parametrize("generation", [4, 5])
def test_a_kernel_for_the_logits_counts_as_it_does_in_transformers(
    name, generation, dtype, tokens, mesh_logits, tmp_path
):
    expected = torch_logits(random_model(name, True, tmp_path / "hf", dtype), tokens)
    if generation == 4:
        as_transformers_4_saves(tmp_path / "hf", tied=False)
    ours = converted_logits(tmp_path / "hf", tokens, mesh_logits, tmp_path)
    np.testing.assert_allclose(ours, expected, rtol=0, atol=LOGITS_TOLERANCE)


@pytest.mark.parametrize("name", ["T5 1.0", "mT5"])
def test_transformers_4_scales_every_tied_model(name, tokens, mesh_logits, tmp_path):
    if name == "mT5" and transformers.__version__.startswith("4."):
        pytest.skip("transformers 4 makes no mT5 whose head is the embedding; 5 does")
    expected = torch_logits(random_model(name, False, tmp_path / "hf"), tokens)
    if name == "mT5":
        expected *= SIZES["d_model"] ** -0.5  # transformers 5, which computed them, does not
    as_transformers_4_saves(tmp_path / "hf", tied=True)
    ours = converted_logits(tmp_path / "hf", tokens, mesh_logits, tmp_path)
    np.testing.assert_allclose(ours, expected, rtol=0, atol=LOGITS_TOLERANCE)


def vocabulary() -> Path:
    path = os.environ.get("T0REPRO_VOCAB")
    if path is None:
        shared = Path(__file__).parents[3] / "shared" / "vocab" / "t5.cc_all.32000.model"
        if not shared.exists():
            pytest.skip("the T5 vocabulary is not here (T0REPRO_VOCAB names it)")
        return shared
    return Path(path)


def test_autotokenizer_gives_sentencepiece_s_tokens(
    tmp_path, mesh_variables, write_mesh_checkpoint
):
    import sentencepiece

    from t0repro.parameters.shape import ModelShape

    family = ModelShape(1, 1, 4, 4, 1, 4, 32128, 4, ("wi_0", "wi_1"), False)
    source = write_mesh_checkpoint(tmp_path / "source", mesh_variables(family))
    convert(source, tmp_path / "hf", "hf", vocabulary=vocabulary())
    pieces = sentencepiece.SentencePieceProcessor(str(vocabulary()))
    texts = ["Hello, World!", "naïve  café ½ ﬁne", "Ünïcödé 東京 → x", "a\tb", " lead and trail "]
    slow_files = tmp_path / "slow"
    slow_files.mkdir()
    for name in ("config.json", "spiece.model", "tokenizer_config.json"):
        (slow_files / name).write_bytes((tmp_path / "hf" / name).read_bytes())
    for directory in (tmp_path / "hf", slow_files):
        tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
        assert len(tokenizer) == 32100
        for text in texts:
            assert tokenizer(text, add_special_tokens=False).input_ids == pieces.encode(text), text
        assert tokenizer("<extra_id_0>").input_ids == [32099, 1]
        assert tokenizer.decode(pieces.encode("Hello, World!")) == "Hello, World!"


def test_byt5_s_tokenizer_is_made_without_a_vocabulary(
    tmp_path, mesh_variables, write_mesh_checkpoint
):
    from t0repro.parameters.shape import ModelShape

    family = ModelShape(2, 1, 4, 4, 1, 4, 384, 4, ("wi_0", "wi_1"), False)
    source = write_mesh_checkpoint(tmp_path / "source", mesh_variables(family))
    convert(source, tmp_path / "hf", "hf")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert tokenizer("hé").input_ids == [b + 3 for b in "hé".encode()] + [1]
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert transformers.T5Config(**config).num_decoder_layers == 1


def test_mt5_s_vocabulary_spells_unknown_characters_in_bytes_and_has_no_extra_ids(
    tmp_path, mesh_variables, write_mesh_checkpoint
):
    import sentencepiece

    from t0repro.parameters.shape import ModelShape

    # As mT5's: byte pieces, and the extra ids among the pieces. (mT5's own has 250,100 pieces.)
    (tmp_path / "text").write_text("the quick brown fox jumps over the lazy dog\n" * 20)
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "text"),
        model_prefix=str(tmp_path / "pieces"),
        vocab_size=420,
        byte_fallback=True,
        hard_vocab_limit=False,
        pad_id=0,
        eos_id=1,
        unk_id=2,
        bos_id=-1,
        user_defined_symbols=[f"▁<extra_id_{n}>" for n in range(99, -1, -1)],
        minloglevel=2,
    )
    vocabulary = tmp_path / "pieces.model"
    pieces = sentencepiece.SentencePieceProcessor(str(vocabulary))
    family = ModelShape(1, 1, 2, 2, 1, 2, 250_112, 4, ("wi_0", "wi_1"), False)
    source = write_mesh_checkpoint(tmp_path / "source", mesh_variables(family))
    convert(source, tmp_path / "hf", "hf", vocabulary=vocabulary)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    for text in ("the fox", "東京 fox", "naïve"):
        ids = tokenizer(text, add_special_tokens=False).input_ids
        assert ids == pieces.encode(text), text
        assert tokenizer.decode(ids) == text
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "hf")
    assert type(model).__name__ == "MT5ForConditionalGeneration"
