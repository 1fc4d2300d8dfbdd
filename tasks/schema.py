"""Converts rows to the schema for which the templates were written, and checks them against it.

A schema is a dataset's features in `datasets` 1.12, the version of T0's time, from the catalog.
It is compiled once to plain functions, one per column, since every row of every template passes
through it: a row of four columns takes two or three microseconds.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jinja2
import jinja2.meta

from t0repro.errors import UserError
from t0repro.tasks.catalog import Alias, catalog, features_of, modeled_on
from t0repro.tasks.templates import is_own, load_template, promptsource_environment, template_names
from t0repro.words import some

HIDDEN = -1
"""The label of a row whose label is hidden."""

NUMERALS = frozenset({"label", "answer", "id", "question_id"})
"""Columns that are text in some datasets although they hold numbers: HellaSwag's label is "3"."""


class SchemaError(ValueError):
    """A row does not fit its schema.

    Attributes:
      column: Name of the column, or of a field inside it, for instance `answers.text`.
      reason: What is wrong with it.
    """

    def __init__(self, column: str, reason: str):
        self.column, self.reason = column, reason
        super().__init__(f"Column {column!r}: {reason}.")


Convert = Callable[[Any], Any]


class Schema:
    """A compiled schema.

    Args:
      features: Column -> feature, in the notation of `dataset_infos.json`.
      required: Columns that templates read; others may be missing or null.
      aliases: Column -> other names that it goes by.
      class_names: Column of the data -> names of its classes, if the data has them: class numbers
        are then translated by name.
    """

    def __init__(
        self,
        features: Mapping[str, Any],
        required: Iterable[str],
        aliases: Mapping[str, Sequence[Alias]] | None = None,
        class_names: Mapping[str, Sequence[str]] | None = None,
    ):
        needed = set(required)
        self._names = list(features)
        self._columns: list[tuple[str, Convert, bool]] = []
        self._others: dict[str, list[tuple[str, Convert]]] = {}
        for column, feature in features.items():
            convert = _compile(feature, (class_names or {}).get(column))
            if convert is _text and column in NUMERALS:
                convert = _numeral
            self._columns.append((column, convert, column in needed))
            names = [
                (alias.name, self._convert_renamed(feature, alias, class_names))
                for alias in (aliases or {}).get(column, ())
            ]
            if "-" in column:  # promptsource writes underscores for hyphens
                names.insert(0, (column.replace("-", "_"), convert))
            self._others[column] = names

    @staticmethod
    def _convert_renamed(
        feature: Any, alias: Alias, class_names: Mapping[str, Sequence[str]] | None
    ) -> Convert:
        names = (class_names or {}).get(alias.name)
        if isinstance(feature, dict) and feature.get("_type") == "ClassLabel":
            return _convert_renamed_label(alias, feature["names"], names)
        return _compile(feature, names)

    def bring(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """The row with only the schema's columns, each converted to the schema's type.

        Raises:
          SchemaError: If a column does not fit.
        """
        brought: dict[str, Any] = {}
        # Follow the schema's order, whatever the row's.
        for column, convert, needed in self._columns:
            if column in row:
                value = row[column]
            else:
                name, convert = self._alias(column, row)
                # Columns that no template reads may be missing.
                if name is None:
                    if needed:
                        known = ", ".join(map(repr, row)) or "no columns"
                        raise SchemaError(column, f"it is missing; the row has {known}")
                    continue
                value = row[name]
            if value is None and not needed:
                brought[column] = None
                continue
            try:
                brought[column] = convert(value)
            except SchemaError as error:
                inside = error.column
                raise SchemaError(f"{column}{inside}", error.reason) from None
        return brought

    def _alias(self, column: str, row: Mapping[str, Any]) -> tuple[str | None, Convert]:
        for name, convert in self._others[column]:
            if name in row:
                return name, convert
        return None, _text


def _format_value(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _wrong(value: Any, wanted: str) -> SchemaError:
    if value is None:
        return SchemaError("", f"it is null where {wanted} is wanted")
    return SchemaError("", f"it is {_format_value(value)} ({type(value).__name__}), not {wanted}")


def _compile(feature: Any, class_names: Sequence[str] | None = None) -> Convert:
    """Returns a function that converts a value to a feature's type, or raises SchemaError."""
    if isinstance(feature, list):
        return _list_of(feature[0])
    kind = feature.get("_type")
    if kind == "Sequence":
        inner = feature["feature"]
        # In `datasets`, a sequence of records is a record of sequences.
        is_record = isinstance(inner, dict) and "_type" not in inner
        return _record_of_lists(inner) if is_record else _list_of(inner)
    if kind == "ClassLabel":
        return _class_label(feature["names"], class_names)
    if kind == "Value":
        # Treat "int32", "int64" and the like as one type.
        return _VALUES[feature["dtype"].rstrip("0123456789")]
    return _record({name: _compile(inner) for name, inner in feature.items()})


def _text(value: Any) -> str:
    if type(value) is str:
        return value
    raise _wrong(value, "text")


def _numeral(value: Any) -> str:
    # pandas reads a column of numerals as numbers; written again, nothing is lost.
    whole = type(value) is int or (type(value) is float and value.is_integer())
    return str(int(value)) if whole else _text(value)


def _integer(value: Any) -> int:
    if type(value) is int:
        return value
    # pandas writes an integer column as floats if one of its values was missing.
    if type(value) is float and value.is_integer():
        return int(value)
    raise _wrong(value, "a whole number")


def _number(value: Any) -> float:
    if type(value) is float:
        return value
    if type(value) is int:
        return float(value)
    raise _wrong(value, "a number")


def _truth(value: Any) -> bool:
    if type(value) is bool:
        return value
    raise _wrong(value, "true or false")


_VALUES: Mapping[str, Convert] = {
    "string": _text,
    "large_string": _text,
    "int": _integer,
    "uint": _integer,
    "float": _number,
    "bool": _truth,
}


def _class_label(names: Sequence[str], data_names: Sequence[str] | None) -> Convert:
    number_of = {name: number for number, name in enumerate(names)}
    count = len(names)
    translated = None
    if data_names is not None and list(data_names) != list(names):
        translated = [number_of.get(name) for name in data_names]

    listed = some([repr(name) for name in names])

    def convert(value: Any) -> int:
        if type(value) is bool:  # BoolQ's own files say true and false
            value = str(value)
        if type(value) is str:
            if value in number_of:
                return number_of[value]
            # A class's number as text, as `datasets` takes it too.
            if value.isdecimal() and value.isascii() and translated is None and int(value) < count:
                return int(value)
            raise SchemaError("", f"it is {value!r}, which is none of its classes {listed}")
        number = _integer(value)
        # HIDDEN is -1 in every dataset of the hub, so it is never translated.
        if number == HIDDEN:
            return HIDDEN
        # Translate by name: return the number of the same-named class in T0's time.
        if translated is not None and data_names is not None and 0 <= number < len(translated):
            known = translated[number]
            if known is None:
                raise SchemaError(
                    "",
                    f"its class {data_names[number]!r} is none of T0's classes {listed}",
                )
            return known
        if not 0 <= number < (count if translated is None else len(translated)):
            raise SchemaError(
                "", f"it is {number}; its classes are 0 to {count - 1}, or -1 for a hidden label"
            )
        return number

    return convert


def _convert_renamed_label(
    alias: Alias, names: Sequence[str], data_names: Sequence[str] | None
) -> Convert:
    """Converts a label column that was renamed, whose classes may be in another order today."""
    # TREC's coarse labels, for instance, are in another order; numbers without class names are
    # refused.

    def plain(name: str) -> str:
        return name.split(alias.after)[-1] if alias.after else name

    by_name = _class_label(names, data_names and [plain(name) for name in data_names])

    def convert(value: Any) -> int:
        if type(value) is str:
            return by_name(plain(value))
        if data_names is None and value != HIDDEN:
            raise SchemaError(
                "",
                f"{alias.name!r} stands in for it with the number {_format_value(value)}, and the"
                " file does not say which class that is; write the class's name",
            )
        return by_name(value)

    return convert


def _list_of(feature: Any) -> Convert:
    convert = _compile(feature)
    if convert is _text:
        return _list_of_text

    # Some copies have lists of records in place of records of lists, or the reverse.
    def convert_list(value: Any) -> list[Any]:
        if type(value) is dict and isinstance(feature, dict) and "_type" not in feature:
            value = _rows_of(value)
        if type(value) is not list:
            raise _wrong(value, "a list")
        try:
            return [convert(item) for item in value]
        except SchemaError as error:
            raise SchemaError(error.column, f"inside the list, {error.reason}") from None

    return convert_list


def _list_of_text(value: Any) -> list[str]:
    if type(value) is not list:
        raise _wrong(value, "a list")
    for item in value:
        if type(item) is not str:
            raise SchemaError("", f"inside the list, {_wrong(item, 'text').reason}")
    return value


def _record(columns: Mapping[str, Convert]) -> Convert:
    pairs = list(columns.items())

    def convert(value: Any) -> dict[str, Any]:
        if type(value) is not dict:
            raise _wrong(value, "a record")
        try:
            # Drop fields that the schema does not have.
            return {name: _inside(name, inner, value) for name, inner in pairs}
        except KeyError as error:
            raise SchemaError(
                f".{error.args[0]}", f"it is missing from {_format_value(value)}"
            ) from None

    return convert


def _inside(name: str, convert: Convert, record: dict[str, Any]) -> Any:
    value = record[name]
    # Arrow has no required fields inside records, and the datasets have nulls in some of them.
    if value is None:
        return None
    try:
        return convert(value)
    except SchemaError as error:
        raise SchemaError(f".{name}{error.column}", error.reason) from None


def _record_of_lists(inner: Mapping[str, Any]) -> Convert:
    record = _record({name: _list_of(feature) for name, feature in inner.items()})

    def convert(value: Any) -> dict[str, Any]:
        if type(value) is list:
            value = _columns_of(value, inner)
        brought = record(value)
        # zip would silently truncate the longer lists.
        if len({len(items) for items in brought.values() if items is not None}) > 1:
            raise SchemaError("", "the lists of its record differ in length")
        return brought

    return convert


def _columns_of(records: list[Any], names: Iterable[str]) -> dict[str, list[Any]]:
    """A list of records as a record of lists."""
    for record in records:
        if type(record) is not dict:
            raise _wrong(record, "a record")
    return {name: [record.get(name) for record in records] for name in names}


def _rows_of(record: dict[str, Any]) -> list[dict[str, Any]]:
    """A record of lists as a list of records."""
    if not all(type(items) is list for items in record.values()):
        raise _wrong(record, "a list of records")
    columns = list(record)
    return [dict(zip(columns, row, strict=True)) for row in zip(*record.values(), strict=True)]


@functools.cache
def schema_of(
    dataset: str,
    subset: str | None,
    read: frozenset[str],
    class_names: tuple[tuple[str, tuple[str, ...]], ...],
) -> Schema | None:
    """The schema of a dataset, or None if the catalog has none.

    Args:
      dataset: The Hugging Face name.
      subset: The configuration, or None.
      read: Columns that a template reads besides those that promptsource's templates of the
        dataset read.
      class_names: Columns of the data and the names of their classes, as far as the data has them.
    """
    features = features_of(dataset, subset)
    if features is None:
        return None
    return _compile_schema(dataset, subset, read | columns_of_dataset(dataset, subset), class_names)


@functools.cache
def _compile_schema(
    dataset: str,
    subset: str | None,
    read: frozenset[str],
    class_names: tuple[tuple[str, tuple[str, ...]], ...],
) -> Schema:
    # Cached separately from schema_of, whose `read` differs by template: templates that read no
    # more columns than promptsource's share one Schema.
    required = [
        column for column in features_of(dataset, subset) or {} if column.replace("-", "_") in read
    ]
    aliases = catalog()[modeled_on(dataset), subset].aliases
    return Schema(features_of(dataset, subset) or {}, required, aliases, dict(class_names))


def columns_read(template: Any) -> frozenset[str]:
    """The variables that a template and its answer choices read, as spelled in the template.

    Templates write underscores for the hyphens of column names. For a template that is not valid
    Jinja the result is empty; rendering it reports the error.
    """
    if template is None:
        return frozenset()
    read = _variables
    if is_own(template):
        from t0repro.tasks.sandbox import variables as read
    return read(template.jinja) | read(template.answer_choices or "")


@functools.cache
def columns_of_dataset(dataset: str, subset: str | None) -> frozenset[str]:
    """All variables that promptsource's templates of a dataset read; empty if it has none."""
    try:
        names = template_names(dataset, subset)
    except UserError:
        return frozenset()
    return frozenset().union(
        *(columns_read(load_template(dataset, subset, name)) for name in names)
    )


@functools.cache
def _variables(jinja: str) -> frozenset[str]:
    environment = promptsource_environment()
    try:
        found = jinja2.meta.find_undeclared_variables(environment.parse(jinja))
    except jinja2.TemplateSyntaxError:
        return frozenset()
    # Not columns: Jinja's globals, and the variable that promptsource adds.
    return frozenset(found) - set(environment.globals) - {"answer_choices"}
