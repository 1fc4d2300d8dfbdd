"""The vocabulary: read when needed, the same to SeqIO and Beam, clear when it cannot be had."""

import pickle
import urllib.error

import numpy as np
import pytest
import sentencepiece
import seqio
from sentencepiece import sentencepiece_model_pb2

from t0repro.errors import UserError
from t0repro.storage import access, buckets
from t0repro.tasks import vocabulary
from t0repro.tasks.demo.datasets import VOCABULARY
from t0repro.tasks.seqio_tasks import LazyVocabulary, seqio_vocabulary
from t0repro.tasks.vocabulary import (
    VocabularyFile,
    are_same,
    check_equal,
    check_ids,
    check_rows,
    default_vocabulary,
    local_copy_of,
    named_vocabulary,
)
from tests.tasks.vocabularies import write_vocabulary


def test_the_default_is_t5s_with_100_extra_ids(monkeypatch):
    monkeypatch.delenv("T0REPRO_VOCAB", raising=False)
    default = default_vocabulary()
    assert default.address == ("gs://t5-data/vocabs/cc_all.32000.100extra/sentencepiece.model")
    assert default.given_ids == 100


def test_a_local_copy_overrides_the_address(monkeypatch):
    monkeypatch.setenv("T0REPRO_VOCAB", str(VOCABULARY))
    assert default_vocabulary() == VocabularyFile(str(VOCABULARY))
    monkeypatch.setenv("T0REPRO_EXTRA_IDS", "7")
    assert default_vocabulary() == VocabularyFile(str(VOCABULARY), 7)
    assert default_vocabulary().vocab_size == VocabularyFile(str(VOCABULARY), 0).vocab_size + 7
    monkeypatch.setenv("T0REPRO_EXTRA_IDS", "none")
    with pytest.raises(UserError, match="not a number of sentinels"):
        default_vocabulary()


def test_files_with_and_without_t5s_sentinels_are_one_vocabulary(tmp_path):
    """As cc_all.32000.100extra and cc_all.32000, which SeqIO reads with 0 and 100 extra ids."""
    held = str(write_vocabulary(tmp_path / "100extra.model", inside=100))
    plain, text = str(VOCABULARY), "Did <extra_id_0> enjoy <extra_id_99>?"
    seqios = seqio.SentencePieceVocabulary(held), seqio.SentencePieceVocabulary(plain, 100)
    for file in (VocabularyFile(path, number) for path in (held, plain) for number in (None, 100)):
        lazy = seqio_vocabulary(file)
        for peer in seqios:
            assert file.sp_model == lazy.sp_model == peer.sp_model and lazy == peer == lazy
            assert file.encode(text) == lazy.encode(text) == peer.encode(text)
            assert file.vocab_size == lazy.vocab_size == peer.vocab_size
        assert file.processor().id_to_piece(file.vocab_size - 1) == "\u2581<extra_id_0>"
        assert list(lazy.encode_tf(text).numpy()) == file.encode(text)
    # With 0 sentinels to add, the file is as SeqIO reads it.
    assert VocabularyFile(held, 0).sp_model == seqios[0].sp_model
    assert VocabularyFile(plain, 0) != VocabularyFile(held, 0)


def test_the_file_that_t5x_names_is_the_one_that_t5_names(shared_vocab, tmp_path):
    model = sentencepiece_model_pb2.ModelProto.FromString(shared_vocab.read_bytes())
    for number in reversed(range(100)):
        model.pieces.add(piece=f"\u2581<extra_id_{number}>", score=0.0, type=4)
    held = tmp_path / "cc_all.32000.100extra.model"
    held.write_bytes(model.SerializeToString())
    one, other = VocabularyFile(str(shared_vocab)), VocabularyFile(str(held))
    assert one.sp_model == other.sp_model and are_same(one, other)
    assert one.vocab_size == other.vocab_size == 32_100
    assert one.encode("Hello world") == other.encode("Hello world") == [8774, 296]


def test_part_of_the_sentinels_is_refused(tmp_path):
    path = str(write_vocabulary(tmp_path / "held.model", inside=100))
    with pytest.raises(UserError, match="holds 100 sentinels, not 300") as error:
        _ = VocabularyFile(path, 300).sp_model
    assert "T0REPRO_EXTRA_IDS" in error.value.fix


@pytest.mark.parametrize(
    ("family", "form", "size", "noted"),
    [
        ("mT5", {"pieces": 250_100, "inside": 100}, 250_100, ""),
        ("umT5", {"pieces": 256_000}, 256_300, "taking 300, as umT5 has"),
        ("MADLAD", {"pieces": 256_000, "unk": 0, "bos": 1, "eos": 2}, 256_000, "as MADLAD-400 has"),
        ("T5", {"pieces": 32_000}, 32_100, ""),
        ("own", {}, 1_408, "taking 100, as T5 has"),
        ("others", {"inside": 100, "mark": ""}, 1_408, ""),
    ],
)
def test_the_number_of_sentinels_is_that_of_the_file_or_its_family(
    tmp_path, capsys, family, form, size, noted
):
    path = write_vocabulary(tmp_path / f"{family}.model", **form)
    file = VocabularyFile(str(path))
    first = {"umT5": 256_299, "mT5": 250_099, "T5": 32_099}.get(family)
    assert file.vocab_size == seqio_vocabulary(file).vocab_size == size
    if first:
        assert file.processor().piece_to_id("\u2581<extra_id_0>") == first
    said = capsys.readouterr().err
    assert noted in said and bool(noted) == bool(said)
    assert not noted or "T0REPRO_EXTRA_IDS" in said


@pytest.mark.parametrize(
    ("ids", "what"),
    [
        ({"unk": 0, "bos": 1, "eos": 2}, "gives unknown characters padding's id, 0"),
        ({"unk": 1, "bos": 2, "eos": -1}, "has no token that ends a text"),
        ({"unk": 2, "bos": 1, "eos": 0}, "ends texts with padding's id, 0"),
    ],
)
def test_ids_that_are_not_t5s_are_refused_wherever_a_vocabulary_is_opened(tmp_path, ids, what):
    path = str(write_vocabulary(tmp_path / "own.model", **ids))
    opened = (
        lambda: VocabularyFile(path).encode("yes"),
        lambda: LazyVocabulary(path).encode("yes"),
        lambda: check_ids(seqio.SentencePieceVocabulary(path, 100)),
    )
    for each in opened:
        with pytest.raises(UserError, match=what) as error:
            each()
        assert error.value.where == path and "--pad_id=0 --eos_id=1 --unk_id=2" in error.value.fix


def test_byte_fallback_leaves_no_character_unknown(tmp_path):
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["the quick brown fox jumps over the lazy dog"] * 20),
        model_prefix=str(tmp_path / "bytes"),
        vocab_size=300,
        byte_fallback=True,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    file = VocabularyFile(str(tmp_path / "bytes.model"))
    assert file.processor().unk_id() == 0 and 0 not in file.encode("\u2603 fox")


def test_bytes_are_seqios_byte_vocabulary():
    file, peer = VocabularyFile("bytes"), seqio.ByteVocabulary()
    assert seqio_vocabulary(file) == peer and are_same(file, peer)
    assert (file.vocab_size, file.eos_id, file.extra_ids) == (peer.vocab_size, peer.eos_id, 0)
    random = np.random.default_rng(0)
    for text in ("", "Ein gro\u00dfes \u6771", "\x00\n \U0001f600 </s>"):
        assert file.encode(text) == peer.encode(text)
        assert file.decode(file.encode(text)) == text
    for tokens in random.integers(0, 300, (50, 12)).tolist():
        assert file.decode(tokens) == peer.decode(tokens)
    more = VocabularyFile("bytes", 125)
    assert more.vocab_size == seqio_vocabulary(more).vocab_size == 384 and not are_same(more, peer)


def test_a_tokenizer_of_transformers_says_which_file_to_give(tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_text("{}")
    with pytest.raises(UserError, match="not a SentencePiece model") as error:
        _ = VocabularyFile(str(path)).sp_model
    assert "spiece.model" in error.value.fix


def test_rows_are_enough_if_each_piece_has_one(tmp_path):
    plain = VocabularyFile(str(VOCABULARY), 0).vocab_size
    check_rows(VocabularyFile(str(VOCABULARY), 100), plain + 100, "here", "do")
    # No prompt has a sentinel, and their number is assumed here.
    check_rows(VocabularyFile(str(VOCABULARY)), plain, "here", "do")
    for file in (
        VocabularyFile(str(VOCABULARY), 100),
        seqio.SentencePieceVocabulary(VOCABULARY, 100),
    ):
        with pytest.raises(UserError, match="1,408 pieces, the model's embedding 1,407 rows"):
            check_rows(file, plain + 99, "here", "do")


def test_two_vocabularies_differ_by_their_first_other_piece(tmp_path):
    plain = VocabularyFile(str(VOCABULARY))
    held = VocabularyFile(str(write_vocabulary(tmp_path / "held.model", inside=100)))
    check_equal(plain, held, "here")
    check_equal(VocabularyFile(str(VOCABULARY), 0), held, "here")
    check_equal(seqio.SentencePieceVocabulary(str(VOCABULARY), 300), held, "here")
    other = sentencepiece_model_pb2.ModelProto.FromString(VOCABULARY.read_bytes())
    other.trainer_spec.model_prefix = "elsewhere"
    (tmp_path / "other.model").write_bytes(other.SerializeToString())
    own = VocabularyFile(str(tmp_path / "other.model"))
    check_equal(plain, own, "here")
    name, other.pieces[7].piece = other.pieces[7].piece, "\u2603"
    (tmp_path / "changed.model").write_bytes(other.SerializeToString())
    changed = VocabularyFile(str(tmp_path / "changed.model"))
    with pytest.raises(UserError, match=f"id 7 is '{name}' there and '\u2603' here") as error:
        check_equal(plain, changed, "here")
    assert error.value.where == "here" and "changed.model" in error.value.fix
    with pytest.raises(UserError, match="only one is a SentencePiece model"):
        check_equal(VocabularyFile("bytes"), plain, "here")


@pytest.mark.parametrize("extra_ids", [0, 100])
def test_its_model_is_seqios_byte_for_byte(extra_ids):
    ours = VocabularyFile(str(VOCABULARY), extra_ids)
    seqios = seqio.SentencePieceVocabulary(str(VOCABULARY), extra_ids)
    assert ours.sp_model == seqios.sp_model and ours.eos_id == seqios.eos_id == 1
    assert seqio_vocabulary(ours) == seqios


def test_it_encodes_as_seqios_own_and_is_equal_to_it():
    ours, seqios = (
        kind(str(VOCABULARY), 100) for kind in (LazyVocabulary, seqio.SentencePieceVocabulary)
    )
    text = "Did the reviewer enjoy the movie?"
    assert ours == seqios and ours.vocab_size == seqios.vocab_size
    ids = ours.encode(text)
    assert ids == seqios.encode(text) == list(ours.encode_tf(text).numpy())
    assert ours.decode_tf(np.array(ids, np.int32)).numpy().decode() == ours.decode(ids) == text


def test_it_survives_pickling_unread_and_read():
    original = LazyVocabulary(str(VOCABULARY), 100)
    unread = pickle.loads(pickle.dumps(original))
    original.load_model()
    read = pickle.loads(pickle.dumps(original))
    assert unread == read == original and read.encode("yes") == original.encode("yes")


def test_a_missing_file_says_how_to_get_it(tmp_path, monkeypatch):
    absent = str(tmp_path / "absent.model")
    for read in (
        lambda: LazyVocabulary(absent).encode("text"),
        lambda: VocabularyFile(absent).sp_model,
    ):
        monkeypatch.setenv("T0REPRO_VOCAB", absent)
        with pytest.raises(UserError, match="Set T0REPRO_VOCAB to a copy of T5's") as error:
            read()
        assert error.value.where == f"T0REPRO_VOCAB={absent}"
        # Another vocabulary than T5's, which T5's would not replace.
        monkeypatch.setenv("T0REPRO_VOCAB", str(VOCABULARY))
        with pytest.raises(UserError) as error:
            read()
        assert error.value.where == absent and "T5" not in str(error.value)


def test_a_folder_is_answered_with_the_file_in_it(tmp_path, monkeypatch):
    monkeypatch.setenv("T0REPRO_VOCAB", str(tmp_path))
    for read in (lambda: named_vocabulary(tmp_path), lambda: default_vocabulary().processor()):
        with pytest.raises(UserError, match="folder has none"):
            read()
        (tmp_path / "spiece.model").touch()
        with pytest.raises(UserError, match=f"in it, {tmp_path}/spiece.model"):
            read()
        (tmp_path / "spiece.model").unlink()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("byte", "There is no vocabulary byte(.|\n)*is called bytes"),
        ("Bytes", "is called bytes"),
        ("~/spiece.model", r"did not expand the ~(.|\n)*\$HOME"),
        ("absent.model", "T0REPRO_VOCAB=absent.model|no vocabulary absent.model"),
    ],
)
def test_a_name_that_is_no_path_is_answered_with_what_was_meant(given, message, monkeypatch):
    monkeypatch.setenv("T0REPRO_VOCAB", given)
    with pytest.raises(UserError, match=message) as error:
        default_vocabulary().processor()
    assert error.value.where == f"T0REPRO_VOCAB={given}"
    with pytest.raises(UserError, match=message):
        named_vocabulary(given)


def test_a_path_may_begin_with_file(monkeypatch):
    monkeypatch.setenv("T0REPRO_VOCAB", f"file://{VOCABULARY}")
    assert default_vocabulary().address == named_vocabulary(f"file://{VOCABULARY}").address
    assert default_vocabulary().address == str(VOCABULARY)


def test_a_file_of_another_kind_is_named(tmp_path):
    path = tmp_path / "text.model"
    path.write_text("not a model")
    with pytest.raises(UserError, match="not a SentencePiece model"):
        LazyVocabulary(str(path), 100).encode("text")
    with pytest.raises(UserError, match="not a SentencePiece model") as error:
        _ = VocabularyFile(str(path)).sp_model
    assert error.value.where == str(path) and "such as spiece.model" in error.value.fix


@pytest.fixture
def asked(monkeypatch, tmp_path):
    """The requests for vocabularies, none of which is answered, nor was before."""
    asked = []

    def no_network(url, timeout):
        asked.append((url, timeout))
        raise urllib.error.URLError("no network")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(vocabulary.urllib.request, "urlopen", no_network)
    monkeypatch.setattr(access, "has_google_credentials", lambda: False)
    vocabulary._fetch.cache_clear()
    yield asked
    vocabulary._fetch.cache_clear()


def test_an_unreachable_bucket_is_asked_once_and_named(asked):
    for _ in range(2):  # a task's, another task's
        with pytest.raises(UserError, match="cannot be reached") as error:
            LazyVocabulary(vocabulary.DEFAULT_ADDRESS, 100).encode("text")
    assert "T0REPRO_VOCAB" in str(error.value) and "gs://t5-data" in str(error.value)
    assert asked == [
        (
            "https://storage.googleapis.com/t5-data/vocabs/cc_all.32000.100extra/sentencepiece.model",
            vocabulary.TIMEOUT_SECONDS,
        )
    ]


def test_an_unreachable_vocabulary_is_not_replaced_by_t5s(asked):
    for address in vocabulary.T5_ADDRESSES:
        with pytest.raises(UserError, match="Set T0REPRO_VOCAB.* own vocabulary"):
            LazyVocabulary(address, 100).encode("text")
    with pytest.raises(UserError, match="cannot be reached") as error:
        LazyVocabulary("gs://bucket/other.model", 100).encode("text")
    assert "gsutil cp gs://bucket/other.model ." in error.value.fix
    assert "T5" not in error.value.fix


def test_a_fetched_vocabulary_is_kept(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    copy = tmp_path / "t0repro" / "bucket" / "a.model"
    copy.parent.mkdir(parents=True)
    copy.write_bytes(VOCABULARY.read_bytes())
    plain = LazyVocabulary(str(VOCABULARY), 100)
    assert LazyVocabulary("gs://bucket/a.model", 100).encode("yes") == plain.encode("yes")
    copy.with_name("b.model").write_text("a page that asks for a password")
    with pytest.raises(UserError, match="not a SentencePiece model") as error:
        LazyVocabulary("gs://bucket/b.model", 100).encode("yes")
    assert error.value.where == str(copy.with_name("b.model"))
    assert error.value.fix == "Remove it, and it is fetched again."


def test_a_vocabulary_in_a_bucket_is_read_from_there(bucket, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    buckets.write(f"{bucket}/a.model", VOCABULARY.read_bytes())
    expected = LazyVocabulary(str(VOCABULARY), 100).encode("yes")
    assert LazyVocabulary(f"{bucket}/a.model", 100).encode("yes") == expected
    with pytest.raises(UserError) as error:
        _ = VocabularyFile(f"{bucket}/absent.model").sp_model
    assert error.value.where == f"{bucket}/absent.model"
    assert error.value.fix.startswith("Name a copy on this machine")
    with pytest.raises(UserError, match="foo:// is not a known scheme"):
        _ = VocabularyFile("foo://bucket/a.model").sp_model


def test_t5s_vocabulary_encodes_a_known_sentence(shared_vocab):
    ids = LazyVocabulary(str(shared_vocab), 100).encode("The house is wonderful.")
    assert ids == [37, 629, 19, 1627, 5]


@pytest.mark.parametrize("seed", range(3))
def test_a_vocabulary_file_decodes_what_seqios_vocabulary_decodes(seed):
    file = VocabularyFile(str(VOCABULARY))
    random, theirs = np.random.default_rng(seed), seqio_vocabulary(file)
    # Ids beyond the pieces, which a padded embedding can generate; padding; text after EOS.
    table = random.integers(0, file.vocab_size + 50, (40, 12)).astype(np.int32)
    table[random.random(table.shape) < 0.1] = 0
    table[random.random(table.shape) < 0.1] = file.eos_id
    texts = [file.decode(row) for row in table]
    assert texts == [theirs.decode(row.tolist()) for row in table]
    assert texts == [text.decode() for text in theirs.decode_tf(table).numpy()]


def test_t5s_address_is_not_what_the_variable_names(monkeypatch):
    """A task that names T5's file has T5's tokens, whatever the others have."""
    monkeypatch.setenv("T0REPRO_VOCAB", str(VOCABULARY))
    t5s = VocabularyFile(vocabulary.DEFAULT_ADDRESS, 100)
    assert not are_same(t5s, default_vocabulary())
    assert local_copy_of(t5s) == default_vocabulary()  # where gin names it for T5's model
    monkeypatch.delenv("T0REPRO_VOCAB")
    assert are_same(t5s, default_vocabulary())
