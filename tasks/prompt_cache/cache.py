"""Caches prompted tasks with several worker processes; a task appears once it is complete."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import json
import multiprocessing
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import numpy as np

from t0repro.errors import UserError
from t0repro.progress import working
from t0repro.storage import make_folder, output_path, write_atomically
from t0repro.storage.disk import FULL_NUMBERS
from t0repro.storage.names import check_is_no_pattern
from t0repro.tasks.modules import needs_seqio
from t0repro.tasks.prompt_cache import folders, provenance, shards
from t0repro.tasks.prompt_cache.beam_workers import BeamWorkers
from t0repro.tasks.prompt_cache.example_writer import Statistics, feature_types
from t0repro.tasks.prompt_cache.plan import CachePlan, Request, make_plan
from t0repro.tasks.prompt_cache.prompts import CachedTask, Prompt, RowsOfSplit
from t0repro.tasks.prompt_cache.shards import Piece, PieceResult, SpooledRows
from t0repro.tasks.prompt_cache.spool import save_array
from t0repro.words import counted

# Rows that a worker renders per call, to report progress and to limit memory.
_ROWS_PER_PIECE = 1 << 12


@dataclasses.dataclass
class Summary:
    """The result of a run.

    Attributes:
      selected: Number of tasks selected.
      cached: Names of the tasks that it cached or added splits to.
      examples: Number of examples written, over all tasks.
      dropped: Reason -> number of rows that templates dropped, over all tasks.
      left_out: (task, split, reason) for each split whose rows are not available.
      skipped: The tasks that lack a split of `left_out` that training or ranking reads.
      seconds: Wall time, planning included.
    """

    selected: int
    cached: list[str]
    examples: int
    dropped: Mapping[str, int]
    left_out: tuple[tuple[str, str, str], ...]
    skipped: list[str]
    seconds: float


def cache_tasks(
    request: Request,
    workers: int,
    progress: Callable[[int], contextlib.AbstractContextManager[Callable[[int], None]]],
    plan_for: Callable[[Request], CachePlan] | None = None,
    beam_options: Sequence[str] | None = None,
) -> Summary:
    """Caches the requested tasks that are not cached yet.

    Args:
      request: The tasks, splits and folder.
      workers: Number of worker processes.
      progress: Called with the total number of renderings; returns a context manager that yields a
        function, to be called with the number of renderings just done.
      plan_for: Makes the plan from tasks that this process has registered, as `make_plan` does;
        by default a worker makes it.
      beam_options: Run the work as Beam pipelines with these options; None runs it on `workers`.

    Returns:
      A summary of the run.

    Raises:
      UserError: On bad names, rows or templates, when the disk is full, when another run holds the
        folder, or when a worker was killed. Tasks finished before that remain.
    """
    started = time.monotonic()
    folder = output_path(request.folder)
    check_is_no_pattern(folder, "Caches")
    try:
        with contextlib.ExitStack() as stack:
            staging = stack.enter_context(folders.lock_cache(folder))
            if beam_options is None:
                pool = stack.enter_context(_workers(workers))
                plan = plan_for(request) if plan_for else _make_plan(request, pool, workers)
                # Two pieces per worker, so that no worker waits for its next one.
                wait, ahead = _wait_for_first, 2 * workers
            else:
                plan = plan_for(request) if plan_for else _make_plan_elsewhere(request)
                pool = BeamWorkers(beam_options, staging)
                wait, ahead = pool.finished, None  # a pipeline takes all available work
            run = _Run(plan, request, folder, staging)
            with progress(run.total) as advance:
                run.work(pool, wait, ahead, advance)
            folders.record_skipped(folder, plan.skipped)
    except OSError as error:
        if error.errno in FULL_NUMBERS:
            raise _no_space(folder, error) from error
        raise
    except BrokenProcessPool as error:
        raise UserError(
            "A worker process was killed, perhaps because memory ran out.",
            where=str(folder),
            fix="Run the same command again, with fewer --workers; finished tasks are kept.",
        ) from error
    return Summary(
        selected=plan.selected,
        cached=run.done,
        examples=run.examples,
        dropped=dict(run.dropped),
        left_out=plan.left_out,
        skipped=sorted(plan.skipped),
        seconds=time.monotonic() - started,
    )


def _no_space(folder: Path, error: OSError) -> UserError:
    whole = len(list(folder.glob(f"*/{folders.MARKER}")))
    return UserError(
        f"The disk is full ({error.strerror}).",
        where=str(folder),
        fix="Free some space and run the same command again;"
        f" {counted(whole, 'finished task is', 'finished tasks are')} kept, and nothing unfinished"
        " was left.",
    )


def _pool(workers: int, **options: Any) -> ProcessPoolExecutor:
    # Spawned, because forking a process that has threads, as the caller may, can deadlock.
    return ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), **options)


@contextlib.contextmanager
def _workers(count: int) -> Iterator[ProcessPoolExecutor]:
    # Give the processors that the workers leave idle to SentencePiece's threads.
    threads = max(1, default_workers() // count)
    pool = _pool(count, initializer=shards.start_worker, initargs=(os.getpid(), threads))
    _start_without_interrupts(pool, count)
    try:
        yield pool
    finally:
        # Drop queued work but wait for running work, since the staging folder is removed next.
        pool.shutdown(wait=True, cancel_futures=True)


def _start_without_interrupts(pool: ProcessPoolExecutor, count: int) -> None:
    """Starts the workers with Ctrl-C blocked: it would end their imports, each with a traceback."""
    # It unblocks the signal after starting, so it starts first.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        for _ in range(count):  # each task starts a worker, which inherits what is blocked
            pool.submit(int)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _make_plan(request: Request, pool: ProcessPoolExecutor, workers: int) -> CachePlan:
    """The plan, made by a worker or, if it needs SeqIO, by a process that ends right after.

    A worker that imported SeqIO would keep the gigabyte that SeqIO and TensorFlow take.
    """
    if needs_seqio(request.modules):
        return _make_plan_elsewhere(request)
    with working("importing the tasks, while the workers start"):
        plan = pool.submit(make_plan, request)
        for _ in range(workers - 1):  # meanwhile the other workers start and import
            pool.submit(shards.warm_up)
        return plan.result()


def _make_plan_elsewhere(request: Request) -> CachePlan:
    libraries = ", with TensorFlow and SeqIO" if needs_seqio(request.modules) else ""
    # Ctrl-C ends it without a traceback.
    quiet: Any = {"initializer": signal.signal, "initargs": (signal.SIGINT, signal.SIG_DFL)}
    with working(f"importing the tasks{libraries}"), _pool(1, **quiet) as other:
        return other.submit(make_plan, request).result()


@dataclasses.dataclass
class _Split:
    """A prompt's split while it is being written."""

    prompt: Prompt
    split: str
    rows: SpooledRows
    num_shards: int
    left: int = 0  # pieces not written yet
    count: int = 0  # rows rendered
    statistics: dict[bool, Statistics] = dataclasses.field(default_factory=dict)
    dropped: dict[str, list[int]] = dataclasses.field(default_factory=dict)
    files: dict[bool, dict[str, dict[str, int]]] = dataclasses.field(default_factory=dict)
    again: bool = False  # the twin is being rewritten, with the ordinals of its rows

    def tasks(self) -> dict[bool, CachedTask]:
        return {task.score_eval: task for task in self.prompt.wanting(self.split)}

    def add(self, result: PieceResult) -> None:
        self.left -= 1
        self.count += result.rows
        for form, statistics in result.statistics.items():
            self.statistics.setdefault(form, Statistics()).merge(statistics)
        for form, files in result.files.items():
            self.files.setdefault(form, {}).update(files)
        for reason, places in result.dropped.items():
            self.dropped.setdefault(reason, []).extend(places)

    def dropped_places(self) -> list[int]:
        return sorted(place for places in self.dropped.values() for place in places)


class _Run:
    """The state of one run: what is queued, being written, and done."""

    def __init__(self, plan: CachePlan, request: Request, folder: Path, staging: Path):
        self._plan, self._request = plan, request
        self._folder, self._staging = folder, staging
        self._groups: dict[RowsOfSplit, list[tuple[Prompt, str]]] = {}
        for prompt in plan.prompts:
            for split, rows in prompt.rows.items():
                self._groups.setdefault(rows, []).append((prompt, split))
        # Progress counts one rendering per row and prompt; a twin is rendered with its task.
        self.total = sum(rows.estimate * len(group) for rows, group in self._groups.items())
        self._splits_left = {task.name: set(task.splits) for task in plan.tasks()}
        self._described: dict[str, dict[str, Any]] = {task.name: {} for task in plan.tasks()}
        self._in_use: dict[int, int] = {}  # a spool's id -> splits that need it
        self.done: list[str] = []
        self.examples = 0
        self.dropped: Counter[str] = Counter()

    def work(
        self,
        pool: ProcessPoolExecutor | BeamWorkers,
        wait: Callable[[list[Future[Any]]], set[Future[Any]]],
        ahead: int | None,
        advance: Callable[[int], None],
    ) -> None:
        """Runs the whole plan.

        Args:
          pool: The workers.
          wait: Waits until some of their calls are done and returns these.
          ahead: The most pieces submitted at a time; None submits whatever is known.
          advance: See `cache_tasks`.
        """
        for digest, model in self._plan.vocabularies.items():
            self._vocabulary(digest).write_bytes(model)
        spooling: dict[Future[SpooledRows], RowsOfSplit] = {}
        writing: dict[Future[PieceResult], _Split] = {}
        queued: list[Iterator[tuple[_Split, Piece]]] = []
        waiting = iter(enumerate(self._groups))
        while True:
            # At most two at a time: spool one dataset's rows while rendering another's.
            while (ahead is None or len(queued) + len(spooling) < 2) and (
                entry := next(waiting, None)
            ):
                base = str(self._staging / f"rows-{entry[0]}")
                spooling[pool.submit(shards.spool_rows, entry[1], base)] = entry[1]
            while queued and (ahead is None or len(writing) < ahead):
                # Finish one dataset's pieces before the next, so that its spool can be removed
                # early.
                piece = next(queued[0], None)
                if piece is None:
                    queued.pop(0)
                    continue
                writing[pool.submit(shards.write_piece, piece[1])] = piece[0]
            futures = [*spooling, *writing]
            if not futures and not queued:
                return
            for future in wait(futures):
                if future in spooling:
                    rows = spooling.pop(future)
                    spooled = future.result()
                    self._in_use[id(spooled.spool)] = len(self._groups[rows])
                    queued.append(self._pieces(rows, spooled))
                else:
                    split = writing.pop(future)
                    result = future.result()
                    split.add(result)
                    # A second pass over the same rows does not count as progress.
                    if not split.again:
                        advance(result.rows)
                    if split.left == 0 and self._needs_ordinals(split):
                        # Do this next, while the spool exists.
                        queued.insert(0, self._rewrite_twin(split))
                    elif split.left == 0:
                        self._finish(split)

    # Pieces ------------------------------------------------------------------------------------

    def _pieces(self, rows: RowsOfSplit, spooled: SpooledRows) -> Iterator[tuple[_Split, Piece]]:
        for prompt, name in self._groups[rows]:
            number = shards.number_of_shards(spooled.spool.count, self._request.min_shards)
            split = _Split(prompt, name, spooled, number)
            yield from self._pieces_of(split, tuple(split.tasks()))

    def _pieces_of(
        self, split: _Split, forms: tuple[bool, ...], ordinals: str | None = None
    ) -> Iterator[tuple[_Split, Piece]]:
        tasks = split.tasks()
        staged = {form: self._staging_folder(tasks[form]) for form in forms}
        for path in staged.values():
            make_folder(path)
        # Rows of one shard.
        per_shard = max(1, split.rows.spool.count // split.num_shards)
        # Write several small shards per call, since each message to a worker has a cost.
        step = max(1, _ROWS_PER_PIECE // per_shard)
        starts = range(0, split.num_shards, step)
        split.left = len(starts)
        for start in starts:
            yield (
                split,
                Piece(
                    prompt=split.prompt,
                    split=split.split,
                    spool=split.rows.spool,
                    folders={form: str(path) for form, path in staged.items()},
                    shards=range(start, min(start + step, split.num_shards)),
                    num_shards=split.num_shards,
                    vocabulary=str(self._vocabulary(split.prompt.vocabulary)),
                    seed=self._request.seed,
                    ordinals=ordinals,
                ),
            )

    def _needs_ordinals(self, split: _Split) -> bool:
        """Whether the twin must be rewritten, since some of its rows were dropped."""
        return True in split.tasks() and bool(split.dropped) and not split.again

    def _rewrite_twin(self, split: _Split) -> Iterator[tuple[_Split, Piece]]:
        """Rewrites the twin's pieces, because its `idx` counts only rows that the template keeps.

        Those rows are known only after rendering all of them. Few templates with choices drop rows,
        so the first pass assumes that all are kept.
        """
        kept = np.ones(split.rows.spool.count, bool)
        kept[split.dropped_places()] = False
        path = self._staging / f"ordinals-{split.prompt.source}-{split.split}.npy"
        # A kept row's number among the kept ones; the numbers of dropped rows are never read.
        save_array(path, np.cumsum(kept) - 1)
        split.again = True
        del split.statistics[True]
        # The second pass counts again.
        split.count, split.dropped = 0, {}
        # The task itself is done; only its twin (True) is rewritten.
        yield from self._pieces_of(split, (True,), str(path))

    # What is written last ----------------------------------------------------------------------

    def _vocabulary(self, digest: str) -> Path:
        return self._staging / f"{digest}.model"

    def _staging_folder(self, task: CachedTask) -> Path:
        return self._staging / "tasks" / task.folder

    def _finish(self, split: _Split) -> None:
        _check_gives_examples(split)
        dropped = {reason: len(places) for reason, places in split.dropped.items()}
        for form, task in split.tasks().items():
            statistics = split.statistics[form]
            self.examples += statistics.examples
            self.dropped.update(dropped)
            self._write_json(task, f"stats.{split.split}.json", dataclasses.asdict(statistics))
            self._write_json(task, f"info.{split.split}.json", self._info(split, form))
            self._described[task.name][split.split] = _description(split, form, statistics)
            self._splits_left[task.name].remove(split.split)
            # Move a task into place as soon as its last split is written.
            if not self._splits_left[task.name]:
                self._complete(split.prompt, task)
        self._in_use[id(split.rows.spool)] -= 1
        if not self._in_use[id(split.rows.spool)]:
            split.rows.spool.remove()

    def _info(self, split: _Split, score_eval: bool) -> Mapping[str, Any]:
        return {
            "num_shards": split.num_shards,
            "features": feature_types(score_eval, bool(split.prompt.template.answer_choices)),
            "seqio_version": self._plan.seqio_version,
        }

    def _complete(self, prompt: Prompt, task: CachedTask) -> None:
        folder, staged = self._folder / task.folder, self._staging_folder(task)
        described = self._described.pop(task.name)
        before = folder / folders.PROVENANCE
        if before.is_file():  # splits are added
            described = {**json.loads(before.read_text())["splits"], **described}
        content = provenance.describe(prompt, task, self._request.seed, described)
        self._write_json(task, folders.PROVENANCE, content)
        folders.put_in_place(staged, folder, task.splits)
        self.done.append(task.name)

    def _write_json(self, task: CachedTask, name: str, content: Mapping[str, Any]) -> None:
        # As SeqIO's: sorted, indented, one line break at the end.
        text = json.dumps(content, sort_keys=True, indent=2) + "\n"
        write_atomically(self._staging_folder(task) / name, text)


def _description(split: _Split, score_eval: bool, statistics: Statistics) -> dict[str, Any]:
    numbers = split.dropped
    return {
        "origin": dict(split.rows.origin),
        "rows": split.count,
        "examples": statistics.examples,
        "shards": split.num_shards,
        "files": split.files[score_eval],
        # A few numbers of dropped rows suffice for inspection.
        "dropped": {
            reason: {"rows": len(places), "first": sorted(places)[: shards.MAX_NUMBERS]}
            for reason, places in sorted(numbers.items())
        },
    }


def _check_gives_examples(split: _Split) -> None:
    """Refuses a user's own prompt that gives no example of a split, except a test split.

    T0 has prompts that fit no row of some split, but in a user's prompt that is a mistake. Test
    splits often have hidden labels.
    """
    gives = any(statistics.examples for statistics in split.statistics.values())
    if gives or not split.count or not split.prompt.template.own or split.split == "test":
        return
    reasons = "; ".join(f"{len(places):,}: {why}" for why, places in split.dropped.items())
    raise UserError(
        f"Template {split.prompt.template.name!r} makes no example of the {split.count:,} rows of"
        f" split {split.split!r}. Rows by reason: {reasons}.",
        where=f"task {split.prompt.source}",
        fix="Fix the template ('t0repro tasks show' shows what it makes of rows), or leave the"
        " split out with --splits.",
    )


def _wait_for_first(futures: list[Future[Any]]) -> set[Future[Any]]:
    if not futures:
        return set()
    return concurrent.futures.wait(futures, return_when=concurrent.futures.FIRST_COMPLETED).done


def default_workers() -> int:
    """The number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
