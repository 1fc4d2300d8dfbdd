"""absl's flags of the log, as T5X's documents give them to every command."""

import logging
import sys

import pytest
from absl import logging as absl_logging

from t0repro.cli.app import command
from t0repro.cli.spelling import translate_for_click, translate_t5x_overrides

from .commands import run

T5X = ["--alsologtostderr", "--logtostderr=true", "--stderrthreshold=info", "-v=-1"]


@pytest.fixture(autouse=True)
def log_as_it_was():
    handlers, level = logging.root.handlers[:], logging.root.level
    verbosity = absl_logging.get_verbosity()
    yield
    absl_logging.set_verbosity(verbosity)
    logging.root.handlers[:] = handlers
    logging.root.setLevel(level)


@pytest.mark.parametrize("mode", ["train", "eval", "infer", "precompile", "explain"])
@pytest.mark.parametrize("verbosity", ["-v=-1", "-v -1", "--v=-1", "--verbosity=-1"])
def test_every_command_of_t5x_takes_them_in_absls_spellings(mode, verbosity):
    parser = command().get_command(None, mode)
    words = translate_t5x_overrides([*T5X[:3], *verbosity.split()])
    assert parser.make_context(mode, words).params["verbosity"] == -1


def test_a_level_that_is_none_is_a_mistake(monkeypatch, capsys):
    code, _, err = run(monkeypatch, capsys, "explain", "--stderrthreshold=loud")
    assert code == 2 and "'loud' is not one of debug, info" in err


def test_a_switch_with_a_value_is_the_switch_or_nothing():
    assert translate_for_click("--alsologtostderr=True") == "--alsologtostderr"
    assert translate_for_click("--alsologtostderr=false") is None


def test_the_verbosity_prints_what_the_libraries_log(monkeypatch, capsys):
    def logged(*flags):
        run(monkeypatch, capsys, "explain", *flags, "--gin_file=none.gin", "--run_mode=train")
        # It keeps the standard error of the test that made it.
        absl_logging.get_absl_handler().python_handler.setStream(sys.stderr)
        absl_logging.info("a record")
        return "a record" in capsys.readouterr().err

    assert not logged("-v=-1") and logged("-v=0") and not logged("--verbosity=-1")
