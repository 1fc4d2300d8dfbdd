"""Decides what a call of seqio_cache_tasks has left to do, and finds a user's mistakes before it.

    python -P -m t0repro.tasks.prompt_cache.seqio_plan --module_import=t0repro.tasks.demo \
        --mixtures=demo_train --output_cache_dir=runs/demo/cache --processes=2

prints one line per process to start: the tasks that it should cache, separated by commas. Before
that it reads rows, templates and vocabulary once, so that a missing file or a broken line gives one
clear message rather than the end of a long Beam traceback. scripts/cache.sh calls it.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from t0repro.errors import UserError, nearest_names
from t0repro.progress import working
from t0repro.tasks.modules import load_tasks
from t0repro.tasks.prompt_cache import folders
from t0repro.tasks.registry import find_tasks, how_to_register
from t0repro.tasks.vocabulary import check_ids
from t0repro.words import counted

# SeqIO and TensorFlow take seconds to import, so functions import them after printing a line.
if TYPE_CHECKING:
    import seqio


def choose_tasks(mixtures: Sequence[str], patterns: Sequence[str]) -> list[seqio.Task]:
    """The tasks of the mixtures and those whose full name matches a pattern, without duplicates.

    Raises:
      UserError: If a mixture does not exist or a pattern matches nothing; lists the nearest names.
    """
    import seqio

    known = [*seqio.MixtureRegistry.names(), *seqio.TaskRegistry.names()]
    names: list[str] = []
    for mixture in mixtures:
        if mixture not in known:
            raise UserError(
                f"There is no mixture {mixture!r}.",
                where="--mixtures",
                fix=how_to_register(mixture, nearest_names(mixture, known)),
            )
        names += [task.name for task in find_tasks(mixture)]
    for pattern in patterns:
        matching = [name for name in seqio.TaskRegistry.names() if re.fullmatch(pattern, name)]
        if not matching:
            raise UserError(
                f"No task matches {pattern!r}.",
                where="--tasks",
                fix=how_to_register(pattern, nearest_names(pattern, known)),
            )
        names += matching
    return [seqio.TaskRegistry.get(name) for name in dict.fromkeys(names)]


def list_uncached(tasks: Sequence[seqio.Task], cache_dir: Path) -> list[seqio.Task]:
    """The tasks without a complete cache in the folder."""
    # SeqIO writes this marker last.
    return [task for task in tasks if not (_folder(task, cache_dir) / "COMPLETED").is_file()]


def remove_interrupted(tasks: Sequence[seqio.Task], cache_dir: Path) -> list[str]:
    """Removes what an interrupted call left of these uncached tasks.

    `folders.remove_interrupted` says why that is necessary.

    Returns:
      Names of the tasks that had something to remove.

    Raises:
      UserError: If such a folder contains a file that does not belong in a cache.
    """
    return [
        task.name
        for task in tasks
        if folders.remove_interrupted(_folder(task, cache_dir), task.name)
    ]


def check_readable(tasks: Sequence[seqio.Task]) -> None:
    """Reads the vocabulary and every row once; of tasks without prompts, checks the features.

    Raises:
      UserError: If a file is missing or broken, or a task does not give its features.
    """
    from t0repro.tasks.seqio_tasks import PromptedSource, check_features

    for task in tasks:
        for feature in task.output_features.values():
            check_ids(feature.vocabulary)
        for split in task.splits:
            if isinstance(task.source, PromptedSource):
                task.source.num_input_examples(split)
            else:
                check_features(task, split, None)


def spread(tasks: Sequence[seqio.Task], processes: int) -> list[list[str]]:
    """Divides tasks among processes, with about as many splits each; no share is empty."""
    shares: list[list[str]] = [[] for _ in range(processes)]
    loads = [0] * processes
    # Assign the largest first, each to the process with the least work.
    for task in sorted(tasks, key=lambda task: -len(task.splits)):
        least = loads.index(min(loads))
        shares[least].append(task.name)
        # Building Beam's graph for a split costs about as much as running a small one.
        loads[least] += len(task.splits)
    return [share for share in shares if share]


def _folder(task: seqio.Task, cache_dir: Path) -> Path:
    import seqio

    return cache_dir / seqio.get_task_dir_from_name(task.name)


def plan(arguments: argparse.Namespace) -> list[list[str]]:
    """The names of the tasks to cache, for each process to start."""
    with working("importing the tasks, with TensorFlow and SeqIO"):
        # Keeps the libraries' own lines off the terminal, too.
        load_tasks(arguments.module_import, into_seqio=True)
    tasks = choose_tasks(arguments.mixtures, arguments.tasks)
    left = list_uncached(tasks, arguments.output_cache_dir)
    # By then rows and vocabulary are known to be readable.
    if left:
        with working(f"reading rows and vocabulary of {counted(len(left), 'task')} once"):
            check_readable(left)
    removed = remove_interrupted(left, arguments.output_cache_dir)
    if removed:
        print(
            f"removed what was left of {counted(len(removed), 'interrupted cache')}",
            file=sys.stderr,
        )
    print(
        f"{len(left)} of {counted(len(tasks), 'task')} to cache in {arguments.output_cache_dir}",
        file=sys.stderr,
    )
    return spread(left, arguments.processes)


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the plan; returns 2 on a user's mistake."""

    def names(text: str) -> list[str]:
        return [name for name in text.split(",") if name]

    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--module_import", action="append", required=True)
    parser.add_argument("--mixtures", type=names, default=[])
    parser.add_argument("--tasks", type=names, default=[], help="patterns, as seqio_cache_tasks's")
    parser.add_argument("--output_cache_dir", type=Path, required=True)
    parser.add_argument("--processes", type=int, default=1)
    try:
        shares = plan(parser.parse_args(argv))
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    for share in shares:
        print(",".join(share))
    return 0


if __name__ == "__main__":
    sys.exit(main())
