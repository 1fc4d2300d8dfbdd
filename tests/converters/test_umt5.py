"""umT5, whose every layer has its own position bias: between all formats, and PyTorch's logits."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from t0repro.config.mtf import dialect
from t0repro.config.mtf.parser import MeshInputs
from t0repro.converters.convert import convert
from t0repro.converters.inspection import verify
from t0repro.converters.sources import load_any
from t0repro.errors import UserError
from t0repro.parameters.shape import ModelShape

from .checkpoint_files import assert_same_bits, read_variables
from .logits import jax_logits, torch_logits

# Every kernel is factored, so that a scanned tree loses nothing.
SHAPE = ModelShape(
    2, 3, 128, 192, 2, 64, 256, 32, ("wi_0", "wi_1"), False, position_bias_per_layer=True
)
LOGITS_TOLERANCE = 7e-6


@pytest.fixture
def source(mesh_variables, write_mesh_checkpoint, tmp_path) -> Path:
    """A Mesh TensorFlow checkpoint with slots, and what gin says of it."""
    directory = write_mesh_checkpoint(tmp_path / "source", mesh_variables(SHAPE))
    text = "SelfAttention.relative_attention_type = 'bias'\n"
    (directory / "operative_config.gin").write_text(text)
    return directory


def test_every_block_of_mesh_tensorflow_has_a_bias(source):
    biases = {name for name in read_variables(source) if name.endswith("relative_attention_bias")}
    assert biases == {
        f"{tower}/block_{block:03d}/layer_000/SelfAttention/relative_attention_bias"
        for tower, count in (("encoder", 2), ("decoder", 3))
        for block in range(count)
    }


def test_it_goes_through_all_formats_bit_for_bit(source, tmp_path):
    variables = read_variables(source)
    steps = (("t5x", {"scan": True}), ("jax", {}), ("hf", {}), ("t5x", {"scan": True}), ("mtf", {}))
    for number, (to, choices) in enumerate(steps):
        target = tmp_path / str(number)
        report = convert(source, target, to, **choices)
        assert report.family == SHAPE
        assert report.family.name == "umT5"
        assert verify(target).problems == ()
        source = target
    assert_same_bits(variables, read_variables(source))


def test_t5x_s_scanned_tree_stacks_the_biases(source, tmp_path):
    convert(source, tmp_path / "t5x", "t5x", scan=True)
    file = tmp_path / "t5x" / "checkpoint_7" / "target.decoder.decoder.relpos_bias.rel_embedding"
    assert json.loads((file / ".zarray").read_text())["shape"] == [2, 3, 32]
    tree = load_any(tmp_path / "t5x")
    variables = read_variables(source)
    name = "decoder/block_002/layer_000/SelfAttention/relative_attention_bias"
    np.testing.assert_array_equal(
        tree["target/decoder/layers_2/relpos_bias/rel_embedding"], variables[name]
    )


def test_only_t5x_s_scanned_model_is_such_a_t5(source, tmp_path):
    with pytest.raises(UserError, match=r"scanned layout.*\n.*source.*\n.*--scan"):
        convert(source, tmp_path / "out", "t5x")


@pytest.mark.parametrize("kind", ["bias", "bias_shared"])
def test_a_gin_file_must_say_the_same(source, tmp_path, kind):
    (tmp_path / "own.gin").write_text(f"SelfAttention.relative_attention_type = '{kind}'\n")
    request = {"gin_file": tmp_path / "own.gin", "dry_run": True}
    if kind == "bias":
        convert(source, tmp_path / "out", "jax", **request)
    else:
        with pytest.raises(UserError, match="position_bias_per_layer is True"):
            convert(source, tmp_path / "out", "jax", **request)


@pytest.mark.mtf
@pytest.mark.parametrize(("layers", "per_layer"), [(1, False), (2, True)])
def test_gin_configures_such_a_model(layers, per_layer):
    """Of a single layer, its own bias is a shared one: to Mesh TensorFlow they are the same."""
    params = (
        "MIXTURE_NAME = 'demo_train'",
        "run.train_steps = 1",
        "run.batch_size = 2",
        "utils.run.mesh_shape = []",
        f"num_layers = {layers}",
        "SelfAttention.relative_attention_type = 'bias'",
    )
    files = ("dataset.gin", "models/t5.1.1.small.gin")
    inputs = MeshInputs("a_model_dir", files, params, module_imports=("t0repro.tasks.demo",))
    model = dialect.load(inputs).run.model
    assert model.position_bias_per_layer is per_layer


# --- transformers --------------------------------------------------------------------------------


def umt5(directory: Path, tied: bool, **fields):
    """A random UMT5 as the installed transformers saves it; if not tied, as transformers 4 does."""
    torch = pytest.importorskip("torch", reason="needs the extra hf")
    transformers = pytest.importorskip("transformers", reason="needs the extra hf")
    sizes = {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4}
    torch.manual_seed(0)
    model = transformers.UMT5ForConditionalGeneration(
        transformers.UMT5Config(vocab_size=256, decoder_start_token_id=0, **sizes, **fields)
    ).eval()
    for path, parameter in model.named_parameters():
        if parameter.ndim > 1:
            std = 0.5 if "bias" in path else 0.3 if "shared" in path else 0.08
            torch.nn.init.normal_(parameter, std=std)
    if not tied:
        model.lm_head.weight = torch.nn.Parameter(torch.randn(256, 64) / 20)
        model.config.tie_word_embeddings = False
    model.save_pretrained(directory, max_shard_size="100KB")
    assert len(list(directory.glob("*.safetensors"))) > 1
    return model


@pytest.fixture(scope="module")
def tokens() -> dict[str, np.ndarray]:
    """Two pairs without padding, long enough for distances beyond 20."""
    generator = np.random.default_rng(1)
    return {
        name: generator.integers(2, 250, (2, length)).astype(np.int32)
        for name, length in (("inputs", 40), ("targets", 30))
    }


@pytest.mark.hf
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {
            "feed_forward_proj": "gated-silu",
            "relative_attention_max_distance": 20,
            "layer_norm_epsilon": 1e-3,
        },
        {"feed_forward_proj": "gelu"},
    ],
    ids=["umT5", "every field", "exact gelu"],
)
def test_its_logits_are_pytorch_s_in_every_format_there_and_back(tokens, tmp_path, tied, fields):
    expected = torch_logits(umt5(tmp_path / "hf", tied, **fields), tokens)
    assert np.std(expected) > 0.05
    directories = [tmp_path / "hf", tmp_path / "jax", tmp_path / "again"]
    convert(directories[0], directories[1], "jax")
    if not fields:
        directories += [tmp_path / "mtf", tmp_path / "t5x"]
        convert(directories[1], tmp_path / "mtf", "mtf")
        convert(tmp_path / "mtf", tmp_path / "t5x", "t5x", scan=True)
    report = convert(directories[-1] if not fields else directories[1], tmp_path / "again", "hf")
    for directory in directories:
        difference = np.abs(jax_logits(directory, tokens) - expected).max()
        assert difference < LOGITS_TOLERANCE, directory.name
    import transformers

    loaded = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "again").eval()
    assert type(loaded).__name__ == "UMT5ForConditionalGeneration"
    if not tied:
        assert "tie_word_embeddings = False" in "".join(report.notes)
        loaded.config.tie_word_embeddings = False
    assert np.abs(torch_logits(loaded, tokens) - expected).max() < LOGITS_TOLERANCE


@pytest.mark.hf
def test_an_untied_kernel_under_a_configuration_that_says_tied_is_refused(tmp_path):
    """transformers 5 saves so, and scales; neither T5X nor transformers 4 computes that."""
    umt5(tmp_path / "hf", tied=False)
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    config["tie_word_embeddings"] = True
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"lm_head\.weight differs(?s:.*)umT5"):
        convert(tmp_path / "hf", tmp_path / "jax", "jax")
