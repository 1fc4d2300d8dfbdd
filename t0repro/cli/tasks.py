"""`t0repro tasks`: lists, shows and checks prompted tasks."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Literal

import typer

from t0repro.cli.commands import App
from t0repro.cli.options import AsJson, ModulesOrT0, Templates, modules_or_t0
from t0repro.cli.paths import output, output_file
from t0repro.cli.results import echo, print_for_people, print_json
from t0repro.hub_files import HUB, HubRepository
from t0repro.lm_eval import files as lm_eval
from t0repro.progress import count_progress
from t0repro.storage import address_of
from t0repro.tasks import checking, listing, overlap, p3, printing, showing
from t0repro.tasks.availability import tasks_with_rows
from t0repro.tasks.modules import load_tasks
from t0repro.tasks.registry import select_tasks
from t0repro.words import counted, sized

app = App(
    "tasks",
    help="List, show and check prompted tasks; download the released P3.",
    no_args_is_help=True,
    example="t0repro tasks ls --dataset super_glue/rte",
)

_Mixture = Annotated[str | None, typer.Option(help="Only the tasks of this mixture.")]
_Dataset = Annotated[
    str | None, typer.Option(help="Only the tasks of this dataset, or dataset/subset.")
]


def _register(modules: list[str] | None, templates: list[Path] | None) -> None:
    # Without SeqIO, because its import would dominate the run time of these commands.
    load_tasks(modules_or_t0(modules, templates), templates or (), into_seqio=False)


@app.command("ls")
def list_tasks(
    mixture: _Mixture = None,
    dataset: _Dataset = None,
    cache_dir: Annotated[
        list[Path] | None,
        typer.Option(help="Show which tasks are cached in this folder; repeatable."),
    ] = None,
    skip_missing: Annotated[
        bool,
        typer.Option(
            "--skip_missing", help="Only tasks with available rows, or with a cache in --cache_dir."
        ),
    ] = False,
    module_import: ModulesOrT0 = None,
    templates: Templates = None,
    as_json: AsJson = False,
) -> None:
    r"""List tasks: dataset, template, choices, metrics, rate, training examples, cached or not.

    A rate far above a task's number of examples is marked: T0's rates count rows that a template
    drops.

    Example:
      t0repro tasks ls --mixture t0_train --dataset trec \
        --cache_dir runs/cache
    """
    _register(module_import, templates)

    caches = list(cache_dir or ())
    found = listing.list_tasks(mixture, dataset, caches, skip_missing=skip_missing)
    if as_json:
        print_json(listing.as_json(found))
    else:
        printing.print_list(found, caches)


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
    r"""Show a task's first examples: input, target and choices, tokens, and what is cut off.

    Variables are cut after 2,048 characters, inputs after 1,024 tokens, targets after 256.

    Example:
      t0repro tasks show super_glue_rte_GPT_3_style --split validation \
        --rows 2
    """
    _register(module_import, templates)

    shown = showing.show_task(task, split, rows)
    if as_json:
        print_json(shown.to_json())
    else:
        printing.print_task(shown)


@app.command("check")
def check_tasks(
    mixture: _Mixture = None,
    dataset: _Dataset = None,
    module_import: ModulesOrT0 = None,
    templates: Templates = None,
    as_json: AsJson = False,
) -> None:
    """Render the first rows of every task; exit code 1 if a prompt is broken.

    Example:
      t0repro tasks check --templates my_prompts.yaml
    """
    echo("reading the list of tasks ...", err=True)
    _register(module_import, templates)

    # A task and its twin share a prompt, which is checked once.
    tasks = checking.drop_twins(select_tasks(mixture, dataset))
    if dataset is None:
        tasks += checking.tasks_without_prompts(mixture)
    with count_progress(len(tasks), "checking", "task", "checked") as advance:
        checked = checking.check_tasks(tasks, advance)
    if as_json:
        print_json([task.to_json() for task in checked])
    else:
        printing.print_checks(checked)
    if any(task.verdict is checking.Verdict.BROKEN for task in checked):
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
    skip_missing: Annotated[
        bool, typer.Option("--skip_missing", help="Only tasks with available rows.")
    ] = False,
    module_import: ModulesOrT0 = None,
    templates: Templates = None,
) -> None:
    r"""Write prompted tasks for lm-evaluation-harness: YAML files of prompts and groups, and rows.

    Every example is rendered here, so that the harness needs neither templates nor a download.

    Example:
      t0repro tasks export --mixture t0_eval_score_eval \
        --skip_missing runs/lm_eval
    """
    _register(module_import, templates)

    tasks = select_tasks(mixture, dataset)
    if skip_missing:
        tasks = tasks_with_rows(tasks, split)
    # The harness ranks choices itself, so it gets the prompts and not their `_score_eval` twins.
    suite = name or mixture.removesuffix("_score_eval")
    with count_progress(len(tasks), "rendering", "task", "rendered") as advance:
        done = lm_eval.export_tasks(tasks, split, folder, suite, advance)
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
        typer.Option(callback=output_file, help="JSON file to write, for `report make --overlap`."),
    ],
    split: Annotated[str, typer.Option(help="The split that is evaluated.")] = "validation",
    ngram: Annotated[int, typer.Option(min=2, help="Words in a row that count as shared.")] = 13,
    memory: Annotated[int, typer.Option(min=1, help="MiB for the index of held-out rows.")] = 1024,
    module_import: ModulesOrT0 = None,
    templates: Templates = None,
    as_json: AsJson = False,
) -> None:
    r"""Find held-out rows whose text is in the training rows (contamination).

    Compares rows, not prompts, by sequences of words and by complete fields. Datasets without rows
    are named and skipped.

    Example:
      t0repro tasks overlap --train t0_train --eval t0_eval_score_eval \
        --out overlap.json
    """
    _register(module_import, templates)

    found = overlap.find_overlap(train, evaluated, split, ngram=ngram, memory=memory)
    overlap.write_overlap(found, out)
    with print_for_people(as_json):
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

    Example:
      t0repro tasks fetch-p3 --tasks 'super_glue_rte_*' --to runs/p3
    """
    echo("looking for the files of these tasks ...", err=True)

    # HF_ENDPOINT is how Hugging Face's own clients name a mirror.
    address = base_url or os.environ.get("HF_ENDPOINT") or HUB
    patterns = [pattern for pattern in tasks.split(",") if pattern]
    done = p3.fetch(patterns, to, HubRepository(address, p3.REPOSITORY, p3.REVISION))
    echo(f"Downloaded {counted(len(done.fetched), 'task')} to {to} ({sized(done.bytes)}).")
    if done.present:
        echo(f"{counted(len(done.present), 'task')} had been downloaded already.")
    if done.absent:
        echo(f"Not in P3: {', '.join(done.absent)}.")
