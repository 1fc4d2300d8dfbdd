"""`t0repro browse`: the prompt bench in a browser, or as one static file."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from t0repro.cli.options import ModulesOrT0, Templates, modules_or_t0
from t0repro.cli.paths import output_file, source
from t0repro.cli.results import echo
from t0repro.errors import UserError
from t0repro.reports.run import split_label
from t0repro.storage import address_of, check_readable, write_atomically
from t0repro.tasks.modules import load_tasks
from t0repro.tasks.user_files import TEMPLATES_VARIABLE, template_files
from t0repro.words import sized


def browse(
    templates: Templates = None,
    rows: Annotated[
        list[Path] | None,
        typer.Option(
            help="A dataset of your own: a CSV, TSV, JSONL or Parquet file with rows; repeatable."
        ),
    ] = None,
    mixture: Annotated[str | None, typer.Option(help="Only the tasks of this mixture.")] = None,
    dataset: Annotated[
        str | None, typer.Option(help="Only the tasks of this dataset, or dataset/subset.")
    ] = None,
    checkpoint: Annotated[
        list[str] | None,
        typer.Option(
            callback=source,
            metavar="[LABEL=]PATH",
            help="Score the rows shown with this checkpoint, in any format; repeatable.",
        ),
    ] = None,
    adapter: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[LABEL=]DIR",
            help="Also score with this adapter of the first checkpoint; repeatable.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(callback=output_file, help="Write one static HTML file instead of a server."),
    ] = None,
    sample: Annotated[
        int, typer.Option(min=1, max=100, help="Rows of each prompt in that file.")
    ] = 3,
    port: Annotated[
        int | None,
        typer.Option(min=1, max=65535, help="Port on 127.0.0.1.", show_default="8765, or any"),
    ] = None,
    module_import: ModulesOrT0 = None,
) -> None:
    r"""See, search, edit and score prompts in a browser.

    It prints an address of this machine, which you open; Ctrl-C ends it. Prompts are saved only in
    the files that --templates and T0REPRO_TEMPLATES name, which need not exist yet.

    Example:
      t0repro browse --rows reviews.csv --templates my_prompts.yaml
    """
    # Starlette and uvicorn are those of the extra.
    from t0repro.browse.bench import make_bench
    from t0repro.browse.pages import Pages
    from t0repro.browse.server import serve
    from t0repro.browse.static_file import render_static

    named = [*map(Path, template_files()), *(templates or ())]
    # A module may register these files; those that the bench is to write first are not there yet.
    os.environ[TEMPLATES_VARIABLE] = os.pathsep.join(filter(os.path.exists, template_files()))
    for path in named:
        if address := address_of(path):
            raise UserError(
                "Prompts are saved on this machine only.",
                where=address,
                fix="Copy the file here and name the copy.",
            )
        if out is not None and path in (templates or ()) and not path.exists():
            raise UserError(
                "There is no such file of prompts, and a page of --out can write none.",
                where=f"--templates={path}",
                fix="Name a file that exists, or leave out --out and write it in the browser.",
            )
    own = [*named, *(rows or ())]
    load_tasks(modules_or_t0(module_import, own), None, into_seqio=False)
    bench = make_bench(list(dict.fromkeys(named)), rows or (), mixture, dataset)
    models = None
    if adapter and not checkpoint:
        raise UserError(
            "An adapter needs its base.", where="--adapter", fix="Name the base: --checkpoint PATH."
        )
    if checkpoint:
        echo("importing JAX and reading the checkpoint ...", err=True)
        from t0repro.browse.models import open_models

        adapters = _label_paths(adapter or (), "--adapter")
        models = open_models(_label_paths(checkpoint, "--checkpoint"), adapters)
    pages = Pages(bench, models)
    if out is not None:
        html, said = render_static(pages, sample)
        write_atomically(out, html)
        echo(f"wrote {out}, {sized(len(html.encode()))}. {said}.")
        return
    for fault in pages.row_faults():
        echo(f"note: {fault}", err=True)
    # Not by `echo`, which hides passwords, and the token is one.
    serve(pages, port, lambda address: typer.echo(f"Open {address} (Ctrl-C ends it)"))


def _label_paths(paths: Iterable[str], option: str) -> dict[str, str]:
    """Label of each path, by default its last name -> the path."""
    found: dict[str, str] = {}
    for label, path in map(split_label, paths):
        check_readable(path, option)
        name = label or Path(path).name
        found[name if name not in found else path] = path
    return found
