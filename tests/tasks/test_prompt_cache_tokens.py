"""Packed tokens equal those of SeqIO's vocabulary."""

import itertools
from pathlib import Path

import pytest
import seqio
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from t0repro.tasks.prompt_cache.example_writer import Tokenizer, count
from t0repro.tasks.prompt_cache.records import varint
from t0repro.tasks.rows import read_rows

ODD = [
    "", " ", "\n", "...", "....... ....... ..........", "-----", "aaaa aaaaa aaaaaaaaaaaa",
    "000000 1000000", "haha hahahaha", "´x", "a\u200bb", "é", "a ́x", "a\u00a0b", "a\nb\tc\r\nd",
    "<extra_id_0> x", "x<extra_id_0>", "▁a ▁", "☃☃ ☃", "== " * 40, "x" * 40, "word " * 2000,
    "\u3000full ｗｉｄｔｈ", "don't \u201cquote\u201d \u2014 dash", "𝔘𝔫𝔦 ﬁ ½", "\x00 \x1c \x7f",
]  # fmt: skip
DEMO = Path(__file__).resolve().parents[2] / "tasks" / "demo" / "sentencepiece.model"


def unpacked(tokens: bytes) -> list[int]:
    """The integers of joined varints."""
    found, number, shift = [], 0, 0
    for byte in tokens:
        number |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            found.append(number)
            number = shift = 0
    return found


@pytest.fixture(scope="module")
def t5(shared_vocab):
    """T5's vocabulary, and our tokenizer of it."""
    vocabulary = seqio.SentencePieceVocabulary(str(shared_vocab), 100)
    return vocabulary, Tokenizer(vocabulary.sp_model)


def by_seqio(vocabulary, texts):
    return vocabulary.encode_tf(tf.constant(texts)).to_list()


@pytest.mark.parametrize("threads", [1, 3])
def test_odd_texts_have_seqios_tokens_on_any_number_of_threads(t5, threads):
    vocabulary, _ = t5
    tokenizer = Tokenizer(vocabulary.sp_model, threads)
    assert [unpacked(each) for each in tokenizer.encode(ODD)] == by_seqio(vocabulary, ODD)


def test_a_vocabulary_of_another_kind_has_seqios_tokens():
    vocabulary = seqio.SentencePieceVocabulary(str(DEMO), 100)
    tokenizer = Tokenizer(vocabulary.sp_model)
    assert [unpacked(each) for each in tokenizer.encode(ODD)] == by_seqio(vocabulary, ODD)


@settings(max_examples=60, database=None)
@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=60), max_size=8))
def test_any_text_has_seqios_tokens(t5, words):
    vocabulary, tokenizer = t5
    text = " ".join(words)
    found = [unpacked(each) for each in tokenizer.encode([text])]
    assert found == by_seqio(vocabulary, [text])


def test_texts_of_every_dataset_at_hand_have_seqios_tokens(t5, shared_data):
    vocabulary, tokenizer = t5
    texts = []
    for path in sorted(shared_data.rglob("*.jsonl")):
        for row in itertools.islice(read_rows(path), 40):
            texts.append(" ".join(value for value in row.values() if isinstance(value, str)))
    assert len(texts) > 2000
    assert [unpacked(each) for each in tokenizer.encode(texts)] == by_seqio(vocabulary, texts)


def test_tokens_are_counted_in_their_packed_form():
    assert count(b"".join(map(varint, [2, 127, 128, 16_383, 16_384, 32_099]))) == 6
