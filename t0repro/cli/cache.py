"""`t0repro cache`: writes the prompt cache in SeqIO's format, on a single machine."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Annotated

import typer

from t0repro.words import counted

if TYPE_CHECKING:
    from t0repro.tasks.prompt_cache.cache import Summary

_LISTED = 10


def cache(
    output_cache_dir: Annotated[
        str,
        typer.Option(
            "--output_cache_dir",
            "--output-cache-dir",
            help="Where the tasks' folders go.",
            metavar="DIR",
        ),
    ],
    tasks: Annotated[
        str, typer.Option(help="Task names, with * for anything.", metavar="GLOB,...")
    ] = "",
    mixture: Annotated[
        str, typer.Option(help="Mixtures whose tasks to cache.", metavar="NAME,...")
    ] = "",
    module_import: Annotated[
        list[str] | None,
        typer.Option(
            "--module_import",
            "--module-import",
            help="The module that registers the tasks; may be repeated.",
            show_default="t0repro.tasks.t0, unless --templates is given",
        ),
    ] = None,
    templates: Annotated[
        list[str] | None,
        typer.Option(help="Your own prompts, a file in promptsource's YAML format; repeatable."),
    ] = None,
    splits: Annotated[
        str, typer.Option(help="Only these splits.", metavar="SPLIT,...", show_default="all")
    ] = "",
    at_hand: Annotated[
        bool,
        typer.Option(
            "--at_hand",
            "--at-hand",
            help="Leave out splits whose rows are not here, and list them.",
        ),
    ] = False,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Processes.", show_default="one a processor")
    ] = None,
    seed: Annotated[
        int, typer.Option(min=0, help="Of what templates draw, and of the examples' order.")
    ] = 0,
    min_shards: Annotated[
        int,
        typer.Option(
            "--min_shards", "--min-shards", min=1, max=99999, help="Files of a split, at least."
        ),
    ] = 16,
) -> None:
    """Cache prompted tasks, in SeqIO's format; tasks that are cached already are left alone.

    Example: t0repro cache --mixture t0_eval_score_eval --at_hand --output_cache_dir runs/cache
    """
    from t0repro.errors import UserError

    if not tasks and not mixture:
        raise UserError(
            "Nothing was named to cache.",
            fix="Give --tasks 'super_glue_rte_*' or --mixture t0_eval_score_eval.",
        )
    from t0repro.progress import count_progress
    from t0repro.tasks.prompt_cache.cache import cache_tasks, default_workers
    from t0repro.tasks.prompt_cache.plan import Request

    default = () if templates else ("t0repro.tasks.t0",)
    request = Request(
        modules=tuple(module_import or default),
        templates=tuple(templates or ()),
        patterns=_names(tasks),
        mixtures=_names(mixture),
        folder=output_cache_dir,
        splits=_names(splits) or None,
        at_hand=at_hand,
        seed=seed,
        min_shards=min_shards,
    )
    progress = functools.partial(count_progress, doing="caching", things="rows", done_word="cached")
    summary = cache_tasks(request, workers or default_workers(), progress)
    _print(summary, output_cache_dir)


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _print(summary: Summary, folder: str) -> None:
    missing = sorted({reason for _, _, reason in summary.left_out})
    if missing:
        tasks = {task for task, _, _ in summary.left_out}
        typer.echo(f"Left out, of {counted(len(tasks), 'task')}, splits whose rows are not here:")
        for reason in missing:
            typer.echo(f"  {reason}")
    rate = summary.examples / max(summary.seconds, 1e-9)
    typer.echo(
        f"{len(summary.cached)} of {counted(summary.selected, 'task')} cached now:"
        f" {counted(summary.examples, 'example')} in {summary.seconds:.1f} s"
        f" ({rate:,.0f}/s, start included). {folder}"
    )
    for reason, count in sorted(summary.dropped.items()):
        typer.echo(f"{counted(count, 'rendering')} gave no example: {reason}.")
