"""`t0repro encode`: the file's arrays, its checks, and an interruption."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import load_file

import t0repro
from t0repro.cli.app import command
from t0repro.cli.gate import ErrorHandling
from t0repro.errors import UserError
from t0repro.runs import encode_file as module
from t0repro.runs.encode import Limits, Tokenizer
from t0repro.runs.encode_file import encode_file
from t0repro.runs.encoded_output import OutputLayout
from t0repro.tasks import vocabulary as vocabularies
from t0repro.tasks.demo.datasets import VOCABULARY as DEMO_VOCABULARY

from ..converters.encoders import VOCABULARY, save_encoder

ROWS = [np.random.default_rng(at).integers(2, VOCABULARY, 1 + at % 9).tolist() for at in range(50)]


@pytest.fixture
def model(tmp_path):
    return str(save_encoder(tmp_path / "model"))


@pytest.fixture
def texts(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in ROWS))
    return path


def load(path):
    return load_file(path) if path.suffix == ".safetensors" else dict(np.load(path))


@pytest.mark.parametrize("suffix", [".safetensors", ".npz"])
def test_a_file_holds_what_encode_returns(suffix, model, texts, tmp_path):
    out = tmp_path / f"out{suffix}"
    encoded = encode_file(model, texts, out)
    arrays = load(out)
    assert (encoded.rows, encoded.tokens) == (50, sum(map(len, ROWS)))
    assert arrays["offsets"].tolist() == [0, *np.cumsum([len(row) for row in ROWS])]
    assert arrays["embeddings"].tobytes() == np.concatenate(t0repro.encode(model, ROWS)).tobytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "model", f"out{suffix}", "rows.jsonl"
    ]  # fmt: skip


def test_pooled_rows_have_one_vector_each(model, texts, tmp_path):
    out = tmp_path / "out.safetensors"
    encode_file(model, texts, out, pool="mean", dtype="bfloat16")
    arrays = load(out)
    assert arrays["offsets"].tolist() == list(range(51))
    expected = t0repro.encode(model, ROWS, pool="mean", dtype="bfloat16")
    assert arrays["embeddings"].tobytes() == expected.tobytes()


@pytest.mark.parametrize("suffix", [".safetensors", ".npz"])
@pytest.mark.parametrize("after", [0, 1, 3])
def test_an_interrupted_command_goes_on_and_writes_the_same_bytes(
    suffix, after, model, texts, tmp_path, monkeypatch
):
    monkeypatch.setattr(module, "_CHUNK", 10)
    whole, out = tmp_path / f"whole{suffix}", tmp_path / f"out{suffix}"
    encode_file(model, texts, whole)
    encode_ids, calls = module.encode_ids, []

    def interrupted(*arguments):
        calls.append(1)
        if len(calls) > after:
            raise KeyboardInterrupt
        return encode_ids(*arguments)

    monkeypatch.setattr(module, "encode_ids", interrupted)
    with pytest.raises(KeyboardInterrupt):
        encode_file(model, texts, out)
    assert not out.exists()
    monkeypatch.setattr(module, "encode_ids", encode_ids)
    assert encode_file(model, texts, out).resumed == 10 * after
    arrays, expected = load(out), load(whole)
    assert {name: x.tobytes() for name, x in arrays.items()} == {
        name: x.tobytes() for name, x in expected.items()
    }


def test_what_another_command_left_is_not_taken_up(model, texts, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(module, "_CHUNK", 10)
    out = tmp_path / "out.safetensors"

    def interrupted(file, path):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(OutputLayout, "finish", lambda self, *files: interrupted(*files))
        encode_file(model, texts, out, pool="first")
    assert encode_file(model, texts, out, pool="mean").resumed == 0
    assert "starting over: other settings than" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ("[1]\n[1,\n", "line 2"),
        ("[1]\n\n", "line 2"),
        ('[1]\n{"text": "a"}\n', "line 2"),
        ("[1]\n[99]\n", "line 2"),
        ("[1]\n[1.0]\n", "line 2"),
        ("", "no lines"),
    ],
)
def test_a_bad_line_is_named_before_the_model_is_read(lines, said, model, tmp_path, monkeypatch):
    texts = tmp_path / "rows.jsonl"
    texts.write_text(lines)
    monkeypatch.setattr(module, "open_encoder", lambda *_: pytest.fail("was read"))
    with pytest.raises(UserError) as error:
        encode_file(model, texts, tmp_path / "out.npz")
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("texts", "out", "said"),
    [
        ("mine.txt", "out", "does not end in .safetensors or .npz"),
        ("none.txt", "out.npz", "The file of texts does not exist"),
        (".", "out.npz", "The file of texts is a folder"),
        ("mine.csv", "out.npz", "A .csv file holds rows"),
    ],
)
def test_the_command_refuses_files_before_it_imports_jax(
    texts, out, said, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    for name in ("mine.txt", "mine.csv"):
        (tmp_path / name).write_text("a")
    words = ["encode", "--checkpoint=x", f"--texts={texts}", f"--out={out}"]
    with pytest.raises(UserError, match=said):
        command()(args=words, obj=ErrorHandling(), standalone_mode=False)
    assert "importing JAX" not in capsys.readouterr().err


def test_an_output_that_exists_or_has_no_format_is_refused(model, texts, tmp_path):
    (tmp_path / "out.npz").write_text("mine")
    with pytest.raises(UserError, match="The file exists"):
        encode_file(model, texts, tmp_path / "out.npz")
    with pytest.raises(UserError, match=r"\.safetensors or \.npz"):
        encode_file(model, texts, tmp_path / "out.pt")
    with pytest.raises(UserError, match="no bfloat16"):
        encode_file(model, texts, tmp_path / "other.npz", dtype="bfloat16")
    assert (tmp_path / "out.npz").read_text() == "mine"


def test_a_vocabulary_that_was_replaced_under_its_name_is_another(tmp_path):
    model = str(save_encoder(tmp_path / "model", rows=1408))
    vocabulary = tmp_path / "spiece.model"
    identities = []
    for content in (DEMO_VOCABULARY.read_bytes(), with_another_score(DEMO_VOCABULARY.read_bytes())):
        vocabulary.write_bytes(content)
        # A process opens a file once; the next command is another process.
        vocabularies._open.cache_clear()
        tokenizer = Tokenizer(model, vocabulary, 1408, Limits())
        assert tokenizer.identity() is None
        tokenizer.ids("It rained.", "row 0")
        identities.append(tokenizer.identity())
    assert identities[0] != identities[1]


def test_a_vocabulary_that_is_not_there_is_answered_with_the_option(tmp_path, monkeypatch):
    model, texts = str(save_encoder(tmp_path / "model", rows=1408)), tmp_path / "mine.txt"
    texts.write_text("It rained.")
    words = ["encode", f"--checkpoint={model}", f"--texts={texts}", f"--out={tmp_path}/out.npz"]
    with pytest.raises(UserError, match=r"There is no vocabulary .*no\.model") as error:
        command()(
            args=[*words, f"--vocab={tmp_path}/no.model"],
            obj=ErrorHandling(),
            standalone_mode=False,
        )
    assert "--vocab" in str(error.value.where) and "gin" not in str(error.value)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (1407, "has 32,100 pieces, the model's embedding 1,407 rows(.|\n)*--vocab"),
        (32_384, "has 32,384 rows, and the vocabulary 32,100 pieces(.|\n)*--vocab"),
    ],
)
def test_t5s_vocabulary_serves_no_model_of_another_size(rows, message, tmp_path, monkeypatch):
    monkeypatch.delenv("T0REPRO_VOCAB", raising=False)
    model = str(save_encoder(tmp_path / "model", rows=rows))
    with pytest.raises(UserError, match=message):  # and is not fetched to tell
        Tokenizer(model, None, rows, Limits()).ids("It rained.", "row 0")


def with_another_score(content: bytes) -> bytes:
    from sentencepiece import sentencepiece_model_pb2

    model = sentencepiece_model_pb2.ModelProto.FromString(content)
    model.pieces[-1].score -= 1.0
    return model.SerializeToString()
