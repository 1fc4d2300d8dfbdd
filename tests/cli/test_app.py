"""The command t0repro: messages, exit codes, help."""

import inspect
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from t0repro.cli import app
from t0repro.cli.commands import More
from t0repro.cli.gate import ErrorHandling
from t0repro.cli.spelling import translate_t5x_overrides
from t0repro.errors import UserError

from ..helpers.docs_commands import programs_started
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
    assert err.endswith(" ...\nt0repro: No such thing.\n  where: here:1\n  fix: Make one.\n")
    assert out == ""


def test_a_word_whose_option_was_forgotten_is_answered_with_the_options(monkeypatch, capsys):
    code, _, err = run(monkeypatch, capsys, "tasks", "ls", "my_reviews")
    assert code == 2
    assert "(my_reviews). An option stands before its value: --mixture, --dataset, " in err


def test_an_unexpected_error_is_one_clear_line_with_a_hint_and_exits_with_1(
    monkeypatch, capsys, failing
):
    failing(ValueError("two\nlines"))
    code, _, err = run(monkeypatch, capsys, "doctor")
    assert code == 1
    doing, error, to_do = err.splitlines()
    assert doing.endswith(" ...")
    assert error == "t0repro: ValueError: two lines"
    assert "--debug" in to_do


@pytest.mark.parametrize("error", [UserError("Mine."), ValueError("Theirs.")])
def test_debug_lets_the_exception_through(monkeypatch, failing, error):
    failing(error)
    monkeypatch.setattr(sys, "argv", ["t0repro", "--debug", "doctor"])
    with pytest.raises(type(error)):
        app.main()


def test_a_mistyped_command_or_option_exits_with_2(monkeypatch, capsys):
    assert run(monkeypatch, capsys, "doktor")[0] == 2
    assert run(monkeypatch, capsys, "doctor", "--jsn")[0] == 2
    code, _, said = run(monkeypatch, capsys, "convert", "a", "b", "--to", "jaxx")
    assert code == 2 and "Invalid value for '--to': 'jaxx' is not one of 'mtf'" in said
    words = "rank-eval --checkpoint m --mixture x --out o --limit 0.1".split()
    code, _, said = run(monkeypatch, capsys, *words)
    assert code == 2 and "Invalid value for '--limit': '0.1' should be a valid integer." in said


def test_an_option_of_a_jobs_run_is_sent_behind_the_dashes(monkeypatch, capsys):
    code, _, err = run(monkeypatch, capsys, "vertex", "submit", "--module_import", "my_tasks")
    assert code == 2 and "An option of the run: -- --module_import=VALUE." in " ".join(err.split())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["rank_evl"], "'rank_evl'. Nearest: rank-eval."),
        (["Train"], "'Train'. Nearest: train."),
        (["convert_checkpoint", "a", "b"], "'convert_checkpoint'. Nearest: convert, checkpoint."),
        (["report", "runs/a"], "'runs/a'. There are make, verify, share, history."),
        (["inspect", "runs/a"], "'inspect'. Nearest: checkpoint inspect."),
        (["score", "runs/a"], "'score'. Nearest: rank-eval."),
    ],
)
def test_a_command_that_there_is_not_is_answered_with_those_that_there_are(
    monkeypatch, capsys, words, said
):
    code, _, err = run(monkeypatch, capsys, *words)
    assert code == 2 and f"No such command {said}" in err
    code, _, err = run(monkeypatch, capsys, "quickstart")
    assert code == 2 and "bash scripts/quickstart.sh" in err


@pytest.mark.parametrize(
    ("option", "here"), [("model", "checkpoint"), ("tasks", "mixture"), ("output_dir", "out")]
)
def test_an_option_of_transformers_or_the_harness_is_answered_with_ours(
    monkeypatch, capsys, option, here
):
    code, _, err = run(monkeypatch, capsys, "rank-eval", f"--{option}=a")
    assert code == 2 and f"No such option: --{option}. Nearest: --{here}" in err


@pytest.mark.parametrize(
    "words",
    ["plot runs --out curves.html", "convert a b.safetensors", "parity --demo --out p.json"],
)
def test_the_name_of_a_file_is_refused_where_a_folder_is_written(
    monkeypatch, capsys, tmp_path, words
):
    monkeypatch.chdir(tmp_path)
    code, _, err = run(monkeypatch, capsys, *words.split())
    assert code == 2 and "A folder is written, and this is the name of a file." in err


def test_an_option_of_the_command_to_launch_is_answered_with_the_two_dashes(monkeypatch, capsys):
    words = ("t0repro", "train", "--model_dir=a")
    code, _, err = run(monkeypatch, capsys, "launch", "--to=slurm", "--model_dir=a")
    assert code == 2 and "two dashes, with its options: -- t0repro train --model_dir=" in err
    code, _, err = run(monkeypatch, capsys, "aux", "--build_target_path=rank-eval")
    assert code == 2 and "--auxiliary_job_build_target_path" in err and "two dashes" not in err
    code, _, err = run(monkeypatch, capsys, "train", "--model_dir=a")
    assert code == 2 and """A setting of the run is gin's: --gin.MODEL_DIR="'DIR'\".""" in err
    # The command's own options stay with it, without the dashes too.
    code, out, _ = run(
        monkeypatch, capsys, "launch", "--to=slurm", "--dry_run", *words, "--dry_run"
    )
    assert code == 0 and "t0repro train --model_dir=a --dry_run" in out
    code, _, err = run(monkeypatch, capsys, "launch", "--tow=slurm", "--", *words)
    assert code == 2 and "Nearest: --to" in err and "two dashes" not in err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--json", "runs"], "stand after its name: t0repro runs --json."),
        (
            ["report", "--sample=3", "verify"],
            "stand after its name: t0repro report verify --sample",
        ),
    ],
)
def test_an_option_before_its_command_is_answered_with_its_place(monkeypatch, capsys, words, said):
    code, _, err = run(monkeypatch, capsys, *words)
    assert code == 2 and said in " ".join(err.split())


@pytest.mark.parametrize(
    "words",
    [
        ["train", "--gin.TASK_FEATURE_LENGTHS={inputs:", "64,", "targets:", "16}"],
        ["explain", "--gin_param=MIXTURE_NAME", "=", "'demo_train'"],
        ["train", "--gin.TRAIN_STEPS=", "20"],
    ],
)
def test_an_override_that_the_shell_split_is_answered_with_its_quotation_marks(
    monkeypatch, capsys, words
):
    code, _, err = run(monkeypatch, capsys, *words)
    assert code == 2 and "split a value at its spaces. Quote the whole: --gin.NAME=" in err


def test_several_values_of_an_option_at_once_are_answered_with_its_repetition(monkeypatch, capsys):
    words = "rank-eval --checkpoint m --mixture x --out o --step 10 20".split()
    code, _, err = run(monkeypatch, capsys, *words)
    assert code == 2 and "may be repeated: --step 10 --step 20." in " ".join(err.split())
    code, _, err = run(monkeypatch, capsys, *"compare a b --step 10,20".split())
    assert code == 2 and "it is repeated: --step A --step B." in " ".join(err.split())


def test_of_several_values_of_an_option_that_takes_one_the_last_is_named(monkeypatch, capsys):
    words = "rank-eval --checkpoint m --mixture a --out o --out=p --no_such".split()
    _, _, err = run(monkeypatch, capsys, *words)
    assert "note: --out takes one value: of o, p, the last" in err
    words[words.index("--out=p")] = "--out=o"
    _, _, err = run(monkeypatch, capsys, *words)
    assert "takes one value" not in err
    # Of two mixtures, one would be left out.
    code, _, err = run(monkeypatch, capsys, *words, "--mixture=b")
    assert code == 2 and "Of a, b, one is taken at a time." in err


def test_what_t5x_starts_and_this_does_not_is_refused_by_name(monkeypatch, capsys):
    for command in ("run", "explain"):
        code, _, err = run(monkeypatch, capsys, command, "--run_mode=export")
        assert code == 2 and "a SavedModel" in err and "t0repro convert" in err
        code, _, err = run(monkeypatch, capsys, command, "--run_mode=exprot")
        assert code == 2 and "is not one of" in err and "precompile" in err
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


COMMANDS = list(_commands(app.command()))


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


def _callbacks(command, path: tuple[str, ...] = ()):
    for name, child in getattr(command, "commands", {}).items():
        yield from _callbacks(child, (*path, name))
    if command.callback is not None:
        yield pytest.param(command, id=" ".join(path))


@pytest.mark.parametrize("command", list(_callbacks(app.command())))
def test_an_unknown_option_is_answered_with_the_nearest_or_with_those_that_there_are(command):
    names = [next(name for name in each.opts if name.startswith("--")) for each in command.params
             if each.param_type_name == "option" and not each.hidden]  # fmt: skip
    # `run` passes what it does not know on to another command, and groups have few options.
    if command.name != "run" and not hasattr(command, "commands"):
        for option in [name for name in names if len(name) > 5]:
            with pytest.raises(Exception, match=f"Nearest: .*{option}") as error:
                command.make_context(command.name, [f"{option[:-2]}{option[-1]}=1"])
            assert "Possible options" not in error.value.format_message()
        with pytest.raises(Exception, match="No such option: --zzzz. There are (--|none)"):
            command.make_context(command.name, ["--zzzz", "1"])


def _examples(command) -> list[list[str]]:
    """The words of each command line in a command's help; lines that go on are indented."""
    text = (command.help or command.epilog or "").replace("\\\n", " ").replace("\b", "")
    text = text.partition("Example:")[2].replace("Example:", "")
    text = re.sub(r"\n\s*\n", "\nend\n", text)
    parts = re.split(r"(?:^|\s)(?:[A-Z0-9_]+=\S+ )?t0repro(?= )", text.partition("\nend\n")[0])
    return [shlex.split(part) for part in parts if part.strip()]


@pytest.mark.parametrize("command", list(_callbacks(app.command())))
def test_examples_in_help_are_command_lines_that_the_parser_takes(command):
    root = app.command()
    for words in _examples(command):
        assert "..." not in words  # nobody can paste that
        assert _parse(root, translate_t5x_overrides(words)).callback is not None


@pytest.mark.parametrize("command", list(_callbacks(app.command())))
def test_help_at_80_columns_cuts_no_options_name_and_its_examples_can_be_pasted(command, tmp_path):
    context = typer.Context(command, info_name="t0repro", terminal_width=80)
    page = command.get_help(context)
    assert max(map(len, page.splitlines())) <= 80 and "\u2026" not in page
    names = [next(name for name in each.opts if name.startswith("--")) for each in command.params
             if each.param_type_name == "option" and not each.hidden
             and not isinstance(each.rich_help_panel, More)]  # fmt: skip
    assert [name for name in names if not re.search(rf"{name}\b", page)] == []
    for example in re.findall(r"Example:\n((?: {4}.*\n)+)", f"{page}\n"):
        started = programs_started(example, tmp_path)
        assert len(started) == len(re.findall(r"^ {4}\S", example, re.M))
        assert all("\\" not in word for words in started for word in words)


@pytest.mark.parametrize(
    ("name", "headings", "hidden"),
    [
        ("train", ["Options", "Gin files and data"], ["Several processes", "Auxiliary jobs"]),
        ("rank-eval", ["Required", "Options", "Tasks and rows"], ["Computation", "The report"]),
    ],
)
def test_help_groups_options_under_headings_and_leaves_some_to_help_all(
    monkeypatch, capsys, name, headings, hidden
):
    printed = [run(monkeypatch, capsys, name, flag) for flag in ("-h", "--help-all")]
    assert [(code, err) for code, _, err in printed] == [(0, "")] * 2
    (_, short, _), (_, full, _) = printed
    assert all(f"\n{heading}:\n" in short for heading in headings)
    assert not any(f"\n{heading}:\n" in short for heading in hidden)
    assert all(f"\n{heading}:\n" in full for heading in (*headings, *hidden))


def test_commands_and_options_take_dashes_and_underscores(monkeypatch, capsys):
    # Click makes a command's option for help in its first context, which need not be t0repro's.
    fetch = app.command().commands["tasks"].commands["fetch-p3"]
    fetch._help_option = None
    fetch.get_help(typer.Context(fetch))
    for words in (
        ("rank_eval", "--help"),
        ("rank-eval", "--help_all"),
        ("tasks", "fetch_p3", "-h"),
    ):
        code, out, err = run(monkeypatch, capsys, *words)
        assert (code, err) == (0, "") and "Usage: t0repro " in out


def _parse(command, words, parent=None):
    """Parses a command line as Click would, runs nothing, and returns the command it would run."""
    context = command.make_context(command.name, list(words), parent=parent, obj=ErrorHandling())
    if hasattr(command, "commands") and (rest := [*context._protected_args, *context.args]):
        return _parse(command.commands[rest[0]], rest[1:], context)
    return command


@pytest.mark.parametrize("command", list(_callbacks(app.command())))
def test_a_command_that_prints_a_table_prints_json_too(command):
    source = inspect.getsource(inspect.unwrap(command.callback))
    tables = ("print_table(", "show_page(", "align_columns(", "print_list(", "print_page(")
    has_json = any("--json" in parameter.opts for parameter in command.params)
    assert has_json or not any(table in source for table in tables)


# docs/runs.md: "`--json` works with every command that prints a table or a page".
WITH_JSON = {
    *("doctor", "encode", "explain", "parity", "precompile", "rank-eval", "compare", "runs"),
    "plot",
    *("inspect", "diff", "verify", "released", "plan", "status", "make", "history"),
    *("ls", "show", "check", "overlap"),
}


def test_these_commands_print_json():
    commands = [each.values[0] for each in _callbacks(app.command())]
    given = [c for c in commands if any("--json" in parameter.opts for parameter in c.params)]
    assert {command.name for command in given} == WITH_JSON
    # checkpoint verify and report verify; compare and vertex compare; aux status.
    assert sorted(c.name for c in given if c.name in ("verify", "compare", "status")) == [
        *("compare", "compare", "status", "verify", "verify")
    ]


def _unread(*words: str) -> tuple[int, str]:
    """(exit code, stderr) of a command whose output nobody reads."""
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-P", "-m", "t0repro", *words]
    ended = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write)
    return ended.returncode, ended.stderr


def test_a_pipe_that_is_closed_early_is_no_error():
    assert _unread("checkpoint", "released") == (0, "")
    assert _unread("train", "--help") == (0, "")


@pytest.mark.slow
def test_work_that_a_closed_pipe_cuts_off_is_one(tmp_path):
    code, err = _unread("train", "--dry_run", "--gin_file=t5x/examples/t5/t5_1_1/tiny.gin",
        "--gin_file=t5x/configs/runs/pretrain.gin", "--gin.MIXTURE_OR_TASK_NAME='demo_train'",
        "--gin.TASK_FEATURE_LENGTHS={'inputs': 64, 'targets': 16}", "--gin.DROPOUT_RATE=0.0",
        f"--gin.MODEL_DIR='{tmp_path}'", "--gin.TRAIN_STEPS=1", "--gin.USE_CACHED_TASKS=False",
        "--module_import=t0repro.tasks.demo")  # fmt: skip
    assert code == 1 and "the program that read its output has ended" in err


def test_no_color_is_respected():
    command = [sys.executable, "-P", "-m", "t0repro", "--help"]
    environment = {**os.environ, "NO_COLOR": "1", "FORCE_COLOR": "1"}
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    # Of colors, not of bold or dim, which FORCE_COLOR asks for.
    assert not re.search(r"\x1b\[(?:\d;)*(3[0-7]|38;|9[0-7])", ended.stdout)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_completes_commands_and_options(shell):
    environment = {**os.environ, "_T0REPRO_COMPLETE": f"source_{shell}"}
    t0repro = str(Path(sys.executable).with_name("t0repro"))
    script = subprocess.run([t0repro], capture_output=True, text=True, env=environment).stdout
    if shutil.which(shell) is None:
        assert "complete" in script  # it can only be printed here
        return
    words = {"bash": "COMP_WORDS=(t0repro che); COMP_CWORD=1; _t0repro_completion t0repro"}
    program = f"{script}\nPATH={Path(t0repro).parent}:$PATH\n{words.get(shell, 'true')}\n"
    program += 'echo "${COMPREPLY[@]}"'
    done = subprocess.run([shell, "-c", program], capture_output=True, text=True, check=True)
    assert shell != "bash" or done.stdout.split() == ["checkpoint"]


# Ends the process, with a line, where something heavy is imported.
UNTIL_HEAVY = """
import os, sys

class Heavy:
    def find_spec(self, name, path=None, target=None):
        if name in ("jax", "tensorflow", "seqio", "flax", "orbax", "google.cloud"):
            print("heavy:", name, file=sys.stderr, flush=True)
            os._exit(0)

sys.meta_path.insert(0, Heavy())
"""


LONG_WORK = [
    ("t0repro train --gin_file a.gin", "reading gin files"),
    ("t0repro eval --gin_file a.gin", "reading gin files"),
    ("t0repro precompile --gin_param a=1 --topology cpu-1", "looking for devices"),
    ("t0repro parity --out a", "reading gin files"),
    ("t0repro cache --tasks a --output_cache_dir a", "reading the list of tasks"),
    ("t0repro tasks check", "reading the list of tasks"),
    ("t0repro rank-eval --checkpoint a --mixture a --out a", "importing JAX"),
    ("t0repro convert a b --to jax", "reading a"),
    ("t0repro checkpoint diff a b", "reading a and b"),
    ("t0repro report make a --out b", "reading a"),
    (
        "t0repro aux --model_dir a --auxiliary_job_mixtures a --once"
        " --auxiliary_job_build_target_path rank-eval",
        "checking what the jobs will read",
    ),
    ("t0repro vertex status 1 --project p --location europe-west4", "asking Vertex AI"),
]
# Each command line in a fork of a process that has imported what the program itself imports.
_IN_FORKS = """
import os
from t0repro.cli import app
for number, line in enumerate(LINES):
    if child := os.fork():
        os.waitpid(child, 0)
        continue
    os.dup2(os.open(str(number), os.O_CREAT | os.O_WRONLY), 2)
    sys.argv = line.split()
    app.main()
    os._exit(0)
"""


@pytest.fixture(scope="module")
def said_until_heavy(tmp_path_factory):
    """What each command line says before anything heavy is imported."""
    folder = tmp_path_factory.mktemp("said")
    lines = [line for line, _ in LONG_WORK]
    code = f"LINES = {lines!r}\n{UNTIL_HEAVY}{_IN_FORKS}"
    ended = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, cwd=folder
    )
    assert ended.returncode == 0, ended.stderr
    return {line: (folder / str(number)).read_text() for number, line in enumerate(lines)}


@pytest.mark.parametrize(("line", "first"), LONG_WORK)
def test_long_work_says_what_it_does_before_it_imports_anything_heavy(
    said_until_heavy, line, first
):
    assert said_until_heavy[line].startswith(first)


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


def test_the_scripts_explain_their_variables_on_request():
    for script, variable in (
        ("train", "MODEL_GIN"),
        ("rank_eval", "EVAL_STEP"),
        ("cache", "TASKS"),
    ):
        path = str(Path(__file__).parents[2] / "scripts" / f"{script}.sh")
        done = subprocess.run(["bash", path, "--help"], capture_output=True, text=True)
        assert variable in done.stdout and "set -euo" not in done.stdout, script
