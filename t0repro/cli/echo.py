"""Prints lines that may quote what others wrote, with nothing that a terminal would act on."""

import typer

from t0repro.words import printable


def echo(text: str, *, err: bool = False) -> None:
    """Prints a text's lines on stdout, or on stderr; escape sequences become visible."""
    typer.echo(printable(text, keep="\n"), err=err)
