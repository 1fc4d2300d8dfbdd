"""`t0repro tasks` and `t0repro cache`: lists, shows, checks and caches prompted tasks."""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from t0repro.cli.options import AsJson, ModulesOrT0, Templates, modules_or_t0
from t0repro.cli.results import echo, for_people, print_json
from t0repro.cli.spelling import output
from t0repro.words import counted, sized
from t0repro.working_copies import address_of

if TYPE_CHECKING:
    from t0repro.tasks.prompt_cache.cache import Summary


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

    # Without SeqIO, because its import would dominate the run time of these commands.
    load_tasks(modules_or_t0(modules, templates), templates or (), into_seqio=False)


@app.command("ls")
def list_tasks(
    mixture: _Mixture = None,
    dataset: _Dataset = None,
    cache: Annotated[
        list[Path] | None,
        typer.Option(help="Show which tasks are cached in this folder; repeatable."),
    ] = None,
    at_hand: Annotated[
        bool,
        typer.Option(
            "--at_hand", help="Only tasks with available rows, or with a cache in --cache."
        ),
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
    from t0repro.tasks import listing

    caches = list(cache or ())
    found = listing.list_tasks(mixture, dataset, caches, at_hand=at_hand)
    if as_json:
        print_json(listing.as_json(found))
    else:
        listing.print_list(found, caches)


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
    from t0repro.tasks import listing, showing

    shown = showing.show_task(task, split, rows)
    if as_json:
        print_json(shown.to_json())
    else:
        listing.print_task(shown)


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
    from t0repro.tasks import listing, showing
    from t0repro.tasks.task import select_tasks

    # A task and its twin share a prompt, which is checked once.
    tasks = showing.without_twins(select_tasks(mixture, dataset))
    if dataset is None:
        tasks += showing.tasks_without_prompts(mixture)
    with count_progress(len(tasks), "checking", "task", "checked") as advance:
        checked = showing.check_tasks(tasks, advance)
    if as_json:
        print_json([task.to_json() for task in checked])
    else:
        listing.print_checks(checked)
    if any(task.verdict is showing.Verdict.BROKEN for task in checked):
        raise typer.Exit(1)


@app.command("export")
def export_tasks(
    folder: Annotated[
        Path,
        typer.Argument(metavar="DIR", callback=output, help="A new folder."),
    ],
    mixture: Annotated[str, typer.Option(help="The mixture to export.")],
    to: Annotated[
        Literal["lm-eval"],
        typer.Option(help="The harness to write tasks for: lm-evaluation-harness."),
    ] = "lm-eval",
    split: Annotated[str, typer.Option(help="The split to evaluate.")] = "validation",
    dataset: _Dataset = None,
    name: Annotated[
        str | None,
        typer.Option(help="Name of the group of all datasets.", show_default="the mixture's"),
    ] = None,
    at_hand: Annotated[
        bool, typer.Option("--at_hand", help="Only tasks with available rows.")
    ] = False,
    module_import: ModulesOrT0 = None,
    templates: Templates = None,
) -> None:
    """Write prompted tasks for lm-evaluation-harness: YAML files of prompts and groups, and rows.

    Every example is rendered here, so that the harness needs neither templates nor a download.

    Example: t0repro tasks export --mixture t0_eval_score_eval --at_hand runs/lm_eval
    """
    _register(module_import, templates)
    from t0repro.lm_eval.files import export_tasks
    from t0repro.progress import count_progress
    from t0repro.tasks.task import rows_at_hand, select_tasks

    tasks = select_tasks(mixture, dataset)
    if at_hand:
        tasks = rows_at_hand(tasks, split)
    # The harness ranks choices itself, so it gets the prompts and not their `_score_eval` twins.
    suite = name or mixture.removesuffix("_score_eval")
    with count_progress(len(tasks), "rendering", "task", "rendered") as advance:
        done = export_tasks(tasks, split, folder, suite, advance)
    examples = sum(done.tasks.values())
    echo(
        f"Wrote {counted(len(done.tasks), 'task')} with {counted(examples, 'example')} to {folder},"
        f" in {counted(len(done.groups) - 1, 'dataset group')}."
    )
    for task, why in done.left_out.items():
        echo(f"Left out {task}: {why}.")
    if address := address_of(folder):
        echo("lm_eval reads these rows there, but *.yaml files only from a disk: copy them first.")
        folder = Path(address.rpartition("/")[2])
    echo(f"Run: lm_eval --include_path {folder} --tasks {suite} --model hf --log_samples ...")


@app.command("overlap")
def find_overlap(
    train: Annotated[str, typer.Option(help="The mixture that was trained on.")],
    evaluated: Annotated[str, typer.Option("--eval", help="The mixture that is evaluated.")],
    out: Annotated[
        Path,
        typer.Option(callback=output, help="JSON file to write, for `report make --overlap`."),
    ],
    split: Annotated[str, typer.Option(help="The split that is evaluated.")] = "validation",
    ngram: Annotated[int, typer.Option(min=2, help="Words in a row that count as shared.")] = 13,
    memory: Annotated[int, typer.Option(min=1, help="MiB for the index of held-out rows.")] = 1024,
    module_import: ModulesOrT0 = None,
    templates: Templates = None,
    as_json: AsJson = False,
) -> None:
    """Find held-out rows whose text is in the training rows (contamination).

    Compares rows, not prompts, by sequences of words and by complete fields. Datasets without rows
    are named and skipped.

    Example: t0repro tasks overlap --train t0_train --eval t0_eval_score_eval --out overlap.json
    """
    _register(module_import, templates)
    from t0repro.tasks import overlap

    found = overlap.find_overlap(train, evaluated, split, ngram=ngram, memory=memory)
    overlap.write_overlap(found, out)
    with for_people(as_json):
        echo("\n".join(overlap.summary(found)))
        echo(f"wrote {out}")
    if as_json:
        print_json(json.loads(found.to_json()))


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
    """Download cached tasks of the released P3; a second start resumes the download.

    Example: t0repro tasks fetch-p3 --tasks 'super_glue_rte_*' --to runs/p3
    """
    echo("looking for the files of these tasks ...", err=True)
    from t0repro.hub_files import HubRepository
    from t0repro.tasks import p3

    # HF_ENDPOINT is how Hugging Face's own clients name a mirror.
    address = base_url or os.environ.get("HF_ENDPOINT") or p3.HUB
    patterns = [pattern for pattern in tasks.split(",") if pattern]
    done = p3.fetch(patterns, to, HubRepository(address, p3.REPOSITORY, p3.REVISION))
    echo(f"Downloaded {counted(len(done.fetched), 'task')} to {to} ({sized(done.bytes)}).")
    if done.present:
        echo(f"{counted(len(done.present), 'task')} had been downloaded already.")
    if done.absent:
        echo(f"Not in P3: {', '.join(done.absent)}.")


# ---- `t0repro cache`: writes the prompt cache in SeqIO's format, on a single machine -------------


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
        help="Run on Beam, with the runner that these options name.",
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
    """Cache prompted tasks in SeqIO's format; keeps tasks that are already cached.

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
    # The bar's text is set here; cache_tasks only counts.
    beam = None if beam_options is None else list(_names(beam_options))
    summary = cache_tasks(request, workers or default_workers(), progress, beam_options=beam)
    _print(summary, output_cache_dir)


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _print(summary: Summary, folder: Path) -> None:
    # A reason is about a dataset, so its tasks share it.
    missing = sorted({reason for _, _, reason in summary.left_out})
    if missing:
        tasks = {task for task, _, _ in summary.left_out}
        echo(f"Left out splits of {counted(len(tasks), 'task')}; their rows are missing:")
        for reason in missing:
            echo(f"  {reason}")
    # Guard against a duration near zero, when there was nothing to do.
    rate = summary.examples / max(summary.seconds, 1e-9)
    echo(
        f"Cached {len(summary.cached)} of {counted(summary.selected, 'task')} in {folder}:"
        f" {counted(summary.examples, 'example')} in {summary.seconds:.1f} s"
        f" ({rate:,.0f}/s, start included)."
    )
    for reason, count in sorted(summary.dropped.items()):
        echo(f"{counted(count, 'rendering')} gave no example: {reason}.")
