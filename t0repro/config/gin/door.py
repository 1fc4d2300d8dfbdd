"""The only module that touches gin's private state and follows its macros.

gin 0.5.0 has no public way to list bindings with their lines, to resolve a reference before it is
called, or to list configurables. The rest of this project uses this module for that, so that a new
version of gin affects one module only. It also lets gin read files of buckets, and refuses bound
addresses that cannot be opened.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import io
import logging
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path, PurePath
from typing import IO, Any, NamedTuple

import gin.config

import gin
import t0repro.gin
from gin import resource_reader
from t0repro import storage
from t0repro.errors import UserError
from t0repro.progress import only_records

MACRO = "gin.macro"
"""The configurable under which gin keeps macros; the macro's name is its scope."""


def function_of(selector: str) -> Any:
    """The function or class that a complete selector names, without gin's wrapper."""
    configurable: Any = gin.config._REGISTRY[selector]
    return configurable.wrapped


def argument_names(selector: str) -> list[str]:
    """The arguments of a configurable, given its full or partial name; [] if it is unknown."""
    # gin raises if a partial name fits several configurables, and some builtins have no signature.
    with contextlib.suppress(Exception):
        configurable: Any = gin.config._REGISTRY.get_match(selector)
        return list(inspect.signature(configurable.wrapped).parameters)
    return []


def short_names() -> set[str]:
    """The names of all configurables, without their modules."""
    return {selector.rpartition(".")[2] for selector, _ in gin.config._REGISTRY.items()}


def short(selector: str) -> str:
    """`utils.DatasetConfig` of `t5x.utils.DatasetConfig`, as gin files write it."""
    module, _, name = selector.rpartition(".")
    if module.rpartition(".")[2][:1].isupper():  # a method of a class
        return f"{short(module)}.{name}"
    return f"{module.rpartition('.')[2]}.{name}".lstrip(".")


def find_selector(function: Any) -> str | None:
    """The selector under which a function or class is registered; None if it is not."""
    registered = gin.config._inverse_lookup(function)
    return registered.selector if registered else None


@contextlib.contextmanager
def _replace(owner: Any = gin.config, **attributes: Any) -> Iterator[None]:
    """Gives a module of gin's other attributes within the block."""
    before = {name: vars(owner)[name] for name in attributes if name in vars(owner)}
    try:
        for name, value in attributes.items():
            setattr(owner, name, value)
        yield
    finally:
        for name in attributes:
            if name in before:
                setattr(owner, name, before[name])
            else:
                delattr(owner, name)


@contextlib.contextmanager
def register_apart() -> Iterator[dict[str, Any]]:
    """Keeps what is registered within the block out of gin's registry.

    Yields:
      Filled after the block: selector -> gin's record of the configurable.
    """
    made: dict[str, Any] = {}
    with _replace(_REGISTRY=type(gin.config._REGISTRY)()):
        yield made
        made.update(gin.config._REGISTRY.items())


def swap_configurables(configurables: Mapping[str, Any]) -> dict[str, Any]:
    """Puts configurables under their selectors; returns those that were there, None for none.

    Args:
      configurables: Selector -> gin's record of a configurable; None leaves nothing there.
    """
    registry: Any = gin.config._REGISTRY
    before = {
        selector: registry.pop(selector) if selector in registry else None
        for selector in configurables
    }
    for selector, configurable in configurables.items():
        if configurable is not None:
            registry[selector] = configurable
    return before


@contextlib.contextmanager
def isolate_config(*modules: str) -> Iterator[None]:
    """Empties gin's configuration before the block, and again after it.

    Args:
      *modules: Beginnings of modules' names, whose configurables gin forgets after the block.
    """
    gin.clear_config()
    try:
        yield
    finally:
        gin.clear_config()
        # gin.clear_config leaves the registry as it is, so these have to be removed from it by
        # hand.
        for function in [*gin.config._INVERSE_REGISTRY]:
            if function.__module__.startswith(modules):
                gin.config._REGISTRY.pop(gin.config._INVERSE_REGISTRY.pop(function).selector)


def bound() -> Mapping[tuple[str, str], Mapping[str, Any]]:
    """(scope, selector) -> argument -> value, as written: references are not resolved."""
    return gin.config._CONFIG


def bound_macros() -> set[str]:
    """The names of all macros that have a value."""
    return {scope for scope, selector in bound() if selector == MACRO}


def outer_scopes(scope: str) -> tuple[str, ...]:
    """The scopes whose bindings apply to a call in `a/b`, outermost first: "", "a" and "a/b"."""
    parts = scope.split("/") if scope else []
    return tuple("/".join(parts[:depth]) for depth in range(len(parts) + 1))


def raw_bindings(selector: str, scope: str = "") -> dict[str, Any]:
    """The bindings of a configurable that is called in a scope, as written."""
    layers = [bound().get((each, selector), {}) for each in outer_scopes(scope)]
    return {argument: value for layer in layers for argument, value in layer.items()}


def resolve_bindings(scope: str, selector: str) -> dict[str, Any]:
    """The bindings of a configurable that is called in a scope, references resolved."""
    with gin.config_scope(scope or None):
        return gin.get_bindings(selector)


def forget_calls() -> None:
    """Omits all calls so far from gin's operative configuration."""
    gin.config._OPERATIVE_CONFIG.clear()


def is_reference(value: Any) -> bool:
    """Whether a value is `@name`, `@name()` or `%macro`."""
    return isinstance(value, gin.config.ConfigurableReference)


def is_unknown_reference(value: Any) -> bool:
    """Whether a value refers to an unknown configurable that gin skips."""
    return isinstance(value, gin.config._UnknownConfigurableReference)


def is_required(macro: str) -> bool:
    """Whether a macro still has the value %gin.REQUIRED."""
    value = bound()[macro, MACRO]["value"]
    # gin's parser turns %gin.REQUIRED into a call of its configurable `constant`.
    is_constant = selector_of(value) == "gin.constant"
    return is_constant and value.scoped_configurable_fn() is gin.REQUIRED


def forget_required(read: Collection[str]) -> None:
    """Drops the macros with the value %gin.REQUIRED that nothing reads, which gin would refuse.

    Args:
      read: The macros that are read.
    """
    for macro in bound_macros() - set(read):
        if is_required(macro):
            del gin.config._CONFIG[macro, MACRO]


def is_called(value: Any) -> bool:
    """Whether a value is `@name()` or `%macro`, which gin calls itself."""
    return is_reference(value) and value.evaluate


def selector_of(value: Any) -> str | None:
    """The complete selector that a reference names, called or not; None for other values."""
    return value.configurable.selector if is_reference(value) else None


def flatten_value(value: Any) -> Iterator[Any]:
    """A value and everything nested inside it, in lists and mappings."""
    return gin.config._iterate_flattened_values(value)


def macro_name(value: Any) -> str | None:
    """The name of the macro that a value refers to; None for any other value."""
    # `%name` is a reference to a configurable called `macro`, in a scope of the macro's name.
    if is_called(value) and selector_of(value) == MACRO:
        return "/".join(value.scopes)
    return None


def follow_macros(value: Any) -> Any:
    """The value that a macro resolves to, None if it has none; any other value as it is."""
    passed: set[str] = set()
    while (name := macro_name(value)) is not None:
        # A macro that refers back to itself has none; when gin calls it, it raises a
        # RecursionError.
        value = None if name in passed else bound().get((name, MACRO), {}).get("value")
        passed.add(name)
    return value


class Reference(NamedTuple):
    """The target of `@scope/selector` in a gin file, by its complete selector."""

    scope: str
    selector: str

    @property
    def name(self) -> str:
        """The configurable's own name."""
        return self.selector.rpartition(".")[2]

    @property
    def scopes(self) -> tuple[str, ...]:
        """The scope and its enclosing scopes, outermost first."""
        return outer_scopes(self.scope)


def reference_to(value: Any, within: str = "") -> Reference | None:
    """The configurable that a value names without calling it, macros followed; else None.

    Args:
      value: A value as written.
      within: The scope in which it is called, unless it has one itself.
    """
    value = follow_macros(value)
    if not is_reference(value) or value.evaluate:
        return None
    scope, selector = value.config_key
    return Reference(scope or within, selector)


def value_of(selector: str, argument: str, scope: str = "") -> Any:
    """An argument's value as written, for a call in a scope, macros followed; None if unbound."""
    return follow_macros(raw_bindings(selector, scope).get(argument))


def format_value(value: Any) -> str:
    """A value as gin writes it, macros followed; a reference by the name in its own file."""
    return repr(follow_macros(value))


Key = tuple[str, str, str]  # scope, complete selector, argument


@dataclasses.dataclass(frozen=True)
class Bindings:
    """The recorded places of the bindings in effect.

    Attributes:
      places: (scope, selector, argument) -> "file:line" or "--gin_param '...'". gin's macros are
        also bindings, with the selector gin.macro.
      macros: Every macro that a binding refers to, including bindings overridden since.
      scopes: The scope of every reference such as `@slow/linear_decay`, including overridden ones.
    """

    places: dict[Key, str]
    macros: set[str] = dataclasses.field(default_factory=set)
    scopes: set[str] = dataclasses.field(default_factory=set)

    def place(self, key: Key) -> str | None:
        """Where a binding was set, following a macro to its definition; None if it was not set."""
        if key not in self.places:
            return None
        scope, selector, argument = key
        macro = macro_name(bound().get((scope, selector), {}).get(argument))
        if macro is not None:
            definition = self.place((macro, MACRO, "value"))
            if definition is not None:
                return f"{definition} (%{macro}, bound at {self.places[key]})"
        return self.places[key]

    def find(self, scopes: tuple[str, ...], selector: str, argument: str) -> str | None:
        """Where the innermost scope that binds an argument binds it, "" being the last; or None."""
        for scope in (*reversed(scopes), ""):
            place = self.place((scope, selector, argument))
            if place is not None:
                return place
        return None

    def source(self, scopes: tuple[str, ...], selector: str, argument: str) -> str:
        """The place that `find` returns, or a note that the argument has its default."""
        place = self.find(scopes, selector, argument)
        return place or f"default of {selector.rpartition('.')[2]}.{argument}"


@contextlib.contextmanager
def record_bindings(flag: str = "--gin_param") -> Iterator[Bindings]:
    """Records where each binding parsed inside the block was set.

    Args:
      flag: The command-line option that gives overrides, as it appears in their places.
    """
    bindings = Bindings({})
    location: list[Any] = []
    # gin 0.5.0 forgets a line after parsing it, so both functions that see it are wrapped: one has
    # the statement's place, the other its effect.
    try_with_location: Any = gin.config.utils.try_with_location
    bind_parameter = gin.config.bind_parameter

    @contextlib.contextmanager
    def note_location(place: Any) -> Iterator[None]:
        location.append(place)
        try:
            with try_with_location(place):
                yield
        finally:
            location.pop()

    def note_binding(binding_key: Any, value: Any) -> None:
        bind_parameter(binding_key, value)
        # Record it after gin accepts it: a binding that gin refuses has no place.
        key = gin.config.ParsedBindingKey.parse(binding_key)
        bindings.places[(key.scope, key.complete_selector, key.arg_name)] = _describe(
            location, flag
        )
        # Also of bindings that are overridden later: what they refer to is not misspelled.
        for part in flatten_value(value):
            macro = macro_name(part)
            if macro is not None:
                bindings.macros.add(macro)
            elif is_reference(part) and part.scopes:
                bindings.scopes.add("/".join(part.scopes))

    with _replace(gin.config.utils, try_with_location=note_location):
        with _replace(bind_parameter=note_binding):
            yield bindings


def _describe(locations: list[Any], flag: str) -> str:
    if not locations:
        return "set by t5_mesh_transformer"
    # The innermost: a statement in an included file belongs to that file, not to the `include`.
    innermost = locations[-1]
    if innermost.filename is None:
        statement = innermost.line_content.strip()
        # T5X's `--gin.NAME=VALUE`: in --gin_bindings, spaces are around the "=".
        if flag == "--gin_bindings" and re.match(r"[\w./]+=", statement):
            return f"--gin.{statement}"
        return f"{flag} {statement!r}"
    # Of an installed file, the path inside site-packages.
    path = PurePath(innermost.filename).as_posix().rpartition("/site-packages/")[2]
    return f"{path}:{innermost.line_num}"


def check_bound_addresses(bindings: Bindings) -> None:
    """Refuses gin bindings, in either dialect, that hold an address of an unknown scheme.

    Such an address would be mistaken for a local path. Credentials are not required: many of the
    addresses that files bind are never opened.

    Raises:
      UserError: With the place of the binding.
    """
    for (scope, selector), arguments in bound().items():
        for argument, value in arguments.items():
            for part in flatten_value(value):
                if isinstance(part, str) and "://" in part:
                    name = scope if selector == MACRO else f"{selector}.{argument}"
                    place = bindings.place((scope, selector, argument))
                    storage.check_scheme(part, place or name)


def file_readers() -> list[tuple[Callable[[str], Any], Callable[[str], bool]]]:
    """Functions with which gin opens files and tests whether they exist, in gin's order."""
    readers: Any = gin.config._FILE_READERS
    return readers


def extend_readers() -> None:
    """Makes gin read files at addresses, and take no folder of the user's for a package.

    It refuses addresses out of reach and folders, and finds T5X's files where an author's copy of
    T5X was. All apply to `include`s too.
    """
    readers = file_readers()
    of_packages = resource_reader.system_path_reader
    readers[:] = [
        (reader, _is_in_package if reader is of_packages else exists) for reader, exists in readers
    ]
    # Register once per process, however many command lines it parses.
    if (_open_address, storage.is_address) not in readers:
        # Insert first: gin tries its readers in order, and TensorFlow's, which takes a folder for
        # an empty file, may be among them, or a gin file's imports may add it.
        readers[:0] = [(_open_address, storage.is_address), (_refuse_folder, os.path.isdir)]
        readers.append((_open_shipped, _is_shipped))


def _is_in_package(path: str) -> bool:
    """Whether gin finds a file in an installed package: for models/x.gin, in the package models."""
    try:
        return resource_reader.system_path_file_exists(path)
    except TypeError:
        return False  # a folder `models` without __init__.py is a package of no file


def _open_address(path: str) -> IO[str]:
    where = "--gin_file, --gin_location_prefix, or an `include` line of a gin file"
    address = storage.check_address(path, where)
    try:
        return io.StringIO(storage.read(address).decode())
    except FileNotFoundError as error:
        raise UserError(
            f"There is no gin file {address}.", where=where, fix="Correct the address."
        ) from error


def _refuse_folder(path: str) -> IO[str]:
    # In gin's own words for a file that is nowhere, which it completes with the place.
    searched = gin.config._LOCATION_PREFIXES
    raise OSError(f"Unable to open file: {path}. Searched config paths: {searched}.")


def shipped_files() -> Path:
    """The folder of this package's gin files: `t5x/configs/runs/pretrain.gin` and others."""
    return Path(str(t0repro.gin.__file__)).parent


def _find_shipped(path: str) -> Path | None:
    """T5X's file in this package for `third_party/py/t5x/configs/runs/eval.gin`, looked for there.

    So authors include T5X's files if their copy of T5X is not in a folder of its own.
    """
    shipped = shipped_files()
    _, t5x, inside = path.removeprefix(f"{shipped}/").rpartition("/t5x/")
    return shipped / "t5x" / inside if t5x and path.startswith(f"{shipped}/") else None


def _is_shipped(path: str) -> bool:
    file = _find_shipped(path)
    return file is not None and file.is_file()


def _open_shipped(path: str) -> IO[str]:
    return open(str(_find_shipped(path)))


@contextlib.contextmanager
def search_only(*folders: str, in_packages: bool) -> Iterator[None]:
    """Lets gin find files by their path, then in these folders; it logs no folder without a file.

    Args:
      *folders: The folders, in the order of the search.
      in_packages: Whether gin also looks for files in installed packages.
    """
    readers, of_packages = file_readers(), resource_reader.system_path_reader
    if not in_packages:
        readers = [pair for pair in readers if pair[0] is not of_packages]
    with _replace(_LOCATION_PREFIXES=["", *folders], _FILE_READERS=readers):
        with only_records(None, _is_worth_logging):
            yield


def _is_worth_logging(line: logging.LogRecord) -> bool:
    """Whether gin reports more than that one of its folders lacks a file."""
    return not str(line.msg).startswith("Path not found")


@contextlib.contextmanager
def track_files() -> Iterator[list[str]]:
    """Yields the list of gin files being parsed, outermost first; an exception leaves it as it is.

    gin does not report which file it could not decode or which ended in the middle of a statement.
    """
    files: list[str] = []
    parse_config_file = gin.config.parse_config_file

    def note_file(config_file: str, *args: Any, **kwargs: Any) -> Any:
        files.append(config_file)
        result = parse_config_file(config_file, *args, **kwargs)
        # Not in a `finally`: after an exception the list must still name the file.
        files.pop()
        return result

    with _replace(parse_config_file=note_file):
        yield files


def check_imports(check: Callable[[Any], None]) -> None:
    """Calls a check with each `import` statement of a gin file before it is executed."""
    context: Any = gin.config.ParseContext
    # If called again in this process, replace the earlier wrapper rather than wrap it.
    original = getattr(context.process_import, "unchecked", context.process_import)

    def process_import(self: Any, statement: Any) -> None:
        check(statement)
        original(self, statement)

    process_import.unchecked = original  # pyright: ignore[reportFunctionMemberAccess]
    context.process_import = process_import


def replace_import(function: Callable[..., Any]) -> contextlib.AbstractContextManager[None]:
    """Makes gin call a function instead of Python's `__import__` within the block."""
    # gin's `__import__` lookup finds a global of its module before Python's builtin.
    return _replace(__import__=function)
