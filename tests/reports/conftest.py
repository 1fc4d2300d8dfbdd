"""The demo's prompts, and a small evaluation."""

import warnings

import pytest

from .suites import small_suite


@pytest.fixture(scope="session")
def prompts():
    """Task name -> prompt, of the demo's tasks."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TensorFlow's and T5's own, at import
        from t0repro.reports.prompts import load_prompts

        return load_prompts(["t0repro.tasks.demo"])


@pytest.fixture
def suite(tmp_path):
    return small_suite(tmp_path / "jax" / "validation_eval")
