"""`t0repro tasks`: lists, shows and checks prompted tasks; downloads the released P3."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from t0repro.cli.echo import echo
from t0repro.cli.options import AsJson, ModulesOrT0, Templates, modules_or_t0
from t0repro.cli.paths import output
from t0repro.cli.results import print_json
from t0repro.words import counted, sized

app = typer.Typer(
    name="tasks",
    help="List, show and check prompted tasks; download the released P3.",
    no_args_is_help=True,
    epilog="Example: t0repro tasks ls --dataset super_glue/rte",
)

_Mixture = Annotated[str | None, typer.Option(help="Only the tasks of this mixture.")]
_Dataset = Annotated[
    str | None, typer.Option(help="Only the tasks of this dataset, or dataset/subset.")
]


def _register(modules: list[str] | None, templates: list[Path] | None) -> None:
    from t0repro.tasks.registration import load_tasks

    # Without SeqIO, whose import would take most of such a command's time.
    load_tasks(modules_or_t0(modules, templates), templates or (), into_seqio=False)


@app.command("ls")
def list_tasks(
    mixture: _Mixture = None,
    dataset: _Dataset = None,
    cache: Annotated[
        list[Path] | None,
        typer.Option(help="Say which tasks are cached in this folder; repeatable."),
    ] = None,
    at_hand: Annotated[
        bool,
        typer.Option("--at_hand", help="Only tasks whose rows, or caches in --cache, are here."),
    ] = False,
    module_import: ModulesOrT0 = None,
    templates: Templates = None,
    as_json: AsJson = False,
) -> None:
    """List tasks: dataset, template, choices, metrics, rate, training examples, cached or not.

    A rate far above a task's number of examples is marked: T0's rates count rows that a template
    drops.

    Example: t0repro tasks ls --mixture t0_train --dataset trec --cache runs/cache
    """
    _register(module_import, templates)
    from t0repro.tasks.inspect import listing, tables

    caches = list(cache or ())
    found = listing.list_tasks(mixture, dataset, caches, at_hand=at_hand)
    if as_json:
        print_json(listing.as_json(found))
    else:
        tables.print_list(found, caches)


@app.command("show")
def show_task(
    task: Annotated[str, typer.Argument(help="A task's name.")],
    split: Annotated[
        str | None,
        typer.Option(help="A split of the task.", show_default="the first whose rows are here"),
    ] = None,
    rows: Annotated[int, typer.Option(min=1, help="The number of examples.")] = 3,
    module_import: ModulesOrT0 = None,
    templates: Templates = None,
    as_json: AsJson = False,
) -> None:
    """Show a task's first examples: input, target and choices, tokens, and what is cut off.

    Variables are cut after 2,048 characters, inputs after 1,024 tokens, targets after 256.

    Example: t0repro tasks show super_glue_rte_GPT_3_style --split validation --rows 2
    """
    _register(module_import, templates)
    from t0repro.tasks.inspect import showing, tables

    shown = showing.show_task(task, split, rows)
    if as_json:
        print_json(shown.to_json())
    else:
        tables.print_task(shown)


@app.command("check")
def check_tasks(
    mixture: _Mixture = None,
    dataset: _Dataset = None,
    module_import: ModulesOrT0 = None,
    templates: Templates = None,
    as_json: AsJson = False,
) -> None:
    """Render the first rows of every task; exit code 1 if a prompt is broken.

    Example: t0repro tasks check --templates my_prompts.yaml
    """
    echo("reading the list of tasks ...", err=True)
    _register(module_import, templates)
    from t0repro.progress import count_progress
    from t0repro.tasks.inspect import checking, tables
    from t0repro.tasks.mixture import select_tasks

    # A task and its twin have one prompt, which is checked once.
    tasks = checking.without_twins(select_tasks(mixture, dataset))
    with count_progress(len(tasks), "checking", "task", "checked") as advance:
        checked = checking.check_tasks(tasks, advance)
    if as_json:
        print_json([task.to_json() for task in checked])
    else:
        tables.print_checks(checked)
    if any(task.verdict is checking.Verdict.BROKEN for task in checked):
        raise typer.Exit(1)


@app.command("fetch-p3")
def fetch_p3(
    tasks: Annotated[
        str,
        typer.Option(help="Names or patterns, such as 'super_glue_rte_*', separated by commas."),
    ],
    to: Annotated[
        Path,
        typer.Option(
            callback=output, help="Folder to download to, for --additional_task_cache_dirs."
        ),
    ],
    base_url: Annotated[
        str | None,
        typer.Option(
            help="The Hugging Face hub or a mirror of it.",
            show_default="HF_ENDPOINT, or else the hub itself",
        ),
    ] = None,
) -> None:
    """Download tasks of the released P3, cached as they were; a second start resumes the download.

    Example: t0repro tasks fetch-p3 --tasks 'super_glue_rte_*' --to runs/p3
    """
    echo("looking for the files of these tasks ...", err=True)
    from t0repro.hub_files import HubRepository
    from t0repro.tasks import p3

    # HF_ENDPOINT is how Hugging Face's own clients are told of a mirror.
    address = base_url or os.environ.get("HF_ENDPOINT") or p3.HUB
    patterns = [pattern for pattern in tasks.split(",") if pattern]
    done = p3.fetch(patterns, to, HubRepository(address, p3.REPOSITORY, p3.REVISION))
    typer.echo(f"Downloaded {counted(len(done.fetched), 'task')} to {to} ({sized(done.bytes)}).")
    if done.present:
        typer.echo(f"{counted(len(done.present), 'task')} had been downloaded already.")
    if done.absent:
        typer.echo(f"Not in P3: {', '.join(done.absent)}.")
