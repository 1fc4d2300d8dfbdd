"""Checks a job without a network: gin, machines, memory, paths."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any

from t0repro.cloud.spec import (
    ACCELERATORS,
    CLOUD_TPU,
    MESH_TRANSFORMER,
    MOUNT,
    Arguments,
    JobMode,
    Machines,
    check_machines,
    tpu_slice,
)
from t0repro.config.run_config import ModelConfig, RunConfig
from t0repro.config.training_plan import RestoreConfig
from t0repro.errors import UserError
from t0repro.runs.preflight import Check, Cost, run_checks


@dataclasses.dataclass(frozen=True)
class Configured:
    """A job's configuration, as far as this machine knows it.

    Attributes:
      text: the complete configuration in gin; "" for commands that read no gin.
      warnings: bindings in gin files that nothing reads.
      run: a training run or scoring that precompile can compile; None for any other job.
      architecture: the model's parameters and their shapes; "" if the configuration has none.
      output: the folder of the results.
      checkpoints: paths or addresses that parameters are restored from.
      mixture: a mixture or task, or several joined by commas.
      split: the split of its examples.
    """

    text: str = ""
    warnings: tuple[str, ...] = ()
    run: RunConfig | None = None
    architecture: str = ""
    output: str | None = None
    checkpoints: tuple[str, ...] = ()
    mixture: str | None = None
    split: str | None = None


def read(arguments: Arguments) -> Configured:
    """Reads a job's gin files, as the container will.

    Raises:
      UserError: For macros without a value, misspelt names, values out of range, and whatever else
        the run would refuse; and if the results have no folder.
    """
    configured = _read(arguments)
    if not configured.output:
        raise UserError(
            "The job has no folder for its results.",
            where=f"--run_mode {arguments.mode}" if arguments.mode else "--model_dir",
            fix="Name one in the bucket: as --out for rank-eval, --model_dir for aux and"
            " t5_mesh_transformer, and in gin for the others.",
        )
    return configured


def _read(arguments: Arguments) -> Configured:
    if arguments.mode is None:
        return _mesh_transformer(arguments)
    if arguments.mode in (JobMode.TRAIN, JobMode.PRECOMPILE):
        return _t5x_training(arguments)
    if arguments.mode in (JobMode.EVAL, JobMode.INFER):
        return _t5x_inference(arguments)
    # rank-eval and aux: their flags say everything about the job.
    checkpoints = (arguments.checkpoint,) if arguments.checkpoint else ()
    return Configured(output=arguments.output, checkpoints=checkpoints, mixture=arguments.mixture)


def _t5x(arguments: Arguments) -> Any:
    from t0repro.config.t5x.gin_files import T5xInputs, parse

    if not arguments.gin_files:
        raise UserError(
            f"The run mode {arguments.mode} needs a gin file.", where="--gin_file", fix="Name one."
        )
    # The default of --gin_search_paths, by which the container will look, too.
    search = arguments.search_paths or (".",)
    return parse(T5xInputs(str(arguments.mode), arguments.gin_files, arguments.bindings, search))


def _t5x_training(arguments: Arguments) -> Configured:
    from t0repro.config.t5x.run import precompile_config, train_config

    parsed = _t5x(arguments)
    # precompile.gin describes the training run whose step it compiles.
    compiles = arguments.mode is JobMode.PRECOMPILE
    run = (precompile_config if compiles else train_config)(parsed)
    data = run.plan.train_data
    return Configured(
        text=parsed.gin_text,
        warnings=parsed.warnings,
        run=run,
        architecture=_architecture(run.model),
        output=run.model_dir,
        checkpoints=_paths(run.plan.restore),
        mixture=data and data.mixture_or_task_name,
        split=data and data.split,
    )


def _t5x_inference(arguments: Arguments) -> Configured:
    from t0repro.config.t5x import inference

    parsed = _t5x(arguments)
    plan = (inference.eval_plan if arguments.mode is JobMode.EVAL else inference.infer_plan)(parsed)
    return Configured(
        text=parsed.gin_text,
        warnings=parsed.warnings,
        architecture=_architecture(plan.model),
        output=plan.output_dir,
        checkpoints=_paths(plan.restore),
        mixture=plan.data.mixture_or_task_name,
        split=plan.data.split,
    )


def _mesh_transformer(arguments: Arguments) -> Configured:
    from t0repro.config.configuration import NotOnJax
    from t0repro.config.mtf.dialect import load
    from t0repro.config.mtf.parser import MeshInputs

    inputs = MeshInputs(
        model_dir=arguments.output or "",
        gin_files=arguments.gin_files,
        gin_params=arguments.bindings,
        location_prefixes=arguments.search_paths,
        module_imports=arguments.module_imports,
    )
    # Accelerators' dtypes; float32 is for CPUs, such as this machine's.
    configuration = load(inputs, float32_activations=False)
    try:
        run = configuration.run
    except NotOnJax:
        if arguments.backend == "jax":
            raise
        run = None  # only what the JAX stack supports can be compiled
    return Configured(
        text=configuration.gin_text,
        warnings=tuple(f"{error.where}: {error.what}" for error in configuration.misread),
        run=run,
        architecture=_architecture(run.model) if run else "",
        output=arguments.output,
        checkpoints=(start,) if (start := configuration.inputs.init_checkpoint) else (),
        mixture=configuration.inputs.mixture_or_task_name,
        split=configuration.inputs.split,
    )


def _paths(restore: RestoreConfig | None) -> tuple[str, ...]:
    if restore is None:
        return ()
    return (restore.path,) if isinstance(restore.path, str) else restore.path


def _architecture(model: ModelConfig) -> str:
    """The model's parameters, one per line; only the devices know how they shard them."""
    # The lines of T5X's model-info.txt, without logical axes and partition specs.
    shapes = sorted(model.shape.parameters().items())
    lines = [
        f"Variable    {name:<80} size {math.prod(shape):<12} shape {shape}"
        for name, shape in shapes
    ]
    total = sum(math.prod(shape) for _, shape in shapes)
    return "\n".join([*lines, f"Total number of parameters: {total}", ""])


# ---- Checks a job without a network: gin, machines, memory, paths --------------------------------


def check(
    arguments: Arguments, machines: Machines, location: str, *, compiles: bool = True
) -> tuple[Configured, tuple[str, ...]]:
    """Checks a job; sends nothing.

    With `compiles`, and where libtpu is installed, the steps are compiled for a TPU slice, which
    takes minutes; otherwise memory is estimated.

    Returns:
      What the gin files say, and a line for each thing that was checked or could not be.

    Raises:
      UserError: For the first thing that is wrong.
    """
    # Read by the first check that needs it, so that impossible machines are refused at once.
    configured = functools.cache(lambda: read(arguments))
    lines: list[str] = []
    run_checks(
        (
            Check("machines", Cost.NAMES, lambda: check_machines(machines, location)),
            Check("replicas", Cost.NAMES, lambda: _check_replicas(arguments, machines)),
            Check("stack", Cost.NAMES, lambda: _check_stack(arguments, machines)),
            Check("gin", Cost.FILES, lambda: [f"warning: {x}" for x in configured().warnings]),
            Check("paths", Cost.FILES, lambda: _check_paths(configured())),
            Check(
                "memory",
                Cost.COMPILE,
                lambda: _memory(configured(), arguments, machines, compiles),
            ),
        ),
        lambda name, line: lines.append(line),
        # Nothing compiles for minutes for a job that is refused anyway.
        all_at_once=False,
    )
    return configured(), tuple(lines)


def check_fit(arguments: Arguments, machines: Machines, *, dry_run: bool) -> None:
    """Raises UserError for --fit if it would change nothing."""
    import importlib.util

    fix = "Leave out --fit."
    if not dry_run:
        what = "What is submitted is compiled without --fit, where the extra tpu is installed."
        fix = "Leave out --fit, or add --dry_run."
    elif arguments.backend != "jax" or not (
        machines.machine_type == CLOUD_TPU or tpu_slice(machines)
    ):
        what = "Only the JAX stack's steps are compiled here, and only for TPU slices."
    elif importlib.util.find_spec("libtpu") is None:
        what = "Compiling for a TPU slice takes libtpu, which is not installed."
        fix = "Install the extra tpu: EXTRAS=tpu bash scripts/setup.sh."
    else:
        return
    raise UserError(what, where="--fit", fix=fix)


def _check_replicas(arguments: Arguments, machines: Machines) -> None:
    """Refuses several machines that would each do all of the work, into one folder."""
    alone = arguments.mode is JobMode.AUX or arguments.backend == "mtf"
    if machines.replica_count > 1 and alone:
        what = arguments.mode or f"{MESH_TRANSFORMER} --backend=mtf"
        raise UserError(
            f"{what} runs on one machine.",
            where="--replica_count",
            fix="Leave it out; choose a machine with more accelerators.",
        )


def _check_stack(arguments: Arguments, machines: Machines) -> None:
    """Refuses Mesh TensorFlow on TPUs that TensorFlow does not support."""
    found = tpu_slice(machines)
    if found and found[0].startswith("v6e-") and arguments.backend == "mtf":
        raise UserError(
            "Mesh TensorFlow cannot run on TPU v6e, which TensorFlow does not support.",
            where="--backend=mtf",
            fix="Give --backend=jax, or choose an older TPU.",
        )


def _check_paths(configured: Configured) -> None:
    """Refuses results that would vanish with the machine, and checkpoints that exist only here."""
    # What a container can open: addresses of stores, and buckets where they are mounted.
    written = ("gs://", f"{MOUNT}/")
    seen = (*written, "hf://", "s3://")
    fix = f"Give a folder in a bucket: gs://BUCKET/..., which containers see at {MOUNT}/BUCKET/..."
    if configured.output and not configured.output.startswith(written):
        raise UserError(
            f"Results at {configured.output} would be lost with the job's machine.",
            where=configured.output,
            fix=fix,
        )
    for path in configured.checkpoints:
        if not path.startswith(seen):
            raise UserError(f"The job's container has no checkpoint {path}.", where=path, fix=fix)


def _memory(
    configured: Configured, arguments: Arguments, machines: Machines, compiles: bool
) -> Iterator[str]:
    """Whether a run on JAX fits into the machines' memory, in words.

    Raises:
      UserError: If it does not.
    """
    run = configured.run
    if run is None or arguments.backend != "jax":
        return
    if found := tpu_slice(machines):
        yield from _on_slice(run, *found, compiles)
        return
    kind = ACCELERATORS.get(machines.accelerator_type or "")
    if kind is None or not (kind.topology or kind.memory):
        yield "memory: not checked, because no figures are known for this machine"
        return
    # The count is each machine's; a TPU slice is one replica.
    devices = machines.accelerator_count * machines.replica_count
    if kind.topology is not None:
        yield from _on_slice(run, f"{kind.topology}-{devices}", devices, compiles)
        return
    from t0repro.partitioning.memory import check_fits

    assert kind.memory is not None
    yield f"memory (estimated): {check_fits(run, kind.memory, kind.memory, devices)}"


def _on_slice(run: RunConfig, topology: str, count: int, compiles: bool) -> Iterator[str]:
    """What libtpu's compiler says of a run on a slice, or without `compiles` an estimate."""
    import importlib.util

    from t0repro.partitioning import topologies
    from t0repro.partitioning.memory import check_fits

    installed = importlib.util.find_spec("libtpu") is not None
    if not (installed and compiles):
        memory = topologies.chip_of(topology).memory
        line = check_fits(run, memory, memory, count)
        how = "--fit compiles it" if installed else "the extra tpu lets precompile compile it"
        yield f"memory (estimated; {how}): {line}"
        return
    from t0repro.runs import precompile

    devices, chip = topologies.devices_of(topology)
    run, partitioning, why = precompile.arranged(run, devices)
    if why:
        yield why
    for program in precompile.compiled_programs(run, partitioning):
        verdict = precompile.fits(program, run, partitioning, chip)
        if not program.fits_in(chip):
            raise UserError(
                f"The job's {program.name} step {verdict}.",
                where=topology,
                fix="Choose a larger slice, or what the message offers.",
            )
        yield f"memory: the {program.name} step {verdict} on {topology}"
