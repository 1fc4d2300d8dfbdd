"""Beam search against Mesh TensorFlow's own on tables of logits, with options that no model needs.

A mesh that divides the vocabulary needs several devices there; the search only asks how many parts
there are. What generates from a model is compared in tests/parity/test_decoding_agrees.py.
"""

import json
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from t0repro.config.decoding import DecodingConfig
from t0repro.model import decoding
from t0repro.model.t5 import T5

from ..helpers.kept import COMPAT
from ..helpers.tiny_models import FLOAT32, model_config

pytestmark = pytest.mark.mtf

SCRIPT = Path(__file__).with_name("run_mesh_beam_search.py")
ROWS, LENGTH, VOCABULARY = 6, 8, 24
SEARCHES = [
    {"beams": 4, "alpha": 0.6, "prefilter": 2, "parts": 1, "steps": 8},
    {"beams": 4, "alpha": 0.6, "prefilter": 2, "parts": 2, "steps": 8},
    {"beams": 4, "alpha": 0.6, "prefilter": 1, "parts": 4, "steps": 8},
    {"beams": 2, "alpha": 0.0, "prefilter": 0, "parts": 1, "steps": 5},
    {"beams": 3, "alpha": 1.0, "prefilter": 0, "parts": 3, "steps": 8},
    {"beams": 6, "alpha": 2.0, "prefilter": 3, "parts": 2, "steps": 3},
]


def table_of(search: int) -> np.ndarray:
    """Logits, float32 [rows, position, last token, vocabulary].

    After some tokens one continuation is nearly certain, after others none is, so that a token that
    is not among the likeliest of its beam can lead to the best output.
    """
    generator, shape = np.random.default_rng(search), (ROWS, LENGTH, VOCABULARY, VOCABULARY)
    table = generator.normal(size=shape) * generator.choice([0.3, 6.0], (*shape[:3], 1))
    # EOS is likely in some rows.
    table[..., decoding.EOS] += generator.integers(-2, 3, (ROWS, 1, 1))
    return table.astype(np.float32)


@pytest.fixture(scope="module")
def mesh(once):
    """What Mesh TensorFlow finds in each search."""
    folder = once("mesh_beams", search, Path(__file__), SCRIPT, COMPAT)
    return dict(np.load(folder / "found.npz"))


def search(folder):
    paths = [str(folder / name) for name in ("searches.npz", "options.json", "found.npz")]
    np.savez(paths[0], **{str(number): table_of(number) for number in range(len(SEARCHES))})
    Path(paths[1]).write_text(json.dumps(SEARCHES))
    command = [sys.executable, str(SCRIPT), *paths]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.fixture
def of_tables(monkeypatch):
    """Lets decoding read the logits of a table, given as the parameters, in place of a model's."""

    def step(model, params, reads, cache, tokens, position):
        rows = params["table"][:, position]
        return jnp.take_along_axis(rows, tokens[..., None], axis=1), cache

    monkeypatch.setattr(decoding, "decoder_step", step)
    monkeypatch.setattr(decoding, "read_inputs", lambda model, params, inputs: None)
    monkeypatch.setattr(
        decoding, "empty_cache", lambda model, rows, length: {"nothing": jnp.zeros(rows)}
    )


def found_by(number: int, **changes) -> decoding.Decoded:
    """What the search finds in its table, with other options if some are given."""
    search, table = {**SEARCHES[number], **changes}, table_of(number)
    config = DecodingConfig(
        search["beams"], search["alpha"], 0.0, -1, 1.5, 10, None, search["prefilter"],
        search["parts"],
    )  # fmt: skip
    return decoding.generate(
        T5(model_config(vocab_size=VOCABULARY), FLOAT32),
        {"table": jnp.asarray(table)},
        np.zeros((len(table), 1), np.int32),
        config,
        length=LENGTH,
        search_steps=np.full(len(table), search["steps"], np.int32),
    )


@pytest.mark.always
@pytest.mark.parametrize("number", range(len(SEARCHES)), ids=lambda n: str(SEARCHES[n]))
def test_a_search_finds_mesh_tensorflows_best_beam(mesh, of_tables, number):
    found = found_by(number)
    theirs = mesh[f"{number}/tokens"][:, 0]
    # What follows EOS is not output; Mesh TensorFlow removes it later, in clean_decodes.
    after = np.cumsum(theirs == decoding.EOS, axis=1) - (theirs == decoding.EOS) > 0
    np.testing.assert_array_equal(found.tokens, np.where(after, 0, theirs))
    np.testing.assert_allclose(found.scores, mesh[f"{number}/scores"][:, 0], rtol=1e-5)


def test_the_tables_tell_one_prefilter_and_number_of_parts_from_another(of_tables):
    # Without the prefilter, and with another number of parts, the same tables give other outputs.
    for number, changes in ((0, {"prefilter": 0}), (0, {"parts": 2}), (1, {"parts": 1})):
        assert (found_by(number, **changes).tokens != found_by(number).tokens).any(), changes
