"""Every command's gate: Ctrl-C, a second Ctrl-C, and options in either spelling."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from t0repro.cli import app, gate, spelling
from t0repro.errors import UserError

from .commands import run


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
        "    settings.how_to_continue = 'Go on so.'\n"
    ) + "".join(f"    {line}\n" for line in body.splitlines())
    command = [sys.executable, "-P", "-c", code]
    return subprocess.run(
        command, capture_output=True, encoding=os.environ.get("PYTHONIOENCODING"), text=True
    )


def test_ctrl_c_ends_with_how_to_go_on_and_exit_code_130():
    ended = run_program("interrupt()")
    assert ended.returncode == 130
    assert ended.stderr == "\nit: interrupted.\n  fix: Go on so.\n"


def test_characters_that_the_terminal_lacks_are_escaped(monkeypatch):
    monkeypatch.setenv("PYTHONIOENCODING", "latin-1")
    ended = run_program("print('caf\\xe9 \\u20ac \\udce9')")
    assert (ended.returncode, ended.stdout) == (0, "caf\xe9 \\u20ac \\udce9\n")


def test_output_that_nobody_reads_ends_work_with_how_to_go_on_and_another_pipe_does_not():
    unread = "os.close(1); r, w = os.pipe(); os.close(r); os.dup2(w, 1)\n"
    work = "settings.long_work = True\n"
    ended = run_program(f"{unread}{work}print('step 1', flush=True)")
    assert ended.returncode == 1
    assert ended.stderr == "it: the program that read its output has ended.\n  fix: Go on so.\n"
    assert run_program(f"{unread}print('step 1', flush=True)").returncode == 0
    other = run_program("r, w = os.pipe(); os.close(r); os.write(w, b'a')")
    assert other.returncode == 1 and "BrokenPipeError" in other.stderr


def test_a_working_folder_that_was_removed_is_named():
    code = (
        "import os, tempfile\n"
        "os.chdir(folder := tempfile.mkdtemp())\n"
        "os.rmdir(folder)\n"
        "from t0repro.cli.gate import gate\n"
        "with gate('it'):\n    pass\n"
    )
    command = [sys.executable, "-P", "-c", code]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 2
    assert ended.stderr.startswith("it: The working folder was removed.\n")


def test_a_second_ctrl_c_while_files_are_closed_shows_no_traceback():
    ended = run_program("atexit.register(interrupt)\ninterrupt()")
    assert ended.returncode == 130
    assert ended.stderr == "\nit: interrupted.\n  fix: Go on so.\n"


def test_a_second_ctrl_c_while_the_first_is_handled_shows_no_traceback():
    ended = run_program("try:\n    interrupt()\nfinally:\n    interrupt()")
    assert ended.returncode == 130
    assert ended.stderr == "\nit: interrupted.\n  fix: Go on so.\n"


@pytest.mark.parametrize(
    "body",
    [
        "import gc\ngc.callbacks[:] = [lambda *_: gc.callbacks.clear() or interrupt()]\n"
        "gc.collect()\ntime.sleep(5)",
        "class Held:\n  def __del__(self):\n    interrupt()\ndel_me = Held()\ndel del_me\n"
        "time.sleep(5)",
    ],
    ids=["a callback of the garbage collector", "__del__"],
)
def test_ctrl_c_where_python_swallows_it_still_ends_the_command(body):
    ended = run_program(body)
    assert ended.returncode == 130
    assert ended.stderr == "\nit: interrupted.\n  fix: Go on so.\n"


def test_a_process_of_several_commands_keeps_one_hook(monkeypatch):
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
    hooks = []
    for _ in range(2):
        with gate.gate("it"):
            hooks.append(sys.unraisablehook)
    assert hooks[0] is hooks[1]


def test_an_error_that_a_library_makes_of_ctrl_c_is_still_ctrl_c():
    ended = run_program(
        "try:\n    interrupt()\nexcept KeyboardInterrupt:\n    raise RuntimeError('canceled')"
    )
    assert (ended.returncode, "Go on so." in ended.stderr) == (130, True)


@pytest.mark.parametrize("kind", ["UserError", "ValueError"])
def test_what_a_file_smuggles_into_an_error_does_not_reach_the_terminal(kind):
    title = "from t0repro.errors import UserError\n"
    done = run_program(f"{title}raise {kind}('a\\x1b]0;title\\x07 \\x9b2J \\u202egnp')")
    assert done.returncode == (2 if kind == "UserError" else 1)
    assert "a\\x1b]0;title\\x07 \\x9b2J \\u202egnp" in done.stderr
    assert not set("\x1b\x07\x9b\u202e") & set(done.stderr)


@pytest.fixture
def pressed():
    """A function that presses Ctrl-C, in place of one that a command calls."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield lambda *arguments, **options: signal.raise_signal(signal.SIGINT)
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(
    ("line", "calls", "kept"),
    [
        ("doctor", "t0repro.doctor.diagnose", ""),
        (
            "cache --tasks x --output_cache_dir DIR",
            "t0repro.cli.cache.cache_tasks",
            "tasks that are cached already are kept",
        ),
        (
            "convert A B --to jax",
            "t0repro.cli.convert.convert_checkpoint",
            "tensors that are written already are kept",
        ),
        (
            "rank-eval --checkpoint C --mixture demo_eval_score_eval"
            " --module_import t0repro.tasks.demo --out DIR",
            "t0repro.cli.bodies.rank_eval.open_checkpoint",
            "pairs that are scored already are kept",
        ),
        ("report make E --out DIR", "t0repro.cli.report.find_evaluation", ""),
        ("compare A B", "t0repro.cli.compare.find_evaluation", ""),
        (
            "checkpoint fetch t5.1.1.lm100k.xl --to DIR",
            "t0repro.cli.checkpoint.fetch_checkpoint",
            "files that are downloaded already are kept",
        ),
        (
            "tasks fetch-p3 --tasks x --to DIR",
            "t0repro.tasks.p3.fetch",
            "files that are downloaded already are kept",
        ),
    ],
)
def test_ctrl_c_says_how_to_go_on(monkeypatch, capsys, tmp_path, pressed, line, calls, kept):
    monkeypatch.setattr(calls, pressed)
    words = line.replace("DIR", str(tmp_path)).split()
    code, _, err = run(monkeypatch, capsys, *words)
    assert code == 130
    again = f"Start the same command again: {kept}" if kept else "Start the same command again"
    assert err.endswith(f"\nt0repro: interrupted.\n  fix: {again}.\n")


# ---- Spelling -----------------------------------------------------------------------------------


def commands(command, path: tuple[str, ...] = ()):
    """Every command below one, with the words that call it."""
    yield path, command
    for name, child in getattr(command, "commands", {}).items():
        yield from commands(child, (*path, name))


COMMANDS = dict(commands(app.command()))


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
    line = ["--gin-file=my-model.gin", "--skip_missing", "--", "--not-an-option", "a-b"]
    spelled = spelling.canonical_arguments(line)
    assert spelled[:2] == ["--gin_file=my-model.gin", "--skip_missing"]
    assert spelled[-1] == "a-b"


@pytest.mark.parametrize(
    "spelled", [spelling.canonical_arguments, spelling.translate_t5x_overrides]
)
@pytest.mark.parametrize("argument", ["--out=~/runs", "~/runs", "~"])
def test_a_tilde_that_the_shell_left_is_refused_rather_than_made_a_folder(spelled, argument):
    with pytest.raises(UserError, match="did not expand the ~ of '~") as caught:
        spelled(["cache", argument])
    assert caught.value.where == ("--out" if "out" in argument else None)
    line = ["a/~", "--out=./~/runs", "--out=~older", "~older", "--gin_param=A = '~/a'", "a=~/b"]
    assert spelled(line) == line


def test_an_error_that_passed_through_gin_is_printed_as_it_was_written():
    ended = run_program(
        "import gin\n"
        "from t0repro.errors import UserError\n"
        "@gin.configurable\n"
        "def fails():\n"
        "  raise UserError('This is wrong.', where='here', fix='Do that.')\n"
        "fails()"
    )
    assert ended.returncode == 2
    assert ended.stderr == "it: This is wrong.\n  where: here\n  fix: Do that.\n"


def test_a_package_that_an_installation_leaves_out_is_named_with_how_to_get_it():
    ended = run_program(
        "raise ModuleNotFoundError(\"No module named 'seqio'\", name='seqio.utils')"
    )
    assert ended.returncode == 2
    assert ended.stderr == (
        "it: This needs seqio, which is not installed.\n  fix: Install the reference tier:"
        " TIER=reference bash scripts/setup.sh, in a checkout. docs/tiers.md lists what needs it.\n"
    )


@pytest.mark.parametrize("platform", ["cuda", "gpu", "nonsense"])
def test_a_device_that_jax_does_not_find_is_named_with_what_to_do(platform):
    ended = run_program(f"os.environ['JAX_PLATFORMS'] = '{platform}'\nimport jax\njax.devices()")
    assert ended.returncode == 2
    assert f"it: JAX finds no {platform} here" in ended.stderr
    assert "  where: JAX_PLATFORMS\n  fix: Unset it" in ended.stderr


@pytest.mark.parametrize("command", ["t0repro", "t5_mesh_transformer"])
def test_a_python_without_the_packages_is_named_with_the_environment(command):
    """As /usr/bin/python3 -m t0repro in a checkout."""
    code = f"from t0repro.cli import start; start.{command}()"
    # -S: without site-packages.
    line = [sys.executable, "-S", "-c", code]
    ended = subprocess.run(line, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert ended.returncode == 2
    assert ended.stderr.startswith(f"{command}: {sys.executable} has no package ")
    assert "source .venv/bin/activate" in ended.stderr and ended.stderr.count("\n") == 2


@pytest.mark.parametrize("command", ["t0repro", "t5_mesh_transformer"])
def test_ctrl_c_during_the_first_imports_shows_no_traceback(command):
    code = (
        "import sys\n"
        "class Interrupts:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 't0repro.cli.gate':\n"
        "            raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupts())\n"
        f"from t0repro.cli import start; start.{command}()"
    )
    ended = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
    assert ended.returncode == 130
    assert ended.stderr == f"\n{command}: interrupted.\n  fix: Start the same command again.\n"


def test_ctrl_c_while_page_sizes_are_timed_shows_no_traceback():
    code = (
        "import sys\n"
        "from t0repro.cli import app\n"
        "def interrupt(arguments):\n"
        "    raise KeyboardInterrupt\n"
        "app.use_huge_pages_where_faster, sys.argv = interrupt, ['t0repro', 'train']\n"
        "app.main()"
    )
    ended = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
    assert ended.returncode == 130
    assert ended.stderr == "\nt0repro: interrupted.\n  fix: Start the same command again.\n"


@pytest.mark.parametrize(
    ("command", "place", "options", "code"),
    [
        ("train", "run_modes.parse_files", ["--gin_file", "run.gin"], 75),
        ("cache", "cache.cache_tasks", ["--mixture", "m", "--cache_dir", "c"], 143),
    ],
)
def test_sigterm_where_no_work_is_lost_says_to_start_the_command_again(
    tmp_path, command, place, options, code
):
    program = (
        "import signal, sys\n"
        "from t0repro.cli import app, cache, run_modes\n"
        f"{place} = lambda *_, **__: signal.raise_signal(signal.SIGTERM)\n"
        f"sys.argv = ['t0repro', '{command}', *{options}]\n"
        "app.main()"
    )
    ended = subprocess.run(
        [sys.executable, "-P", "-c", program], capture_output=True, text=True, cwd=tmp_path
    )
    assert ended.returncode == code
    assert ended.stderr.splitlines()[-1] == "stopped by SIGTERM: the same command continues"
