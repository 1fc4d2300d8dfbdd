"""`t0repro tasks`: list, show and check prompted tasks; fetch the released P3."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from t0repro.words import counted

app = typer.Typer(
    name="tasks",
    help="Prompted tasks: list them, look at them, check them, fetch the released P3.",
    no_args_is_help=True,
    epilog="Example: t0repro tasks ls --dataset super_glue/rte",
)

DEFAULT_MODULE = "t0repro.tasks.t0"

Modules = Annotated[
    list[str] | None,
    typer.Option(
        "--module_import",
        "--module-import",
        help=f"A module that registers tasks; repeatable. {DEFAULT_MODULE} by default.",
    ),
]
Templates = Annotated[
    list[Path] | None,
    typer.Option(help="Your own prompts, a file in promptsource's YAML format; repeatable."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def _register(modules: list[str] | None, templates: list[Path] | None) -> None:
    """Loads the modules; the default one if neither modules nor templates are given."""
    from t0repro.tasks.registration import load_tasks

    default = [] if templates else [DEFAULT_MODULE]
    load_tasks(modules or default, templates or (), into_seqio=False)


@app.command("ls")
def list_tasks(
    mixture: Annotated[str | None, typer.Option(help="Only the tasks of this mixture.")] = None,
    dataset: Annotated[
        str | None, typer.Option(help="Only those of this dataset, or dataset/subset.")
    ] = None,
    cache: Annotated[
        list[Path] | None, typer.Option(help="Say which are cached in this folder; repeatable.")
    ] = None,
    module_import: Modules = None,
    templates: Templates = None,
    as_json: Json = False,
) -> None:
    """List tasks: dataset, template, choices, metrics, rate, training examples, cached or not.

    A rate far above the number of examples is marked: T0's rates count rows that a template drops.

    Example: t0repro tasks ls --mixture t0_train --dataset trec --cache runs/cache
    """
    _register(module_import, templates)
    from t0repro.tasks.inspect import listing, tables

    caches = list(cache or ())
    found = listing.list_tasks(mixture, dataset, caches)
    if as_json:
        tables.print_json(listing.as_json(found))
    else:
        tables.print_list(found, caches)


@app.command("show")
def show_task(
    task: Annotated[str, typer.Argument(help="A task's name.")],
    split: Annotated[
        str | None, typer.Option(help="Of the task; the first that is at hand by default.")
    ] = None,
    rows: Annotated[int, typer.Option(min=1, help="The number of examples.")] = 3,
    module_import: Modules = None,
    templates: Templates = None,
    as_json: Json = False,
) -> None:
    """Show a task's first examples: input, target and choices, tokens, and what is cut off.

    What is cut: variables beyond 2,048 characters, inputs beyond 1,024 tokens, targets beyond 256.

    Example: t0repro tasks show super_glue_rte_GPT_3_style --split validation --rows 2
    """
    _register(module_import, templates)
    from t0repro.tasks.inspect import showing, tables

    shown = showing.show_task(task, split, rows)
    if as_json:
        tables.print_json(shown.to_json())
    else:
        tables.print_task(shown)


@app.command("check")
def check_tasks(
    mixture: Annotated[str | None, typer.Option(help="Only the tasks of this mixture.")] = None,
    dataset: Annotated[
        str | None, typer.Option(help="Only those of this dataset, or dataset/subset.")
    ] = None,
    module_import: Modules = None,
    templates: Templates = None,
    as_json: Json = False,
) -> None:
    """Render the first rows of every task from what is at hand; exit code 1 if one is broken.

    Example: t0repro tasks check --templates my_prompts.yaml
    """
    _register(module_import, templates)
    from t0repro.progress import count_progress
    from t0repro.tasks.inspect import checking, tables
    from t0repro.tasks.mixture import select_tasks

    tasks = checking.without_twins(select_tasks(mixture, dataset))
    with count_progress(len(tasks), "checking", "tasks", "checked") as advance:
        checked = checking.check_tasks(tasks, advance)
    if as_json:
        tables.print_json([task.to_json() for task in checked])
    else:
        tables.print_checks(checked)
    if any(task.verdict is checking.Verdict.BROKEN for task in checked):
        raise typer.Exit(1)


@app.command("fetch-p3")
def fetch_p3(
    tasks: Annotated[
        str, typer.Option(help="Names or patterns, such as 'super_glue_rte_*'; comma-separated.")
    ],
    to: Annotated[Path, typer.Option(help="Folder to fetch to, for --additional_task_cache_dirs.")],
    base_url: Annotated[
        str | None,
        typer.Option(
            help="The Hugging Face hub or a mirror; HF_ENDPOINT, or the hub itself, by default."
        ),
    ] = None,
) -> None:
    """Fetch tasks of the released P3 as they were cached; started again, it goes on where it was.

    Example: t0repro tasks fetch-p3 --tasks 'super_glue_rte_*' --to runs/p3
    """
    from t0repro.hub_files import HubRepository
    from t0repro.tasks import p3

    address = base_url or os.environ.get("HF_ENDPOINT") or p3.HUB
    patterns = [pattern for pattern in tasks.split(",") if pattern]
    done = p3.fetch(patterns, to, HubRepository(address, p3.REPOSITORY, p3.REVISION))
    typer.echo(f"{counted(len(done.fetched), 'task')} fetched to {to} ({done.bytes / 1e6:.1f} MB).")
    if done.present:
        typer.echo(f"{len(done.present)} were there already.")
    if done.absent:
        typer.echo(f"P3 does not hold {len(done.absent)}: {', '.join(done.absent)}.")
