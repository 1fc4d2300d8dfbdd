"""The tokenizer beside a checkpoint, compared with the tasks' vocabulary."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer
from sentencepiece import sentencepiece_model_pb2 as pb

from t0repro import score
from t0repro.converters.convert import convert
from t0repro.converters.hf_files import read_pieces, tokenizer_files
from t0repro.converters.own_tokenizer import check_own_tokenizer, own_vocabulary
from t0repro.errors import UserError
from t0repro.evaluation.selection import check_fits
from t0repro.parameters.shape import ModelShape
from t0repro.tasks.demo.datasets import VOCABULARY
from t0repro.tasks.vocabulary import BYTES, VocabularyFile

from ..tasks.vocabularies import write_vocabulary

PIECES = SentencePieceProcessor(str(VOCABULARY)).get_piece_size()
TASKS = VocabularyFile(str(VOCABULARY), 0)


def exchanged(path: Path) -> Path:
    """The same number of pieces, two of them in each other's place."""
    model = pb.ModelProto.FromString(VOCABULARY.read_bytes())
    one, other = model.pieces[70], model.pieces[71]
    one.piece, other.piece = other.piece, one.piece
    path.write_bytes(model.SerializeToString())
    return path


def save_tokenizer(folder: Path, vocabulary: Path, *names: str) -> None:
    """Writes those of the tokenizer's files that have these names."""
    shape = ModelShape(1, 1, 8, 8, 2, 4, PIECES + 128, 4, ("wi",), True)
    for name, content in tokenizer_files(read_pieces(vocabulary, shape), shape).items():
        if name in names:
            (folder / name).write_bytes(content)


@pytest.mark.parametrize("names", [["spiece.model"], ["tokenizer.json", "tokenizer_config.json"]])
def test_the_same_pieces_pass_with_and_without_sentinels(tmp_path, names):
    save_tokenizer(tmp_path, VOCABULARY, *names)
    for vocabulary in (TASKS, VocabularyFile(str(VOCABULARY), 100)):
        assert check_own_tokenizer([str(tmp_path)], vocabulary)
    inside = write_vocabulary(tmp_path / "inside", pieces=PIECES + 100, inside=100)
    assert check_own_tokenizer([str(tmp_path)], VocabularyFile(str(inside)))


def test_a_tokenizer_without_its_sentencepiece_model_is_said_to_lack_it(tmp_path, monkeypatch):
    monkeypatch.delenv("T0REPRO_VOCAB", raising=False)
    monkeypatch.setattr("t0repro.tasks.vocabulary.local_copy", no_network)
    save_tokenizer(tmp_path, VOCABULARY, "tokenizer.json", "tokenizer_config.json")
    with pytest.raises(UserError, match="there is no SentencePiece model") as error:
        own_vocabulary(str(tmp_path))
    assert "spiece.model" in error.value.fix and "--vocab" in error.value.fix


def no_network(address):
    raise UserError("The vocabulary cannot be reached.", where=address)


def test_a_run_here_records_its_vocabulary(tmp_path):
    recorded = {"may_change": {"vocabulary": [str(VOCABULARY), 100]}}
    (tmp_path / "trained_with.json").write_text(json.dumps(recorded))
    assert own_vocabulary(str(tmp_path)) == VocabularyFile(str(VOCABULARY), 100)
    with pytest.raises(UserError, match="The vocabulary has 1,408 pieces") as error:
        check_fits(VocabularyFile(str(VOCABULARY), 100), 1_000, "model", [str(tmp_path)])
    assert f"trained with, {VOCABULARY} (T0REPRO_VOCAB" in error.value.fix
    check_fits(VocabularyFile(str(VOCABULARY), 100), 32_128, "model", [str(tmp_path)])
    for other in ([str(tmp_path / "gone.model"), 100], ["gs://bucket/a.model", 0], None):
        recorded["may_change"]["vocabulary"] = other
        (tmp_path / "trained_with.json").write_text(json.dumps(recorded))
        assert own_vocabulary(str(tmp_path)) is None
    # Of an earlier version, and damaged ones.
    for text in ("{}", "{", '{"may_change": {"vocabulary": "a"}}'):
        (tmp_path / "trained_with.json").write_text(text)
        assert own_vocabulary(str(tmp_path)) is None


def test_a_folder_without_a_tokenizer_says_nothing(tmp_path):
    assert not check_own_tokenizer([str(tmp_path)], TASKS)


@pytest.mark.parametrize("name", ["spiece.model", "tokenizer.json"])
def test_a_vocabulary_of_the_same_size_with_other_pieces_is_refused_by_the_first(tmp_path, name):
    save_tokenizer(tmp_path, exchanged(tmp_path / "other"), name)
    with pytest.raises(UserError, match="(?s)is not the checkpoint's.*id 70 is"):
        check_own_tokenizer([str(tmp_path)], TASKS)


ADDED: dict[str, Any] = {
    "added_tokens.json": {"<premise>": PIECES + 100, "<extra_id_0>": PIECES + 99},
    "tokenizer_config.json": {
        "added_tokens_decoder": {"1": {"content": "</s>"}, "2000": {"content": "<premise>"}}
    },
    "tokenizer.json": {
        "added_tokens": [{"id": 0, "content": "<pad>"}, {"id": 2000, "content": "<premise>"}]
    },
}


@pytest.mark.parametrize("name", ADDED)
def test_added_tokens_are_refused_by_name(tmp_path, name):
    save_tokenizer(tmp_path, VOCABULARY, "spiece.model")
    (tmp_path / name).write_text(json.dumps(ADDED[name]))
    with pytest.raises(UserError, match="lacks: '<premise>'") as caught:
        check_own_tokenizer([str(tmp_path)], TASKS)
    assert caught.value.where == str(tmp_path / name)


@pytest.mark.parametrize("pad", ["<pad_>", {"content": "<pad_>"}])
def test_padding_may_be_added(tmp_path, pad):
    """transformers needs it, and a Llama's vocabulary has none."""
    save_tokenizer(tmp_path, VOCABULARY, "spiece.model")
    (tmp_path / "added_tokens.json").write_text('{"<pad_>": 2000}')
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"pad_token": pad}))
    assert check_own_tokenizer([str(tmp_path)], TASKS)


def test_a_word_s_piece_that_was_added_as_a_token_is_refused(tmp_path):
    """tokenizers then takes it inside words too, under its old id."""
    save_tokenizer(tmp_path, VOCABULARY, "spiece.model", "tokenizer.json")
    tokenizer = json.loads((tmp_path / "tokenizer.json").read_text())
    piece = tokenizer["model"]["vocab"][70][0]
    tokenizer["added_tokens"].append({"id": 70, "content": piece, "special": False})
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(UserError, match=f"even inside words.*{piece}"):
        check_own_tokenizer([str(tmp_path)], TASKS)


def test_two_files_of_one_tokenizer_that_differ_are_refused(tmp_path):
    """transformers reads tokenizer.json; the model may have been trained with either."""
    save_tokenizer(tmp_path, exchanged(tmp_path / "other"), "tokenizer.json")
    save_tokenizer(tmp_path, VOCABULARY, "spiece.model")
    with pytest.raises(UserError, match="two vocabularies: id 70 is"):
        check_own_tokenizer([str(tmp_path)], TASKS)


def test_a_llama_s_tokenizer_model_is_compared(tmp_path):
    """Pile-T5's, of byte pairs, with the ids of a Llama; tokenizer.json has them by name."""
    own = tmp_path / "tokenizer.model"
    text = tmp_path / "text"
    text.write_text("a text of some words, and of more words\n" * 9)
    SentencePieceTrainer.train(
        f"--input={text} --model_prefix={tmp_path}/tokenizer --model_type=bpe --vocab_size=300"
        " --byte_fallback --unk_id=0 --bos_id=1 --eos_id=2 --pad_id=-1 --minloglevel=2"
    )
    with pytest.raises(UserError, match=f"is not the checkpoint's, {own}.*: id 0 is"):
        check_own_tokenizer([str(tmp_path)], TASKS)
    processor = SentencePieceProcessor(str(own))
    pieces = {processor.id_to_piece(token): token for token in range(processor.get_piece_size())}
    tokenizer = {"model": {"type": "BPE", "vocab": pieces}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert check_own_tokenizer([str(tmp_path)], VocabularyFile(str(own)))


def test_word_pieces_are_refused(tmp_path):
    """Chinese T5s have BERT's tokenizer."""
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\n")
    with pytest.raises(UserError, match="is of the kind WordPiece"):
        check_own_tokenizer([str(tmp_path)], TASKS)


def test_byte_pairs_of_as_many_tokens_are_refused(tmp_path):
    """CodeT5's have 32,100, as T5's vocabulary."""
    (tmp_path / "merges.txt").write_text("")
    (tmp_path / "vocab.json").write_text("{}")
    with pytest.raises(UserError, match="is of the kind BPE"):
        check_own_tokenizer([str(tmp_path)], TASKS)


def test_byt5_s_tokenizer_is_its_bytes(tmp_path):
    settings = {"tokenizer_class": "ByT5Tokenizer", "extra_ids": 125}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert check_own_tokenizer([str(tmp_path)], VocabularyFile(BYTES, 125))
    with pytest.raises(UserError, match="only one is a SentencePiece model"):
        check_own_tokenizer([str(tmp_path)], TASKS)


def test_a_damaged_tokenizer_file_is_named(tmp_path):
    (tmp_path / "tokenizer.json").write_text("[")
    with pytest.raises(UserError, match="tokenizer.json is not a JSON object"):
        check_own_tokenizer([str(tmp_path)], TASKS)


# ---- In commands ---------------------------------------------------------------------------------


@pytest.fixture
def checkpoint(tmp_path, mesh_variables, write_mesh_checkpoint) -> Callable[[int], Path]:
    """Makes a Hugging Face T5 with so many rows."""

    def make(rows: int) -> Path:
        shape = ModelShape(1, 1, 8, 8, 2, 4, rows, 32, ("wi",), True)
        source = write_mesh_checkpoint(tmp_path / f"source{rows}", mesh_variables(shape))
        convert(source, tmp_path / f"hf{rows}", "hf", slots=False)
        return tmp_path / f"hf{rows}"

    return make


def scores(model: Path) -> Any:
    return score(model, ["the cat"], ["a", "b"], vocabulary=VOCABULARY)


def test_as_many_rows_as_pieces_are_enough_and_fewer_are_not(checkpoint):
    """A tokenizer's own length, to which people resize the embedding, is not a multiple of 128."""
    assert scores(checkpoint(PIECES)).shape == (1, 2)
    with pytest.raises(UserError, match=f"has {PIECES:,} pieces, the model's embedding"):
        scores(checkpoint(PIECES - 1))


def test_more_rows_than_padding_explains_need_a_tokenizer_that_agrees(checkpoint):
    directory = checkpoint(PIECES + 1000)
    with pytest.raises(UserError, match="put a copy beside the checkpoint, as spiece.model"):
        scores(directory)
    shutil.copy(VOCABULARY, directory / "spiece.model")
    assert scores(directory).shape == (1, 2)


@pytest.mark.parametrize("to", ["mtf", "t5x", "jax", "hf"])
def test_a_conversion_keeps_the_tokenizer_so_that_it_still_counts(checkpoint, tmp_path, to):
    directory = checkpoint(PIECES)
    save_tokenizer(directory, exchanged(tmp_path / "other"), "spiece.model")
    (directory / "added_tokens.json").write_text('{"<premise>": 1408}')
    convert(directory, tmp_path / "converted", to)
    for path in (directory, tmp_path / "converted"):
        with pytest.raises(UserError, match="(?s)is not the checkpoint's.*id 70 is"):
            scores(path)
    with pytest.raises(UserError, match="is not the checkpoint's"):
        convert(directory, tmp_path / "again", "hf", vocabulary=VOCABULARY)
