"""lm-evaluation-harness itself, with our model and with its own `hf` on one checkpoint."""

import os
import shutil
import subprocess
import sys

import numpy as np
import pytest

import t0repro
from t0repro.errors import UserError
from t0repro.evaluation.outputs import read_task_scores
from t0repro.lm_eval.results import import_results
from t0repro.tasks.demo.datasets import VOCABULARY

from ..evaluation.small_model import save_adapter

pytest.importorskip("lm_eval", reason="needs the extra lm-eval")
transformers = pytest.importorskip("transformers", reason="needs the extra hf")

MODULE = "--module_import=t0repro.tasks.demo"
LIMIT = 3


def command(*line, folder):
    """Runs a Python command line offline, with the harness's own caches in a folder."""
    env = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "HF_HOME": str(folder / "hf"),
        "T0REPRO_VOCAB": str(VOCABULARY),
        "CUDA_VISIBLE_DEVICES": "",
    }
    ended = subprocess.run(
        [sys.executable, "-m", *map(str, line)], env=env, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    return ended.stdout


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A random T5 1.1 in transformers' layout, with the demo's vocabulary."""
    import torch

    folder = tmp_path_factory.mktemp("t5")
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=1408, d_model=16, d_kv=4, d_ff=24, num_layers=2, num_decoder_layers=2,
        num_heads=4, feed_forward_proj="gated-gelu", tie_word_embeddings=False,
        decoder_start_token_id=0,
    )  # fmt: skip
    model = transformers.T5ForConditionalGeneration(config)
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.data.normal_(0, 0.3)
    model.save_pretrained(folder)
    shutil.copy(VOCABULARY, folder / "spiece.model")
    transformers.T5Tokenizer.from_pretrained(folder, extra_ids=100).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A folder with the demo's exported tasks."""
    folder = tmp_path_factory.mktemp("harness")
    command(
        "t0repro", "tasks", "export", folder / "tasks", "--mixture=demo_eval_score_eval", MODULE,
        folder=folder,
    )  # fmt: skip
    return folder


def harness(work, name, *arguments):
    """Scores by task of a run of the harness, imported as a report imports them."""
    command(
        "t0repro.lm_eval", "run", "--include_path", work / "tasks", "--tasks", "demo_eval",
        "--log_samples", "--output_path", work / name, *arguments,
        folder=work,
    )  # fmt: skip
    eval_dir, left_out = import_results(work / name, work / f"{name}_scores")
    assert not left_out and eval_dir.name == "validation_eval"
    return {scores.task: scores for scores in read_task_scores(eval_dir)}


@pytest.fixture(scope="module")
def ours(work, checkpoint):
    return harness(work, "ours", "--model", "t0repro", "--model_args", f"checkpoint={checkpoint}")


def test_a_log_likelihood_has_the_bits_of_t0repro_score(checkpoint):
    from lm_eval.api.instance import Instance

    from t0repro.lm_eval.model import T0ReproLM

    contexts = ["is this film good or bad ?", "what is it about " * 9, "was it good ?"]
    choices = ["good", "bad", "the world of business and of sports"]
    pairs = [(context, choice) for context in contexts for choice in choices]
    requests = [Instance("loglikelihood", {}, pair, 0) for pair in pairs[::-1]]
    model = T0ReproLM(str(checkpoint), vocabulary=str(VOCABULARY), tokens_per_batch=1)
    found = [np.float32(score) for score, _ in model.loglikelihood(requests)][::-1]
    expected = t0repro.score(checkpoint, contexts, choices, vocabulary=VOCABULARY)
    np.testing.assert_array_equal(np.reshape(found, expected.shape), expected)


def test_scores_have_the_bits_of_rank_evals(work, checkpoint, ours):
    command(
        "t0repro", "rank-eval", "--checkpoint", checkpoint, "--mixture=demo_eval_score_eval",
        MODULE, "--out", work / "rank", folder=work,
    )  # fmt: skip
    ranked = read_task_scores(work / "rank" / "validation_eval")
    assert len(ranked) == len(ours) == 9
    for expected in ranked:
        found = ours[expected.task]
        np.testing.assert_array_equal(found.input_index, expected.input_index)
        np.testing.assert_array_equal(found.is_correct, expected.is_correct)
        np.testing.assert_array_equal(
            *(each.score.astype(np.float32) for each in (found, expected))
        )


def test_scores_are_those_of_the_harnesss_own_hf_model(work, checkpoint):
    arguments = f"checkpoint={checkpoint},eos=inputs"
    few = ("--limit", LIMIT)
    ours = harness(work, "as_hf", "--model", "t0repro", "--model_args", arguments, *few)
    model = ("--model", "hf", "--model_args", f"pretrained={checkpoint},backend=seq2seq")
    theirs = harness(work, "hf", *model, "--batch_size", "8", *few)
    assert ours.keys() == theirs.keys()
    for task, scores in ours.items():
        np.testing.assert_allclose(scores.score, theirs[task].score, atol=2e-4)
        np.testing.assert_array_equal(scores.is_correct, theirs[task].is_correct)


def test_outputs_are_transformers_greedy_ones_cut_at_stop_sequences(checkpoint):
    from lm_eval.api.instance import Instance

    from t0repro.lm_eval.model import T0ReproLM

    contexts = ["is this film good or bad ?", "what is it about"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    peer = transformers.T5ForConditionalGeneration.from_pretrained(checkpoint)
    expected = [
        tokenizer.decode(
            peer.generate(**tokenizer(text, return_tensors="pt"), max_new_tokens=6)[0],
            skip_special_tokens=True,
        )
        for text in contexts
    ]
    model = T0ReproLM(str(checkpoint), vocabulary=str(VOCABULARY), eos="inputs")

    def outputs(**options):
        pairs = [(text, {"max_gen_toks": 6, **options}) for text in contexts]
        return model.generate_until(
            [Instance("generate_until", {}, pair, number) for number, pair in enumerate(pairs)]
        )

    assert outputs() == expected and all(expected)
    stop = expected[0][2]
    assert outputs(until=[stop])[0] == expected[0].split(stop)[0]
    with pytest.raises(UserError, match="sampling"):
        outputs(do_sample=True, temperature=0.7)


def test_an_adapter_scores_as_the_checkpoint_that_it_is_merged_into(checkpoint, tmp_path):
    from lm_eval.api.instance import Instance

    from t0repro.adapters import ia3
    from t0repro.converters.convert import convert
    from t0repro.evaluation.opened import open_checkpoint
    from t0repro.lm_eval.model import T0ReproLM

    shape = open_checkpoint(str(checkpoint), None, "float32").model.config.shape
    adapter = save_adapter(tmp_path / "adapter", ia3(), checkpoint, shape)
    # Unpadded, as the base's vocabulary is.
    convert(adapter, tmp_path / "merged", "hf", vocabulary=VOCABULARY)
    pairs = [("is this film good or bad ?", "good"), ("what is it about", "the weather")]
    scored = []
    for named in (
        {"checkpoint": str(checkpoint), "adapter": str(adapter)},
        {"checkpoint": str(tmp_path / "merged")},
        {"checkpoint": str(checkpoint)},
    ):
        model = T0ReproLM(vocabulary=str(VOCABULARY), **named)
        asked = [Instance("loglikelihood", {}, pair, at) for at, pair in enumerate(pairs)]
        scored.append([score for score, _ in model.loglikelihood(asked)])
    own, merged, base = np.array(scored)
    np.testing.assert_allclose(own, merged, rtol=1e-5)
    assert np.abs(own - base).max() > 0.1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, "No checkpoint is named"),
        ({"checkpoint": "x", "eos": "both"}, "Invalid eos='both'"),
        ({"checkpoint": "x", "vocabluary": "y"}, "Nearest: 'vocabulary'"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(arguments, words):
    from t0repro.lm_eval.model import T0ReproLM

    with pytest.raises(UserError, match=words):
        T0ReproLM(**arguments)
