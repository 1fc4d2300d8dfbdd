"""Starts one job for each new checkpoint and mixture, and restarts it until it succeeds.

The controller's whole state is in the journal and in the jobs' exit files, so it may be killed and
restarted at any moment. A point (a checkpoint with a mixture) goes from waiting to running to
succeeded. A failed job is restarted after a pause that doubles each time, up to a limit on
failures. A checkpoint is kept until its jobs have ended. A job interrupted with its controller or
by its launcher is restarted without counting as a failure.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import shutil
import statistics
import time
import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from t0repro import storage
from t0repro.errors import UserError
from t0repro.event_files import MARK, read_scalars
from t0repro.jobs import commands
from t0repro.jobs.commands import JobSettings
from t0repro.jobs.job import Job, Limits
from t0repro.jobs.journal import FOLDER, JobJournal, Point, PointProgress
from t0repro.jobs.launcher import Launcher
from t0repro.jobs.pins import Leases, Links, Pins, complete_checkpoints
from t0repro.progress import Waiting, say
from t0repro.storage import (
    absolute_place,
    address_of,
    lock_folder,
    make_folder,
    output_path,
    put_file,
    write_atomically,
)
from t0repro.storage.locks import LOCK_FILES
from t0repro.training.run_state import describe_run
from t0repro.words import counted

SETTINGS = "settings.json"
# Launchers show a newly accepted job with a delay.
_POLLS_BEFORE_LOST = 3
_LINES_OF_LOG = 15
# Exit code after a user error, in `cli.gate`, argparse and absl.
USER_ERROR = 2


@dataclasses.dataclass(frozen=True)
class Policy:
    """How jobs are scheduled.

    Attributes:
      max_parallel: maximum number of jobs at a time.
      poll_seconds: seconds between polls of checkpoints and jobs.
      max_failures: number of failed jobs after which a point is given up.
      retry_seconds: pause after the first failure; it doubles with each further one.
      limits: resource limits of each job.
      environment: variables for each job.
      options: options for the launcher.
      metric: the tag shown as main metric; None chooses one.
    """

    max_parallel: int = 1
    poll_seconds: float = 10.0
    max_failures: int = 3
    retry_seconds: float = 10.0
    limits: Limits = Limits()
    environment: dict[str, str] = dataclasses.field(default_factory=dict)
    options: tuple[str, ...] = ()
    metric: str | None = None


class Controller:
    """The auxiliary jobs of one training run."""

    def __init__(
        self,
        model_dir: Path,
        settings: JobSettings,
        launcher: Launcher,
        policy: Policy,
    ):
        """Checks the settings.

        Raises:
          UserError: if a job could not work; see `commands.check`.
        """
        self._model_dir = absolute_place(model_dir)
        # In a bucket, jobs write to a working copy, which is uploaded.
        self._folder = output_path(self._model_dir / FOLDER)
        is_address = storage.is_address(self._model_dir)
        self._pins: Pins = Leases(self._model_dir) if is_address else Links(self._folder)
        self._settings = settings
        self._launcher = launcher
        # Jobs that do not see that copy have their files in the bucket itself.
        self._address = None if launcher.on_this_machine else address_of(self._folder)
        self._policy = policy
        self._macros, warnings = commands.check(settings)
        for warning in warnings:
            say(f"warning: {warning}")
        self._running: dict[Point, Job] = {}
        self._lost: dict[Point, int] = {}
        self._not_before: dict[Point, float] = {}

    def run(self, training_continues: Callable[[], bool]) -> bool:
        """Works until training has ended and nothing is left to do.

        Args:
          training_continues: whether more checkpoints may come.

        Returns:
          Whether every point succeeded.

        Raises:
          UserError: if another controller has the folder, its jobs did something else, or the
            launcher refuses a job.
        """
        inspect = f"`t0repro aux status {self._model_dir}`"
        fix = f"A controller is already running; inspect it with {inspect}."
        with lock_folder(self._folder, "auxiliary jobs", fix=fix):
            self._journal = JobJournal(self._folder)
            self._check_settings()
            self._try_again()
            waiting = Waiting()
            with contextlib.closing(self._launcher):
                while self._look(training_continues()):
                    waiting.report(*self._describe_wait())
                    time.sleep(self._policy.poll_seconds)
            if not self._journal.progress:
                say(f"there is no complete checkpoint in {self._model_dir}: no job to start")
                return True
            states = [each.state for each in self._journal.progress.values()]
            say(f"{states.count('succeeded')} of {counted(len(states), 'job')} succeeded")
            return states.count("succeeded") == len(states)

    def _look(self, more_to_come: bool) -> bool:
        """Does what is possible now; returns whether to poll again."""
        # Checkpoints first, so that each is pinned before the training run deletes it; release pins
        # last.
        self._poll_checkpoints()
        self._poll_jobs()
        self._start_jobs()
        self._publish()
        self._release_pins()
        return more_to_come or not all(x.is_final for x in self._journal.progress.values())

    def _describe_wait(self) -> tuple[str, str]:
        """What the next poll may find: a job's end, the end of a pause, or else a checkpoint."""
        if self._running:
            jobs = [
                f"{_name_of(point)} (log: {job.log_file})" for point, job in self._running.items()
            ]
            return f"waiting for the end of {', '.join(sorted(jobs))}", ""
        for point, progress in sorted(self._journal.progress.items()):
            if not progress.is_final:
                pause = max(self._not_before.get(point, 0.0) - time.monotonic(), 0.0)
                return f"waiting to start {_name_of(point)} again", f"in {pause:.0f} s"
        return f"waiting for a new checkpoint in {self._model_dir}", describe_run(self._model_dir)

    # ---- Checkpoints ---------------------------------------------------------------------------

    def _poll_checkpoints(self) -> None:
        """Pins each new checkpoint and notes its points."""
        for step, ref in complete_checkpoints(self._model_dir).items():
            points = [Point(step, mixture) for mixture in self._settings.mixtures]
            new = [point for point in points if point not in self._journal.progress]
            if not any(self._is_open(point) for point in points):
                continue
            kept = self._pins.pin(ref)
            if not kept:
                say(f"step {step:,} was deleted by the training run before it could be pinned")
            for point in new:
                self._journal.add("seen" if kept else "missed", point)

    def _try_again(self) -> None:
        """Retries points that an earlier controller gave up, since the cause may be gone."""
        there = complete_checkpoints(self._model_dir)
        for point, progress in self._journal.progress.items():
            if progress.state == "given up" and point.step in there:
                if self._pins.pin(there[point.step]):
                    self._journal.add("again", point)

    def _release_pins(self) -> None:
        points = self._journal.progress
        self._pins.unpin_all_but({point.step for point in points if self._is_open(point)})

    def _is_open(self, point: Point) -> bool:
        """Whether a job may still be started for a point."""
        return not self._journal.progress.get(point, PointProgress()).is_final

    # ---- Jobs ----------------------------------------------------------------------------------

    def _poll_jobs(self) -> None:
        for point, progress in sorted(self._journal.progress.items()):
            if progress.state != "running":
                continue
            # After a restart, there are jobs that this controller did not start.
            job = self._running.setdefault(point, self._job(point, progress.attempt))
            state = self._launcher.state(job)
            if state in ("waiting", "running"):
                self._lost.pop(point, None)
                continue
            # An exit file is proof enough; without one, the launcher may only be slow to show the
            # job.
            if state == "unknown" and job.ending is None and not self._is_lost(point):
                continue
            self._end(point, progress, job, interrupted=state in ("unknown", "preempted"))

    def _is_lost(self, point: Point) -> bool:
        self._lost[point] = self._lost.get(point, 0) + 1
        return self._lost[point] >= _POLLS_BEFORE_LOST

    def _end(self, point: Point, progress: PointProgress, job: Job, *, interrupted: bool) -> None:
        """Records how a job ended; `interrupted` if its launcher ended it without an exit file."""
        del self._running[point]
        self._lost.pop(point, None)
        ending = job.ending
        who = _name_of(point)
        if ending is None and interrupted:
            self._journal.add("interrupted", point)
            say(f"{who}: interrupted by its launcher; it is started again")
            return
        if ending is not None and not ending.reason:
            with self._open_results(point) as results:
                metric = main_metric(results, self._policy.metric)
            self._journal.add("succeeded", point, seconds=ending.seconds, metric=metric)
            shown = f": {metric[0]} {metric[1]:.4g}" if metric else ""
            say(f"{who}: done in {ending.seconds:.0f} s{shown}")
            return
        reason = ending.reason if ending else "it was killed"
        failures = progress.failures + 1
        self._journal.add("failed", point, reason=reason)
        say(f"{who}: failed: {reason}; {job.log_file} ends:\n{_end_of(job.log_file)}")
        # A user error would only recur.
        mistaken = ending is not None and ending.exit_code == USER_ERROR
        if mistaken or failures >= self._policy.max_failures:
            self._journal.add("given up", point, reason=reason)
            why = "a mistake in its settings" if mistaken else counted(failures, "failure")
            say(f"{who}: given up after {why}")
            return
        pause = self._policy.retry_seconds * 2 ** (failures - 1)
        self._not_before[point] = time.monotonic() + pause  # wall clocks jump

    def _start_jobs(self) -> None:
        for point, progress in sorted(self._journal.progress.items()):
            if len(self._running) >= self._policy.max_parallel:
                return
            if progress.state not in ("waiting", "retrying"):
                continue
            if time.monotonic() < self._not_before.get(point, 0.0):
                continue
            if self._pins.path(point.step) is None:  # deleted while no controller ran
                self._journal.add("missed", point)
                continue
            self._start(point, progress.attempt + 1)

    def _start(self, point: Point, attempt: int) -> None:
        job = self._job(point, attempt)
        if not self._settings.final_steps:
            # Discard results of a dead evaluation attempt; a fine-tuning resumes from its own
            # checkpoints.
            shutil.rmtree(self._results_of(point), ignore_errors=True)
            if self._address:
                storage.remove_all(self._place_of(point))
        make_folder(self._results_of(point))
        # Record it before submitting, so that no job runs that the journal lacks.
        self._journal.add("started", point, attempt=attempt)
        storage.upload(self._model_dir / FOLDER)
        self._launcher.submit(job)
        self._running[point] = job
        say(f"{_name_of(point)}: started ({job.name})")

    def _job(self, point: Point, attempt: int) -> Job:
        values = self._values(point)
        # Include the folder: two training runs with equal mixtures and steps may share an launcher.
        named = f"{self._model_dir / FOLDER}\n{point.mixture}"
        digest = hashlib.sha256(named.encode()).hexdigest()[:8]
        return Job(
            name=f"t0repro-{digest}-{point.step}-{attempt}",
            folder=self._folder_of(point),
            command=self._settings.command(values, self._macros),
            environment={name: str(value) for name, value in values.items()}
            | self._policy.environment,
            limits=self._policy.limits,
            options=self._policy.options,
            address=self._address and self._place_of(point).rpartition("/")[0],
        )

    def _values(self, point: Point) -> dict[str, str | int]:
        """The value of each macro.

        An evaluation's output stays separate until it is published, so that an attempt that dies
        leaves nothing in the training run's curves.
        """
        output = self._place_of(point) if self._address else str(self._results_of(point))
        return {
            # A job that trains uses its own folder, since the training run's is locked.
            commands.MODEL_DIR: self._place_of(point)
            if self._settings.target == "train"
            else str(self._model_dir),
            commands.MIXTURE: point.mixture,
            # None for an earlier controller's job, whose command is not used again.
            commands.CHECKPOINT: self._pins.path(point.step) or "",
            commands.TRAIN_STEPS: point.step + self._settings.final_steps,
            commands.OUTPUT: output,
        }

    def _folder_of(self, point: Point) -> Path:
        # Quote the name: a mixture's may contain characters that a folder's may not.
        mixture = urllib.parse.quote(point.mixture, safe="")
        return self._folder / mixture / f"step_{point.step}"

    def _results_of(self, point: Point) -> Path:
        return self._folder_of(point) / "output"

    def _place_of(self, point: Point) -> str:
        """The place of a job's results: an address, if `_results_of` is its working copy."""
        return str(self._model_dir / FOLDER / self._results_of(point).relative_to(self._folder))

    def _open_results(self, point: Point) -> contextlib.AbstractContextManager[Path]:
        """A context with the files that a job has written."""
        if self._settings.target == "train":  # in a bucket it writes there by itself
            return storage.fetch(self._place_of(point))
        return contextlib.nullcontext(self._results_of(point))

    # ---- Results -------------------------------------------------------------------------------

    def _publish(self) -> None:
        """Publishes finished results, each mixture's steps in order."""
        for mixture in self._settings.mixtures:
            for point, progress in sorted(self._journal.progress.items()):
                if point.mixture != mixture:
                    continue
                if not progress.is_final:
                    break  # a later step's metrics wait for it
                if progress.state != "succeeded" or progress.published:
                    continue
                if not self._settings.final_steps:
                    publish_events(point, self._results_of(point), self._model_dir)
                if self._settings.target != "train":
                    results = self._folder_of(point).parent / RESULTS
                    publish_files(self._results_of(point), results)
                self._journal.add("published", point)

    # ---- The folder ----------------------------------------------------------------------------

    def _check_settings(self) -> None:
        """Refuses a folder in which other jobs were started.

        New mixtures are allowed, and --skip_missing and --gin_import_allowlist, which a run may be
        resumed with or without.
        """
        path = self._folder / SETTINGS
        text = _settings_text(dataclasses.asdict(self._settings))
        any_started = any(each.attempt for each in self._journal.progress.values())
        if any_started and path.exists() and _settings_text(json.loads(path.read_text())) != text:
            raise UserError(
                "The folder's results came from jobs with other settings.",
                where=str(path),
                fix=f"Give the same settings, or rename {self._folder} to start over.",
            )
        write_atomically(path, text)


def _settings_text(settings: dict[str, Any]) -> str:
    """The settings that a folder's jobs have in common, as JSON."""
    target = commands.drop_skip_missing(settings["build_target"])
    common = settings | {"mixtures": None, "build_target": target, "import_allowlist": None}
    return json.dumps(common, indent=1) + "\n"


def _name_of(point: Point) -> str:
    return f"step {point.step:,}, {point.mixture}"


def _end_of(log: Path) -> str:
    """The last lines of a log, indented."""
    try:
        lines = log.read_text(errors="replace").splitlines()[-_LINES_OF_LOG:]
    except FileNotFoundError:
        return "  (there is no log)"
    return "\n".join(f"  | {line}" for line in lines) or "  (the log is empty)"


# Publishing results -------------------------------------------------------------------------------
# Each job writes into its own folder, and only successful results leave it, in the order of steps.
# TensorBoard's files go to the training run's folder, so that both runs' curves appear together.
# Everything else is copied to the mixture's folder of results, which has the files of all steps.

RESULTS = "results"


def publish_events(point: Point, output: Path, model_dir: Path) -> None:
    """Moves a job's event files into the training run's folder.

    They are moved, not copied: TensorBoard reads every folder below the one it shows, and would
    show each point twice. An interrupted call can be repeated.

    Args:
      point: the job's point.
      output: the job's output folder. Event files keep their place below it; those at its top go to
        inference_eval/<mixture>.
      model_dir: the training run's folder, or its address.
    """
    mixture = urllib.parse.quote(point.mixture, safe="")
    for path in [path for path in _files(output) if MARK in path.name]:
        folder = path.parent.relative_to(output)
        if not folder.parts:
            folder = Path("inference_eval", mixture)
        # TensorBoard reads a folder's files in the order of their names, and never goes back.
        name = f"events.out.tfevents.{point.step:012d}.{mixture}.{path.name}"
        put_file(path, model_dir / folder / name)
        path.unlink()


def publish_files(output: Path, results: Path) -> None:
    """Copies a job's other files to the folder that collects all steps.

    Files of one step have the step in their names; a later step's report replaces an earlier one.
    """
    for path in _files(output):
        if MARK not in path.name:
            put_file(path, results / path.relative_to(output))


def main_metric(output: Path, wanted: str | None = None) -> tuple[str, float] | None:
    """A job's main metric as (tag, value at its last step); None if it logged no scalar.

    Args:
      output: the job's output folder.
      wanted: a tag; defaults to the accuracy of the evaluated tasks, or else the first tag in
        alphabetical order. If several tasks have it, returns their mean.
    """
    found = _scalars(output)
    accuracies = [one for one in found if one.tag.endswith("accuracy")]
    chosen = (
        [one for one in found if one.tag == wanted]
        if wanted is not None
        # A job that trains also logs its training run's accuracy.
        else [one for one in accuracies if one.tag.startswith("eval/")] or accuracies or found[:1]
    )
    if not chosen:
        return None
    tags = {one.tag for one in chosen}
    name = tags.pop() if len(tags) == 1 else "accuracy"
    if len(chosen) > 1:
        name = f"mean {name} of {len(chosen)} tasks"
    return name, statistics.fmean(one.value for one in chosen)


class _Scalar(NamedTuple):
    tag: str
    folder: str
    value: float


def _scalars(output: Path) -> list[_Scalar]:
    """The last value of each tag in each folder of event files, by tag and folder.

    SeqIO has a folder per task, and all have the same tags.
    """
    folders = {path.parent for path in _files(output) if MARK in path.name}
    return sorted(
        _Scalar(tag, str(folder), points[-1][1])
        for folder in folders
        for tag, points in read_scalars(folder).items()
    )


def _files(folder: Path) -> Iterator[Path]:
    for parent, _, names in os.walk(folder):
        for name in names:
            if name not in LOCK_FILES:
                yield Path(parent, name)
