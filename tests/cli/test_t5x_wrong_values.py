"""Commands of T5X's run modes with wrong values: a run is checked, or refused in words."""

import pytest

import gin

from ..config.t5x.test_wrong_values import cases, inputs
from .commands import run


@pytest.mark.slow
def test_30_dry_runs_with_wrong_values_end_in_words(monkeypatch, capsys):
    """The tasks that they name do not exist, so even a right value ends in an error of words."""
    for mode, name, value in list(cases(8, seed=2))[:30]:
        given = inputs(mode, f"{name} = {value}")
        flags = [f"--gin_file={file}" for file in given.gin_files]
        flags += [f"--gin_bindings={binding}" for binding in given.gin_bindings]
        more = ["--run_mode=precompile"] if mode == "precompile" else []
        code, _, err = run(monkeypatch, capsys, mode, *flags, *more, "--dry_run")
        gin.clear_config()
        assert code == 2 and "fix: " in err and "Error: " not in err, (mode, name, value, err)
