"""A pytest plugin: what absltest's main does before the peers' unit tests run."""

from absl import flags


def pytest_configure() -> None:
    """Parses absl's flags, all at their defaults; pytest's arguments are none of theirs."""
    flags.FLAGS(["pytest"])
