"""The command t5_mesh_transformer: t5 0.9.4's, on Mesh TensorFlow or on JAX.

It takes every flag of t5's command (t5 itself defines them) and more: --backend, --vocab,
--skip_missing, --attention, --allow_changed, --gin_import_allowlist, --tracker, --debug, and those
of auxiliary jobs (docs/auxiliary_jobs.md). Inputs are checked before anything is built or written;
a mistake ends with a message on stderr and exit code 2.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import re
import sys
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from absl import app, flags, logging

from t0repro.cli.commands import help_page
from t0repro.cli.gate import USER_ERROR, gate, use_huge_pages_where_faster
from t0repro.cli.gin_options import allowlist_of
from t0repro.cli.options import TRACKER_HELP, ProcessOptions, track_training
from t0repro.cli.results import echo
from t0repro.cli.spelling import canonical, canonical_arguments
from t0repro.cloud.auxiliary_options import AuxiliaryOptions
from t0repro.cloud.trackers.table import TrackerName
from t0repro.config.configuration import Configuration, NotOnJax
from t0repro.config.gin.folders import package_folder
from t0repro.config.mtf.stand_ins import read_signatures
from t0repro.errors import UserError, needs_reference_tier
from t0repro.progress import SeqioOnce
from t0repro.storage import check_readable, input_path
from t0repro.tasks.modules import check_modules, resolve_modules
from t0repro.tasks.vocabulary import named_vocabulary
from t0repro.training.preemption import resumable
from t0repro.words import printable

if TYPE_CHECKING:
    from t0repro.config.mtf.parser import MeshInputs


def console_entry_point() -> None:
    """Runs the command with the arguments in sys.argv; the console script's entry point."""
    # Keep the traceback of an unexpected error, which may come hours into a run.
    with gate("t5_mesh_transformer", show_unexpected=True) as settings:
        if _is_on_jax(sys.argv[1:]):
            use_huge_pages_where_faster(sys.argv[1:])
        _check_places(sys.argv[1:])
        define_flags()
        _import_others_flags(sys.argv[1:])

        def main(arguments: Sequence[str]) -> None:
            settings.debug, settings.long_work = flags.FLAGS.debug, True
            settings.how_to_continue = (
                "Start the same command again: training continues from the latest checkpoint in"
                f" {flags.FLAGS.model_dir}; an evaluation starts over."
            )
            if len(arguments) > 1:
                raise UserError(
                    f"Unexpected argument {arguments[1]!r}.",
                    fix='Write --flag=value; quote a binding: --gin_param="A.b = 1".',
                )
            run(flags.FLAGS)

        app.run(main, flags_parser=_parse_flags)


def _check_places(arguments: Sequence[str]) -> None:
    """Refuses addresses that cannot be opened before the slow imports that define the flags."""
    for argument, following in itertools.pairwise([*arguments, ""]):
        name, equals, value = argument.lstrip("-").partition("=")
        name = canonical(name)
        if argument.startswith("-") and name in _PLACES:
            for place in (value if equals else following).split(","):
                check_readable(place, f"--{name}")


_PLACES = (
    *("model_dir", "gin_file", "gin_location_prefix", "additional_task_cache_dirs"),
    *("vocab", "t5_tfds_data_dir", "pretrained_model_dir"),
)


def run(options: Any) -> None:
    """Runs t5_mesh_transformer with parsed flags.

    Raises:
      UserError: If a check of the inputs fails, before anything is written.
    """
    _check_flags(options)
    if options.vocab:
        # Tasks read the vocabulary's name on registration, so it is set before any import.
        os.environ["T0REPRO_VOCAB"] = options.vocab
    if not options.debug and not options["verbosity"].present:
        logging.set_verbosity(logging.WARNING)
    logging.get_absl_logger().addFilter(SeqioOnce())
    if options.backend == "jax":
        _run_jax(options)
    else:
        _run_mesh_tensorflow(options)


def _check_flags(options: Any) -> None:
    from t0repro.config.addresses import check_output

    if not (options.gin_file or options.gin_param or options.use_model_api):
        raise UserError(
            "There is nothing to run: no gin file and no parameter is given.",
            where="the command line",
            fix="Say what to run, for instance: t5_mesh_transformer --model_dir=DIR"
            " --module_import=t0repro.tasks.demo --gin_file=dataset.gin"
            " --gin_param=\"MIXTURE_NAME = 'demo_train'\" --gin_file=demo/t5.1.1.demo.gin"
            ' --gin_param="utils.run.mesh_shape = []"; --help lists the flags.',
        )
    check_output(options.model_dir, "--model_dir", jax=options.backend == "jax")
    if options.vocab:
        named_vocabulary(options.vocab)
    check_modules(options.module_import or ())
    if options.use_model_api:
        return
    name = next((name for name, flag in _model_api_flags().items() if flag.present), None)
    if name is not None:
        binding = _RUN_BINDINGS.get(name)
        in_gin = f', or bind it in gin: --gin_param="{binding} = ..."' if binding else ""
        raise UserError(
            f"--{name} is a flag of the Model API, without which it has no effect.",
            where=f"--{name}",
            fix=f"Add --use_model_api{in_gin}.",
        )


def _run_jax(options: Any) -> None:
    with contextlib.ExitStack() as beside:
        with resumable():  # nothing is written yet, in any mode
            import jax

            from t0repro.data.seqio_need import why_mesh_run_needs_seqio
            from t0repro.partitioning.processes import is_first
            from t0repro.runs import run
            from t0repro.runs.preflight import check_mesh_transformer

            beside.enter_context(_group_of(ProcessOptions, options).joined())
            # As t5's main does on every run without --tpu.
            float32 = jax.default_backend() == "cpu"
            configuration = _load(options, float32_activations=float32)
            if why := why_mesh_run_needs_seqio(configuration.run):
                _import_seqio(options, why)
            check_mesh_transformer(configuration, jax=True, skip_missing=options.skip_missing)
            print_flag_notes(options, configuration, on_jax=True)
        if is_first():
            tracked = track_training(options.tracker, Path(options.model_dir), configuration.run)
            beside.enter_context(tracked)
            beside.enter_context(jobs_during_training(options))
        run(dataclasses.replace(configuration, allow_changed=options.allow_changed))


def _import_seqio(options: Any, why: str) -> None:
    """Imports SeqIO, TensorFlow and t5, which read data that the core cannot; adds the tasks.

    Raises:
      UserError: If they are not installed.
    """
    from t0repro import compat
    from t0repro.tasks.modules import load_tasks
    from t0repro.tasks.registry import add_cache_dirs

    if not compat.is_installed():
        raise needs_reference_tier(why)
    inputs = gin_inputs(options)
    with _announce_import():
        compat.install()
        import seqio

        load_tasks(inputs.module_imports, into_seqio=True)
    if inputs.tfds_data_dir:
        seqio.set_tfds_data_dir_override(inputs.tfds_data_dir)
    add_cache_dirs(inputs.cache_dirs, "--additional_task_cache_dirs")


def _run_mesh_tensorflow(options: Any) -> None:
    if (options.process_count or 1) > 1 or options.multiprocess_gpu:
        raise UserError(
            "Mesh TensorFlow runs as one process here.",
            where="--process_count" if options.process_count else "--multiprocess_gpu",
            fix="Add --backend=jax.",
        )
    from t0repro import compat

    with _announce_import():
        compat.install()
        from mesh_tensorflow.transformer import utils as utils
        from t5.models import mesh_transformer_main as mesh_transformer_main
    import tensorflow

    tf = tensorflow.compat.v1
    # As in t5's own entry point: Mesh TensorFlow builds graphs as in TensorFlow 1.
    tf.disable_v2_behavior()
    tf.logging.set_verbosity(tf.logging.INFO if options.debug else tf.logging.WARN)
    # Otherwise absl's handler repeats every line of TensorFlow's handler.
    tf.get_logger().propagate = False

    from t0repro.config.mtf import parser
    from t0repro.mtf.run import run
    from t0repro.runs.preflight import check_mesh_transformer

    configuration = None
    try:
        configuration = _load(options, float32_activations=True, with_packages=True)
    except NotOnJax:
        # Only t5 implements some modes, such as export; it checks their few flags itself.
        if not options.use_model_api:
            raise
    if configuration:
        for warning in configuration.warnings:
            print(printable(f"warning: {warning}"), file=sys.stderr)
        check_mesh_transformer(configuration, jax=False, skip_missing=options.skip_missing)
        print_flag_notes(options, configuration, on_jax=False)
    if options.use_model_api:
        # t5's MtfModel builds the run from the flags itself, so `run` must be bound only to what
        # the gin files say.
        parser.parse(gin_inputs(options), warn=False)
        configuration = None
    asked = configuration.run_or_refusal if configuration else None
    # Its settings as the JAX stack has them, unless only this one can do what they say.
    config = None if isinstance(asked, NotOnJax) else asked
    with (
        track_training(options.tracker, Path(options.model_dir), config),
        jobs_during_training(options),
    ):
        run(options, configuration)


def _load(options: Any, *, float32_activations: bool, with_packages: bool = False) -> Configuration:
    """The configuration; the Model API's flags amount to the same bindings as gin files would."""
    from t0repro.config.mtf import dialect
    from t0repro.converters.finding import find_checkpoint

    return dialect.load(
        gin_inputs(options),
        float32_activations=float32_activations,
        with_packages=with_packages,
        flags=options if options.use_model_api else None,
        find_checkpoint=find_checkpoint,
    )


def gin_inputs(options: Any) -> MeshInputs:
    """Collects the gin files, overrides and imports from parsed flags."""
    from t0repro.config.mtf.parser import MeshInputs

    return MeshInputs(
        model_dir=options.model_dir,
        gin_files=options.gin_file or (),
        gin_params=options.gin_param or (),
        location_prefixes=options.gin_location_prefix,
        module_imports=resolve_modules(options.module_import or ()),
        cache_dirs=options.additional_task_cache_dirs,
        skip_unknown=options.skip_all_gin_unknowns or options.additional_deprecated_gin_references,
        tfds_data_dir=options.t5_tfds_data_dir,
        import_allowlist=allowlist_of(options.gin_import_allowlist),
    )


# ---- Auxiliary jobs beside the training run ------------------------------------------------------


@contextlib.contextmanager
def jobs_during_training(options: Any) -> Iterator[None]:
    """Runs the auxiliary jobs that the flags ask for while the block trains.

    Raises:
      UserError: see `auxiliary_jobs_during_training`.
    """
    names = [field.name for field in dataclasses.fields(AuxiliaryOptions)]
    if not any(options[name].present for name in names):
        yield
        return
    from t0repro.cloud.auxiliary import auxiliary_jobs_during_training, hand_on_skip_missing
    from t0repro.config.t5x.gin_files import T5xInputs

    jobs = _group_of(AuxiliaryOptions, options)
    machines = input_path(options.machines, "--machines") if options.machines else None
    jobs = dataclasses.replace(jobs, machines=machines, replace_gin_file=True)
    if options.skip_missing:
        jobs = hand_on_skip_missing(jobs)
    # The jobs have gin files of their own.
    allowlist = allowlist_of(options.gin_import_allowlist)
    gin = T5xInputs("train", import_allowlist=allowlist)
    with auxiliary_jobs_during_training(options.model_dir, jobs, gin):
        yield


# ---- What TPU flags mean on this machine, and whether the batch fits -----------------------------


_TPU_FLAGS = ("tpu", "gcp_project", "tpu_zone", "tpu_job_name")


def print_flag_notes(options: Any, configuration: Configuration, *, on_jax: bool) -> None:
    """Prints a line for each flag whose meaning differs here, and one about memory.

    Args:
      options: t5_mesh_transformer's flags.
      configuration: The run's configuration.
      on_jax: Whether the JAX stack runs it; Mesh TensorFlow runs on the CPU.

    Raises:
      UserError: If the run certainly does not fit into the device's memory.
    """
    name, devices, total, free = _devices(on_jax)
    lines = tpu_lines(options, configuration, name, devices)
    run = configuration.run_or_refusal
    if not isinstance(run, NotOnJax):
        from t0repro.partitioning.memory import check_fits

        # Virtual devices of a CPU share its memory.
        shares = 1 if name == "the CPU" else devices
        fit = check_fits(run, total, free, shares)
        # Report a fit only beside other lines; always report a misfit.
        if lines or not fit.endswith("it fits."):
            lines.append(fit)
    for line in lines:
        print(f"t5_mesh_transformer: {line}", file=sys.stderr)


def tpu_lines(options: Any, configuration: Configuration, device: str, several: int) -> list[str]:
    """One line on the meaning of each TPU flag and binding on a machine without a TPU.

    Args:
      options: t5_mesh_transformer's flags.
      configuration: The run's configuration.
      device: What computes here.
      several: How many of those devices there are.
    """
    given = [f"--{flag}={getattr(options, flag)}" for flag in _TPU_FLAGS if getattr(options, flag)]
    lines = []
    # With a TPU on this machine, they keep their usual meaning.
    if given and "tpu" not in device.lower():
        lines.append(f"{', '.join(given)}: no effect without a TPU; this runs on {device}.")
    inputs = configuration.inputs
    if inputs.tpu_mesh and several < 2:
        lines.append(
            f"mesh_shape {inputs.tpu_mesh}, of tpu_mesh_shape: one device here; the batch stays"
            f" {inputs.batch_size:,} sequences."
        )
    return lines


def _devices(on_jax: bool) -> tuple[str, int, int, int]:
    """The kind of the devices that compute, their number, and one's memory and free memory."""
    count = 1
    if on_jax:
        import jax

        device, count = jax.local_devices()[0], jax.device_count()
        # CPU devices report no statistics, so use the machine's memory.
        statistics = device.memory_stats() or {}
        if "bytes_limit" in statistics:
            total = statistics["bytes_limit"]
            return device.device_kind, count, total, total - statistics.get("bytes_in_use", 0)
    import psutil

    memory = psutil.virtual_memory()
    return "the CPU", count, memory.total, memory.available


# ---- The flags: t5's, with or without importing t5, and our own ----------------------------------

_Group = TypeVar("_Group", ProcessOptions, AuxiliaryOptions)


def _is_on_jax(arguments: Sequence[str]) -> bool:
    """Whether the command line asks for the JAX stack, before any flag is defined."""
    words = [*canonical_arguments(arguments), ""]
    pairs = [pair for word in itertools.pairwise(words) for pair in ["=".join(word), word[0]]]
    # absl takes a flag with one dash too.
    return not {"--backend=jax", "-backend=jax"}.isdisjoint(pairs)


def define_flags() -> None:
    """Defines t5's flags as they are recorded, and this project's own."""
    _define_recorded()
    _define_own()
    of_t5 = [flags.FLAGS[flag["name"]] for flag in read_signatures()["flags"]]
    for flag in (*of_t5, *flags.FLAGS.flags_by_module_dict()[__name__]):
        # --help lists only the key flags of the main module, which is the console script.
        flags.FLAGS.register_key_flag_for_module(sys.argv[0], flag)


def _import_others_flags(arguments: Sequence[str]) -> None:
    """Imports t5's command if the command line has a flag of another of its packages."""
    words = canonical_arguments(arguments)
    names = {word.lstrip("-").partition("=")[0] for word in words if word.startswith("-")}
    # absl turns a boolean flag off by --noNAME.
    known = {*flags.FLAGS, *(f"no{name}" for name in flags.FLAGS), *_HELP, ""}
    if not names <= known and package_folder("t5"):
        from t0repro import compat

        with _announce_import():
            compat.install()
            from t5.models import mesh_transformer_main as mesh_transformer_main


@contextlib.contextmanager
def _announce_import() -> Iterator[None]:
    """Says that the block imports t5; keeps the values of flags that it defines anew."""
    echo("importing TensorFlow, t5 and Mesh TensorFlow ...", err=True)
    before = {flag["name"]: flags.FLAGS[flag["name"]] for flag in read_signatures()["flags"]}
    try:
        yield
    finally:
        for name, flag in before.items():
            flags.FLAGS[name].value, flags.FLAGS[name].present = flag.value, flag.present


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
            "skip_missing",
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


def _define_recorded() -> None:
    """Defines the recorded flags of t5's command; its import may define them anew."""
    for flag in read_signatures()["flags"]:
        if flag["name"] not in flags.FLAGS:
            more = {"enum_values": flag["choices"]} if "choices" in flag else {}
            make = getattr(flags, f"DEFINE_{flag['kind']}")
            make(
                name=flag["name"],
                default=flag["default"],
                help=flag["help"],
                allow_override=True,
                **more,
            )


# Never combined: the training run's gin files are Mesh TensorFlow's, a job's are T5X's.
_TAKEN_FOR_GRANTED = "replace_gin_file"


def define_group(group: type[_Group]) -> None:
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
        elif choices := typing.get_args(kinds[0]):  # of a Literal
            flags.DEFINE_enum(name, default, choices, option.help)
        else:
            flags.DEFINE_string(name, default, option.help)


def _group_of(group: type[_Group], options: Any) -> _Group:
    """A dataclass of options, filled from parsed flags."""
    return group(**{field.name: options[field.name].value for field in dataclasses.fields(group)})


# ---- The page of --help --------------------------------------------------------------------------


_HELP = {"help", "helpshort", "h", "?"}
_TEXT = r"""Train or evaluate as T0's README does: t5 0.9.4's command, on Mesh TensorFlow or on JAX.

It takes every flag of t5's command and adds those below that t5 does not have. Inputs are checked
before anything is built or written; a mistake ends with a message and exit code 2.

Example:
  t5_mesh_transformer --backend=jax --model_dir=runs/demo \
    --module_import=t0repro.tasks.demo --gin_file=dataset.gin \
    --gin_param="MIXTURE_NAME = 'demo_train'" \
    --gin_file=demo/t5.1.1.demo.gin \
    --gin_file=learning_rate_schedules/constant_0_001.gin \
    --gin_param="run.train_steps = 20" \
    --gin_param="run.batch_size = ('tokens_per_batch', 1024)" \
    --gin_param="run.sequence_length = {'inputs': 128, 'targets': 16}" \
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
        "module_import", "additional_task_cache_dirs", "skip_missing", "vocab", "t5_tfds_data_dir",
    ),
    "The run": ("model_dir", "backend", "attention", "allow_changed", "tracker", "debug"),
    "Several processes": tuple(
        field.name for field in dataclasses.fields(ProcessOptions) if field.name != "attention"
    ),
    "Auxiliary jobs": tuple(field.name for field in dataclasses.fields(AuxiliaryOptions)),
    "TPUs": ("tpu", "gcp_project", "tpu_zone", "tpu_job_name"),
}  # fmt: skip
# What binds the same as a flag of the Model API.
_RUN_BINDINGS = {
    "mode": "run.mode",
    "train_steps": "run.train_steps",
    "batch_size": "run.batch_size",
    "mixture_or_task": "MIXTURE_NAME",
    "pretrained_model_dir": "run.init_checkpoint",
    "eval_split": "run.dataset_split",
    "tpu_topology": "tpu_mesh_shape.tpu_topology",
    "model_parallelism": "tpu_mesh_shape.model_parallelism",
    "input_file": "input_filename",
    "output_file": "output_filename",
    "beam_size": "Bitransformer.decode.beam_size",
    "temperature": "Bitransformer.decode.temperature",
}
# Replaces t5's terse help for common flags, and what Click shows beside a kind of value.
_WORDS = {
    "gin_file": "A gin file of t5, of this project or of --gin_location_prefix; repeatable.",
    "gin_param": "A binding that overrides the files'; repeatable.",
    "gin_location_prefix": "Folders to look for gin files in.",
    "skip_all_gin_unknowns": "Ignore bindings of configurables that do not exist.",
    "additional_deprecated_gin_references": "Configurables whose bindings are ignored.",
    "module_import": "Modules that register tasks, separated by commas; repeatable.",
    "additional_task_cache_dirs": "Folders that hold cached tasks.",
    "t5_tfds_data_dir": "The folder of TensorFlow Datasets' data, for all tasks.",
    "model_dir": "The folder of the run's checkpoints and metrics.",
    "coordinator_address": "HOST:PORT of process 0.",
    "initialization_timeout": "Seconds to wait for the others.",
}


def _parse_flags(arguments: Sequence[str]) -> list[str]:
    """Parses the command line and returns the words that are not flags; exits after --help."""
    if _HELP.intersection(word.lstrip("-") for word in arguments if word.startswith("-")):
        echo(_help().rstrip())
        sys.exit(0)
    try:
        return flags.FLAGS(canonical_arguments(arguments))
    except flags.Error as error:
        said, _, near = str(error).partition(". Did you mean: ")
        # Without --use_model_api, other flags have no effect.
        read = {each for names in _HEADINGS.values() for each in names}
        names = [f"--{each}" for each in near.removesuffix(" ?").split(", ") if each in read]
        fix = (
            "--help lists the flags. A setting of the run is gin's: --gin_param="
            '"run.train_steps = 100", or run.save_checkpoints_steps, run.batch_size; for some,'
            " scripts read a variable: TRAIN_STEPS=100."
        )
        if names:
            fix = f"Nearest: {', '.join(names)}."
        raise UserError(f"{said}.", where="the command line", fix=fix) from error
    except SystemExit:
        # absl exits with 1 even after printing help that was requested.
        asked = {"helpfull", "helpxml"} & {word.strip("-") for word in arguments}
        sys.exit(0 if asked else USER_ERROR)


def _help() -> str:
    """The page of --help; --helpfull is absl's, with the flags of every library."""
    sections = {
        heading: [_record(flags.FLAGS[name]) for name in names]
        for heading, names in _HEADINGS.items()
    }
    of_model_api = [flags.FLAGS["use_model_api"], *_model_api_flags().values()]
    sections["The Model API"] = list(map(_record, of_model_api))
    return help_page("t5_mesh_transformer", _TEXT, sections)


def _model_api_flags() -> dict[str, Any]:
    """t5's flags that have an effect only with --use_model_api, by name."""
    of_run = {name for names in _HEADINGS.values() for name in names} | {"use_model_api"}
    known = flags.FLAGS.get_key_flags_for_module(sys.argv[0])
    return {flag.name: flag for flag in known if flag.name not in of_run}


def _record(flag: Any) -> tuple[str, str]:
    """A flag with its kind of value, and its help with the default if there is one."""
    if flag.boolean:
        name = f"--[no]{flag.name}"
    elif choices := getattr(flag.parser, "enum_values", None):
        name = f"--{flag.name} <{'|'.join(choices)}>"
    else:
        kind = flag.parser.flag_type()
        words = {"string": "text", "int": "number", "float": "number"}
        name = f"--{flag.name} <{'text,...' if 'list' in kind else words.get(kind, kind)}>"
    # absl adds the choices before a help text, and how to repeat a flag after it.
    text = re.sub(r"^<[^>]*>: |;\s+repeat this option.*", "", flag.help, flags=re.S)
    text = _WORDS.get(flag.name, " ".join(text.split()))
    default = flag.default_as_str
    has_default = flag.default not in (None, False, "", [])
    return name, f"{text}  [default: {default.strip(chr(39))}]" if has_default else text
