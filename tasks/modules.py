"""Modules and template files that register tasks."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from t0repro.errors import (
    INSTALL_REFERENCE,
    OF_REFERENCE,
    UserError,
    place_in_module,
    similar_names,
)
from t0repro.progress import say
from t0repro.tasks.registration import describing
from t0repro.tasks.registry import left_out_files, prompted_mixtures, task_descriptions
from t0repro.tasks.template_files import read_template_file
from t0repro.tasks.template_registration import register_templates
from t0repro.tasks.user_files import TEMPLATES_VARIABLE, NoRowsError, template_files
from t0repro.words import shortened

# T0's own names for the module that registers its tasks.
_ALIASES = {
    "t0.seqio_tasks": "t0repro.tasks.t0",
    "promptsource.seqio_tasks": "t0repro.tasks.t0",  # an earlier name; it downloads on import
}


def resolve_modules(modules: Iterable[str]) -> list[str]:
    """The modules, with T0's names replaced by this project's; each change is noted on stderr.

    Args:
      modules: Names, each of which may be several, separated by commas.
    """
    found = []
    for module in [name for names in modules for name in names.split(",") if name]:
        name = _ALIASES.get(module, module)
        if name != module:
            print(f"--module_import={module}: {name} registers T0's tasks here.", file=sys.stderr)
        found.append(name)
    return found


_OWN = "t0repro."


def needs_seqio(modules: Iterable[str]) -> bool:
    """Whether a module may register directly with SeqIO, as any but t0repro's own may.

    Raises:
      UserError: See `check_modules`.
    """
    check_modules(modules)
    return not all(name.startswith(_OWN) for names in modules for name in names.split(","))


def check_modules(modules: Iterable[str]) -> None:
    """Looks for modules without importing them, which may take SeqIO and TensorFlow.

    Raises:
      UserError: If there is none of the name's first part, or it is a file's name.
    """
    for module in [name for names in modules for name in names.split(",") if name]:
        if module.endswith(".py") or os.sep in module:
            path = Path(module)
            raise UserError(
                f"{module} is a file, and not the name of a module.",
                where="--module_import",
                fix=f"Write {path.name.removesuffix('.py')}"
                + (f", with PYTHONPATH={path.parent}." if path.parent != Path(".") else "."),
            )
        package = module.partition(".")[0]
        if package not in sys.modules and not (package and importlib.util.find_spec(package)):
            raise _no_module(module)


def _no_module(module: str) -> UserError:
    if (package := module.partition(".")[0]) in OF_REFERENCE - sys.modules.keys():
        what = f"This needs {package}, which is not installed."
        return UserError(what, where=f"--module_import {module}", fix=INSTALL_REFERENCE)
    known = [f"{_OWN}tasks.{name}" for name in ("t0", "demo", "local", "few_shot", "flan")]
    near = similar_names(module, known + [path.stem for path in Path().glob("*.py")], 1)
    nearest = f" Nearest: {near[0]}." if near else ""
    return UserError(
        f"There is no module {module!r}.",
        where="--module_import",
        fix="Name a module that registers tasks, for instance t0repro.tasks.t0. One of your own is"
        f" looked for in PYTHONPATH and in the working folder.{nearest}",
    )


# Of T0REPRO_TEMPLATES: like a module, each is registered once.
_registered_files: set[str] = set()


def load_tasks(
    modules: Sequence[str], templates: Sequence[str | Path] | None = (), *, into_seqio: bool
) -> None:
    """Imports modules that register tasks, and registers the tasks of template files.

    The files that T0REPRO_TEMPLATES names are registered too; beside modules, only those that have
    rows.

    Args:
      modules: Module names.
      templates: Files in promptsource's YAML format; None registers no file but what modules do.
      into_seqio: Whether to add the tasks to SeqIO. If not, they are only described, which takes
        under a second unless a module needs SeqIO.

    Raises:
      UserError: If a module cannot be found, or a file is broken.
    """
    modules = resolve_modules(modules)
    known = () if templates is None else template_files()
    named = [path for path in known if path not in _registered_files]
    templates = [*named, *(templates or ())]
    for path in templates:
        read_template_file(path)  # report a broken file before seconds of imports
    # A user's module may register plain SeqIO tasks in addition to prompted ones.
    with_seqio = needs_seqio(modules) or into_seqio
    if with_seqio and (modules or templates):
        # First: on a current TensorFlow, SeqIO and t5 cannot be imported without it.
        from t0repro import compat

        compat.quiet_logs()
        compat.install()
        from t0repro.tasks.seqio_tasks import read_t5s_vocabulary_as_ours

        read_t5s_vocabulary_as_ours()
        hand_to_seqio()
    with contextlib.nullcontext() if with_seqio else describing():
        for module in modules:
            _import(module)
        for path in templates:
            try:
                register_templates(path)
                left_out_files.pop(str(path), None)
            except NoRowsError as error:
                # The variable may stand for all of a user's work, and the modules need other rows.
                if path not in named or not modules:
                    raise
                named = [each for each in named if each != path]
                if str(path) not in left_out_files:  # a command may load its tasks twice
                    say(f"note: {path}, of {TEMPLATES_VARIABLE}, is left out: {error.what}")
                left_out_files[str(path)] = error
    _registered_files.update(named)


def hand_to_seqio() -> None:
    """Adds to SeqIO what was only described, since a module registers tasks on its first import."""
    if not task_descriptions():
        return
    import seqio

    from t0repro.tasks import seqio_tasks

    names = set(seqio.TaskRegistry.names())
    for name, description in task_descriptions().items():
        if name not in names:
            seqio_tasks.add_task(description)
    # After the tasks: SeqIO makes no mixture of tasks that it does not have.
    for mixture in prompted_mixtures().values():
        rates = mixture.rates or mixture.tasks
        seqio_tasks.add_mixture(mixture.name, rates, mixture.default_rate)


def _import(module: str) -> None:
    try:
        importlib.import_module(module)
    except Exception as error:  # whatever a user's module raises, or SeqIO for it
        is_missing = isinstance(error, ModuleNotFoundError) and error.name is not None
        # Otherwise the module exists, and it imports one that does not.
        if is_missing and f"{module}.".startswith(f"{error.name}."):
            raise _no_module(module) from error
        if module.startswith(_OWN):
            raise
        place = place_in_module(error)
        if isinstance(error, UserError):
            where = " in ".join(filter(None, (error.where, place)))
            raise type(error)(error.what, where=where or None, fix=error.fix) from error
        raise UserError(
            f"The module {module!r} cannot be imported:"
            f" {shortened(f'{type(error).__name__}: {error}', 300)}",
            where=place,
            fix="Correct the module, or install what it imports; --debug shows the traceback.",
        ) from error
