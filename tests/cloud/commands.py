"""`t0repro vertex` as a user calls it."""

import subprocess
import sys

from t0repro.storage import access
from tests.cli.commands import run
from tests.cloud.services import LOCATION, PROJECT

SUBMIT = ("--staging_bucket", "gs://bucket", "--image_uri", "image", "--display_name", "small")


def no_credentials(monkeypatch, empty):
    """A machine that is not Google's, without credentials; `empty` is an empty folder."""
    for variable in (
        "GOOGLE_APPLICATION_CREDENTIALS",
        "STORAGE_EMULATOR_HOST",
        "GCE_METADATA_HOST",
    ):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(empty))
    for file in ("_MACHINE", "_VENDOR"):
        monkeypatch.setattr(access, file, empty / file)


def vertex(monkeypatch, capsys, command, *arguments):
    """(exit code, stdout, stderr) of a command in the project and region of the services."""
    place = ("--project", PROJECT, "--location", LOCATION)
    return run(monkeypatch, capsys, "vertex", command, *place, *arguments)


def vertex_process(command, *arguments):
    """The same in a process of its own: pytest's would not show what Google's client prints."""
    place = ("--project", PROJECT, "--location", LOCATION)
    command_line = [sys.executable, "-P", "-m", "t0repro.cli", "vertex", command, *place]
    return subprocess.run([*command_line, *arguments], capture_output=True, text=True)


def submit(monkeypatch, capsys, *arguments):
    """Submits a job on a machine without accelerators."""
    machine = ("--machine_type", "n1-standard-4")
    return vertex(monkeypatch, capsys, "submit", *SUBMIT, *machine, *arguments)
