"""The flags of t5_mesh_transformer: t5's, with or without importing t5, our own, and --help."""

from __future__ import annotations

import dataclasses
import itertools
import re
import sys
import typing
from collections.abc import Sequence
from typing import Any, TypeVar

from absl import app, flags

from t0repro.cli import help_pages
from t0repro.cli.gate import USER_ERROR
from t0repro.cli.options import TRACKER_HELP, ProcessOptions
from t0repro.cli.results import echo
from t0repro.cli.spelling import canonical_arguments
from t0repro.cloud.tracker import TrackerName
from t0repro.config.gin_imports import package_folder
from t0repro.config.mtf.packages import recorded
from t0repro.jobs.options import AuxiliaryOptions

Group = TypeVar("Group", ProcessOptions, AuxiliaryOptions)

_T5_COMMAND = "t5.models.mesh_transformer_main"
_NEED_T5 = {"help", "helpshort", "helpfull", "helpxml", "h", "?", "use_model_api"}


def is_on_jax(arguments: Sequence[str]) -> bool:
    """Whether the command line asks for the JAX stack, before any flag is defined."""
    words = [*canonical_arguments(arguments), ""]
    pairs = [pair for word in itertools.pairwise(words) for pair in ["=".join(word), word[0]]]
    # absl takes a flag with one dash too.
    return not {"--backend=jax", "-backend=jax"}.isdisjoint(pairs)


def define_alone(arguments: Sequence[str]) -> bool:
    """Defines the flags without importing t5 if the command line does not need it; else none.

    Args:
      arguments: The command line. It needs t5 for Mesh TensorFlow, for a flag of another of its
        packages, and for the help texts of t5's flags.
    """
    if not is_on_jax(arguments):
        return False
    words = canonical_arguments(arguments)
    names = {word.lstrip("-").partition("=")[0] for word in words if word.startswith("-")}
    # A process that has imported t5's command has its flags already.
    if names & _NEED_T5 or _T5_COMMAND in sys.modules:
        return False
    _define_recorded()
    _define_own()
    # absl turns a boolean flag off by --noNAME.
    if all(name in flags.FLAGS or name.removeprefix("no") in flags.FLAGS for name in names):
        return True
    exchange()
    return False


def define() -> None:
    """Defines t5's flags, by importing its command if it is installed, and this project's own."""
    theirs = _import_t5s_flags() if package_folder("t5") else (_define_recorded(),)
    _define_own()
    by_module = flags.FLAGS.flags_by_module_dict()
    for module in (*theirs, __name__):
        for flag in by_module.get(module, []):
            # --help lists only the key flags of the main module, which is the console script.
            flags.FLAGS.register_key_flag_for_module(sys.argv[0], flag)


def _import_t5s_flags() -> tuple[str, ...]:
    """Imports t5's command, which defines its flags; returns the modules that they are of."""
    from t0repro import compat

    # Before t5's command is imported, because the import fails without the patches.
    compat.install()
    from mesh_tensorflow.transformer import utils
    from t5.models import mesh_transformer_main

    return mesh_transformer_main.__name__, utils.__name__


def _define_own() -> None:
    """Defines the flags that t5's command does not have."""
    # Flags are the process's own, and tests define them more than once.
    if "backend" not in flags.FLAGS:
        flags.DEFINE_enum(
            "backend", "mtf", ["mtf", "jax"], "Mesh TensorFlow on CPU, or JAX on any device."
        )
        flags.DEFINE_string(
            "vocab",
            None,
            "A local copy of the SentencePiece model that the tasks use (sets T0REPRO_VOCAB).",
        )
        flags.DEFINE_boolean(
            "at_hand",
            False,
            "Use only the tasks of the mixture whose rows or caches are on this machine, with their"
            " rates, and list the others.",
        )
        flags.DEFINE_multi_string(
            "gin_import_allowlist",
            None,
            "Modules that gin files may import, separated by commas; repeatable. Default: all.",
        )
        flags.DEFINE_boolean("debug", False, "Show tracebacks and Mesh TensorFlow's own log.")
        flags.DEFINE_boolean(
            "allow_changed",
            False,
            "Continue in a model_dir even if the optimizer, the model's settings or a checkpoint's"
            " name changed.",
        )
        flags.DEFINE_multi_enum("tracker", None, list(TrackerName), TRACKER_HELP)
        define_group(AuxiliaryOptions)
        define_group(ProcessOptions)


def _define_recorded() -> str:
    """Defines the recorded flags, without help texts; returns the name of their module."""
    for flag in recorded()["flags"]:
        more = {"enum_values": flag["choices"]} if "choices" in flag else {}
        make = getattr(flags, f"DEFINE_{flag['kind']}")
        # --help imports t5 where it is installed, so its help texts need no record.
        make(name=flag["name"], default=flag["default"], help="", **more)
    return __name__


def exchange() -> None:
    """Imports t5's command, which defines the flags; values that are already parsed are kept."""
    from t0repro import compat

    values = flags.FLAGS
    given = {flag["name"]: values[flag["name"]] for flag in recorded()["flags"]}
    for name in given:
        delattr(values, name)  # no flag may be defined twice
    # Before t5's command is imported: without the patches that import fails.
    compat.install()
    from t5.models import mesh_transformer_main  # noqa: F401

    for name, flag in given.items():
        if flag.present:
            values[name].value, values[name].present = flag.value, flag.present


# Never combined: the training run's gin files are Mesh TensorFlow's, a job's are T5X's.
_TAKEN_FOR_GRANTED = "replace_gin_file"


def define_group(group: type[Group]) -> None:
    """Defines a flag for each field of a dataclass of options, which Click's commands have too."""
    types = typing.get_type_hints(group, include_extras=True)
    for name, default in dataclasses.asdict(group()).items():
        type_, option = typing.get_args(types[name])
        kinds = typing.get_args(type_) or (type_,)  # str | None
        if name == _TAKEN_FOR_GRANTED:
            flags.DEFINE_boolean(name, True, "Always on here: a job reads only its own file.")
        elif bool in kinds:
            flags.DEFINE_boolean(name, default, option.help)
        elif int in kinds:
            flags.DEFINE_integer(name, default, option.help, lower_bound=option.min)
        elif float in kinds:
            flags.DEFINE_float(name, default, option.help, lower_bound=option.min)
        else:
            flags.DEFINE_string(name, default, option.help)


def group_of(group: type[Group], options: Any) -> Group:
    """A dataclass of options, filled from parsed flags."""
    return group(**{field.name: options[field.name].value for field in dataclasses.fields(group)})


# ---- The page of --help --------------------------------------------------------------------------


_HELP = {"help", "helpshort", "h", "?"}
_TEXT = """Train or evaluate as T0's README does: t5 0.9.4's command, on Mesh TensorFlow or on JAX.

It takes every flag of t5's command and adds those below that t5 does not have. Inputs are checked
before anything is built or written; a mistake ends with a message and exit code 2.

Example: t5_mesh_transformer --backend=jax --model_dir=runs/demo --module_import=t0repro.tasks.demo
  --gin_file=dataset.gin --gin_param="MIXTURE_NAME = 'demo_train'" --gin_file=demo/t5.1.1.demo.gin
  --gin_file=learning_rate_schedules/constant_0_001.gin --gin_param="run.train_steps = 20"
  --gin_param="run.batch_size = ('tokens_per_batch', 1024)"
  --gin_param="run.sequence_length = {'inputs': 128, 'targets': 16}"
  --gin_param="utils.run.mesh_shape = []"
"""
# The flags of t5's command that T0's README uses, and this project's. t5's module defines the
# remaining ones, for its Model API.
_HEADINGS = {
    "Gin files": (
        "gin_file", "gin_param", "gin_location_prefix", "gin_import_allowlist",
        "skip_all_gin_unknowns", "additional_deprecated_gin_references",
    ),
    "Tasks": (
        "module_import", "additional_task_cache_dirs", "at_hand", "vocab", "t5_tfds_data_dir",
    ),
    "The run": ("model_dir", "backend", "allow_changed", "tracker", "debug"),
    "Several processes": tuple(field.name for field in dataclasses.fields(ProcessOptions)),
    "Auxiliary jobs": tuple(field.name for field in dataclasses.fields(AuxiliaryOptions)),
    "TPUs": ("tpu", "gcp_project", "tpu_zone", "tpu_job_name"),
}  # fmt: skip
# Replaces t5's terse help for common flags, and what Click shows beside a kind of value.
_WORDS = {
    "gin_file": "A gin file of t5, of this project or of --gin_location_prefix; repeatable.",
    "gin_param": "A binding that overrides the files'; repeatable.",
    "gin_location_prefix": "Folders to look for gin files in.",
    "skip_all_gin_unknowns": "Ignore bindings of configurables that do not exist.",
    "additional_deprecated_gin_references": "Configurables whose bindings are ignored.",
    "module_import": "A module that registers tasks; repeatable.",
    "additional_task_cache_dirs": "Folders that hold cached tasks.",
    "t5_tfds_data_dir": "The folder of TensorFlow Datasets' data, for all tasks.",
    "model_dir": "The folder of the run's checkpoints and metrics.",
    "coordinator_address": "HOST:PORT of process 0.",
    "initialization_timeout": "Seconds to wait for the others.",
}


def parse(arguments: Sequence[str]) -> list[str]:
    """Parses the command line and returns the words that are no flags; exits after --help."""
    if _HELP.intersection(word.lstrip("-") for word in arguments if word.startswith("-")):
        echo(_help().rstrip())
        sys.exit(0)
    try:
        return app.parse_flags_with_usage(canonical_arguments(arguments))
    except SystemExit:
        # absl exits with 1 even after printing help that was requested.
        asked = {"helpfull", "helpxml"} & {word.strip("-") for word in arguments}
        sys.exit(0 if asked else USER_ERROR)


def _help() -> str:
    """The page of --help; --helpfull is absl's, with the flags of every library."""
    known = {flag.name: flag for flag in flags.FLAGS.get_key_flags_for_module(sys.argv[0])}
    sections = {
        heading: [_record(known.pop(name)) for name in names]
        for heading, names in _HEADINGS.items()
    }
    sections["The Model API"] = [_record(known.pop("use_model_api")), *map(_record, known.values())]
    return help_pages.page("t5_mesh_transformer", _TEXT, sections)


def _record(flag: Any) -> tuple[str, str]:
    """A flag with its kind of value, and its help with the default if there is one."""
    if flag.boolean:
        name = f"--[no]{flag.name}"
    elif choices := getattr(flag.parser, "enum_values", None):
        name = f"--{flag.name} <{'|'.join(choices)}>"
    else:
        kind = flag.parser.flag_type()
        name = f"--{flag.name} <{'str,...' if 'list' in kind else kind.replace('string', 'str')}>"
    # absl adds the choices before a help text, and how to repeat a flag after it.
    text = re.sub(r"^<[^>]*>: |;\s+repeat this option.*", "", flag.help, flags=re.S)
    text = _WORDS.get(flag.name, " ".join(text.split()))
    default = flag.default_as_str
    has_default = flag.default not in (None, False, "", [])
    return name, f"{text}  [default: {default.strip(chr(39))}]" if has_default else text
