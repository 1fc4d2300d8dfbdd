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
      UserError: If the file is damaged, or text in it is not UTF-8.
    """
    batches = _read_parquet if path.suffix == ".parquet" else _read_stream
    for first, batch in batches(path, start, stop):
        low = max(start - first, 0)
        high = batch.num_rows if stop is None else min(stop - first, batch.num_rows)
        if low < high:
            yield from _batch_rows(path, batch.slice(low, high - low), first + low)


def count_arrow(path: Path) -> int:
    """Number of rows, none of them decoded."""
    if path.suffix == ".parquet":
        with _parquet(path) as file:
            return file.metadata.num_rows
    return sum(batch.num_rows for _, batch in _read_stream(path))


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


def _read_stream(path: Path, start: int = 0, stop: int | None = None) -> Iterator[tuple[int, Any]]:
    """Yields (number of its first row, batch) of every batch up to the last wanted row."""
    first = 0
    with _stream(path) as stream:
        try:
            batches = stream
            if hasattr(stream, "num_record_batches"):  # a file is no iterator
                batches = map(stream.get_batch, range(stream.num_record_batches))
            for batch in batches:
                if stop is not None and first >= stop:
                    return
                yield first, batch
                first += batch.num_rows
        except (OSError, ValueError) as error:
            raise UserError(
                f"The file is damaged: {error}", where=str(path), fix="Write the file again."
            ) from error


def _batch_rows(path: Path, batch: Any, first: int) -> list[dict[str, Any]]:
    names = batch.schema.names
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UserError(
            f"The file has two columns {twice!r}; a row has one value of a name.",
            where=str(path),
            fix="Rename or remove one of them.",
        )
    try:
        return _truncate_times(batch).to_pylist()
    # Decoded bytes are text only if they are UTF-8.
    except UnicodeDecodeError as error:
        raise UserError(
            f"Text is not UTF-8: {error}.",
            where=f"{path}, rows {first + 1} to {first + batch.num_rows}",
            fix="Write the file again, from text in UTF-8.",
        ) from error


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
