"""What the tests of auxiliary jobs share."""

import pytest

from .trainings import make_evaluator


@pytest.fixture
def evaluator(tmp_path) -> list[str]:
    """A command of a user's; its last argument is a file that gets a line for each run."""
    return make_evaluator(tmp_path)
