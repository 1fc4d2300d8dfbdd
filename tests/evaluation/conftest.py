"""The demo's prompts, and a small model of its vocabulary."""

import warnings

import pytest

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
