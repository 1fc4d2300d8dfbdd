"""The options of T5X's run modes, and the gin files that they name."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, ClassVar

import typer

from t0repro.cli.gin_options import GIN, GinOptions
from t0repro.cli.options import LogOptions, Modules, SkipMissing
from t0repro.cli.paths import source
from t0repro.cli.results import echo
from t0repro.config.checkpoints import RestoreConfig
from t0repro.config.t5x.gin_files import Parsed, T5xInputs, parse
from t0repro.config.t5x.layout import list_differences
from t0repro.storage import check_address


@dataclasses.dataclass(frozen=True)
class T5xOptions(LogOptions, GinOptions):
    """The options of every run mode of T5X."""

    HEADING: ClassVar = GIN

    module_import: Modules = None
    tfds_data_dir: Annotated[
        str | None,
        typer.Option(callback=source, help="The folder of TensorFlow Datasets' data."),
    ] = None
    cache_dir: Annotated[
        list[str] | None,
        typer.Option(
            "--cache_dir",
            "--seqio_additional_cache_dirs",
            callback=source,
            help="Folders of cached tasks, separated by commas; repeatable.",
        ),
    ] = None
    skip_missing: SkipMissing = False
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry_run",
            help="Only check: macros, tasks, caches, vocabularies, checkpoints. Nothing is"
            " written.",
        ),
    ] = False


def check_restored(restore: RestoreConfig | None, places: Mapping[str, str], prefix: str) -> None:
    """Refuses addresses of checkpoints that cannot be opened, before tasks are imported."""
    if restore is None:
        return
    named = [("path", path) for path in restore.paths]
    for field, path in [*named, ("adapter", restore.adapter)]:
        if path is not None:
            where = f"utils.RestoreCheckpointConfig.{field}"
            check_address(path, places.get(f"{prefix}.{field}", where))


def parse_files(inputs: T5xInputs) -> Parsed:
    """The program that the command line's gin files configure; shows warnings.

    Raises:
      UserError: see `t0repro.config.t5x.gin_files.parse`.
    """
    echo("reading gin files ...", err=True)
    parsed = parse(inputs)
    for warning in (*parsed.warnings, *list_differences(parsed.program)):
        typer.echo(f"warning: {warning}", err=True)
    return parsed
