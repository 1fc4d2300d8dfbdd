"""The demo's prompts."""

import warnings

import pytest


@pytest.fixture(scope="session")
def prompts():
    """Task name -> prompt, of the demo's tasks."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TensorFlow's and T5's own, at import
        from t0repro.reports.prompts import load_prompts

        return load_prompts(["t0repro.tasks.demo"])
