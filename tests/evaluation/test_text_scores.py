"""`t0repro.score`: rank-eval's scores, for texts and choices given in Python."""

import dataclasses
import json
import shutil

import flax.traverse_util
import jax
import numpy as np
import pandas as pd
import pytest

import t0repro
from t0repro.converters.convert import convert
from t0repro.errors import UserError
from t0repro.evaluation.evaluation_folder import EvaluationSettings
from t0repro.evaluation.opened import Checkpoint, open_checkpoint
from t0repro.evaluation.outputs import read_task_scores
from t0repro.evaluation.reading import TaskReader
from t0repro.model.t5 import T5, initial_parameters
from t0repro.runs.rank_eval import rank_eval
from t0repro.tasks.demo.datasets import VOCABULARY
from t0repro.tasks.vocabulary import VocabularyFile
from t0repro.training.checkpoints import save_tree

from ..helpers import tiny_models as tiny
from ..helpers.plain_scoring import row_scores

TEXTS = ["is this film good or bad ? the cast was lovely", "what is it about"]
MODEL = tiny.model(vocab_size=1408)


@pytest.fixture(scope="module")
def checkpoint():
    return Checkpoint("here", 0, "", initial_parameters(MODEL, jax.random.key(0)), MODEL)


def plain(params, text: str, choice: str, targets_length: int = 256) -> float:
    """One pair's score, by a plain pass over one row."""
    processor = VocabularyFile(str(VOCABULARY)).processor()
    target = [*processor.encode(choice)[: targets_length - 1], processor.eos_id()]
    batch = {"inputs": np.array([processor.encode(text)]), "targets": np.array([target])}
    return row_scores(params, MODEL, batch)[0]


def test_scores_are_a_plain_passes_for_every_pair(checkpoint):
    choices = ["good", "bad", "neither of the two"]
    scores = t0repro.score(checkpoint, TEXTS, choices, vocabulary=VOCABULARY)
    assert scores.dtype == np.float32
    expected = [[plain(checkpoint.params, text, choice) for choice in choices] for text in TEXTS]
    np.testing.assert_allclose(scores, expected, rtol=1e-5)


def test_a_score_has_the_bits_of_rank_evals(model_dir, prompts, tmp_path):
    lengths, task = (
        {"inputs": 128, "targets": 32},
        "demo_synthetic_glue_mrpc_want_to_know_score_eval",
    )
    settings = EvaluationSettings(lengths=lengths, limit=6)
    outcome = rank_eval(open_checkpoint(str(model_dir), None, "float32"), task, tmp_path, settings)
    (ranked,) = read_task_scores(outcome.folder)
    pairs = [
        (each["inputs_pretokenized"].decode(), each["targets_pretokenized"].decode())
        for each in TaskReader(task, "validation", lengths, 6).examples()
    ]
    inputs = list(dict.fromkeys(source for source, _ in pairs))[::-1]
    choices = list(dict.fromkeys(choice for _, choice in pairs))
    found = t0repro.score(model_dir, inputs, choices, vocabulary=VOCABULARY, lengths=lengths)
    expected = [found[inputs.index(source), choices.index(choice)] for source, choice in pairs]
    np.testing.assert_array_equal(ranked.score.astype(np.float32), expected)


def test_inputs_may_have_choices_of_their_own_and_long_ones_are_cut_before_eos(checkpoint, capsys):
    choices = [["good", "bad"], ["the world of business and of sports"]]
    lengths = {"inputs": 1024, "targets": 3}
    scores = t0repro.score(checkpoint, TEXTS, choices, vocabulary=VOCABULARY, lengths=lengths)
    assert scores[1, 1] == -np.inf
    assert capsys.readouterr().err == "score: 1 choice cut to 3 tokens\n"
    expected = plain(checkpoint.params, TEXTS[1], choices[1][0], 3)
    np.testing.assert_allclose(scores[1, 0], expected, rtol=1e-5)
    assert (scores.argmax(axis=1)[1]) == 0
    lengths = {"inputs": 2, "targets": 256}
    t0repro.score(checkpoint, TEXTS, ["good"], vocabulary=VOCABULARY, lengths=lengths)
    assert capsys.readouterr().err == "score: 2 inputs cut to 2 tokens\n"


def test_no_inputs_have_no_rows_of_scores(checkpoint):
    found = t0repro.score(checkpoint, [], ["a", "b"], vocabulary=VOCABULARY)
    assert found.shape == (0, 2)
    assert t0repro.score(checkpoint, [], [], vocabulary=VOCABULARY).shape == (0, 0)


@pytest.mark.parametrize(
    ("inputs", "choices"),
    [(TEXTS, [["a"]]), (TEXTS, [["a"], []]), (TEXTS, [])],
)
def test_what_does_not_pair_is_refused(inputs, choices, checkpoint):
    with pytest.raises(UserError, match="choices"):
        t0repro.score(checkpoint, inputs, choices, vocabulary=VOCABULARY)


def test_a_vocabulary_that_is_not_there_is_named_before_the_checkpoint_is_read():
    with pytest.raises(UserError, match="There is no vocabulary absent.model"):
        t0repro.score("no/such/model", TEXTS, ["a"], vocabulary="absent.model")


def test_the_model_comes_first(checkpoint):
    for call in (lambda: t0repro.score(TEXTS, "m", ["a"]), lambda: t0repro.encode(TEXTS, "m")):
        with pytest.raises(UserError, match="The model is of type list(.|\n)*checkpoint first"):
            call()


NO_LISTS = [
    "one text",
    b"bytes",
    None,
    3,
    {"a": 1},
    {"a", "b"},
    np.array("a"),
    pd.DataFrame({"a": ["b"]}),
]


@pytest.mark.parametrize("given", NO_LISTS, ids=lambda given: type(given).__name__)
def test_what_is_no_list_of_texts_is_refused(given, checkpoint):
    for inputs, choices, name in (
        (given, ["a"], "inputs"),
        (TEXTS, given, "choices"),
        (TEXTS, [["a"], given], "choices of input 1"),
    ):
        with pytest.raises(UserError, match=f"The {name} are .*(single string|no list)|of 2|for 2"):
            t0repro.score(checkpoint, inputs, choices, vocabulary=VOCABULARY)
    with pytest.raises(UserError, match="The texts are .*(single string|no list)"):
        t0repro.encode(checkpoint, given)


def test_texts_may_come_from_a_generator_an_array_or_a_column(checkpoint):
    expected = t0repro.score(checkpoint, TEXTS, ["a", "b"], vocabulary=VOCABULARY)
    for inputs in ((text for text in TEXTS), np.array(TEXTS), pd.Series(TEXTS, index=[5, 9])):
        choices = (choice for choice in "ab")
        found = t0repro.score(checkpoint, inputs, choices, vocabulary=VOCABULARY)
        np.testing.assert_array_equal(found, expected)


def test_half_a_pair_of_surrogates_is_refused_with_its_place(checkpoint):
    broken = "a\ud83d"
    for inputs, choices in (([TEXTS[0], broken], ["a"]), (TEXTS, ["a", broken])):
        with pytest.raises(UserError, match="at character 1, half of a pair of surrog") as error:
            t0repro.score(checkpoint, inputs, choices, vocabulary=VOCABULARY)
        assert error.value.where.startswith("score, number 1 of the ")


def test_an_activation_that_is_no_dtype_is_refused(checkpoint):
    with pytest.raises(UserError, match="activation is 'bf16'(.|\n)*one of 'float32', 'bf"):
        t0repro.score(checkpoint, TEXTS, ["a"], vocabulary=VOCABULARY, activation="bf16")


@pytest.mark.parametrize(
    "lengths",
    [{"inputs": 8}, {}, *({"inputs": 8, "targets": n} for n in (0, -3, 2.5, "8", True, None))],
)
def test_a_length_that_is_none_is_refused(lengths, checkpoint):
    with pytest.raises(UserError, match=r"The length of targets|The length of inputs"):
        t0repro.score(checkpoint, TEXTS, ["a"], vocabulary=VOCABULARY, lengths=lengths)


@pytest.mark.parametrize("missing", [None, float("nan"), 3, b"text"])
def test_what_is_not_text_is_refused_with_its_place(missing, checkpoint):
    for inputs, choices, place in (
        ([TEXTS[0], missing], ["a"], "Number 1 of the inputs is "),
        (TEXTS, [["a"], ["b", missing]], "Number 1 of the choices is "),
        (TEXTS, ["a", missing], "Number 1 of the choices is "),
    ):
        with pytest.raises(UserError, match=place):
            t0repro.score(checkpoint, inputs, choices, vocabulary=VOCABULARY)


def test_another_vocabulary_than_the_checkpoints_is_refused(checkpoint, monkeypatch):
    monkeypatch.delenv("T0REPRO_VOCAB", raising=False)
    small = dataclasses.replace(checkpoint, model=tiny.model())
    # T5's own, which is not fetched for it.
    for vocabulary, pieces in ((VOCABULARY, "1,[0-9]{3}"), (None, "32,100")):
        message = f"has {pieces} pieces, the model's embedding 128 rows(.|\n)*T0REPRO_VOCAB, enc"
        with pytest.raises(UserError, match=message):
            t0repro.score(small, TEXTS, ["a"], vocabulary=vocabulary)


def test_without_a_vocabulary_the_checkpoints_own_is_taken_if_there_is_one(
    checkpoint, tmp_path, monkeypatch
):
    absent = str(tmp_path / "absent.model")
    monkeypatch.setenv("T0REPRO_VOCAB", absent)
    of_folder = dataclasses.replace(checkpoint, folders=(str(tmp_path),))
    with pytest.raises(UserError, match="is missing(.|\n)*Set T0REPRO_VOCAB to a copy of T5's"):
        t0repro.score(of_folder, TEXTS, ["a"])
    own = shutil.copy(VOCABULARY, tmp_path / "spiece.model")
    found = t0repro.score(of_folder, TEXTS, ["a"])
    expected = t0repro.score(checkpoint, TEXTS, ["a"], vocabulary=VOCABULARY)
    np.testing.assert_array_equal(found, expected)
    with pytest.raises(UserError, match=f"T0REPRO_VOCAB={own}, or in Python vocabulary='{own}'"):
        t0repro.score(of_folder, TEXTS, ["a"], vocabulary=VocabularyFile(absent))


def save(folder, step: int, seed: int) -> None:
    """A checkpoint of the model with parameters drawn from a seed."""
    parameters = initial_parameters(MODEL, jax.random.key(seed))
    flat = flax.traverse_util.flatten_dict(parameters, sep="/")
    tree = {f"target/{name}": np.array(value) for name, value in flat.items()}
    save_tree(folder / f"checkpoint_{step}", {**tree, "state/step": np.int32(step)})


def test_a_folder_is_scored_with_its_latest_checkpoint_even_after_an_earlier_call(
    tmp_path, checkpoint
):
    def scores():
        return t0repro.score(tmp_path, TEXTS, ["good", "bad"], vocabulary=VOCABULARY)

    save(tmp_path, 7, seed=0)
    first = scores()
    np.testing.assert_array_equal(scores(), first)
    of_memory = t0repro.score(checkpoint, TEXTS, ["good", "bad"], vocabulary=VOCABULARY)
    np.testing.assert_allclose(first, of_memory, rtol=1e-5)
    save(tmp_path, 8, seed=1)
    assert (scores() != first).all()
    again = t0repro.score(tmp_path, TEXTS, ["good", "bad"], vocabulary=VOCABULARY, step=7)
    assert (again == first).all()
    with pytest.raises(UserError, match=f"open is of step {checkpoint.step}"):
        t0repro.score(checkpoint, TEXTS, ["a"], vocabulary=VOCABULARY, step=checkpoint.step + 1)


@pytest.mark.parametrize("written_as", ["hf", "jax"])
def test_a_model_whose_file_is_corrected_is_opened_again(tmp_path, written_as, checkpoint):
    save(tmp_path / "run", 7, seed=0)
    folder = tmp_path / "model"
    convert(str(tmp_path / "run"), str(folder), written_as)

    def scores():
        return t0repro.score(folder, TEXTS, ["good", "bad"], vocabulary=VOCABULARY)

    before = scores()
    if written_as == "hf":
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"layer_norm_epsilon": 0.5}))
    else:
        (folder / "operative_config.gin").write_text("sublayer_rms_norm.epsilon = 0.5\n")
    corrected = dataclasses.replace(MODEL.config, rms_norm_epsilon=0.5)
    other = dataclasses.replace(checkpoint, model=T5(corrected, MODEL.dtypes))
    expected = t0repro.score(other, TEXTS, ["good", "bad"], vocabulary=VOCABULARY)
    assert (np.abs(before - expected) > 1e-3).any()
    np.testing.assert_allclose(scores(), expected, rtol=1e-5)
