"""The tokenizer files that go with a Hugging Face model, of any SentencePiece model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from sentencepiece import SentencePieceProcessor
from sentencepiece import sentencepiece_model_pb2 as pb

from t0repro.converters.convert import convert
from t0repro.converters.hf_files import Pieces, read_pieces, tokenizer_files
from t0repro.errors import UserError
from t0repro.parameters.shape import ModelShape
from t0repro.tasks.demo.datasets import VOCABULARY

from ..tasks.vocabularies import write_vocabulary

PIECES = SentencePieceProcessor(str(VOCABULARY)).get_piece_size()
TEXTS = ["Hello, World!", "naïve  café ½", "a\tb", " lead and trail ", "the cat sat on the mat."]
LINES = [*TEXTS, "one\n\n two  \n", "\n", "", "a\u3000b"]


def shape(rows: int) -> ModelShape:
    return ModelShape(1, 1, 2, 2, 1, 2, rows, 4, ("wi_0", "wi_1"), False)


def with_begin(path: Path) -> Path:
    """Inserts a piece before the unknown one and leaves the trainer's ids, as people do."""
    model = pb.ModelProto.FromString(VOCABULARY.read_bytes())
    pieces = list(model.pieces)
    pieces.insert(2, pb.ModelProto.SentencePiece(piece="<s>", type=pieces[0].CONTROL))
    del model.pieces[:]
    model.pieces.extend(pieces)
    path.write_bytes(model.SerializeToString())
    return path


def plain(path: Path) -> Path:
    return write_vocabulary(path)


def with_rules(path: Path, **rules: object) -> Path:
    """Texts are normalized by other rules than T5's, and a line's end is a piece."""
    model = pb.ModelProto.FromString(VOCABULARY.read_bytes())
    for name, value in rules.items():
        setattr(model.normalizer_spec, name, value)
    model.pieces.add(piece="\n", score=-5.0)
    path.write_bytes(model.SerializeToString())
    return path


def with_line_ends(path: Path) -> Path:
    return with_rules(path, name="identity", precompiled_charsmap=b"")


def with_all_spaces(path: Path) -> Path:
    return with_rules(path, remove_extra_whitespaces=False)


def without_dummy_prefix(path: Path) -> Path:
    return with_rules(path, add_dummy_prefix=False)


def with_sentinels(path: Path) -> Path:
    return write_vocabulary(path, pieces=PIECES + 100, inside=100)


def both_files(path: Path) -> list[dict[str, bytes]]:
    """What T5's two files become: without sentinels, and with 100 inside."""
    files = (plain(path.with_name("plain")), with_sentinels(path.with_name("inside")))
    return [tokenizer_files(read_pieces(file, shape(PIECES + 128)), shape(1)) for file in files]


def test_t5_s_two_files_become_the_same_tokenizer(tmp_path):
    one, other = both_files(tmp_path / "x")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert one[name] == other[name]
    assert json.loads(one["tokenizer_config.json"])["extra_ids"] == 100
    parsed = [pb.ModelProto.FromString(files["spiece.model"]).pieces for files in (one, other)]
    assert parsed[0] == parsed[1]


def test_a_piece_that_was_inserted_moves_the_unknown_one_and_is_kept(tmp_path):
    pieces = read_pieces(with_begin(tmp_path / "edited"), shape(PIECES + 1))
    names = [name for name, _ in pieces.scored]
    assert names[:4] == ["<pad>", "</s>", "<s>", "<unk>"]
    assert len(set(names)) == len(names) == PIECES + 1
    assert (pieces.unknown, pieces.special) == (3, [0, 1, 2, 3])
    tokenizer = json.loads(tokenizer_files(pieces, shape(1))["tokenizer.json"])
    assert tokenizer["model"]["unk_id"] == 3


@pytest.mark.parametrize(
    ("pieces", "rows", "given", "sentinels"),
    [
        (32_000, 32_128, None, 100),
        (32_000, 32_000, None, 0),
        (256_000, 256_384, None, 300),  # umT5
        (5_000, 5_120, None, 100),
        (5_000, 5_120, "7", 7),
    ],
)
def test_there_are_as_many_sentinels_as_the_family_has(
    tmp_path, monkeypatch, pieces, rows, given, sentinels
):
    if given:
        monkeypatch.setenv("T0REPRO_EXTRA_IDS", given)
    file = write_vocabulary(tmp_path / "spiece.model", pieces=pieces)
    found = read_pieces(file, shape(rows))
    assert found.sentinels == sentinels
    assert len(found.scored) == pieces + sentinels
    if sentinels:
        assert found.scored[-1][0] == "<extra_id_0>"
    # T5's own number and one that was given are not assumptions.
    assert bool(found.note) == (sentinels == 300 or (pieces, given) == (5_000, None))


def test_more_pieces_than_rows_are_refused(tmp_path, monkeypatch):
    with pytest.raises(UserError, match=f"has {PIECES} pieces, but the embedding only 100 rows"):
        read_pieces(VOCABULARY, shape(100))
    monkeypatch.setenv("T0REPRO_EXTRA_IDS", "100")
    with pytest.raises(UserError, match=f"has {PIECES + 100} pieces, but"):
        read_pieces(VOCABULARY, shape(PIECES))


def test_a_tokenizer_json_leads_to_the_model_that_it_was_made_from(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="(?s)not a SentencePiece model.*spiece.model beside it"):
        read_pieces(tmp_path / "tokenizer.json", shape(100))


@pytest.mark.parametrize("write", [with_line_ends, with_all_spaces, without_dummy_prefix])
def test_other_rules_for_spaces_than_t5_s_are_written_as_they_are(tmp_path, write):
    pieces = read_pieces(write(tmp_path / "pieces"), shape(PIECES + 128))
    files = tokenizer_files(pieces, shape(1))
    # transformers' T5Tokenizer would put T5's rules in their place.
    assert json.loads(files["tokenizer_config.json"])["tokenizer_class"] != "T5Tokenizer"
    tokenizer = json.loads(files["tokenizer.json"])
    assert tokenizer["pre_tokenizer"] is None
    steps = [step["type"] for step in tokenizer["normalizer"]["normalizers"]]
    assert ("Precompiled" in steps) == (write is not with_line_ends)
    assert ("Prepend" in steps) == (write is not without_dummy_prefix)
    assert steps.count("Replace") == (1 if write is with_all_spaces else 3)


def test_a_vocabulary_that_marks_the_ends_of_words_is_refused(tmp_path):
    model = pb.ModelProto.FromString(VOCABULARY.read_bytes())
    model.trainer_spec.treat_whitespace_as_suffix = True
    (tmp_path / "suffix.model").write_bytes(model.SerializeToString())
    with pytest.raises(UserError, match="marks the ends of words"):
        read_pieces(tmp_path / "suffix.model", shape(PIECES))


@pytest.mark.hf
@pytest.mark.parametrize(
    "write",
    [plain, with_sentinels, with_begin, with_line_ends, with_all_spaces, without_dummy_prefix],
)
def test_transformers_gives_sentencepiece_s_tokens(tmp_path, write: Callable[[Path], Path]):
    transformers = pytest.importorskip("transformers")
    file = write(tmp_path / "pieces")
    pieces: Pieces = read_pieces(file, shape(PIECES + 128))
    folder = tmp_path / "hf"
    folder.mkdir()
    for name, content in tokenizer_files(pieces, shape(1)).items():
        (folder / name).write_bytes(content)
    (folder / "config.json").write_text('{"model_type": "t5"}')
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    processor = SentencePieceProcessor(str(file))
    for text in LINES:
        assert tokenizer(text, add_special_tokens=False).input_ids == processor.encode(text), text
    assert tokenizer.unk_token_id == processor.unk_id()
    assert tokenizer("snow \u2603").input_ids[-2:] == [processor.unk_id(), 1]
    if pieces.sentinels:
        assert tokenizer("<extra_id_0>").input_ids == [len(pieces.scored) - 1, 1]
    if write is with_begin:
        assert tokenizer.convert_tokens_to_ids("<s>") == 2


def test_a_vocabulary_with_less_than_half_the_rows_is_refused(
    mesh_variables, write_mesh_checkpoint, tmp_path
):
    source = write_mesh_checkpoint(tmp_path / "source", mesh_variables(shape(3 * PIECES)))
    with pytest.raises(UserError, match="1,408 pieces, and the model's embedding 3,924 rows"):
        convert(source, tmp_path / "hf", "hf", vocabulary=str(plain(tmp_path / "vocabulary")))
    assert not (tmp_path / "hf").exists()


@pytest.mark.parametrize(
    ("binding", "sentinels"),
    [
        ("seqio.SentencePieceVocabulary.extra_ids = 12", 12),
        # T5X's own file binds 0, since the vocabulary that it names holds them.
        ("seqio.SentencePieceVocabulary.extra_ids = 0", 100),
        ("N = 7\nsentencepiece_vocabulary.SentencePieceVocabulary.extra_ids = %N", 7),
        ("", 100),
    ],
)
def test_the_gin_file_beside_a_checkpoint_says_how_many_sentinels_there_are(
    binding, sentinels, mesh_variables, write_mesh_checkpoint, tmp_path
):
    source = write_mesh_checkpoint(tmp_path / "source", mesh_variables(shape(PIECES + 128)))
    (source / "operative_config.gin").write_text(f"{binding}\n")
    convert(source, tmp_path / "hf", "hf", vocabulary=str(plain(tmp_path / "vocabulary")))
    tokens = json.loads((tmp_path / "hf/tokenizer.json").read_text())["model"]["vocab"]
    assert len(tokens) == PIECES + sentinels
