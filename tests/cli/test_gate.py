"""Every command's gate: Ctrl-C, a second Ctrl-C, and options in either spelling."""

import subprocess
import sys

import pytest
import typer

from t0repro.cli import app, spelling


def run(monkeypatch, capsys, *arguments: str) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of a t0repro command line."""
    monkeypatch.setattr(sys, "argv", ["t0repro", *arguments])
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit) as end:
        app.main()
    printed = capsys.readouterr()
    return int(end.value.code or 0), printed.out, printed.err


def run_program(body: str) -> subprocess.CompletedProcess[str]:
    """A program whose body runs inside the gate; `interrupt()` is Ctrl-C."""
    code = (
        "import atexit, os, signal, time\n"
        "from t0repro.cli.gate import gate\n"
        # A shell starts what runs in the background with Ctrl-C ignored.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "def interrupt():\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    time.sleep(5)\n"
        "with gate('it') as settings:\n"
        "    settings.go_on = 'Go on so.'\n"
    ) + "".join(f"    {line}\n" for line in body.splitlines())
    return subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)


def test_ctrl_c_ends_with_how_to_go_on_and_exit_code_130():
    ended = run_program("interrupt()")
    assert ended.returncode == 130
    assert ended.stderr == "\nit: interrupted.\n  to do: Go on so.\n"


def test_a_second_ctrl_c_while_files_are_closed_shows_no_traceback():
    ended = run_program("atexit.register(interrupt)\ninterrupt()")
    assert ended.returncode == 130
    assert ended.stderr == "\nit: interrupted.\n  to do: Go on so.\n"


def test_a_second_ctrl_c_while_the_first_is_handled_shows_no_traceback():
    ended = run_program("try:\n    interrupt()\nfinally:\n    interrupt()")
    assert ended.returncode == 130
    assert ended.stderr == "\nit: interrupted.\n  to do: Go on so.\n"


def test_an_error_that_a_library_makes_of_ctrl_c_is_still_ctrl_c():
    ended = run_program(
        "try:\n    interrupt()\nexcept KeyboardInterrupt:\n    raise RuntimeError('cancelled')"
    )
    assert (ended.returncode, "Go on so." in ended.stderr) == (130, True)


@pytest.mark.parametrize("kind", ["UserError", "ValueError"])
def test_what_a_file_smuggles_into_an_error_does_not_reach_the_terminal(kind):
    title = "from t0repro.errors import UserError\n"
    done = run_program(f"{title}raise {kind}('a\\x1b]0;title\\x07 \\x9b2J \\u202egnp')")
    assert done.returncode == (2 if kind == "UserError" else 1)
    assert "a\\x1b]0;title\\x07 \\x9b2J \\u202egnp" in done.stderr
    assert not set("\x1b\x07\x9b\u202e") & set(done.stderr)


def test_ctrl_c_in_a_t0repro_command_says_how_to_go_on(monkeypatch, capsys):
    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr("t0repro.doctor.diagnose", interrupted)
    code, _, err = run(monkeypatch, capsys, "doctor")
    assert code == 130
    assert err == "\nt0repro: interrupted.\n  to do: Start the same command again.\n"


# ---- Spelling -----------------------------------------------------------------------------------


def commands(command, path: tuple[str, ...] = ()):
    """Every command below one, with the words that call it."""
    yield path, command
    for name, child in getattr(command, "commands", {}).items():
        yield from commands(child, (*path, name))


COMMANDS = dict(commands(typer.main.get_command(app.app)))


def options(path: tuple[str, ...]) -> list[str]:
    return [name for p in COMMANDS[path].params for name in (*p.opts, *p.secondary_opts)]


@pytest.mark.parametrize(
    ("path", "name"),
    [
        (path, name)
        for path in COMMANDS
        for name in options(path)
        if name.startswith("--") and set("-_") & set(name[2:])
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_every_option_is_taken_in_both_spellings(monkeypatch, capsys, path, name):
    for spelled in (name[2:].replace("-", "_"), name[2:].replace("_", "-")):
        _, _, err = run(monkeypatch, capsys, *path, f"--{spelled}")
        assert "No such option" not in err, spelled


def test_help_shows_every_option_in_one_spelling(monkeypatch, capsys):
    for path in COMMANDS:
        _, out, _ = run(monkeypatch, capsys, *path, "--help")
        shown = [word for word in out.split() if word.startswith("--") and "│" not in word]
        names = {spelling.canonical(name[2:]) for name in options(path) if name.startswith("--")}
        for word in shown:
            if spelling.canonical(word[2:]) in names:
                assert "-" not in word[2:], (path, word)


def test_values_keep_their_dashes():
    line = ["--gin-file=my-model.gin", "--at_hand", "--", "--not-an-option", "a-b"]
    spelled = spelling.canonical_arguments(line)
    assert spelled[:2] == ["--gin_file=my-model.gin", "--at_hand"]
    assert spelled[-1] == "a-b"
