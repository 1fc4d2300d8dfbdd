"""Parses T5X's gin files and overrides into the record of the program that they configure.

`Places` says where each value was set, also in errors for values that are not supported.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from t0repro.config import gin_door
from t0repro.config.gin_door import MACRO, Bindings, record_bindings
from t0repro.config.gin_errors import check_macros_are_read, configuration_errors
from t0repro.config.gin_imports import check_allowed, list_imports, restrict_imports
from t0repro.config.t5x import modules, programs, records
from t0repro.config.t5x.records import WrongArgument
from t0repro.errors import NONE_IS_SIMILAR, UserError, nearest_names
from t0repro.words import without_passwords


@dataclasses.dataclass(frozen=True)
class T5xInputs:
    """The gin-related part of a T5X command line.

    Attributes:
      run_mode: a key of `modules.PROGRAMS`.
      gin_bindings: statements such as `MODEL_DIR = 'runs/a'`; they override files.
      gin_search_paths: folders to search for files and includes; the first match wins, and the
        files of this package come last.
      import_allowlist: modules that gin files may import; see gin_imports. None allows all.
    """

    run_mode: str
    gin_files: tuple[str, ...] = ()
    gin_bindings: tuple[str, ...] = ()
    gin_search_paths: tuple[str, ...] = (".",)
    import_allowlist: tuple[str, ...] | None = None


@dataclasses.dataclass(frozen=True)
class Value:
    """One argument of the run: its name in gin, its value, and the place that set it.

    `standard` is its name in T5X's class, by that class's usual name, which the file may not use.
    """

    name: str
    value: str
    place: str
    standard: str | None = None


@dataclasses.dataclass(frozen=True)
class Parsed:
    """The result of parsing a run's gin files and overrides.

    Attributes:
      program: the record of `modules.PROGRAMS[run_mode]`.
      values: every argument that the run reads, defaults included, in call order.
      imports: modules other than T5X's and SeqIO's that the files import, or name as
        `DatasetConfig.module`; they register tasks.
      warnings: bindings in files that nothing reads, and imported T5X modules that are missing.
      gin_text: the configuration as gin writes it, for the run's config.gin.
    """

    program: Any
    values: tuple[Value, ...]
    imports: tuple[str, ...]
    warnings: tuple[str, ...]
    gin_text: str = ""


def shipped_files() -> Path:
    """The folder that contains `t5x/configs/runs/pretrain.gin` and the other gin files."""
    import t0repro.gin

    return Path(str(t0repro.gin.__file__)).parent


def parse(inputs: T5xInputs) -> Parsed:
    """Parses and checks a run's gin files without importing anything heavy.

    It leaves nothing in gin: one process may read several configurations, and a later one, in
    either dialect, must not find these records.

    Raises:
      UserError: if a macro has no value, nothing reads an override, or a name is unknown, with the
        nearest right name; and for whatever gin's parser finds wrong.
    """
    import gin

    # Read gin's state inside the block; it is empty afterwards.
    with _files_in_gin(inputs) as (bindings, imports):
        program = _program(inputs.run_mode)
        # The calls that the program will make; a binding that none of them reads is a mistake.
        reached = _reached(program, bindings)
        warnings = _check_macros(reached, bindings) + _check_overrides(reached, bindings)
        warnings += _absent_modules(inputs, imports.absent)
        # An override may have replaced what read a macro that the files leave to the user.
        gin_door.forget_required(_macros(reached))
        gin.finalize()
        try:
            called = _call(program)
        except WrongArgument as error:
            raise _placed(error, reached, bindings) from error
        values = tuple(_values(reached, bindings))
        # T5X's old way to name the tasks' modules; treat it as any other import.
        for module in programs.task_modules(called):
            place = next(each.place for each in values if each.value == repr(module))
            check_allowed(module, inputs.import_allowlist, place)
            imports.users.append(module)
        text = without_passwords(gin.operative_config_str())
        return Parsed(called, values, tuple(imports.users), tuple(warnings), text)


def macros_read(inputs: T5xInputs) -> frozenset[str]:
    """The names of the macros that a run reads, with or without a value.

    Raises:
      UserError, ValueError, TypeError, SyntaxError, OSError: see `parse`; macros are not checked.
    """
    with _files_in_gin(inputs) as (bindings, _):
        return frozenset(_macros(_reached(_program(inputs.run_mode), bindings)))


def _macros(reached: Iterable[_Call]) -> list[str]:
    """The names of the macros among the calls."""
    return ["/".join(call.scopes) for call in reached if call.selector == MACRO]


@contextlib.contextmanager
def _files_in_gin(inputs: T5xInputs) -> Iterator[tuple[Bindings, modules.Imports]]:
    """Parses the files and overrides into gin's state; yields their places and other imports."""
    import gin

    gin_door.extend_readers()
    with (
        configuration_errors(),
        gin_door.left_empty(_is_served),
        modules.served() as imports,
        record_bindings("--gin_bindings") as bindings,
        gin_door.looking_in(*inputs.gin_search_paths, str(shipped_files())),
    ):
        # Check module imports while parsing, because that is when gin runs them.
        restrict_imports(inputs.import_allowlist)
        gin.parse_config_files_and_bindings(
            list(inputs.gin_files), list(inputs.gin_bindings), finalize_config=False
        )
        gin_door.check_bound_addresses(bindings)
        yield bindings, imports


def _is_served(module: str) -> bool:
    """Whether a module's configurables are T5X's, served by this package.

    Some have names that Mesh TensorFlow's files also use, such as SentencePieceVocabulary, and must
    not be found there. What a user's module registers stays: the module registers it only once.
    """
    kinds = (records, programs)
    return module in [kind.__name__ for kind in kinds] or module.startswith("optax.")


def _call(program: str) -> Any:
    """The program's record.

    Raises:
      UserError: if arguments without a default are not bound.
    """
    import gin

    try:
        return gin.get_configurable(program)()
    except TypeError as error:
        what, _, caller = str(error).partition("\n")
        # Other TypeErrors are errors of a record, whose messages are complete.
        if "missing" not in what:
            raise
        names = re.findall(r"'(\w+)'", what)
        called = re.search(r"configurable '(\w+)'", caller)
        raise UserError(
            f"{called[1] if called else program} lacks {', '.join(names)}: no gin file binds them.",
            fix="Include the run file and the model file that this one adds to.",
        ) from error


def _placed(error: WrongArgument, reached: Iterable[_Call], bindings: Bindings) -> UserError:
    """The error of an argument by its name in gin, with the place that set it."""
    name, argument = error.record.__name__, error.argument
    base = modules.base_class(error.hint)
    fix = f"Bind {error.wanted}{f', or your own subclass of {base}' if base else ''}."
    if error.hint is records.Transformer:
        fix = (
            "Bind @network.Transformer(): the commands run T5 alone. Train a network of your own in"
            " Python, by t0repro.training.trainer.Trainer and your subclass of models.BaseModel or"
            " BaseTransformerModel (docs/trainer.md)."
        )
    own = gin_door.registered_selector(error.record) or name
    # What `loss_fn` binds replaces the model's own arguments, so it is looked at first.
    for call in sorted(reached, key=lambda call: not call.selector.endswith(".loss_fn")):
        # Arguments of a model's method belong to another record.
        is_method = issubclass(error.record, records.Decoding) and "." in _short(call.selector)
        ends = "predict_batch_with_aux" if is_method else (own, f"{own}.loss_fn")
        if call.scopes == error.scopes and call.selector.endswith(ends):
            scope = "/".join(call.scopes)
            name = f"{scope + '/' if scope else ''}{_short(call.selector)}"
            place = call.place(bindings, argument)
            if place is not None:
                value = gin_door.as_text(call.arguments[argument])
                return UserError(
                    f"{name}.{argument} is {value}; it must be {error.wanted}.",
                    where=_without_folder(place),
                    fix=fix,
                )
    return UserError(error.what, fix=fix)


# ---- What the program reads ----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Call:
    """A configurable as the program calls it: gin's scopes, its selector and its bindings."""

    scopes: tuple[str, ...]
    selector: str
    arguments: Mapping[str, Any]

    def place(self, bindings: Bindings, argument: str) -> str | None:
        """Where the call's argument is bound, if anywhere."""
        return bindings.find(gin_door.enclosing("/".join(self.scopes)), self.selector, argument)


def _program(run_mode: str) -> str:
    """The selector of a run mode's function; its name depends on how the file imports `__main__`.

    Raises:
      UserError: if no file configures it.
    """
    # `import __main__ as train_script` makes gin's selector begin with another name.
    configured = {mode: _configured(record) for mode, (_, record) in modules.PROGRAMS.items()}
    selector = configured[run_mode]
    if selector:
        return selector
    others = [mode for mode, found in configured.items() if found]
    run_file = "pretrain" if run_mode == "train" else run_mode
    raise UserError(
        f"No gin file configures `{modules.PROGRAMS[run_mode][0]}`, which the run mode {run_mode}"
        f" calls{f'; these files are for {others[0]}' if others else ''}.",
        fix=f"Include a run file, such as t5x/configs/runs/{run_file}.gin, or choose"
        " the run mode that the files are for.",
    )


def _configured(record: type) -> str | None:
    """The selector under which gin binds arguments of a record, if it binds any."""
    selector = gin_door.registered_selector(record)
    return selector if any(key == selector for _, key in gin_door.bound()) else None


def _reached(selector: str, bindings: Bindings) -> list[_Call]:
    """Every call made to evaluate the program, macros included, in the order of its arguments.

    A reference with scopes is called under those only; one without, under its caller's.

    Raises:
      UserError: if a call contains itself, with the places that bind its arguments.
    """
    calls: dict[tuple[tuple[str, ...], str], _Call] = {}
    within: list[tuple[tuple[str, ...], str]] = []

    def visit(scopes: tuple[str, ...], selector: str) -> None:
        # Calling it would never end.
        if (scopes, selector) in within:
            raise UserError(
                f"{'/'.join(scopes) if selector == MACRO else _short(selector)} refers to itself.",
                where="; ".join(_places_of(within[within.index((scopes, selector)) :], bindings)),
                fix="Bind another value.",
            )
        # A configurable may be reached by several paths, and several bindings may read one macro.
        if (scopes, selector) in calls:
            return
        within.append((scopes, selector))
        arguments = gin_door.written(selector, "/".join(scopes))
        calls[scopes, selector] = _Call(scopes, selector, arguments)
        for value in gin_door.parts_of(arguments):
            if gin_door.is_reference(value):
                visit(tuple(value.scopes) or scopes, value.configurable.selector)
        within.pop()
        # The program reads the arguments of a record's methods when it calls them.
        for _, other in gin_door.bound():
            if other.startswith(f"{selector}."):
                visit(scopes, other)

    visit((), selector)
    return list(calls.values())


def _places_of(calls: Sequence[tuple[tuple[str, ...], str]], bindings: Bindings) -> Iterator[str]:
    """The places that bind the references from each call to the next, and back."""
    for (scopes, selector), (_, following) in zip(calls, [*calls[1:], calls[0]], strict=True):
        arguments = gin_door.written(selector, "/".join(scopes))
        for argument, value in arguments.items():
            parts = gin_door.parts_of(value)
            if any(gin_door.selector_of(part) == following for part in parts):
                place = bindings.find(gin_door.enclosing("/".join(scopes)), selector, argument)
                yield _without_folder(place or f"default of {_short(selector)}.{argument}")


def _check_macros(reached: Iterable[_Call], bindings: Bindings) -> list[str]:
    """Refuses macros that the program reads but nothing sets.

    Returns:
      The macros of the user's files that nothing reads, in words.

    Raises:
      UserError: naming all of them, and for each the nearest macro that is set but not read.
    """
    read = _macros(reached)
    bound = gin_door.bound_macros()
    missing = [name for name in read if name not in bound or gin_door.is_required(name)]
    if not missing:
        return check_macros_are_read(
            bindings,
            bindings.macros,
            overrides="--gin",
            is_shipped=lambda place: place.startswith(str(shipped_files())),
            instead=lambda name: f"nearest: {nearest_names(name, bindings.macros, count=3)}",
        )
    lines = []
    for name in missing:
        place = bindings.place((name, MACRO, "value"))
        # A macro that is set but not read is probably the missing one, misspelt.
        stray = nearest_names(name, bound - set(read), count=1)
        hint = "" if stray.startswith(NONE_IS_SIMILAR) else f", for which {stray} may be meant"
        required = f" (required at {_without_folder(place)})" if place else ""
        lines.append(f"{name}{required}{hint}")
    raise UserError(
        f"Macros without a value: {'; '.join(lines)}.",
        fix=_how_to_set(missing),
    )


def _how_to_set(missing: Sequence[str]) -> str:
    if "MODEL" in missing:
        return "Include a model's gin file before the run's: t5x/examples/t5/t5_1_1/small.gin, say."
    return f"Set {missing[0]} in a gin file, or add --gin.{missing[0]}=VALUE."


def _check_overrides(reached: Sequence[_Call], bindings: Bindings) -> list[str]:
    """Refuses overrides on the command line that nothing reads.

    Returns:
      The bindings of the user's files that nothing reads, in words.
    """
    warnings = []
    for key, place in bindings.places.items():
        scope, selector, argument = key
        if selector == MACRO or any(_reads(call, scope, selector) for call in reached):
            continue
        name = f"{scope + '/' if scope else ''}{_short(selector)}.{argument}"
        # Files of this package bind more than any single run reads.
        if place.startswith(str(shipped_files())):
            continue
        # A file may serve several runs, but an override was written for this one.
        if not place.startswith("--gin"):
            warnings.append(f"{place}: this run does not read {name}")
            continue
        known = {f"{'/'.join(call.scopes)}/{_short(call.selector)}".lstrip("/") for call in reached}
        nearest = nearest_names(name.rpartition(".")[0], known, count=3)
        raise UserError(
            f"This run does not read {name}.",
            where=place,
            fix=f"Remove it, or correct it: {nearest}.",
        )
    return warnings


def _absent_modules(inputs: T5xInputs, absent: Sequence[str]) -> list[str]:
    """A line for each missing T5X module that a file imports for its tasks only."""
    if not absent:
        return []
    folders = (*inputs.gin_search_paths, str(shipped_files()))
    lines = list_imports(inputs.gin_files, inputs.gin_bindings, folders, None)
    return [
        f"{_without_folder(line.place)}: t0repro has no {line.module}, so the import does nothing;"
        " import a module of your own that registers the tasks of the same names"
        " (--module_import=MODULE)"
        for line in lines
        if line.module in absent
    ]


def _reads(call: _Call, scope: str, selector: str) -> bool:
    """Whether the bindings of a scope apply to a call: its own scopes begin with this one."""
    parts = tuple(scope.split("/")) if scope else ()
    # gin applies a binding in a scope to every call in that scope or in one inside it.
    return call.selector == selector and call.scopes[: len(parts)] == parts


def _short(selector: str) -> str:
    """`utils.DatasetConfig` of `t5x.utils.DatasetConfig`, as gin files write it."""
    module, _, name = selector.rpartition(".")
    if module.rpartition(".")[2][:1].isupper():  # a method of a class
        return f"{_short(module)}.{name}"
    return f"{module.rpartition('.')[2]}.{name}"


# ---- The program's arguments, for people ---------------------------------------------------------


def _values(reached: Iterable[_Call], bindings: Bindings) -> Iterator[Value]:
    for call in reached:
        scope = "/".join(call.scopes)
        # Their values are shown where arguments take them.
        if call.selector == MACRO or call.selector == "gin.constant":
            continue
        wrapped = gin_door.function_of(call.selector)
        known = modules.standard_name(wrapped)
        for argument, parameter in inspect.signature(wrapped).parameters.items():
            standard = known and f"{scope + '/' if scope else ''}{known}.{argument}"
            name = f"{scope + '/' if scope else ''}{_short(call.selector)}.{argument}"
            if argument in call.arguments:
                value = gin_door.as_text(call.arguments[argument])
                place = call.place(bindings, argument) or ""
                yield Value(name, value, _without_folder(place), standard)
            elif parameter.default is not parameter.empty:
                source = f"default of {_short(call.selector)}"
                yield Value(name, repr(parameter.default), source, standard)


def _without_folder(place: str) -> str:
    """A place without this package's folder, such as `t5x/configs/runs/pretrain.gin:17`."""
    return place.replace(f"{shipped_files()}/", "")


# ---- The places of values, and errors for unsupported ones ---------------------------------------

_ONLY_T5X = "Remove the binding, or run it with T5X itself."


@dataclasses.dataclass(frozen=True)
class Places:
    """Places by gin name, for instance `train/utils.DatasetConfig.pack`.

    Attributes:
      by_name: Standard names and the files' own -> places.
      own: Standard name -> the file's own.
    """

    by_name: Mapping[str, str]
    own: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, values: Iterable[Value]) -> Places:
        """The places of everything that a parsed configuration reads."""
        found = list(values)
        standard = {value.standard: value.place for value in found if value.standard}
        own = {value.standard: value.name for value in found if value.standard}
        return cls(standard | {value.name: value.place for value in found}, own)

    def said(self, name: str, what: str) -> str:
        """A line about an argument, with its place if it has one and the file's own name."""
        place = self.place(name)
        return f"{f'{place}: ' if place else ''}{self.own.get(name, name)}{what}"

    def place(self, name: str) -> str | None:
        """The place of a name, or of the first match that ignores its scope or module.

        A file may use another scope, or import a module under another name.
        """
        if name in self.by_name:
            return self.by_name[name]
        bare = name.rpartition("/")[2]
        last_two = ".".join(bare.rsplit(".", 2)[-2:])
        for ending in (name, bare, last_two):
            for key, place in self.by_name.items():
                if key == ending or key.endswith((f"/{ending}", f".{ending}")):
                    return place
        return None

    def refused(self, name: str, value: Any, why: str, fix: str = _ONLY_T5X) -> UserError:
        """An error for an unsupported value, with the place that set it."""
        own = self.own.get(name, name)
        return UserError(f"{own} = {value!r}: {why}", where=self.place(name), fix=fix)

    def check_unset(self, record: Any, name: str, whys: Mapping[str, str]) -> None:
        """Refuses arguments of a record that differ from their defaults.

        Args:
          record: The record.
          name: Its name in gin, with its scope if there are several of it.
          whys: Argument -> why only its default is accepted.

        Raises:
          UserError: For the first argument that is set.
        """
        defaults = {field.name: field.default for field in dataclasses.fields(record)}
        for argument, why in whys.items():
            value, default = getattr(record, argument), defaults[argument]
            # None, empty sequences and T5X's own objects count as defaults that gin bound
            # explicitly.
            standard = argument in getattr(value, "default_of", ())
            if value != default and value not in (None, (), []) and not standard:
                raise self.refused(f"{name}.{argument}", value, why)


def check_summary(program: Any, name: str, places: Places) -> None:
    """Refuses a user's function in place of T5X's that writes config.gin.

    Raises:
      UserError: with the place that binds it.
    """
    function = program.summarize_config_fn
    if function is not None and not isinstance(function, programs.WriteConfig):
        raise places.refused(
            f"{name}.summarize_config_fn",
            function,
            "the configuration is always written as config.gin.",
            "Bind @gin_utils.summarize_gin_config, or leave it out.",
        )


def provenance(places: Places, names: Mapping[str, str]) -> dict[str, str]:
    """Places by field of the RunConfig.

    Args:
      places: Places by gin name.
      names: Field -> gin name.
    """
    found = {field: places.place(name) for field, name in names.items()}
    return {field: place for field, place in found.items() if place}
