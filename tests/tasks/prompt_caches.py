"""Makes caches for tests from tasks that this process has registered."""

import contextlib
from pathlib import Path

from t0repro.storage.locks import LOCK_FILE
from t0repro.tasks.prompt_cache.cache import Summary, cache_tasks
from t0repro.tasks.prompt_cache.plan import Request, make_plan


def silent(total):
    """Shows no progress."""
    return contextlib.nullcontext(lambda count: None)


def request(folder: Path, *patterns: str, **settings) -> Request:
    """A request for registered tasks."""
    return Request(
        modules=(), patterns=patterns, mixtures=settings.pop("mixtures", ()), folder=str(folder),
        **settings,
    )  # fmt: skip


def make(folder: Path, *patterns: str, workers: int = 1, beam_options=None, **settings) -> Summary:
    """Caches registered tasks, the plan made in this process."""
    return cache_tasks(
        request(folder, *patterns, **settings), workers, silent, make_plan, beam_options
    )


def files(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, by its path there; what stays of its lock is not among them."""
    paths = [path for path in folder.rglob("*") if path.is_file() and path.name != LOCK_FILE]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}
