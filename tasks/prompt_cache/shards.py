"""A worker's part of caching: spools rows, and writes a spool's shards as TFRecord files.

Workers are processes of this machine, or those of Beam's runners.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import hashlib
import io
import itertools
import json
import os
import signal
import tempfile
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import dacite
import numpy as np

from t0repro.errors import UserError
from t0repro.files import write_atomically
from t0repro.tasks import sandbox
from t0repro.tasks.prompt_cache.folders import shard_names
from t0repro.tasks.prompt_cache.plan import Prompt, RowsOfSplit
from t0repro.tasks.prompt_cache.records import ExampleWriter, RecordFile, Statistics, Tokenizer
from t0repro.tasks.readers import Reader, find_reader
from t0repro.tasks.source import Split, cannot_render, checked_rows, schema_of_rows
from t0repro.tasks.templates import (
    Drop,
    Renderer,
    Rendering,
    compile_template,
    promptsource_environment,
)


@dataclasses.dataclass(frozen=True)
class Spool:
    """The files of a split's rows: `<base>.rows`, with their offsets and numbers in the source."""

    base: str
    count: int

    def open(self) -> SpoolReader:
        """Opens the rows for reading."""
        return SpoolReader(self)

    def remove(self) -> None:
        """Removes the files."""
        for suffix in (".rows", ".offsets.npy", ".numbers.npy", ".ordinals.npy"):
            Path(self.base + suffix).unlink(missing_ok=True)


def write_spool(rows: Iterable[tuple[int, dict[str, Any]]], base: Path) -> Spool:
    """Writes (number in the source, row) pairs; needs 16 bytes of memory per row."""
    offsets, numbers = array("Q", [0]), array("Q")
    with open(f"{base}.rows", "wb", buffering=1 << 20) as file:
        for number, row in rows:
            data = sandbox.encode_row(row)
            file.write(data)
            offsets.append(offsets[-1] + len(data))
            numbers.append(number)
    save_array(Path(f"{base}.offsets.npy"), np.frombuffer(offsets, np.uint64))
    save_array(Path(f"{base}.numbers.npy"), np.frombuffer(numbers, np.uint64))
    return Spool(str(base), len(numbers))


def save_array(path: Path, values: np.ndarray) -> None:
    """Writes an array like np.save, but raises the system's own error on failure.

    On a full disk, NumPy's own file writing raises an OSError without an error number.
    """
    whole = io.BytesIO()
    np.save(whole, values)
    path.write_bytes(whole.getbuffer())


class SpoolReader:
    """Reads rows by their place in the spool; a context manager."""

    def __init__(self, spool: Spool):
        # Map it rather than load it: a worker with a few shards needs only part of it.
        self._offsets = np.load(f"{spool.base}.offsets.npy", mmap_mode="r", allow_pickle=False)
        empty = np.zeros(0, np.uint64)  # which cannot be mapped
        numbers = f"{spool.base}.numbers.npy"
        self._numbers = (
            np.load(numbers, mmap_mode="r", allow_pickle=False) if spool.count else empty
        )
        self._file = os.open(f"{spool.base}.rows", os.O_RDONLY)

    def __enter__(self) -> SpoolReader:
        return self

    def __exit__(self, *exception: object) -> None:
        os.close(self._file)

    def rows(self, places: np.ndarray) -> Iterator[tuple[int, int, dict[str, Any]]]:
        """Yields (place, number in the source, row) for each place, in the order given."""
        for place in places.tolist():
            start, end = int(self._offsets[place]), int(self._offsets[place + 1])
            # Read, not mapped: mapped pages would count toward this process's memory.
            row = sandbox.decode_row(os.pread(self._file, end - start, start))
            yield place, int(self._numbers[place]), row


# ---- A worker's part of caching: spools rows, and writes a spool's shards as TFRecord files ------


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


# Rows --------------------------------------------------------------------------------------------


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
      UserError: As for `t0repro.tasks.source.checked_rows`.
    """
    columns, limit = frozenset(rows.columns), Split(rows.file, rows.max_rows, rows.seed)
    schema = schema_of_rows(rows.dataset, rows.subset, reader, columns)
    return checked_rows(rows.dataset, rows.subset, reader, schema, limit)


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


# Shards ------------------------------------------------------------------------------------------


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


# What a worker keeps between pieces -------------------------------------------------------------


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


# Beam's runners in place of local processes -------------------------------------------------------
# One pipeline at a time runs all queued work: the first spools the rows of all splits, the second
# writes all shards, and a third rewrites twins whose rows are renumbered. The same functions write
# the same bytes. Workers read and write the cache folder at the same path as this machine, and find
# the rows there.

# The result type of each function, since results come back as JSON.
_RESULTS = {"spool_rows": SpooledRows, "write_piece": PieceResult}
_FUNCTIONS = {"spool_rows": spool_rows, "write_piece": write_piece}


class BeamWorkers:
    """Accepts calls like a process pool, and runs them when a caller waits for their results.

    Args:
      options: Beam's pipeline options, as on the command line of a pipeline.
      folder: a folder that all workers can access, for results.
    """

    def __init__(self, options: Sequence[str], folder: Path):
        self._options, self._folder = list(options), folder
        self._queued: list[tuple[Future[Any], str, tuple[Any, ...]]] = []

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Queues a call of one of `_FUNCTIONS`."""
        future: Future[Any] = Future()
        self._queued.append((future, function.__name__, arguments))
        return future

    def finished(self, futures: Collection[Future[Any]]) -> set[Future[Any]]:
        """Runs a pipeline over everything queued, after which all futures have their results."""
        import apache_beam as beam

        queued, self._queued = self._queued, []
        with tempfile.TemporaryDirectory(dir=self._folder) as results:
            calls = [(n, name, arguments) for n, (_, name, arguments) in enumerate(queued)]
            with _pipeline(self._options) as pipeline:
                # Reshuffle, so that calls are spread over all workers.
                _ = pipeline | beam.Create(calls) | beam.Reshuffle() | beam.Map(_call, results)
            for number, (future, name, _) in enumerate(queued):
                future.set_result(_read(Path(results, f"{number}.json"), name))
        return set(futures)


def _pipeline(options: Sequence[str]) -> Any:
    """A pipeline with these options.

    Raises:
      UserError: if Beam refuses them.
    """
    import apache_beam as beam
    from apache_beam.options.pipeline_options import PipelineOptions

    said = io.StringIO()
    try:
        # argparse prints the refused option, below hundreds of lines of usage, and exits.
        with contextlib.redirect_stderr(said):
            parsed = PipelineOptions(options)
            parsed.get_all_options()  # by itself Beam parses many of them while it works
            return beam.Pipeline(options=parsed)
    except (ValueError, SystemExit) as error:
        reason = error if isinstance(error, ValueError) else said.getvalue().splitlines()[-1]
        raise UserError(
            f"Beam refuses its options: {reason}",
            where="--beam_options",
            fix="Correct them: the options of Beam's own pipelines, joined by commas.",
        ) from error


def _call(call: tuple[int, str, tuple[Any, ...]], results: str) -> None:
    """Runs a call on a worker; writes its result, or the user error that it found."""
    number, name, arguments = call
    try:
        result = dataclasses.asdict(_FUNCTIONS[name](*arguments))
    except UserError as error:
        result = {"error": [error.what, error.where, error.fix]}
    write_atomically(Path(results, f"{number}.json"), json.dumps(result))


def _read(path: Path, name: str) -> Any:
    """A call's result.

    Raises:
      UserError: if the call found a user error.
    """
    result = json.loads(path.read_text(encoding="utf-8"))
    if "error" in result:
        what, where, fix = result["error"]
        raise UserError(what, where=where, fix=fix)
    for field in ("statistics", "files"):  # JSON's names are strings
        if field in result:
            result[field] = {key == "true": value for key, value in result[field].items()}
    return dacite.from_dict(_RESULTS[name], result, dacite.Config(strict=True))
