"""The demo's prompts, and a small model of its vocabulary."""

import warnings

import pytest

from .rank_evaluations import evaluate
from .small_model import save_model


@pytest.fixture(scope="session")
def prompts():
    """Task name -> prompt, of the demo's tasks."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TensorFlow's and T5's own, at import
        from t0repro.reports.prompts import load_prompts

        return load_prompts(["t0repro.tasks.demo"], into_seqio=True)


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory):
    """A folder with a checkpoint of step 7."""
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def evaluated(model_dir, prompts, tmp_path_factory):
    """A folder with the results of the demo's tasks, and their outcome."""
    out = tmp_path_factory.mktemp("out")
    return out, evaluate(model_dir, out)
