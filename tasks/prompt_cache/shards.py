"""The worker's part of a cache: rows to a spool, and a spool's shards to TFRecord files."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import hashlib
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from t0repro.errors import UserError
from t0repro.tasks.prompt_cache.folders import shard_names
from t0repro.tasks.prompt_cache.plan import Prompt, RowsOfSplit
from t0repro.tasks.prompt_cache.prompts import ExampleWriter, Statistics
from t0repro.tasks.prompt_cache.records import RecordFile
from t0repro.tasks.prompt_cache.spool import Spool, SpoolReader, write_spool
from t0repro.tasks.prompt_cache.tokens import Tokenizer
from t0repro.tasks.readers import Reader, find_reader
from t0repro.tasks.source import cannot_render, checked_rows, schema_of_rows
from t0repro.tasks.templates import (
    Drop,
    Renderer,
    Rendering,
    compile_template,
    promptsource_environment,
)

ROWS_PER_SHARD = 1 << 14
"""A larger split has more shards than asked for, so that each is written from bounded memory."""

_BATCH = 256  # rows whose inputs are tokenized together
NUMBERS_KEPT = 20  # of dropped rows, in the provenance file

_threads = 1  # of SentencePiece in this process


def start_worker(parent: int, threads: int) -> None:
    """Prepares a worker process: it tokenizes with so many threads, and ends with `parent`."""
    global _threads
    _threads = threads
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process above decides
    try:
        # PR_SET_PDEATHSIG: nothing is written any more once the run was killed.
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    except (AttributeError, OSError):  # not Linux
        pass
    if os.getppid() != parent:  # it was killed before that call
        os._exit(1)


def warm_up() -> None:
    """Imports what rendering takes."""
    promptsource_environment()


# Rows --------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class SpooledRows:
    """A split's rows on disk, and what the provenance file says of their origin."""

    spool: Spool
    origin: Mapping[str, Any]


def reader_of(rows: RowsOfSplit) -> Reader:
    """Where the rows are now: on this machine, or on the hub."""
    root = None if rows.root is None else Path(rows.root)
    return find_reader(root, rows.dataset, rows.subset, rows.file)


def rows_of(rows: RowsOfSplit, reader: Reader) -> Iterator[tuple[int, dict[str, Any]]]:
    """The same rows as `t0repro.tasks.source.PromptedRows.rows`, for all templates of a run.

    Raises:
      UserError: as `t0repro.tasks.source.checked_rows`.
    """
    columns = frozenset(rows.columns)
    schema = schema_of_rows(rows.dataset, rows.subset, reader, columns)
    return checked_rows(rows.dataset, rows.subset, reader, schema, rows.max_rows)


def spool_rows(rows: RowsOfSplit, base: str) -> SpooledRows:
    """Reads the rows of a split into a spool.

    Raises:
      UserError: if a row is broken.
    """
    reader = reader_of(rows)
    spool = write_spool(rows_of(rows, reader), Path(base))
    # Neither where the data lies nor when it was copied there makes another cache.
    origin = {
        key: value for key, value in reader.origin().items() if key not in ("path", "modified_ns")
    }
    split = {"dataset": rows.dataset, "subset": rows.subset, "split": rows.file}
    return SpooledRows(spool, {**split, **origin, "max_rows": rows.max_rows})


# Shards ------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Piece:
    """Some shards of one split of one prompt.

    Attributes:
      folders: of the tasks that want the split, by the form of their examples (score_eval or not).
      shards: the numbers of the shards to write, of `num_shards`.
      vocabulary: the file of the vocabulary's serialized model, extra ids included.
      ordinals: a file with the number of each row among those that the template keeps, where it
        drops some; the twin's `idx` counts only these.
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
    """What was written of a piece.

    Attributes:
      statistics: by the form of the examples.
      dropped: reason -> places in the spool.
      files: by the form of the examples, each shard's records and bytes.
    """

    rows: int
    statistics: dict[bool, Statistics]
    dropped: dict[str, list[int]]
    files: dict[bool, dict[str, dict[str, int]]]


def number_of_shards(rows: int, min_shards: int) -> int:
    """How many files a split of so many rows is written to."""
    return max(min_shards, -(-rows // ROWS_PER_SHARD))


def shard_order(count: int, shard: int, num_shards: int, seed: str) -> np.ndarray:
    """Places in the spool of a shard's rows, in the order that they are written.

    Every num_shards-th row, shuffled: with SeqIO's reading of several files at once, and its
    buffer, a dataset sorted by its labels is then read well mixed. SeqIO's cache is shuffled too.
    """
    places = np.arange(shard, count, num_shards)
    digest = hashlib.sha256(f"{seed}/{shard}".encode()).digest()
    np.random.Generator(np.random.PCG64(int.from_bytes(digest[:16], "little"))).shuffle(places)
    return places


def draw_key(source: str, split: str, number: int, seed: int) -> str:
    """Seeds the draws of one row; with seed 0 as SeqIO's own pipeline seeds them."""
    key = f"{source}/{split}/{number}"
    return f"{seed}/{key}" if seed else key


def write_piece(piece: Piece) -> PieceResult:
    """Renders, tokenizes and writes the shards of a piece.

    Raises:
      UserError: if the template cannot render a row, which is named.
    """
    result = PieceResult(
        rows=0,
        statistics={form: Statistics() for form in piece.folders},
        dropped={},
        files={form: {} for form in piece.folders},
    )
    ordinals = np.load(piece.ordinals, mmap_mode="r") if piece.ordinals else None
    with piece.spool.open() as reader:
        for shard in piece.shards:
            files = {
                form: RecordFile(Path(folder) / _file_name(piece, shard))
                for form, folder in piece.folders.items()
            }
            try:
                for batch in _batches(_renderings(piece, reader, shard, result), _BATCH):
                    _write_batch(piece, batch, ordinals, files, result.statistics)
                for form, file in files.items():
                    file.close()
                    written = {"records": file.records, "bytes": file.bytes}
                    result.files[form][_file_name(piece, shard)] = written
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
    """Renders one row, or says why it is dropped.

    Raises:
      UserError: if it cannot be rendered.
    """
    try:
        rendering = template.render(row, draw_key(prompt.source, split, number, seed))
        if isinstance(rendering, Rendering):
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


def _batches(items: Iterator[Any], size: int) -> Iterator[list[Any]]:
    batch = []
    for item in items:
        batch.append(item)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch


# What a worker keeps between pieces -------------------------------------------------------------


def compiled_template(prompt: Prompt) -> Renderer:
    """The prompt's template, compiled and kept; a Jinja error names template and task."""
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
