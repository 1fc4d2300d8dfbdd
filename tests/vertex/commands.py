"""`t0repro vertex` as a user calls it, in this process."""

from tests.cli.commands import run
from tests.vertex.services import LOCATION, PROJECT

SUBMIT = ("--staging_bucket", "gs://bucket", "--image_uri", "image", "--display_name", "small")


def vertex(monkeypatch, capsys, command, *arguments):
    """(exit code, stdout, stderr) of a command in the project and region of the services."""
    place = ("--project", PROJECT, "--location", LOCATION)
    return run(monkeypatch, capsys, "vertex", command, *place, *arguments)


def submit(monkeypatch, capsys, *arguments):
    """Submits a job on a machine without accelerators."""
    machine = ("--machine_type", "n1-standard-4")
    return vertex(monkeypatch, capsys, "submit", *SUBMIT, *machine, *arguments)
