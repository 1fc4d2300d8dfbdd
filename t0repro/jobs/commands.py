"""The command of an auxiliary job, checked for common mistakes before any job starts."""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from typing import Literal

from t0repro.config.settings import shared_values
from t0repro.config.t5x import gin_files
from t0repro.config.t5x.gin_files import T5xInputs
from t0repro.errors import UserError
from t0repro.jobs.job import INTERPRETER
from t0repro.progress import say
from t0repro.runs.checkpoint_checks import NO_CHECKPOINT_YET
from t0repro.tasks.availability import SKIP_MISSING

MODEL_DIR, MIXTURE, CHECKPOINT, TRAIN_STEPS, OUTPUT = (
    "MODEL_DIR",
    "MIXTURE_OR_TASK_NAME",
    "INITIAL_CHECKPOINT_PATH",
    "TRAIN_STEPS",
    "EVAL_OUTPUT_DIR",
)
_RUN_MODES = ("train", "eval")
_RANKING = "rank-eval"
_SKIP_MISSING = re.compile(r"\s--skip[_-]missing(?!\S)")


@dataclasses.dataclass(frozen=True)
class JobSettings:
    """The settings of a training run's auxiliary jobs.

    Attributes:
      mixtures: each gets its own job for each checkpoint.
      gin_file: the auxiliary job's, read after the training run's.
      train_gin_files: the training run's; `replace_gin_file` omits them.
      gin_bindings: overrides for the auxiliary job, `NAME = VALUE`.
      final_steps: 0 evaluates each checkpoint; N fine-tunes each for N steps.
      build_target: "eval" or "train" (T5X's label //t5x:eval is the same), or "rank-eval", which
        options may follow; or any command, in which {INITIAL_CHECKPOINT_PATH} and the other names
        stand for their values.
      import_allowlist: modules that the jobs' gin files may import; None allows all.
    """

    mixtures: tuple[str, ...]
    gin_file: str | None = None
    train_gin_files: tuple[str, ...] = ()
    replace_gin_file: bool = False
    gin_bindings: tuple[str, ...] = ()
    gin_search_paths: tuple[str, ...] = (".",)
    final_steps: int = 0
    build_target: str = "eval"
    import_allowlist: tuple[str, ...] | None = None

    @property
    def target(self) -> str:
        """The first word of the build target, without T5X's package: "eval" of "//t5x:eval"."""
        return self._words[0].rpartition(":")[2] if self._words else ""

    @property
    def _words(self) -> list[str]:
        return shlex.split(self.build_target)

    @property
    def run_mode(self) -> Literal["train", "eval"] | None:
        """The run mode whose gin files the job reads; None for any other command."""
        return next((mode for mode in _RUN_MODES if mode == self.target), None)

    @property
    def gin_files(self) -> tuple[str, ...]:
        """The job's gin files in the order in which gin reads them."""
        # Put the job's file last, since a later binding wins.
        own = (self.gin_file,) if self.gin_file else ()
        return own if self.replace_gin_file else (*self.train_gin_files, *own)

    def command(self, values: Mapping[str, str | int], macros: frozenset[str]) -> tuple[str, ...]:
        """The command of one job.

        Args:
          values: name of a replaced macro -> its value.
          macros: what `check` returned.
        """
        t0repro = (INTERPRETER, "-m", "t0repro.cli")
        options = self._words[1:]
        if self.run_mode:
            # Pass only macros that the files read: t0repro refuses others on the command line.
            replaced = [f"--gin.{name}={values[name]!r}" for name in values if name in macros]
            allowed = self.import_allowlist
            return (
                *t0repro,
                self.run_mode,
                *(f"--gin_file={name}" for name in self.gin_files),
                f"--gin_search_paths={','.join(self.gin_search_paths)}",
                *(() if allowed is None else (f"--gin_import_allowlist={','.join(allowed)}",)),
                *(f"--gin_bindings={binding}" for binding in self.gin_bindings),
                *replaced,
                *options,
            )
        if self.target == _RANKING:
            return (
                *(*t0repro, "rank-eval"),
                *("--checkpoint", str(values[CHECKPOINT]), "--mixture", str(values[MIXTURE])),
                # The jobs of all checkpoints share a folder, whose steps make a history.
                *("--out", str(values[OUTPUT]), "--add_step", *options),
            )
        return tuple(_fill(self._words, values))


def add_skip_missing(build_target: str) -> str:
    """A build target with --skip_missing; a custom command stays as it is, with a note."""
    if _is_command(build_target):
        say(f"note: --skip_missing is not handed on to the jobs' own command, {build_target!r}")
        return build_target
    return f"{drop_skip_missing(build_target)} --skip_missing"


def drop_skip_missing(build_target: str) -> str:
    """A build target without --skip_missing; a custom command stays as it is."""
    return build_target if _is_command(build_target) else _SKIP_MISSING.sub("", build_target)


def _is_command(build_target: str) -> bool:
    """Whether a build target is a custom command, maybe one that cannot be split."""
    target = "".join(build_target.split()[:1]).rpartition(":")[2]
    return target not in (*_RUN_MODES, _RANKING)


def _fill(words: list[str], values: Mapping[str, str | int]) -> list[str]:
    """A command with the values in place of their names, or appended if it has no names."""
    filled = []
    for word in words:
        for name, value in values.items():
            word = word.replace(f"{{{name}}}", str(value))
        filled.append(word)
    # A command without any of the names gets all values, so that it can distinguish its jobs.
    if filled == words:
        filled += [f"--{name.lower()}={value}" for name, value in values.items()]
    return filled


def check(settings: JobSettings) -> tuple[frozenset[str], list[str]]:
    """Checks everything about the jobs that is known before the first checkpoint.

    Returns:
      The macros that the job's gin files read, empty if it reads none; and warnings.

    Raises:
      UserError: for each of the mistakes that T5X's page lists; and whatever gin finds wrong.
    """
    if not settings.mixtures:
        raise UserError(
            "There are no mixtures for the auxiliary job, so no job would ever be started.",
            where="--auxiliary_job_mixtures",
            fix="Name at least one, even for a command that needs none: there is one job for each.",
        )
    if settings.final_steps < 0:
        raise UserError(
            f"{settings.final_steps} is not a number of fine-tuning steps.",
            where="--final_auxiliary_job_steps",
            fix="Give 0 for continuous evaluation, or the number of steps.",
        )
    # First, because `target` and `run_mode` split it too.
    _check_command(settings.build_target)
    if settings.target != "train":
        _check_evaluation(settings)
    if settings.run_mode is None:
        return frozenset(), []
    if not settings.gin_files:
        raise UserError(
            f"The auxiliary job is `{settings.run_mode}`, but there is no gin file for it.",
            where="--auxiliary_job_gin_file",
            fix="Name a gin file that configures it, or another job:"
            " --auxiliary_job_build_target_path 'rank-eval --module_import my.tasks'.",
        )
    return _check_gin(settings)


def _check_command(build_target: str) -> None:
    try:
        words = shlex.split(build_target)
    except ValueError as error:
        raise UserError(
            f"The jobs' command cannot be split into words: {error}.",
            where=f"--auxiliary_job_build_target_path={build_target}",
            fix="Close every quote, as for a shell.",
        ) from error
    if not any(words):
        raise UserError(
            "The jobs' command is empty.",
            where="--auxiliary_job_build_target_path",
            fix="Give eval, train, rank-eval with its options, or a command.",
        )


def _check_evaluation(settings: JobSettings) -> None:
    """Checks the rules for jobs that do not train."""
    if settings.final_steps:
        raise UserError(
            f"The job is `{settings.target}`, which takes no steps, but"
            f" {settings.final_steps} are asked for.",
            where="--final_auxiliary_job_steps",
            fix="Give 0 for continuous evaluation, or train with"
            " --auxiliary_job_build_target_path=train.",
        )
    if settings.run_mode and settings.train_gin_files and not settings.replace_gin_file:
        raise UserError(
            "The job is not a training run, but would read the training run's gin files, whose"
            " `train` it does not have.",
            where="--replace_gin_file",
            fix="Add --replace_gin_file.",
        )


def _check_gin(settings: JobSettings) -> tuple[frozenset[str], list[str]]:
    files = T5xInputs(**shared_values(settings, T5xInputs))
    macros = gin_files.macros_read(files)
    if CHECKPOINT not in macros:
        used, file = "CHECKPOINT_PATH" in macros, settings.gin_files[-1]
        # One of this package's, which serves other runs too.
        where = (
            "Add" if os.path.isfile(file) else f"Write a file that has include '{file}' and then"
        )
        raise UserError(
            f"The job's gin files do not read {CHECKPOINT}, which the controller sets"
            f"{'; they read CHECKPOINT_PATH' if used else ''}.",
            where=file,
            fix=f"{where} the line: CHECKPOINT_PATH = %{CHECKPOINT}"
            if used
            else f"Bind the checkpoint's path to %{CHECKPOINT}.",
        )
    # With examples for what the controller will set, everything else must be complete.
    examples = {MODEL_DIR: "'d'", MIXTURE: "'m'", CHECKPOINT: "'c'", TRAIN_STEPS: 1, OUTPUT: "'o'"}
    values = [f"{name} = {value}" for name, value in examples.items() if name in macros]
    parsed = gin_files.parse(
        dataclasses.replace(files, gin_bindings=(*settings.gin_bindings, *values))
    )
    warnings = list(parsed.warnings)
    for name in (MIXTURE, OUTPUT if settings.run_mode == "eval" else MODEL_DIR):
        if name not in macros:
            raise UserError(
                f"The job's gin files do not read {name}, which the controller sets: every job"
                " would do the same.",
                where=settings.gin_files[-1],
                fix=f"Use %{name} where its value belongs.",
            )
    if settings.run_mode == "eval" and parsed.program["inference_evaluator_cls"] is not None:
        called = {call.configurable for call in parsed.program.walk()}
        if "seqio.TensorBoardLogger" not in called:
            warnings.append(
                f"{settings.gin_files[-1]}: the evaluator logs nothing to TensorBoard, so no metric"
                " will be shown; add @seqio.TensorBoardLogger to seqio.Evaluator.logger_cls"
            )
    return macros, warnings


def check_by_dry_run(
    settings: JobSettings, macros: frozenset[str], environment: Mapping[str, str]
) -> list[str]:
    """Checks tasks, splits, caches, vocabularies and lengths, each mixture as its job would.

    Each runs in its own process, since registering the jobs' tasks here could clash with the
    training run's. What --skip_missing leaves out of a job is reported.

    Args:
      settings: The jobs' settings; a user's own command is looked up, not run.
      macros: The result of `check`.
      environment: Variables for the jobs.

    Returns:
      The mixtures to make jobs for: all but those of which --skip_missing leaves out every task.

    Raises:
      UserError: With the error that would end the job.
    """
    if _is_command(settings.build_target):
        program = shlex.split(settings.build_target)[0]
        # A program below one of the jobs' own folders may be there later.
        if "{" not in program and shutil.which(program, path=environment.get("PATH")) is None:
            raise UserError(
                f"The jobs' command cannot be started: there is no program {program}.",
                where="--auxiliary_job_build_target_path",
                fix="Correct its name or path, or give eval, train, or rank-eval with its options.",
            )
        return list(settings.mixtures)
    mixtures = []
    for mixture in settings.mixtures:
        values: dict[str, str | int] = {
            MODEL_DIR: "model_dir",
            MIXTURE: mixture,
            CHECKPOINT: "checkpoint",
            TRAIN_STEPS: settings.final_steps,
            OUTPUT: "output",
        }
        words = [*settings.command(values, macros), "--dry_run"]
        done = subprocess.run(
            [sys.executable if word == INTERPRETER else word for word in words],
            # The checkpoint that the first job will read does not exist yet.
            env={**os.environ, **environment, NO_CHECKPOINT_YET: "1"},
            # A user's module that asks something would wait for ever.
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            message = _message(done.stderr)
            message = message.replace("where: --mixture", "where: --auxiliary_job_mixtures")
            if f"where: {SKIP_MISSING}" in message:
                say(f"the jobs for {mixture} are left out: {message}")
                continue
            if "--module_import" in message:  # which only the jobs' own command has
                quoted = shlex.quote(f"{settings.build_target} --module_import MODULE")
                message += f" Give --module_import as --auxiliary_job_build_target_path={quoted}."
            raise UserError(f"The jobs for {mixture} would fail. {message}")
        mixtures.append(mixture)
        for line in [*done.stderr.splitlines(), *done.stdout.splitlines()]:
            if "left out" in line.lower():
                say(f"the jobs for {mixture}: {line}")
    return mixtures


def _message(said: str) -> str:
    """A command's own error, with where and what to do, from all of its output."""
    # What libraries print on import comes before it.
    _, mark, message = said.rpartition("\nt0repro: ")
    return (message if mark else said).strip()
