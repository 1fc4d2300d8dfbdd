"""The vocabulary: read when needed, the same to SeqIO and Beam, clear when it cannot be had."""

import pickle
import urllib.error

import numpy as np
import pytest
import seqio

from t0repro import buckets
from t0repro.errors import UserError
from t0repro.tasks import vocabulary
from t0repro.tasks.demo.datasets import VOCABULARY
from t0repro.tasks.seqio_tasks import LazyVocabulary, seqio_vocabulary
from t0repro.tasks.vocabulary import VocabularyFile, default_vocabulary


def test_the_default_is_t5s_with_100_extra_ids(monkeypatch):
    monkeypatch.delenv("T0REPRO_VOCAB", raising=False)
    default = default_vocabulary()
    assert default.address == ("gs://t5-data/vocabs/cc_all.32000.100extra/sentencepiece.model")
    assert default.extra_ids == 100


def test_a_local_copy_overrides_the_address(monkeypatch):
    monkeypatch.setenv("T0REPRO_VOCAB", str(VOCABULARY))
    assert default_vocabulary() == VocabularyFile(str(VOCABULARY), 100)


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
        assert error.value.where == absent
        # Another vocabulary than T5's, which T5's would not replace.
        monkeypatch.setenv("T0REPRO_VOCAB", str(VOCABULARY))
        with pytest.raises(UserError) as error:
            read()
        assert error.value.where == absent and "T5" not in str(error.value)


def test_a_file_of_another_kind_is_named(tmp_path):
    path = tmp_path / "text.model"
    path.write_text("not a model")
    with pytest.raises(UserError, match="not a SentencePiece model"):
        LazyVocabulary(str(path), 100).encode("text")
    with pytest.raises(UserError, match="not a SentencePiece model") as error:
        _ = VocabularyFile(str(path)).sp_model
    assert error.value.where == str(path)


@pytest.fixture
def asked(monkeypatch, tmp_path):
    """The requests for vocabularies, none of which is answered, nor was before."""
    asked = []

    def no_network(url, timeout):
        asked.append((url, timeout))
        raise urllib.error.URLError("no network")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(vocabulary.urllib.request, "urlopen", no_network)
    monkeypatch.setattr(buckets, "has_google_credentials", lambda: False)
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
        with pytest.raises(UserError, match="Set T0REPRO_VOCAB"):
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
