"""`t0repro cache`: writes the prompt cache in SeqIO's format, on a single machine."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from t0repro.cli.echo import echo
from t0repro.cli.options import ModulesOrT0, Templates, modules_or_t0
from t0repro.cli.paths import output
from t0repro.words import counted

if TYPE_CHECKING:
    from t0repro.tasks.prompt_cache.cache import Summary

_Folder = Annotated[
    Path,
    typer.Option(callback=output, help="Folder to write the tasks' caches to.", metavar="DIR"),
]
_Tasks = Annotated[str, typer.Option(help="Task names; * matches anything.", metavar="GLOB,...")]
_Mixtures = Annotated[str, typer.Option(help="Mixtures whose tasks to cache.", metavar="NAME,...")]
_Splits = Annotated[
    str, typer.Option(help="Only these splits.", metavar="SPLIT,...", show_default="all")
]
_AtHand = Annotated[
    bool,
    typer.Option("--at_hand", help="Leave out splits whose rows are missing, and list them."),
]
_Workers = Annotated[
    int | None,
    typer.Option(min=1, help="Number of processes.", show_default="one per processor"),
]
_Seed = Annotated[
    int,
    typer.Option(min=0, help="Seed for templates' random choices and the order of examples."),
]
_MinShards = Annotated[
    int, typer.Option(min=1, max=99999, help="Minimum number of files per split.")
]
_BeamOptions = Annotated[
    str | None,
    typer.Option(
        "--beam_options",
        help="Do the work with Beam, on the runner that these options name.",
        metavar="--runner=NAME,...",
    ),
]


def cache(
    output_cache_dir: _Folder,
    tasks: _Tasks = "",
    mixture: _Mixtures = "",
    module_import: ModulesOrT0 = None,
    templates: Templates = None,
    splits: _Splits = "",
    at_hand: _AtHand = False,
    workers: _Workers = None,
    seed: _Seed = 0,
    # As many as SeqIO's reader interleaves; within a file, examples are shuffled already.
    min_shards: _MinShards = 16,
    beam_options: _BeamOptions = None,
) -> None:
    """Cache prompted tasks in SeqIO's format; tasks that are cached already are left alone.

    Example: t0repro cache --mixture t0_eval_score_eval --at_hand --output_cache_dir runs/cache
    """
    from t0repro.errors import UserError

    if not tasks and not mixture:
        raise UserError(
            "Nothing was named to cache.",
            fix="Give --tasks 'super_glue_rte_*' or --mixture t0_eval_score_eval.",
        )
    echo("reading the list of tasks ...", err=True)
    from t0repro.progress import count_progress
    from t0repro.tasks.prompt_cache.cache import cache_tasks, default_workers
    from t0repro.tasks.prompt_cache.plan import Request

    request = Request(
        modules=tuple(modules_or_t0(module_import, templates)),
        templates=tuple(map(str, templates or ())),
        patterns=_names(tasks),
        mixtures=_names(mixture),
        folder=str(output_cache_dir),
        splits=_names(splits) or None,
        at_hand=at_hand,
        seed=seed,
        min_shards=min_shards,
    )
    progress = functools.partial(count_progress, doing="caching", thing="row", done_word="cached")
    # The bar's words are bound here; cache_tasks knows only how to count.
    beam = None if beam_options is None else list(_names(beam_options))
    summary = cache_tasks(request, workers or default_workers(), progress, beam_options=beam)
    _print(summary, output_cache_dir)


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _print(summary: Summary, folder: Path) -> None:
    # A reason is a sentence about a dataset; its tasks share it.
    missing = sorted({reason for _, _, reason in summary.left_out})
    if missing:
        tasks = {task for task, _, _ in summary.left_out}
        echo(f"Left out splits of {counted(len(tasks), 'task')}; their rows are missing:")
        for reason in missing:
            echo(f"  {reason}")
    # A run that had nothing to do takes next to no time.
    rate = summary.examples / max(summary.seconds, 1e-9)
    echo(
        f"Cached {len(summary.cached)} of {counted(summary.selected, 'task')} in {folder}:"
        f" {counted(summary.examples, 'example')} in {summary.seconds:.1f} s"
        f" ({rate:,.0f}/s, start included)."
    )
    for reason, count in sorted(summary.dropped.items()):
        echo(f"{counted(count, 'rendering')} gave no example: {reason}.")
