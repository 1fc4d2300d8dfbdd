"""A job's command line, as it would be given on this machine.

Two kinds of commands run as jobs: the run modes, which the image's entry point takes as
`--run_mode=MODE ...`, and t5_mesh_transformer with the arguments of T0's README.
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
import os
import re
from collections.abc import Mapping, Sequence

from t0repro.cloud.vertex.spec import MOUNT
from t0repro.errors import UserError

MESH_TRANSFORMER = "t5_mesh_transformer"
_AUXILIARY = "--auxiliary_job_gin_file"


class JobMode(enum.StrEnum):
    """What the image's entry point runs: the command with this name."""

    TRAIN = "train"
    EVAL = "eval"
    INFER = "infer"
    PRECOMPILE = "precompile"
    RANK_EVAL = "rank-eval"
    AUX = "aux"


@dataclasses.dataclass(frozen=True)
class Arguments:
    """The parts of a job's command line that matter outside its container.

    Attributes:
      words: all arguments, in order.
      mode: the run mode; None for t5_mesh_transformer.
      backend: mtf or jax.
      auxiliary_gin_files: those of auxiliary jobs beside the run.
      search_paths: folders of gin files, from --gin_search_paths or --gin_location_prefix.
      bindings: overrides, from --gin.NAME=VALUE, --gin_bindings or --gin_param.
      output: the folder for results on the command line; gin names any others.
      mixture: what --mixture or --auxiliary_job_mixtures name.
    """

    words: tuple[str, ...]
    mode: JobMode | None
    backend: str
    gin_files: tuple[str, ...]
    auxiliary_gin_files: tuple[str, ...]
    search_paths: tuple[str, ...]
    bindings: tuple[str, ...]
    module_imports: tuple[str, ...]
    output: str | None
    checkpoint: str | None
    mixture: str | None

    @property
    def command(self) -> tuple[str, ...]:
        """Replaces the image's entry point; empty for run modes, which the entry point takes."""
        return (MESH_TRANSFORMER,) if self.mode is None else ()


def read_arguments(words: Sequence[str]) -> Arguments:
    """Reads a job's command line: `--run_mode=MODE ...` or `t5_mesh_transformer ...`.

    Raises:
      UserError: If it is neither, or has an option without its value.
    """
    if words and words[0] == MESH_TRANSFORMER:
        return _read(tuple(words[1:]), None)
    mode, _ = _parse(_parser("--run_mode"), words)
    check_not_export(mode.run_mode)
    if mode.run_mode is None:
        raise UserError(
            "The job has nothing to do.",
            where="--run_mode",
            fix=f"Give one of {', '.join(JobMode)}, or a whole command after `--`:"
            f" -- {MESH_TRANSFORMER} --backend=mtf ...",
        )
    try:
        return _read(tuple(words), JobMode(mode.run_mode))
    except ValueError as error:
        raise UserError(
            f"There is no run mode {mode.run_mode!r}.",
            where="--run_mode",
            fix=f"Choose one of {', '.join(JobMode)}.",
        ) from error


def check_not_export(run_mode: str | None) -> None:
    """Refuses T5X's run mode for SavedModels, and names the alternative.

    Raises:
      UserError: if it is `export`.
    """
    if run_mode == "export":
        raise UserError(
            "There is no run mode 'export': T5X's writes a SavedModel for TensorFlow Serving, and"
            " no model here is a TensorFlow graph.",
            where="--run_mode=export",
            fix="`t0repro convert CHECKPOINT OUT --to hf` writes a model that transformers loads;"
            " `--to t5x` writes a checkpoint that T5X itself exports.",
        )


def _read(words: tuple[str, ...], mode: JobMode | None) -> Arguments:
    single = ("--backend", "--model_dir", "--out", "--checkpoint", "--mixture")
    single += ("--auxiliary_job_mixtures", "--gin_search_paths", "--gin_location_prefix")
    parser = _parser(*single)
    # The commands take these several times; of the others, the last one counts.
    repeated = ("--gin_file", "--gin_param", "--gin_bindings")
    for name in (*repeated, _AUXILIARY, "--module_import"):
        parser.add_argument(name, action="append", default=[])
    options, rest = _parse(parser, words)
    # argparse cannot declare --gin.NAME: they are among the words that it does not know.
    overrides = [word.removeprefix("--gin.") for word in rest if word.startswith("--gin.")]
    folders = options.gin_search_paths or options.gin_location_prefix
    return Arguments(
        words=words,
        mode=mode,
        # The commands' own defaults.
        backend=options.backend or ("mtf" if mode is None else "jax"),
        gin_files=tuple(map(_readable, options.gin_file)),
        auxiliary_gin_files=tuple(map(_readable, options.auxiliary_job_gin_file)),
        search_paths=tuple(folders.split(",")) if folders else (),
        bindings=(*overrides, *options.gin_bindings, *options.gin_param),
        module_imports=tuple(options.module_import),
        output=options.out or options.model_dir,
        checkpoint=options.checkpoint,
        mixture=options.mixture or options.auxiliary_job_mixtures,
    )


def address_of(path: str) -> str:
    """The address of a path below the mounted buckets; any other path as it is."""
    return re.sub(f"^{MOUNT}/", "gs://", path)


def _readable(name: str) -> str:
    """A gin file's name, or its address if only the container has the bucket mounted."""
    return name if os.path.exists(name) else address_of(name)


def replace_gin_files(
    arguments: Arguments, places: Mapping[str, str], folder: str | None
) -> tuple[str, ...]:
    """The command line with other paths for gin files.

    Args:
      arguments: the command line, read.
      places: name on this machine -> path in the container; other names stay.
      folder: where the container finds included files; None if none are staged.
    """
    words: list[str] = []
    follows_file = False
    for word in arguments.words:
        name, equals, value = word.partition("=")
        # Both spellings: `--gin_file NAME` and `--gin_file=NAME`.
        if follows_file:
            word = places.get(word, word)
        elif name in ("--gin_file", _AUXILIARY) and equals:
            word = f"{name}={places.get(value, value)}"
        follows_file = word in ("--gin_file", _AUXILIARY)
        words.append(word)
    if folder is None:
        return tuple(words)
    option = "--gin_location_prefix" if arguments.mode is None else "--gin_search_paths"
    folders = ",".join((folder, *arguments.search_paths))
    return (*words, f"{option}={folders}")  # of two, the commands take the last


def _parser(*single: str) -> argparse.ArgumentParser:
    # No abbreviations: a word that is unknown here may be an option of the container's command.
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for name in single:
        parser.add_argument(name)
    return parser


def _parse(
    parser: argparse.ArgumentParser, words: Sequence[str]
) -> tuple[argparse.Namespace, list[str]]:
    try:
        return parser.parse_known_args(list(words))
    except argparse.ArgumentError as error:
        raise UserError(
            f"The job's command line cannot be read: {error}.", fix="Write --option=value."
        ) from error


def override(binding: str) -> str:
    """The container argument for a gin statement: `--gin.NAME=VALUE`, with the value as written.

    Args:
      binding: `NAME = VALUE`, the value in gin's syntax.

    Raises:
      UserError: If it is not of that form.
    """
    name, equals, value = binding.partition("=")
    if not equals or not name.strip():
        raise UserError(
            f"{binding!r} binds nothing.", where="--gin", fix="Write it as --gin.NAME=VALUE."
        )
    return f"--gin.{name.strip()}={value.strip()}"
