"""Models without an encoder are ranked like the others: T5X's decoder-only ones by its formulas."""

import dataclasses
import shutil
import subprocess

import flax.traverse_util
import jax
import numpy as np
import pytest

import t0repro
from t0repro.config.decoding import GREEDY
from t0repro.converters.convert import convert
from t0repro.errors import UserError
from t0repro.evaluation import engine
from t0repro.evaluation.engine import score_examples
from t0repro.evaluation.evaluation_folder import EvaluationSettings
from t0repro.evaluation.generation import decode_examples, generate_tokens
from t0repro.evaluation.opened import check_checkpoint, open_checkpoint, open_encoder
from t0repro.evaluation.outputs import read_task_scores
from t0repro.evaluation.pairs import collect_pairs
from t0repro.evaluation.reading import TaskReader
from t0repro.model.decoding import generate
from t0repro.model.t5 import T5, initial_parameters
from t0repro.runs import rank_eval
from t0repro.tasks.demo.datasets import VOCABULARY
from t0repro.tasks.registry import find_task
from t0repro.tasks.vocabulary import VocabularyFile
from t0repro.training.checkpoints import save_tree

from ..config.t5x_trainings import BIDIRECTIONAL, DECODER_ONLY, decoder_only_config
from ..helpers.t5x_decoder import continue_by_hand, score_by_hand
from ..helpers.tiny_models import FLOAT32

TEXTS = [[7, 8, 9, 5, 1], [6, 4], [], list(range(2, 22))]
CHOICES = [[3, 9, 1], [5, 1], [1], [8, 8, 8, 1]]
EXAMPLES = [{"inputs": text, "targets": choice} for text in TEXTS for choice in CHOICES]


@pytest.fixture(scope="module", params=[False, True], ids=["causal", "prefix"])
def model_dir(request, tmp_path_factory):
    """A run of T5X's decoder-only model: config.gin and a checkpoint; and whether it is prefix."""
    folder = tmp_path_factory.mktemp("decoder_only")
    lines = [*[BIDIRECTIONAL] * request.param, "network.TransformerConfig.vocab_size = 1408"]
    config = dataclasses.replace(decoder_only_config(folder, *lines).model, dropout_rate=0.0)
    params = initial_parameters(T5(config, FLOAT32), jax.random.key(0))
    tree = flax.traverse_util.flatten_dict({"target": params}, sep="/")
    tree = {name: np.array(x) for name, x in tree.items()}
    save_tree(folder / "checkpoint_3", {**tree, "state/step": np.int32(3)})
    text = DECODER_ONLY.replace("include 't5x/configs/runs/pretrain.gin'\n", "DROPOUT_RATE = 0.1\n")
    (folder / "config.gin").write_text("\n".join([text, *lines]))
    return folder, request.param


def test_scores_are_those_of_t5xs_score_by_hand(model_dir):
    folder, bidirectional = model_dir
    opened = open_checkpoint(str(folder), None, "float32")
    assert opened.model.config.input_full_attention is bidirectional
    scores = score_examples(opened.params, opened.model, EXAMPLES, None)
    expected = score_by_hand(opened.params, EXAMPLES, bidirectional)
    np.testing.assert_allclose(scores, expected, rtol=2e-5, atol=2e-5)


def test_converted_weights_have_the_same_scores(model_dir, tmp_path):
    folder, bidirectional = model_dir
    opened = open_checkpoint(str(folder), None, "float32")
    expected = score_examples(opened.params, opened.model, EXAMPLES, None)
    notes = convert(folder, tmp_path / "mtf", "mtf").notes
    assert any("distance 0" in note for note in notes) is bidirectional
    assert not any("distance 0" in n for n in convert(folder, tmp_path / "jax", "jax").notes)
    for name in ("mtf", "jax"):
        again = open_checkpoint(str(tmp_path / name), None, "float32")
        scores = score_examples(again.params, again.model, EXAMPLES, None)
        np.testing.assert_array_equal(scores, expected)


def test_without_a_runs_gin_file_it_is_asked_where_inputs_attend(model_dir, tmp_path):
    """Wherever it is opened; one line beside it is an answer, and a conversion carries it."""
    folder, bidirectional = model_dir
    shutil.copytree(folder, tmp_path / "moved")
    moved = tmp_path / "moved"
    (moved / "config.gin").unlink()
    for opens in (
        lambda: open_checkpoint(str(moved), None, "float32"),
        lambda: check_checkpoint(str(moved), None, 1),
        lambda: t0repro.score(str(moved), ["is it"], ["yes"], vocabulary=VOCABULARY),
        lambda: convert(moved, tmp_path / "out", "mtf"),
    ):
        with pytest.raises(UserError, match="in both directions") as caught:
            opens()
    command = caught.value.fix.partition("    (")[0].partition(": echo ")[2]
    subprocess.run(f"echo {command}".replace("False", str(bidirectional)), shell=True, check=True)
    convert(moved, tmp_path / "out", "jax")
    for path in (moved, tmp_path / "out"):
        opened = open_checkpoint(str(path), None, "float32")
        assert opened.model.config.input_full_attention is bidirectional


def test_a_score_has_the_same_bits_in_any_order_and_company(model_dir):
    opened, random = open_checkpoint(str(model_dir[0]), None, "float32"), np.random.default_rng(0)
    expected = score_examples(opened.params, opened.model, EXAMPLES, None)
    for _ in range(4):
        some = random.permutation(len(EXAMPLES))[: random.integers(1, len(EXAMPLES) + 1)]
        examples = [EXAMPLES[number] for number in some]
        found = score_examples(opened.params, opened.model, examples, None)
        assert found.tobytes() == expected[some].tobytes()


def test_misses_count_a_choices_tokens_alone(model_dir):
    opened = open_checkpoint(str(model_dir[0]), None, "float32")
    pairs = collect_pairs(EXAMPLES)
    own, scored = engine.Engine(opened.params, opened.model, misses=True), []
    for found in own.run(pairs, own.plan(pairs)):
        scored += found.pairs.tolist()
        assert (found.misses <= [len(pairs.targets[pair]) for pair in found.pairs]).all()
    assert sorted(scored) == [n for n in range(len(pairs)) if len(pairs.targets[n])]


@pytest.mark.parametrize("batch_size", [1, 4])
def test_greedy_outputs_are_those_of_full_forward_passes(model_dir, batch_size):
    folder, bidirectional = model_dir
    opened = open_checkpoint(str(folder), None, "float32")
    outputs = generate_tokens(
        opened.params, opened.model, TEXTS, GREEDY, length=6, batch_size=batch_size
    )
    for text, output in zip(TEXTS, outputs, strict=True):
        room = len(text) + 6
        assert output == continue_by_hand(opened.params, text, room, bidirectional)
    assert len({tuple(output) for output in outputs}) == len(TEXTS)


def test_a_beams_score_is_its_log_probability_over_the_penalty(model_dir):
    folder, bidirectional = model_dir
    opened = open_checkpoint(str(folder), None, "float32")
    inputs = np.zeros((len(TEXTS), 24), np.int32)
    for row, text in zip(inputs, TEXTS, strict=True):
        row[: len(text)] = text
    beams = dataclasses.replace(GREEDY, beam_size=3)
    found = generate(opened.model, opened.params, inputs, beams, length=5)
    outputs = [np.trim_zeros(row, "b") for row in np.asarray(found.tokens)]
    examples = [
        {"inputs": text, "targets": output} for text, output in zip(TEXTS, outputs, strict=True)
    ]
    sums = score_by_hand(opened.params, examples, bidirectional)
    penalties = [((5 + len(output)) / 6) ** 0.6 for output in outputs]
    # Without a finished beam, it is the plain log-probability.
    expected = [
        total / (penalty if 1 in output else 1)
        for total, penalty, output in zip(sums, penalties, outputs, strict=True)
    ]
    np.testing.assert_allclose(found.scores, expected, rtol=1e-4)
    greedy = generate(opened.model, opened.params, inputs, GREEDY, length=5).tokens
    examples = [
        {"inputs": text, "targets": np.trim_zeros(row, "b")}
        for text, row in zip(TEXTS, np.asarray(greedy), strict=True)
    ]
    worse = score_by_hand(opened.params, examples, bidirectional)
    same_length = [len(a["targets"]) == len(b) for a, b in zip(examples, outputs, strict=True)]
    assert any(same_length) and (sums >= worse - 1e-4)[same_length].all()


def test_rank_eval_generates_with_it_and_it_is_no_encoder(model_dir, prompts, tmp_path):
    folder, bidirectional = model_dir
    opened = open_checkpoint(str(folder), None, "float32")
    settings = EvaluationSettings(
        lengths={"inputs": 64, "targets": 4}, split="train", modes=("generate",), limit=2
    )
    outcome = rank_eval.rank_eval(opened, "demo_train", tmp_path, settings)
    assert outcome.decoded == 2 * len(outcome.generated) > 0
    reader = TaskReader(outcome.generated[0], "train", settings.lengths, 2)
    examples = list(reader.examples())
    vocabulary = find_task(outcome.generated[0]).output_features["targets"].vocabulary
    texts, _ = decode_examples(opened, examples, settings.lengths, vocabulary)
    processor = VocabularyFile(str(VOCABULARY)).processor()
    for text, example in zip(texts, examples, strict=True):
        room = len(example["inputs"]) + 4
        tokens = continue_by_hand(opened.params, example["inputs"], room, bidirectional)
        assert text == processor.decode([token for token in tokens if token > 1])
    with pytest.raises(UserError, match="no encoder"):
        open_encoder(str(folder), "float32")


def test_rank_eval_and_score_take_a_run_of_t5xs(model_dir, prompts, tmp_path):
    folder, bidirectional = model_dir
    opened = open_checkpoint(str(folder), None, "float32")
    settings = EvaluationSettings(lengths={"inputs": 128, "targets": 32}, limit=1)
    out = tmp_path / "out"
    outcome = rank_eval.rank_eval(opened, "demo_eval_score_eval", out, settings)
    assert outcome.scored == outcome.distinct
    (scores,) = read_task_scores(outcome.folder, tasks=outcome.tasks[:1])
    reader = TaskReader(outcome.tasks[0], "validation", settings.lengths, 1)
    expected = score_by_hand(opened.params, list(reader.examples()), bidirectional)
    np.testing.assert_allclose(scores.score, expected, rtol=2e-5)

    found = t0repro.score(folder, ["is it good ?"], ["yes", "no"], vocabulary=VOCABULARY)
    processor = VocabularyFile(str(VOCABULARY)).processor()
    examples = [
        {"inputs": processor.encode("is it good ?"), "targets": [*processor.encode(choice), 1]}
        for choice in ("yes", "no")
    ]
    expected = score_by_hand(opened.params, examples, bidirectional)
    np.testing.assert_allclose(found[0], expected, rtol=2e-5)


def test_mesh_tensorflows_prefix_models_are_refused(model_dir, tmp_path):
    convert(model_dir[0], tmp_path / "mtf", "mtf")
    (tmp_path / "mtf" / "config.gin").unlink()
    with open(tmp_path / "mtf" / "operative_config.gin", "a") as file:
        file.write("\nUnitransformer.input_full_attention = True\n")
    with pytest.raises(UserError, match="prefix language models"):
        open_checkpoint(str(tmp_path / "mtf"), None, "float32")
