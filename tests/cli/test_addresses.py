"""Addresses of buckets on command lines: no command takes one for a local folder.

The table of options is made from the commands' own definitions: a new option that takes text has
to be declared as written (`cli.paths.output`) or listed here as not written.
"""

import contextlib
import functools
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from t0repro.cli import app
from t0repro.cli.paths import output, output_file, source, target
from t0repro.config.t5x import gin_files
from t0repro.config.t5x.gin_files import T5xInputs
from t0repro.errors import UserError
from t0repro.storage import access, check_folder, make_folder, output_path, write_atomically

from ..runs.tiny_gin import MODEL
from .commands import run

# Each with why it is refused on a machine without credentials.
SCHEMES = {
    "gs": "no Google Cloud credentials",
    "s3": "no AWS credentials",
    "hdfs": "hdfs:// is not a known scheme",
    "foo": "foo:// is not a known scheme",
}


@pytest.fixture(autouse=True)
def no_credentials(monkeypatch, tmp_path_factory):
    """A machine that is not a store's own, without credentials; a network call fails the test."""
    for name in list(os.environ):
        if name.startswith(("AWS_", "GOOGLE_", "FSSPEC_", "STORAGE_EMULATOR")):
            monkeypatch.delenv(name)
    monkeypatch.delenv("GCE_METADATA_HOST", raising=False)
    home = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(home / "gcloud"))
    for file in ("_MACHINE", "_VENDOR"):
        monkeypatch.setattr(access, file, home / file)

    def refuse(*args, **kwargs):
        raise AssertionError("a network connection was tried")

    monkeypatch.setattr(socket.socket, "connect", refuse)


# Options that take text and name nothing that is written, by name, whichever command has them.
NOT_WRITTEN = frozenset(
    # names, words and numbers
    """--accelerator_type --adapter --auxiliary_job_build_target_path --auxiliary_job_cell
    --auxiliary_job_mixtures --auxiliary_job_platform --beam_options --cell --coordinator_address
    --dataset --device --devices --display_name --eval --eval_task --experiment --family
    --image_uri --label --labels --launcher --location --machine_type --main_metric --metric
    --mixture --model --module_import --network --note --option --platform --project --revision
    --run --run_mode --run_name --service_account --split --splits --stderrthreshold --step --tasks
    --tensorboard --title --topology --tpu_topology --train --train_dataset --train_mixture
    COMMAND EXPERIMENT JOB TASK"""
    """ --additional_deprecated_gin_references --job_name_prefix"""
    # what has places in it, and names that look like one
    """ --auxiliary_job_gin_file --base_url --checkpoint --gin_files
    --gin_import_allowlist --gin_search_paths --losses --other --tfds_data_dir NAME RUNS"""
    # Vertex AI's own folder for its jobs; explain shows a run and writes nothing
    """ --staging_bucket --model_dir"""
    # gin's, see test_any_t5x_binding_... below; runs/NAME, which has a test of its own
    """ --gin_bindings --gin_overwrites --gin_param --name""".split()
)


@functools.cache
def options():
    """(command's words, the parameter) of every option and argument of every command."""

    def below(command, words):
        for parameter in command.params:
            yield words, parameter
        for name, child in getattr(command, "commands", {}).items():
            yield from below(child, (*words, name))

    return list(below(app.command(), ()))


def name_of(parameter):
    name = parameter.opts[0]
    return name.replace("-", "_").replace("__", "--", 1) if name[0] == "-" else name.upper()


def is_written(parameter):
    return getattr(parameter.callback, "__wrapped__", None) in (output, output_file, target)


def is_read_as_text(parameter):
    return getattr(parameter.callback, "__wrapped__", None) is source


def takes(parameter, kind):
    return kind in str(parameter.type_descriptor.annotation)


WRITTEN = [(words, parameter) for words, parameter in options() if is_written(parameter)]
READ = [
    (words, parameter)
    for words, parameter in options()
    if takes(parameter, "Path") and not is_written(parameter)
]
TEXTS = [(words, parameter) for words, parameter in options() if is_read_as_text(parameter)]


def test_every_option_that_takes_text_is_known_as_written_or_not():
    text = [
        name_of(each)
        for _, each in options()
        if (takes(each, "'str'") or takes(each, "[str"))
        and not (is_read_as_text(each) or is_written(each))
    ]
    unknown = sorted(set(text) - NOT_WRITTEN)
    assert not unknown, f"list {unknown} here, give them callback=source or make them Paths"


def line(words, parameter, value):
    """A command line with this value, and something for all else that the command must have."""
    given = list(words)
    siblings = [each for path, each in options() if path == words]
    for each in siblings:
        told = value if each is parameter or name_of(each) == name_of(parameter) else None
        if told is None and each.required:
            choices = getattr(each.type_descriptor, "choices", None)
            told = choices[0] if choices else "x"
        if told is not None:
            option = each.opts[0]
            given += [f"{option}={told}"] if option.startswith("-") else [told]
    return given


def case(entry):
    words, parameter = entry
    return f"{'-'.join(words)} {name_of(parameter)}"


@pytest.mark.parametrize("entry", [*WRITTEN, *READ, *TEXTS], ids=case)
def test_an_address_is_refused_at_once_and_nothing_is_made(entry, monkeypatch, capsys, tmp_path):
    words, parameter = entry
    monkeypatch.chdir(tmp_path)
    # What is read by fsspec may be at a store of any kind that it knows.
    schemes = {name: why for name, why in SCHEMES.items() if entry not in TEXTS or name != "hdfs"}
    for scheme, why in schemes.items():
        address = f"{scheme}://bucket/run"
        code, _, said = run(monkeypatch, capsys, *line(words, parameter, address))
        assert code == 2, said
        assert f"{address} cannot be opened" in said and why in said
        assert f"where: {name_of(parameter)}" in said
        assert "fix: " in said and not any(tmp_path.iterdir())


T5X = ["--gin_file", MODEL, "--gin.DROPOUT_RATE=0.0", "--gin.MIXTURE_OR_TASK_NAME='m'"]
LENGTHS = "--gin.TASK_FEATURE_LENGTHS={'inputs': 8, 'targets': 8}"


@pytest.mark.parametrize(
    ("command", "files", "binding"),
    [
        ("train", "pretrain", "MODEL_DIR"),
        ("eval", "eval", "EVAL_OUTPUT_DIR"),
        ("infer", "infer", "INFER_OUTPUT_DIR"),
        ("precompile", "precompile", "MODEL_DIR"),
        ("train", "finetune", "INITIAL_CHECKPOINT_PATH"),
        ("eval", "eval", "CHECKPOINT_PATH"),
        ("infer", "infer", "CHECKPOINT_PATH"),
    ],
)
def test_a_t5x_macro_with_an_address_is_refused_before_tasks_are_imported(
    command, files, binding, monkeypatch, capsys, tmp_path
):
    more = {
        "train": ["--gin.TRAIN_STEPS=1", "--gin.MODEL_DIR='x'"],
        "eval": ["--gin.CHECKPOINT_PATH='x'", "--gin.EVAL_OUTPUT_DIR='x'"],
        "infer": ["--gin.CHECKPOINT_PATH='x'", "--gin.INFER_OUTPUT_DIR='x'"],
        "precompile": [],
    }[command]
    monkeypatch.chdir(tmp_path)
    for scheme, why in SCHEMES.items():
        arguments = [
            *(command, *T5X, "--gin_file", f"t5x/configs/runs/{files}.gin", LENGTHS, *more),
            f"--gin.{binding}='{scheme}://bucket/run'",
        ]
        code, _, said = run(monkeypatch, capsys, *arguments)
        assert code == 2 and f"{scheme}://bucket/run cannot be opened" in said and why in said
        assert binding in said and "importing" not in said
        assert not any(tmp_path.iterdir())


def test_any_t5x_binding_of_an_unknown_scheme_is_refused_with_its_place():
    files = ("t5x/configs/runs/finetune.gin",)
    path = "utils.RestoreCheckpointConfig.path = ['runs/a', 'foo://bucket/run']"
    for binding in (path, "A_MACRO = 'foo://bucket/run'"):
        with pytest.raises(UserError, match="foo://bucket/run .*not a known scheme") as error:
            gin_files.parse(T5xInputs("train", files, (binding,)))
        assert error.value.where == f"--gin_bindings {binding!r}"


def test_a_run_cannot_be_named_after_an_address(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    code, _, said = run(monkeypatch, capsys, "train", *T5X, "--name=gs://bucket/run")
    assert code == 2 and "where: --name" in said and not any(tmp_path.iterdir())


@pytest.mark.parametrize("scheme", SCHEMES)
def test_no_folder_is_ever_made_of_an_address(scheme, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    address = f"{scheme}://bucket/run"
    # As given, as pathlib shortens it, made absolute, below a folder, in capitals.
    forms = [address, Path(address), Path(address).absolute(), f"runs/{address}", address.upper()]
    for form in forms:
        for write in (make_folder, lambda path: write_atomically(Path(path) / "file", "x")):
            with pytest.raises(UserError, match="(?i)" + address):
                write(form)
    assert not any(tmp_path.iterdir())


def test_no_folder_is_made_of_a_tilde_that_no_shell_expanded(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for write in (make_folder, check_folder):
        with pytest.raises(UserError, match="only a shell expands"):
            write("~/runs/a")
    (tmp_path / "~").mkdir()
    make_folder("~/runs/a")
    check_folder("~/runs/b")


def test_a_local_path_may_be_spelled_as_a_file_address_and_a_folder_keep_its_colon(tmp_path):
    (tmp_path / "c:").mkdir()
    write_atomically(tmp_path / "c:" / "below" / "file", "x")
    assert output_path(f"file://{tmp_path}/a") == tmp_path / "a"
    with contextlib.suppress(UserError):
        make_folder(tmp_path / "d:" / "below")
    assert [path.name for path in tmp_path.iterdir()] == ["c:"]


def test_all_folders_are_made_in_one_place():
    """Other code makes single folders at most, below one that was made here."""
    package = Path(app.__file__).parents[1]
    roots = (package, package.parent / "converters", package.parent / "tasks")
    found = {
        path.name
        for root in roots
        for path in root.rglob("*.py")
        for text in [path.read_text(encoding="utf-8")]
        if "parents=True" in text or "os.makedirs" in text
    }
    assert found == {"disk.py", "working_copies.py"}


# Runs each command line in a process of its own, which begins with what the program itself imports;
# prints (exit code, CPU seconds with those imports, what it said).
_TIMED = """
import json, os, pathlib, resource, signal, sys
from t0repro.storage import access
access._MACHINE = access._VENDOR = pathlib.Path("/not/there")
from t0repro.cli import app, t5_mesh_transformer
own = resource.getrusage(resource.RUSAGE_SELF)
for line in json.load(sys.stdin):
    out, inside = os.pipe()
    if not (child := os.fork()):
        os.dup2(inside, 1), os.dup2(inside, 2), os.close(out)
        signal.alarm(60)
        sys.argv = line
        code = 1
        try:
            mesh = line[0] == "t5_mesh_transformer"
            t5_mesh_transformer.console_entry_point() if mesh else app.main()
        except SystemExit as end:
            code = int(end.code or 0)
        finally:
            sys.stdout.flush(), sys.stderr.flush()
            os._exit(code)
    os.close(inside)
    with open(out, errors="replace") as said:
        text = said.read()
    _, status, used = os.wait4(child, 0)
    seconds = sum(each.ru_utime + each.ru_stime for each in (own, used))
    print(json.dumps([os.waitstatus_to_exitcode(status), seconds, text]), flush=True)
"""
SECONDS = 2.0


def test_each_command_says_within_two_seconds_that_there_are_no_credentials(tmp_path):
    address = "gs://a-bucket/run"  # whose dash is not an option's
    assert len(TEXTS) > 20
    # One option of each command and kind; each option's refusal is tested above.
    taken = {
        (words, kind): parameter
        for kind, group in enumerate((WRITTEN, READ, TEXTS))
        for words, parameter in group
    }
    lines = [["t0repro", *line(words, taken[words, kind], address)] for words, kind in taken]
    mesh = ["t5_mesh_transformer", "--module_import=t0repro.tasks.demo"]
    lines += [
        [*mesh, f"--model_dir={address}", "--gin_file=train.gin", f"--backend={backend}"]
        for backend in ("jax", "mtf")
    ]
    lines += [[*mesh, "--model_dir=x", f"--gin-file={address}", "--backend=jax"]]
    timed = subprocess.run(
        [sys.executable, "-P", "-c", _TIMED],
        input=json.dumps(lines),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    results = list(map(json.loads, timed.stdout.splitlines()))
    assert len(results) == len(lines)
    wrong = [
        (" ".join(given), seconds, said)
        for given, (code, seconds, said) in zip(lines, results, strict=True)
        if not (
            (code, seconds < SECONDS) == (2, True)
            and f"{address} cannot be opened" in said
            and "no Google Cloud credentials" in said
            and "fix: " in said
        )
    ]
    assert not wrong and not any(tmp_path.iterdir()), wrong


@pytest.mark.parametrize("command", ["browse", "tasks overlap --train=a --eval=b"])
def test_what_is_there_or_can_be_no_file_is_refused_as_one_files_name(
    tmp_path, monkeypatch, capsys, command
):
    (tmp_path / "file.txt").write_text("")
    for out, what in (
        *(("", "This is a folder"), ("file.txt/x.html", "file.txt is a file")),
        ("file.txt", "The file exists"),
    ):
        code, _, errors = run(monkeypatch, capsys, *command.split(), f"--out={tmp_path / out}")
        assert code == 2 and what in errors and "where: --out" in errors
