"""Reads rows from Parquet, and from Arrow: `datasets`' streams, and files as Feather has them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from t0repro.errors import INSTALL_PYARROW, UserError

_FILE_MARK = b"ARROW1"


def read_arrow(path: Path, start: int = 0, stop: int | None = None) -> Iterator[dict[str, Any]]:
    """Yields rows `start` to `stop` (exclusive); batches and row groups before them stay encoded.

    Raises:
      UserError: If the file is damaged, or a value has no counterpart in Python.
    """
    for first, batch in _batches(path, start, stop):
        low = max(start - first, 0)
        high = batch.num_rows if stop is None else min(stop - first, batch.num_rows)
        if low < high:
            yield from _batch_rows(path, batch.slice(low, high - low), first + low)


def count_arrow(path: Path) -> int:
    """Number of rows, none of them decoded."""
    if path.suffix == ".parquet":
        with _parquet(path) as file:
            return file.metadata.num_rows
    return sum(batch.num_rows for _, batch in _batches(path))


def class_names(path: Path) -> dict[str, list[str]]:
    """Column -> names of its classes, from the metadata that `datasets` writes to its files."""
    if path.suffix == ".parquet":
        with _parquet(path) as file:
            metadata = file.schema_arrow.metadata
    else:
        with _stream(path) as stream:
            metadata = stream.schema.metadata
    written = (metadata or {}).get(b"huggingface")
    try:
        features = json.loads(written or b"{}").get("info", {}).get("features") or {}
        named = {name: each for name, each in features.items() if isinstance(each, dict)}
    except (ValueError, AttributeError):
        raise UserError(
            "The metadata that `datasets` wrote into the file (huggingface) is damaged.",
            where=str(path),
            fix="Write the file again, with this metadata or without it.",
        ) from None
    return {
        name: feature["names"]
        for name, feature in named.items()
        # Classes that are only counted have no names.
        if feature.get("_type") == "ClassLabel" and feature.get("names")
    }


def _parquet(path: Path) -> Any:
    return _open(path, lambda arrow: arrow.parquet.ParquetFile(path))


def _stream(path: Path) -> Any:
    def open_mapped(arrow: Any) -> Any:
        # Mapped, so that batches that are passed over are not read.
        source = arrow.memory_map(str(path))
        is_file = source.read(len(_FILE_MARK)) == _FILE_MARK
        source.seek(0)
        return (arrow.ipc.open_file if is_file else arrow.ipc.open_stream)(source)

    return _open(path, open_mapped)


def _open(path: Path, open_file: Any) -> Any:
    try:
        import pyarrow.ipc
        import pyarrow.parquet
    except ModuleNotFoundError as error:
        raise UserError(
            f"Rows in {_kind(path)} need pyarrow, which is not installed.",
            where=str(path),
            fix=INSTALL_PYARROW,
        ) from error
    try:
        return open_file(pyarrow)
    except (OSError, ValueError) as error:  # pyarrow's ArrowInvalid is a ValueError
        raise UserError(
            f"The file is not {_kind(path)}: {error}", where=str(path), fix="Write the file again."
        ) from error


def _kind(path: Path) -> str:
    return "Parquet" if path.suffix == ".parquet" else "Arrow"


def _batches(path: Path, start: int = 0, stop: int | None = None) -> Iterator[tuple[int, Any]]:
    """Yields (number of its first row, batch) of every batch that may hold wanted rows."""
    read = _read_parquet if path.suffix == ".parquet" else _read_stream
    try:
        yield from read(path, start, stop)
    except (OSError, ValueError) as error:
        raise UserError(
            f"The file is damaged: {' '.join(str(error).split())}",
            where=str(path),
            fix="Write the file again.",
        ) from error


def _read_parquet(path: Path, start: int, stop: int | None) -> Iterator[tuple[int, Any]]:
    """Yields (number of its first row, batch) of the row groups that hold wanted rows."""
    first = 0
    with _parquet(path) as file:
        end = file.metadata.num_rows if stop is None else stop
        for group in range(file.num_row_groups):
            rows = file.metadata.row_group(group).num_rows
            if first + rows > start and first < end:
                at = first
                for batch in file.iter_batches(row_groups=[group]):
                    yield at, batch
                    at += batch.num_rows
            first += rows


def _read_stream(path: Path, start: int, stop: int | None) -> Iterator[tuple[int, Any]]:
    """Yields (number of its first row, batch) of every batch up to the last wanted row."""
    first = 0
    with _stream(path) as stream:
        batches = stream
        if hasattr(stream, "num_record_batches"):  # a file is no iterator
            batches = map(stream.get_batch, range(stream.num_record_batches))
        for batch in batches:
            if stop is not None and first >= stop:
                return
            yield first, batch
            first += batch.num_rows


def _batch_rows(path: Path, batch: Any, first: int) -> list[dict[str, Any]]:
    names = batch.schema.names
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UserError(
            f"The file has two columns {twice!r}; a row has one value of a name.",
            where=str(path),
            fix="Rename or remove one of them.",
        )
    columns = []
    for name, column in zip(names, _truncate_times(batch).columns, strict=True):
        try:
            columns.append(column.to_pylist())
        # Bytes that are not UTF-8; a year after 9999; an unknown time zone.
        except (ValueError, OverflowError, LookupError) as error:
            is_text = isinstance(error, UnicodeDecodeError)
            what = "text that is not UTF-8" if is_text else "a value that Python lacks"
            raise UserError(
                f"Column {name!r} has {what}: {error}.",
                where=f"{path}, rows {first + 1} to {first + batch.num_rows}",
                fix="Write the file again, the column as text in UTF-8, or leave it out.",
            ) from error
    return [dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True)]


def _truncate_times(batch: Any) -> Any:
    """A batch whose times are no finer than Python's; pandas writes nanoseconds."""
    import pyarrow as pa

    def truncate(kind: Any) -> Any:
        if pa.types.is_timestamp(kind) and kind.unit == "ns":
            return pa.timestamp("us", kind.tz)
        if pa.types.is_duration(kind) and kind.unit == "ns":
            return pa.duration("us")
        if pa.types.is_time64(kind) and kind.unit == "ns":
            return pa.time64("us")
        if pa.types.is_struct(kind):
            return pa.struct([field.with_type(truncate(field.type)) for field in kind])
        for is_kind, make in (
            (pa.types.is_list, pa.list_),
            (pa.types.is_large_list, pa.large_list),
        ):
            if is_kind(kind):
                return make(kind.value_field.with_type(truncate(kind.value_type)))
        return kind

    columns = [
        column if (kind := truncate(column.type)) == column.type else column.cast(kind, safe=False)
        for column in batch.columns
    ]
    return pa.RecordBatch.from_arrays(columns, names=batch.schema.names)
