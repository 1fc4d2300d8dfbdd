"""Embeddings: the same bits in any company, and what cannot be encoded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import t0repro
from t0repro.errors import UserError
from t0repro.evaluation.encoding import SHORTEST, class_length, make_blocks
from t0repro.evaluation.opened import open_encoder

ROWS = [
    np.random.default_rng(at).integers(3, 1408, size).tolist()
    for at, size in enumerate((1, 5, 31, 32, 33, 47, 60, 90, 3, 12, 40, 70, 100, 2))
]


@pytest.fixture(scope="module")
def alone(model_dir):
    """Each row's outputs when it is encoded by itself."""
    return [t0repro.encode(model_dir, [row])[0] for row in ROWS]


@pytest.mark.parametrize("seed", range(8))
def test_the_bits_depend_on_neither_neighbors_nor_order_nor_batch_size(seed, model_dir, alone):
    generator = np.random.default_rng(seed)
    chosen = generator.permutation(len(ROWS))[: generator.integers(2, len(ROWS) + 1)]
    # With more rows than a block has, so that a row is in the first block or in another.
    chosen = np.concatenate([chosen] * int(generator.integers(1, 4)))
    size = int(generator.integers(1, 64))
    outputs = t0repro.encode(model_dir, [ROWS[at] for at in chosen], batch_size=size)
    for at, output in zip(chosen, outputs, strict=True):
        assert output.tobytes() == alone[at].tobytes()


@pytest.mark.always
def test_the_bits_do_not_depend_on_the_number_of_devices(model_dir, alone, tmp_path):
    script = Path(__file__).with_name("encode_on_eight_devices.py")
    out = tmp_path / "out.npz"
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    subprocess.run(
        [sys.executable, "-P", str(script), str(model_dir), str(out)],
        input=json.dumps(ROWS),
        text=True,
        check=True,
        env={**os.environ, "XLA_FLAGS": flags},
    )
    arrays = np.load(out)
    outputs, pooled, devices = (arrays[name] for name in arrays.files)
    assert devices == 8
    assert outputs.tobytes() == np.concatenate(alone).tobytes()
    assert pooled.tobytes() == t0repro.encode(model_dir, ROWS, pool="mean").tobytes()


def test_pooling_averages_a_rows_own_tokens_or_takes_its_first(model_dir, alone):
    mean = t0repro.encode(model_dir, ROWS, pool="mean")
    np.testing.assert_allclose(mean, [each.mean(axis=0) for each in alone], atol=1e-6)
    first = t0repro.encode(model_dir, ROWS, pool="first")
    assert first.tobytes() == np.stack([each[0] for each in alone]).tobytes()


def test_an_open_checkpoint_holds_the_encoder_alone(model_dir, alone):
    opened = open_encoder(str(model_dir), "float32")
    assert set(opened.params) == {"encoder", "token_embedder"}
    (output,) = t0repro.encode(opened, ROWS[1:2])
    assert output.tobytes() == alone[1].tobytes()


def test_bfloat16_is_given_when_asked_for(model_dir, alone):
    (output,) = t0repro.encode(model_dir, ROWS[1:2], dtype="bfloat16")
    assert output.dtype.name == "bfloat16"
    np.testing.assert_allclose(output.astype(np.float32), alone[1], atol=0.05)


def test_id_0_in_a_row_is_a_token(model_dir):
    with_zero, without = t0repro.encode(model_dir, [[5, 0, 9], [5, 9]])
    assert with_zero.shape == (3, 8)
    assert np.abs(with_zero[1]).max() > 0
    assert not np.array_equal(with_zero[0], without[0])


def test_no_rows_give_no_arrays(model_dir):
    assert t0repro.encode(model_dir, []) == []
    assert t0repro.encode(model_dir, [], pool="mean").shape == (0, 8)


@pytest.mark.parametrize(
    ("given", "among"),
    [
        ({"pool": "max"}, "'mean', 'first'"),
        ({"too_long": "cut_it"}, "'cut', 'error'"),
        ({"dtype": "float16"}, "'float32', 'bfloat16'"),
    ],
)
def test_a_word_that_is_none_of_the_choices_is_refused(given, among, model_dir):
    with pytest.raises(UserError, match=f"fix: Give one of {among}"):
        t0repro.encode(model_dir, [[5, 9]], **given)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ([3, 1408], "1,408 rows, and the id 1408 is not one"),
        ([-1], "the id -1 is not one"),
        ([], "no tokens"),
        ([1.5], "neither a text nor a list of token ids"),
        ([True], "neither a text nor a list of token ids"),
        (None, "neither a text nor a list of token ids"),
        ("a\ud83d", "half of a pair of surrogates"),
        (float("nan"), "neither a text nor a list of token ids"),
        ([[1], [2, 3]], "neither a text nor a list of token ids"),
    ],
)
def test_a_bad_row_is_named_before_the_model_is_read(row, said, model_dir, monkeypatch):
    monkeypatch.setattr("t0repro.runs.encode.open_cached", lambda *_: pytest.fail("was read"))
    with pytest.raises(UserError, match=said) as error:
        t0repro.encode(model_dir, [[5, 9], row])
    assert error.value.where == "row 1"


def test_longer_rows_are_cut_and_counted_or_refused(model_dir, capsys):
    outputs = t0repro.encode(model_dir, ROWS[:3], length=5)
    assert [len(each) for each in outputs] == [1, 5, 5]
    assert "1 row was cut to 5 tokens" in capsys.readouterr().err
    with pytest.raises(UserError, match="31 tokens, more than 5"):
        t0repro.encode(model_dir, ROWS[:3], length=5, too_long="error")
    with pytest.raises(UserError, match="length is 0(.|\n)*at least 1"):
        t0repro.encode(model_dir, ROWS[:3], length=0)
    with pytest.raises(UserError, match="batch_size is 0; it must be at least 1"):
        t0repro.encode(model_dir, ROWS[:3], batch_size=0)


def test_a_text_ends_with_eos_even_where_it_is_cut(model_dir, demo_vocabulary):
    text = "It rained all day, and nobody went out."
    ids = [*demo_vocabulary.encode(text), demo_vocabulary.eos_id]
    (whole,) = t0repro.encode(model_dir, [text], vocabulary=demo_vocabulary.address)
    assert whole.tobytes() == t0repro.encode(model_dir, [ids])[0].tobytes()
    (cut,) = t0repro.encode(model_dir, [text], vocabulary=demo_vocabulary.address, length=4)
    assert cut.tobytes() == t0repro.encode(model_dir, [[*ids[:3], ids[-1]]])[0].tobytes()


def test_an_empty_text_is_eos_alone(model_dir, demo_vocabulary):
    (output,) = t0repro.encode(model_dir, [""], vocabulary=demo_vocabulary.address)
    assert output.tobytes() == t0repro.encode(model_dir, [[demo_vocabulary.eos_id]])[0].tobytes()


@pytest.fixture
def demo_vocabulary():
    from t0repro.tasks.demo import VOCABULARY
    from t0repro.tasks.vocabulary import VocabularyFile

    return VOCABULARY if isinstance(VOCABULARY, VocabularyFile) else VocabularyFile(VOCABULARY)


def test_length_classes_rise_by_a_third_or_a_half():
    assert [class_length(n) for n in (1, 32, 33, 48, 49, 65, 97, 129, 193, 512, 513)] == [
        *(32, 32, 48, 48, 64, 96, 128, 192, 256, 512, 768)
    ]
    lengths = sorted({class_length(tokens) for tokens in range(1, 5000)})
    steps = [after / before for before, after in zip(lengths, lengths[1:], strict=False)]
    assert lengths[0] == SHORTEST
    assert all(4 / 3 <= step <= 1.5 for step in steps)


def test_blocks_of_a_length_class_have_one_shape():
    lengths = [*range(1, 300), *range(1, 40)]
    blocks = make_blocks(lengths, parts=2)
    assert sorted(text for block in blocks for text in block.texts) == list(range(len(lengths)))
    shapes = {block.length: set() for block in blocks}
    for block in blocks:
        shapes[block.length].add(block.rows)
        assert len(block.texts) <= block.rows
        assert all(class_length(lengths[text]) == block.length for text in block.texts)
    assert all(len(rows) == 1 for rows in shapes.values())
