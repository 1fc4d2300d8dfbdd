"""A worker's part of caching: spools rows, and writes a spool's shards as TFRecord files.

Workers are processes of this machine, or those of Beam's runners.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import hashlib
import itertools
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from t0repro.errors import UserError
from t0repro.tasks.prompt_cache.example_writer import ExampleWriter, Statistics, Tokenizer
from t0repro.tasks.prompt_cache.folders import shard_names
from t0repro.tasks.prompt_cache.prompts import Prompt, RowsOfSplit
from t0repro.tasks.prompt_cache.records import RecordFile
from t0repro.tasks.prompt_cache.spool import Spool, SpoolReader, write_spool
from t0repro.tasks.readers import Reader, find_reader
from t0repro.tasks.rendering import Renderer, compile_template
from t0repro.tasks.source import Split, cannot_render, check_rows, schema_of_rows
from t0repro.tasks.templates import Drop, Rendering, promptsource_environment

ROWS_PER_SHARD = 1 << 14
"""Rows per shard; a larger split gets more shards than requested, to bound memory."""

_BATCH = 256  # rows whose inputs are tokenized together
MAX_NUMBERS = 20  # of dropped rows, in the provenance file

_threads = 1  # SentencePiece's threads in this process


def start_worker(parent: int, threads: int) -> None:
    """Prepares a worker process: sets its tokenizer's threads, and makes it end with `parent`."""
    global _threads
    _threads = threads
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    try:
        # 1 is PR_SET_PDEATHSIG: once the run is killed, nothing more is written.
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    except (AttributeError, OSError):  # not Linux
        pass
    if os.getppid() != parent:  # the parent died before that call
        os._exit(1)


def warm_up() -> None:
    """Imports what rendering needs."""
    promptsource_environment()


@dataclasses.dataclass(frozen=True)
class SpooledRows:
    """A split's rows on disk, and their origin for the provenance file."""

    spool: Spool
    origin: Mapping[str, Any]


def reader_of(rows: RowsOfSplit) -> Reader:
    """The reader of the rows, wherever they are now: on this machine or the hub."""
    root = None if rows.root is None else Path(rows.root)
    return find_reader(root, rows.dataset, rows.subset, rows.file)


def rows_of(rows: RowsOfSplit, reader: Reader) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields the same rows as `t0repro.tasks.source.PromptedRows.rows`, for all templates of a run.

    Raises:
      UserError: As for `t0repro.tasks.source.check_rows`.
    """
    columns, limit = frozenset(rows.columns), Split(rows.file, rows.max_rows, rows.seed)
    schema = schema_of_rows(rows.dataset, rows.subset, reader, columns)
    return check_rows(rows.dataset, rows.subset, reader, schema, limit)


def spool_rows(rows: RowsOfSplit, base: str) -> SpooledRows:
    """Reads the rows of a split into a spool.

    Raises:
      UserError: if a row is broken.
    """
    reader = reader_of(rows)
    spool = write_spool(rows_of(rows, reader), Path(base))
    # The cache's bytes must not depend on where the data is or when it was copied.
    origin = {
        key: value for key, value in reader.origin().items() if key not in ("path", "modified_ns")
    }
    split = {"dataset": rows.dataset, "subset": rows.subset, "split": rows.file}
    drawn = {} if rows.seed is None else {"seed": rows.seed}
    return SpooledRows(spool, {**split, **origin, "max_rows": rows.max_rows, **drawn})


@dataclasses.dataclass(frozen=True)
class Piece:
    """Some shards of one split of one prompt.

    Attributes:
      prompt: The prompt.
      split: The split's name.
      spool: The split's rows.
      folders: Whether examples are a twin's (score_eval) -> the folder to write them to.
      shards: Numbers of the shards to write, out of `num_shards`.
      num_shards: Number of shards of the whole split.
      vocabulary: File with the vocabulary's serialized model, extra ids included.
      seed: Seed for the templates' draws and the order of rows.
      ordinals: File with each row's number among those that the template keeps, if it drops some;
        the twin's `idx` counts only these.
    """

    prompt: Prompt
    split: str
    spool: Spool
    folders: Mapping[bool, str]
    shards: Sequence[int]
    num_shards: int
    vocabulary: str
    seed: int
    ordinals: str | None = None


@dataclasses.dataclass
class PieceResult:
    """The result of writing a piece.

    Attributes:
      rows: Number of rows rendered.
      statistics: Whether examples are a twin's -> their statistics.
      dropped: Reason -> places in the spool.
      files: Whether examples are a twin's -> file name -> its records and bytes.
    """

    rows: int
    statistics: dict[bool, Statistics]
    dropped: dict[str, list[int]]
    files: dict[bool, dict[str, dict[str, int]]]


def number_of_shards(rows: int, min_shards: int) -> int:
    """Number of files to write a split of `rows` rows to."""
    # Rounded up.
    return max(min_shards, -(-rows // ROWS_PER_SHARD))


def shard_order(count: int, shard: int, num_shards: int, seed: str) -> np.ndarray:
    """Places in the spool of a shard's rows, in writing order.

    These are every num_shards-th row, shuffled. SeqIO reads several files at once through a shuffle
    buffer, so that even a dataset sorted by label is then well mixed. SeqIO's own cache is shuffled
    too.
    """
    # The same rows for any number of workers.
    places = np.arange(shard, count, num_shards)
    # PCG64 by name: numpy may give default_rng another generator, and a cache's bytes must stay.
    digest = hashlib.sha256(f"{seed}/{shard}".encode()).digest()
    np.random.Generator(np.random.PCG64(int.from_bytes(digest[:16], "little"))).shuffle(places)
    return places


def draw_key(source: str, split: str, number: int, seed: int) -> str:
    """The seed for one row's random choices; with seed 0 it equals that of the SeqIO pipeline."""
    key = f"{source}/{split}/{number}"
    return f"{seed}/{key}" if seed else key


def write_piece(piece: Piece) -> PieceResult:
    """Renders, tokenizes and writes the shards of a piece.

    Raises:
      UserError: If the template cannot render a row; names the row.
    """
    result = PieceResult(
        rows=0,
        statistics={form: Statistics() for form in piece.folders},
        dropped={},
        files={form: {} for form in piece.folders},
    )
    ordinals = (
        # Mapped, since a piece needs only some of the rows; without pickle, since it is
        # only numbers.
        np.load(piece.ordinals, mmap_mode="r", allow_pickle=False) if piece.ordinals else None
    )
    with piece.spool.open() as reader:
        for shard in piece.shards:
            files = {
                form: RecordFile(Path(folder) / _file_name(piece, shard))
                for form, folder in piece.folders.items()
            }
            try:
                renderings = _renderings(piece, reader, shard, result)
                while batch := list(itertools.islice(renderings, _BATCH)):
                    _write_batch(piece, batch, ordinals, files, result.statistics)
                for form, file in files.items():
                    file.close()
                    written = {"records": file.records, "bytes": file.bytes}
                    result.files[form][_file_name(piece, shard)] = written
            # Closing again is harmless, and an error must not leave a file open.
            finally:
                for file in files.values():
                    file.abandon()
    return result


def _file_name(piece: Piece, shard: int) -> str:
    return shard_names(piece.split, piece.num_shards)[shard]


def _renderings(
    piece: Piece, reader: SpoolReader, shard: int, result: PieceResult
) -> Iterator[tuple[int, Rendering]]:
    prompt = piece.prompt
    template = compiled_template(prompt)
    order = f"{piece.seed}/{prompt.source}/{piece.split}"
    places = shard_order(piece.spool.count, shard, piece.num_shards, order)
    for place, number, row in reader.rows(places):
        result.rows += 1
        rendering = render_row(prompt, template, piece.split, number, row, piece.seed)
        if isinstance(rendering, Drop):
            result.dropped.setdefault(rendering.value, []).append(place)
        else:
            yield place, rendering


def render_row(
    prompt: Prompt,
    template: Renderer,
    split: str,
    number: int,
    row: Mapping[str, Any],
    seed: int,
) -> Rendering | Drop:
    """Renders one row, or returns why it is dropped.

    Raises:
      UserError: If the row cannot be rendered.
    """
    try:
        rendering = template.render(row, draw_key(prompt.source, split, number, seed))
        if isinstance(rendering, Rendering):
            # Text that UTF-8 cannot encode must fail here, where the row is known.
            rendering.inputs.encode(), rendering.targets.encode()
        return rendering
    except Exception as error:
        place = reader_of(prompt.rows[split]).place(number)
        raise cannot_render(template.name, error, row, f"task {prompt.source}, {place}") from error


def _write_batch(
    piece: Piece,
    batch: Sequence[tuple[int, Rendering]],
    ordinals: np.ndarray | None,
    files: Mapping[bool, RecordFile],
    statistics: Mapping[bool, Statistics],
) -> None:
    # Cached by path and eos, which are the same for all pieces of a task.
    writer = _example_writer(piece.vocabulary, tuple(sorted(piece.prompt.eos.items())))
    has_choices = bool(piece.prompt.template.answer_choices)
    inputs = writer.inputs([rendering for _, rendering in batch])
    for (place, rendering), encoded in zip(batch, inputs, strict=True):
        if False in files:
            files[False].write(writer.as_text(rendering, encoded, has_choices, statistics[False]))
        if True in files:
            ordinal = place if ordinals is None else int(ordinals[place])
            for record in writer.as_ranking(rendering, encoded, ordinal, statistics[True]):
                files[True].write(record)


def compiled_template(prompt: Prompt) -> Renderer:
    """The prompt's compiled template, cached; a Jinja error names template and task."""
    return _compile(prompt.template, prompt.source)


@functools.lru_cache(maxsize=64)
def _compile(template: Any, task: str) -> Renderer:
    try:
        return compile_template(template)
    except UserError as error:
        raise UserError(error.what, where=f"task {task}, {error.where}", fix=error.fix) from error


@functools.lru_cache(maxsize=4)
def _example_writer(vocabulary: str, eos: tuple[tuple[str, int | None], ...]) -> ExampleWriter:
    return ExampleWriter(Tokenizer(Path(vocabulary).read_bytes(), _threads), dict(eos))
