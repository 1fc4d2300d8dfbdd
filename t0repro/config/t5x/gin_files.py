"""Parses T5X's gin files and overrides into the calls of the program that they configure."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import importlib
import inspect
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import gin
from t0repro.config.gin import door
from t0repro.config.gin.door import MACRO, Bindings, Reference, record_bindings, short
from t0repro.config.gin.errors import configuration_errors
from t0repro.config.gin.folders import shipped_files, strip_folder
from t0repro.config.gin.imports import check_allowed, list_imports, restrict_imports
from t0repro.config.gin.references import check_macros_are_read
from t0repro.config.t5x import modules
from t0repro.config.t5x.arguments import PROGRAMS
from t0repro.config.t5x.calls import Call
from t0repro.config.t5x.modules import WrongArgument, function_for
from t0repro.errors import UserError, nearest_names, similar_names
from t0repro.words import remove_passwords

_DATA = "utils.DatasetConfig"
# Beginnings of the names of modules whose functions only record calls.
_SERVED = (modules.__name__, "optax.")


@dataclasses.dataclass(frozen=True)
class T5xInputs:
    """The gin-related part of a T5X command line.

    Attributes:
      run_mode: a key of `arguments.PROGRAMS`.
      gin_bindings: statements such as `MODEL_DIR = 'runs/a'`; they override files.
      gin_search_paths: folders to search for files and includes; the first match wins, and the
        files of this package come last.
      import_allowlist: modules that gin files may import; see gin.imports. None allows all.
    """

    run_mode: str
    gin_files: tuple[str, ...] = ()
    gin_bindings: tuple[str, ...] = ()
    gin_search_paths: tuple[str, ...] = (".",)
    import_allowlist: tuple[str, ...] | None = None


@dataclasses.dataclass(frozen=True)
class Value:
    """One argument of the run: its name in gin, its value, and the place that set it."""

    name: str
    value: str
    place: str


@dataclasses.dataclass(frozen=True)
class Parsed:
    """The result of parsing a run's gin files and overrides.

    Attributes:
      program: the call of `arguments.PROGRAMS[run_mode]`.
      values: every argument that the run reads, defaults included, in call order.
      imports: modules other than T5X's and SeqIO's that the files import, or name as
        `DatasetConfig.module`; they register tasks.
      warnings: bindings in files that nothing reads, and imported T5X modules that are missing.
      gin_text: the configuration as gin writes it, for the run's config.gin.
    """

    program: Call
    values: tuple[Value, ...]
    imports: tuple[str, ...]
    warnings: tuple[str, ...]
    gin_text: str = ""


def parse(inputs: T5xInputs) -> Parsed:
    """Parses and checks a run's gin files without importing anything heavy.

    It leaves nothing in gin but what functions of the user's modules are bound to: one process may
    read several configurations, and a later one, in either dialect, must not find T5X's functions.

    Raises:
      UserError: if a macro has no value, nothing reads an override, or a name is unknown, with the
        nearest right name; and for whatever gin's parser finds wrong.
    """
    # Read gin's state inside the block; it is empty afterward.
    with _files_in_gin(inputs) as (bindings, imports):
        program = _program(inputs.run_mode)
        # The calls that the program will make; a binding that none of them reads is a mistake.
        reached = _list_calls(program, bindings)
        warnings = _check_macros(reached, bindings) + _check_overrides(reached, bindings)
        warnings += _absent_modules(inputs, imports.absent)
        values = tuple(_values(reached, bindings))
        # An override may have replaced what read a macro that the files leave to the user.
        door.forget_required(_macros(reached))
        gin.finalize()
        try:
            called: Call = gin.get_configurable(program)()
        except WrongArgument as error:
            raise _locate_error(error, bindings) from error
        called.locate(bindings)
        # T5X's old way to name the tasks' modules; treat it as any other import.
        for data in called.walk():
            module = data["module"] if data.configurable == _DATA else None
            if module and module not in imports.users:
                check_allowed(module, inputs.import_allowlist, data.places["module"])
                imports.users.append(module)
        text = remove_passwords(gin.operative_config_str())
        of_users = {each: door.resolve_bindings(*each) for each in _find_user_bindings()}
    # Their own code calls them, when it is imported or makes a dataset.
    for (scope, selector), arguments in of_users.items():
        for argument, value in arguments.items():
            gin.bind_parameter((scope, selector, argument), value)
    return Parsed(called, values, tuple(imports.users), tuple(warnings), text)


def macros_read(inputs: T5xInputs) -> frozenset[str]:
    """The names of the macros that a run reads, with or without a value.

    Raises:
      UserError, ValueError, TypeError, SyntaxError, OSError: see `parse`; macros are not checked.
    """
    with _files_in_gin(inputs) as (bindings, _):
        return frozenset(_macros(_list_calls(_program(inputs.run_mode), bindings)))


def _macros(reached: Iterable[Reference]) -> list[str]:
    """The names of the macros among the calls."""
    return [call.scope for call in reached if call.selector == MACRO]


@contextlib.contextmanager
def _files_in_gin(inputs: T5xInputs) -> Iterator[tuple[Bindings, modules.Imports]]:
    """Parses the files and overrides into gin's state; yields their places and other imports."""
    door.extend_readers()
    with (
        # Mesh TensorFlow's files have some of T5X's names too, such as SentencePieceVocabulary, and
        # must not find these. What a user's module registers stays: it registers it only once.
        door.isolate_config(*_SERVED),
        modules.serve_modules() as imports,
        record_bindings("--gin_bindings") as bindings,
        # gin would find the files of an installed T5X among its packages.
        door.search_only(*inputs.gin_search_paths, str(shipped_files()), in_packages=False),
        # Innermost: an error's nearest names are those that gin has until the others end.
        configuration_errors(bindings, t5x=True),
    ):
        # Check module imports while parsing, because that is when gin runs them.
        restrict_imports(inputs.import_allowlist, t5x=True)
        statements = list(inputs.gin_files), list(inputs.gin_bindings)
        try:
            gin.parse_config_files_and_bindings(*statements, finalize_config=False)
        except ValueError as error:
            if "No configurable matching" not in str(error) or not imports.users:
                raise
            # A file without dynamic registration may bind what these modules register.
            for name in imports.users:
                importlib.import_module(name)
            gin.clear_config()
            gin.parse_config_files_and_bindings(*statements, finalize_config=False)
        door.check_bound_addresses(bindings)
        yield bindings, imports


def _find_user_bindings() -> list[Reference]:
    """The functions of the user's modules that are bound to plain values, by their scopes."""
    return [
        Reference(scope, selector)
        for (scope, selector), arguments in door.bound().items()
        if not door.function_of(selector).__module__.startswith((*_SERVED, "gin."))
        # A record of a call of T5X's or SeqIO's is of no use to them.
        and not any(
            door.is_reference(inner)
            for part in door.flatten_value(arguments)
            if door.is_reference(part)
            for inner in door.flatten_value(door.follow_macros(part))
        )
    ]


def _locate_error(error: WrongArgument, bindings: Bindings) -> UserError:
    """The error of an argument by its name in gin, with the place that set it."""
    scope = "/".join(error.scopes)
    place = bindings.find(door.outer_scopes(scope), error.selector, error.argument)
    if place is None:
        return UserError(error.what, fix=error.fix)
    value = door.format_value(door.raw_bindings(error.selector, scope)[error.argument])
    name = f"{scope + '/' if scope else ''}{short(error.selector)}.{error.argument}"
    return UserError(error.describe(name, value), where=strip_folder(place), fix=error.fix)


def _program(run_mode: str) -> str:
    """The selector of a run mode's function; its name depends on how the file imports `__main__`.

    Raises:
      UserError: if no file configures it.
    """
    # `import __main__ as train_script` makes gin's selector begin with another name.
    selectors = {mode: door.find_selector(function_for(name)) for mode, name in PROGRAMS.items()}
    bound = {selector for _, selector in door.bound()}
    configured = {mode: selector for mode, selector in selectors.items() if selector in bound}
    if selector := configured.get(run_mode):
        return selector
    others = [*configured]
    run_file = "pretrain" if run_mode == "train" else run_mode
    raise UserError(
        f"No gin file configures `{PROGRAMS[run_mode]}`, which the run mode {run_mode}"
        f" calls{f'; these files are for {others[0]}' if others else ''}.",
        fix=f"Include a run file, such as t5x/configs/runs/{run_file}.gin, or choose"
        " the run mode that the files are for.",
    )


def _list_calls(selector: str, bindings: Bindings) -> list[Reference]:
    """Every call made to evaluate the program, macros included, in the order of its arguments.

    Calls that the user's own code may make come last. A reference with scopes is called under those
    only; one without, under its caller's.

    Raises:
      UserError: if a call contains itself, with the places that bind its arguments.
    """
    calls: dict[Reference, None] = {}  # a set in order
    within: list[Reference] = []

    def visit(call: Reference) -> None:
        # Calling it would never end.
        if call in within:
            raise UserError(
                f"{call.scope if call.selector == MACRO else short(call.selector)} refers to"
                " itself.",
                where="; ".join(_places_of(within[within.index(call) :], bindings)),
                fix="Bind another value.",
            )
        # A configurable may be reached by several paths, and several bindings may read one macro.
        if call in calls:
            return
        within.append(call)
        calls[call] = None
        for value in door.flatten_value(door.raw_bindings(call.selector, call.scope)):
            if door.is_reference(value):
                scope = "/".join(value.scopes) or call.scope
                visit(Reference(scope, value.configurable.selector))
        within.pop()
        # The program reads the arguments of a record's methods when it calls them.
        for _, other in door.bound():
            if other.startswith(f"{call.selector}."):
                visit(Reference(call.scope, other))

    for call in (Reference("", selector), *_find_user_bindings()):
        visit(call)
    return list(calls)


def _places_of(calls: Sequence[Reference], bindings: Bindings) -> Iterator[str]:
    """The places that bind the references from each call to the next, and back."""
    for call, following in zip(calls, [*calls[1:], calls[0]], strict=True):
        for argument, value in door.raw_bindings(call.selector, call.scope).items():
            parts = door.flatten_value(value)
            if any(door.selector_of(part) == following.selector for part in parts):
                place = bindings.find(call.scopes, call.selector, argument)
                yield strip_folder(place or f"default of {short(call.selector)}.{argument}")


# How values that are no numbers are written, in the shell's quotation marks.
_FORMS = {
    "TASK_FEATURE_LENGTHS": """"{'inputs': 512, 'targets': 114}\"""",
    **dict.fromkeys(("MODEL_DIR", "EVAL_OUTPUT_DIR", "INFER_OUTPUT_DIR"), "\"'DIR'\""),
    **dict.fromkeys(("CHECKPOINT_PATH", "INITIAL_CHECKPOINT_PATH"), "\"'DIR'\""),
    "MIXTURE_OR_TASK_NAME": "\"'NAME'\"",
}

# Macros that T5X's files might have, and have not -> what they bind.
_BOUND = {
    "LEARNING_RATE": "utils.create_learning_rate_scheduler.base_learning_rate",
    "WARMUP_STEPS": "utils.create_learning_rate_scheduler.warmup_steps",
    "SAVE_PERIOD": "utils.SaveCheckpointConfig.period",
}


def _check_macros(reached: Iterable[Reference], bindings: Bindings) -> list[str]:
    """Refuses macros that the program reads but nothing sets.

    Returns:
      The macros of the user's files that nothing reads, in words.

    Raises:
      UserError: naming all of them, and for each the nearest macro that is set but not read.
    """
    read = _macros(reached)
    bound = door.bound_macros()
    missing = [name for name in read if name not in bound or door.is_required(name)]
    if not missing:
        return check_macros_are_read(
            bindings,
            bindings.macros,
            overrides="--gin",
            is_shipped=lambda place: place.startswith(str(shipped_files())),
            known=bindings.macros,
            bind_instead=_BOUND,
        )
    lines = []
    for name in missing:
        place = bindings.place((name, MACRO, "value"))
        # A macro that is set but not read is probably the missing one, misspelled.
        stray = similar_names(name, bound - set(read), count=1)
        hint = f", for which {stray[0]!r} may be meant" if stray else ""
        required = f" (required at {strip_folder(place)})" if place else ""
        lines.append(f"{name}{required}{hint}")
    them = "them" if len(missing) > 1 else missing[0]
    added = " ".join(f"--gin.{name}={_FORMS.get(name, 'VALUE')}" for name in missing)
    fix = f"Set {them} in a gin file, or add {added}."
    if "MODEL" in missing:
        fix = "Include a model's gin file before the run's: t5x/examples/t5/t5_1_1/small.gin, say."
    raise UserError(f"Macros without a value: {'; '.join(lines)}.", fix=fix)


def _check_overrides(reached: Sequence[Reference], bindings: Bindings) -> list[str]:
    """Refuses overrides on the command line, and misspelled scopes, that nothing reads.

    Returns:
      The bindings of the user's files that nothing reads, in words.
    """
    warnings = []
    for key, place in bindings.places.items():
        scope, selector, argument = key
        if selector == MACRO or any(
            # gin applies a binding in a scope to every call in that scope or in one inside it.
            call.selector == selector and scope in call.scopes
            for call in reached
        ):
            continue
        name = f"{scope + '/' if scope else ''}{short(selector)}.{argument}"
        # Files of this package bind more than any single run reads.
        if place.startswith(str(shipped_files())):
            continue
        scopes = {each for call in reached if call.selector == selector for each in call.scopes}
        # `trian/`, which no reference of the files has either, so no other run reads it.
        is_misspelled = scope not in bindings.scopes and bool(
            difflib.get_close_matches(scope, scopes, n=1, cutoff=0.8)
        )
        # A file may serve several runs, but an override was written for this one.
        if not place.startswith("--gin") and not is_misspelled:
            warnings.append(f"{place}: this run does not read {name}")
            continue
        known = {f"{call.scope}/{short(call.selector)}".lstrip("/") for call in reached}
        nearest = nearest_names(name.rpartition(".")[0], known, count=3)
        raise UserError(
            f"This run does not read {name}.",
            where=place,
            fix=f"Remove it, or correct it; nearest: {nearest}.",
        )
    return warnings


def _absent_modules(inputs: T5xInputs, absent: Sequence[str]) -> list[str]:
    """A line for each missing T5X module that a file imports for its tasks only."""
    if not absent:
        return []
    folders = (*inputs.gin_search_paths, str(shipped_files()))
    lines = list_imports(inputs.gin_files, inputs.gin_bindings, folders, None)
    return [
        f"{strip_folder(line.place)}: t0repro has no {line.module}, so the import does nothing;"
        " import a module of your own that registers the tasks of the same names"
        " (--module_import=MODULE)"
        for line in lines
        if line.module in absent
    ]


def _values(reached: Iterable[Reference], bindings: Bindings) -> Iterator[Value]:
    for call in reached:
        # Their values are shown where arguments take them.
        if call.selector == MACRO or call.selector == "gin.constant":
            continue
        name = f"{call.scope}/{short(call.selector)}".lstrip("/")
        arguments = door.raw_bindings(call.selector, call.scope)
        function = door.function_of(call.selector)
        for argument, parameter in inspect.signature(function).parameters.items():
            if argument in arguments:
                value = door.format_value(arguments[argument])
                place = strip_folder(bindings.find(call.scopes, call.selector, argument) or "")
                yield Value(f"{name}.{argument}", value, place)
            elif parameter.default is not parameter.empty:
                default = _format_default(parameter.default)
                yield Value(f"{name}.{argument}", default, f"default of {short(call.selector)}")


def _format_default(default: Any) -> str:
    """A default as gin would write it."""
    if configurable := getattr(default, "gin_configurables", {}).get("t5x"):
        return f"@{configurable}()"
    records_call = getattr(default, "records_call", None) is True
    return f"@{default.__name__}" if records_call else repr(default)
