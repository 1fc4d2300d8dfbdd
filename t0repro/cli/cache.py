"""`t0repro cache`: writes the prompt cache in SeqIO's format, on a single machine or with Beam."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Annotated

import typer

from t0repro.cli.gin_options import listed
from t0repro.cli.options import ModulesOrT0, Templates, modules_or_t0
from t0repro.cli.paths import output
from t0repro.cli.results import echo
from t0repro.errors import UserError
from t0repro.progress import count_progress
from t0repro.tasks.prompt_cache.cache import Summary, cache_tasks, default_workers
from t0repro.tasks.prompt_cache.plan import Request
from t0repro.words import counted


def cache(
    cache_dir: Annotated[
        Path,
        typer.Option(
            "--cache_dir",
            "--output_cache_dir",  # the name in seqio_cache_tasks
            callback=output,
            help="Folder to write the tasks' caches to.",
        ),
    ],
    tasks: Annotated[
        list[str] | None,
        typer.Option(
            help="Task names, separated by commas; * matches anything; repeatable.",
            metavar="<globs>",
        ),
    ] = None,
    mixture: Annotated[
        list[str] | None,
        typer.Option(help="Mixtures whose tasks to cache, separated by commas; repeatable."),
    ] = None,
    module_import: ModulesOrT0 = None,
    templates: Templates = None,
    splits: Annotated[
        list[str] | None,
        typer.Option(
            help="Only these splits, separated by commas; repeatable.", show_default="all"
        ),
    ] = None,
    skip_missing: Annotated[
        bool,
        typer.Option(
            "--skip_missing",
            help="Leave out splits whose rows are missing, and list them. Without it, only splits"
            " that are neither trained on nor ranked may be missing.",
        ),
    ] = False,
    workers: Annotated[
        int | None,
        typer.Option(min=1, help="Number of processes.", show_default="one per processor"),
    ] = None,
    seed: Annotated[
        int,
        typer.Option(min=0, help="Seed for templates' random choices and the order of examples."),
    ] = 0,
    # As many as SeqIO's reader interleaves; within a file, examples are shuffled already.
    min_shards: Annotated[
        int, typer.Option(min=1, max=99999, help="Minimum number of files per split.")
    ] = 16,
    beam_options: Annotated[
        str | None,
        typer.Option(
            help="Run on Beam, with the runner that these options name.",
            metavar="--runner=NAME,...",
        ),
    ] = None,
) -> None:
    r"""Cache prompted tasks in SeqIO's format; keeps tasks that are already cached.

    Example:
      t0repro cache --mixture t0_eval_score_eval --skip_missing \
        --cache_dir runs/cache
    """
    if not tasks and not mixture:
        raise UserError(
            "Nothing was named to cache.",
            fix="Give --tasks 'super_glue_rte_*' or --mixture t0_eval_score_eval.",
        )
    echo("reading the list of tasks ...", err=True)

    request = Request(
        modules=tuple(modules_or_t0(module_import, templates)),
        templates=tuple(map(str, templates or ())),
        patterns=tuple(listed(tasks)),
        mixtures=tuple(listed(mixture)),
        folder=str(cache_dir),
        splits=tuple(listed(splits)) or None,
        skip_missing=skip_missing,
        seed=seed,
        min_shards=min_shards,
    )
    progress = functools.partial(count_progress, doing="caching", thing="row", done_word="cached")
    # The bar's text is set here; cache_tasks only counts.
    beam = None if beam_options is None else listed([beam_options])
    summary = cache_tasks(request, workers or default_workers(), progress, beam_options=beam)
    _print(summary, cache_dir)


def _print(summary: Summary, folder: Path) -> None:
    # A reason is about a dataset, so its tasks share it.
    missing = sorted({reason for _, _, reason in summary.left_out})
    if missing:
        tasks = {task for task, _, _ in summary.left_out}
        echo(f"Left out splits of {counted(len(tasks), 'task')}; their rows are missing:")
        for reason in missing:
            echo(f"  {reason}")
    if summary.skipped:
        echo(
            f"{counted(len(summary.skipped), 'task lacks', 'tasks lack')} what training or ranking"
            " reads: give --skip_missing there too; scripts/train.sh and rank_eval.sh do."
        )
    if not (summary.cached or summary.left_out):
        echo(f"Nothing to cache: {folder} has the {counted(summary.selected, 'task')} already.")
        return
    rate = summary.examples / summary.seconds
    echo(
        f"Cached {len(summary.cached)} of {counted(summary.selected, 'task')} in {folder}:"
        f" {counted(summary.examples, 'example')} in {summary.seconds:.1f} s"
        f" ({rate:,.0f}/s, start included)."
    )
    for reason, count in sorted(summary.dropped.items()):
        echo(f"{counted(count, 'rendering')} gave no example: {reason}.")
