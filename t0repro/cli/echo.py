"""Prints lines that may quote what others wrote, with nothing that a terminal would act on."""

import typer

from t0repro.errors import as_shown
from t0repro.redaction import without_passwords
from t0repro.words import printable


def echo(text: str, *, err: bool = False) -> None:
    """Prints a text's lines on stdout or stderr, without passwords; escape sequences are shown."""
    typer.echo(printable(without_passwords(as_shown(text)), keep="\n"), err=err)
