"""The command t0repro: messages, exit codes, help."""

import subprocess
import sys

import pytest
import typer

from t0repro.cli import app
from t0repro.errors import UserError

from .commands import run


@pytest.fixture
def failing(monkeypatch):
    """A function that makes `t0repro doctor` raise an exception."""

    def fail_with(error: Exception) -> None:
        def diagnose():
            raise error

        monkeypatch.setattr("t0repro.doctor.diagnose", diagnose)

    return fail_with


def test_a_user_error_is_printed_to_stderr_and_exits_with_2(monkeypatch, capsys, failing):
    failing(UserError("No such thing.", where="here:1", fix="Make one."))
    code, out, err = run(monkeypatch, capsys, "doctor")
    assert code == 2
    assert err == "t0repro: No such thing.\n  where: here:1\n  to do: Make one.\n"
    assert out == ""


def test_an_unexpected_error_is_one_clear_line_with_a_hint_and_exits_with_1(
    monkeypatch, capsys, failing
):
    failing(ValueError("two\nlines"))
    code, _, err = run(monkeypatch, capsys, "doctor")
    assert code == 1
    assert err.splitlines()[0] == "t0repro: ValueError: two lines"
    assert "--debug" in err.splitlines()[1]


@pytest.mark.parametrize("error", [UserError("Mine."), ValueError("Theirs.")])
def test_debug_lets_the_exception_through(monkeypatch, failing, error):
    failing(error)
    monkeypatch.setattr(sys, "argv", ["t0repro", "--debug", "doctor"])
    with pytest.raises(type(error)):
        app.main()


def test_a_mistyped_command_or_option_exits_with_2(monkeypatch, capsys):
    assert run(monkeypatch, capsys, "doktor")[0] == 2
    assert run(monkeypatch, capsys, "doctor", "--jsn")[0] == 2


def test_what_t5x_starts_and_this_does_not_is_refused_by_name(monkeypatch, capsys):
    code, _, err = run(monkeypatch, capsys, "run", "--run_mode=export")
    assert code == 2 and "'export' is not one of" in err and "precompile" in err
    code, _, err = run(monkeypatch, capsys, "train", "--fdl_config=a")
    assert code == 2 and "--fdl_config" in err


def test_version(monkeypatch, capsys):
    code, out, _ = run(monkeypatch, capsys, "--version")
    assert code == 0
    assert out.startswith("t0repro 0.")


def _commands(command, path: tuple[str, ...] = ()):
    yield path
    for name, child in getattr(command, "commands", {}).items():
        yield from _commands(child, (*path, name))


COMMANDS = list(_commands(typer.main.get_command(app.app)))


def test_all_commands_are_there():
    for path in (
        ("doctor",), ("explain",), ("convert",), ("checkpoint", "inspect"), ("checkpoint", "diff"),
        ("report", "make"), ("compare",), ("rank-eval",), ("cache",), ("tasks", "check"),
    ):  # fmt: skip
        assert path in COMMANDS


@pytest.mark.parametrize("path", [path for path in COMMANDS if path], ids=" ".join)
def test_help_of_every_command_has_an_example(monkeypatch, capsys, path):
    is_group = any(other[: len(path)] == path and other != path for other in COMMANDS)
    code, out, _ = run(monkeypatch, capsys, *path, "--help")
    assert code == 0
    assert is_group or f"t0repro {' '.join(path)}" in " ".join(out.split()).partition("Example")[2]


def test_help_imports_nothing_heavy():
    heavy = ("jax", "tensorflow", "seqio", "gin", "numpy", "flax", "orbax", "pandas", "torch")
    code = (
        "import sys; sys.argv = ['t0repro', '--help']\n"
        "from t0repro.cli import app\n"
        "try:\n    app.main()\nexcept SystemExit:\n    pass\n"
        f"print('loaded', [name for name in {heavy!r} if name in sys.modules])"
    )
    ended = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
    assert ended.stdout.splitlines()[-1] == "loaded []", ended.stderr
