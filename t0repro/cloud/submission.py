"""Checks a job, submits it to Vertex AI and follows it to its recorded end."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from t0repro.cloud import experiments, job_files, xmanager
from t0repro.cloud.experiments import Facts, Record, Tracking
from t0repro.cloud.google import (
    Look,
    Place,
    cloud_errors,
    connect,
    find_job,
    storage_client,
    wait_until_ended,
)
from t0repro.cloud.job_files import best_metrics, copy_results, split_address, uploading
from t0repro.cloud.spec import (
    ACCELERATORS,
    CLOUD_TPU,
    MESH_TRANSFORMER,
    MOUNT,
    Arguments,
    JobMode,
    JobSpec,
    Machines,
    address_of,
    check_machines,
    read_arguments,
    tpu_slice,
)
from t0repro.config.run_config import ModelConfig, RunConfig
from t0repro.config.training_plan import RestoreConfig
from t0repro.errors import UserError
from t0repro.runs.preflight import Check, Cost, run_checks


@dataclasses.dataclass(frozen=True)
class Request:
    """A user's request for a job, with the command line that it would have on this machine.

    Attributes:
      words: `--run_mode=MODE ...`, or `t5_mesh_transformer ...`.
      labels, service_account, network: see JobSpec.
    """

    display_name: str
    image_uri: str
    machines: Machines
    words: tuple[str, ...]
    labels: Mapping[str, str] = dataclasses.field(default_factory=dict)
    service_account: str | None = None
    network: str | None = None

    @property
    def arguments(self) -> Arguments:
        """The command line, read."""
        return read_arguments(self.words)


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A job whose files have destinations but are not copied yet."""

    spec: JobSpec
    staged: job_files.Staged


def prepare(request: Request, configured: Configured, place: Place) -> Prepared:
    """The specification of a job, and the files to stage; sends nothing.

    Args:
      request: the job.
      configured: the content of its gin files, from `checks.check` or `checks.read`.
      place: where to run it.

    Raises:
      UserError: If the gin files cannot be staged, or a label or the command line is wrong.
    """
    arguments = request.arguments
    if place.staging_bucket is None:
        raise UserError(
            "There is no bucket for the job's files.",
            where="--staging_bucket",
            fix="Give gs://BUCKET, in the job's region.",
        )
    folder = job_files.new_folder(place.staging_bucket, request.display_name)
    staged = job_files.stage(arguments, folder)
    if configured.text:
        staged.files[CONFIGURATION] = configured.text.encode()
    if configured.architecture:
        staged.files[ARCHITECTURE] = configured.architecture.encode()
    spec = JobSpec(
        display_name=request.display_name,
        image_uri=request.image_uri,
        machines=request.machines,
        arguments=staged.arguments,
        command=arguments.command,
        labels=request.labels,
        service_account=request.service_account,
        network=request.network,
    )
    return Prepared(spec, staged)


def create_custom_job(request: Request, configured: Configured, place: Place) -> Any:
    """Copies a job's gin files to staging and returns the job, not yet submitted.

    Returns:
      A google.cloud.aiplatform.CustomJob, to `submit`.

    Raises:
      UserError: If the bucket is missing or refuses, with nothing left in it.
    """
    prepared = prepare(request, configured, place)
    job_files.upload(prepared.staged, storage_client(place.project))
    return _custom_job(prepared, place)


def submit(
    request: Request,
    configured: Configured,
    place: Place,
    executor: xmanager.Executor | None = None,
) -> str:
    """Starts a job that is not tracked and returns its resource name.

    Args:
      request: the job.
      configured: the content of its gin files.
      place: where it is to run.
      executor: starts it as an experiment of XManager; on this machine, the experiment's number
        is returned instead.

    Raises:
      UserError: If anything refuses it; then nothing of it remains.
    """
    prepared, storage = prepare(request, configured, place), storage_client(place.project)
    if executor:
        xmanager.check(prepared.spec, executor)
    with _staged(prepared.staged, storage):
        if executor:
            return xmanager.launch(prepared.spec, executor, place)
        return _submitted(prepared, place)


def submit_and_track(
    request: Request, configured: Configured, tracking: Tracking, place: Place
) -> tuple[str, Record]:
    """Starts a job and creates its run in Vertex AI Experiments.

    Returns:
      The job's resource name, and what leads to its run; `ending.follow` does the rest.

    Raises:
      UserError: If anything refuses it; then no job, run or staged file remains.
    """
    # First, since it creates nothing: most refusals then leave nothing to delete.
    experiments.check(tracking, place)
    prepared, storage = prepare(request, configured, place), storage_client(place.project)
    staged = prepared.staged
    with (
        _staged(staged, storage),
        experiments.started(tracking, prepared.spec, _facts(configured, staged), place) as run,
    ):
        record = Record(
            experiment=tracking.experiment,
            run_name=tracking.run_name,
            execution=run.execution.resource_name,
            output=configured.output and address_of(configured.output),
            tensorboard=run.tensorboard,
        )
        # Before the job is created, so that no job refers to a missing file.
        job_files.write(storage, f"{staged.folder}/{experiments.RECORD}", record.to_json())
        name = _submitted(prepared, place)
    # Outside the block: the job runs now, and an error here must not undo what belongs to it.
    run.submitted(name)
    return name, record


@contextlib.contextmanager
def _staged(staged: job_files.Staged, storage: Any) -> Iterator[None]:
    """Copies files for a job that is submitted in the block; removes them if the block fails."""
    job_files.upload(staged, storage)
    try:
        yield
    except BaseException:
        with contextlib.suppress(UserError):  # the first error says more
            job_files.remove(storage, *job_files.split_address(staged.folder))
        raise


def _custom_job(prepared: Prepared, place: Place) -> Any:
    """The google.cloud.aiplatform.CustomJob of a specification; nothing is sent."""
    spec = prepared.spec
    return connect(place).CustomJob(
        display_name=spec.display_name,
        worker_pool_specs=spec.worker_pool_specs,
        # By this address a job leads to its staged files, and to what tracks it.
        base_output_dir=prepared.staged.folder,
        labels=dict(spec.labels),
        staging_bucket=place.staging_bucket,
    )


def _submitted(prepared: Prepared, place: Place) -> str:
    """Starts a job and returns its resource name."""
    from google.api_core import exceptions

    spec = prepared.spec
    with cloud_errors("create the job", where=spec.display_name):
        job = _custom_job(prepared, place)
        try:
            job.submit(service_account=spec.service_account, network=spec.network)
        except (exceptions.ServerError, exceptions.RetryError):
            # The job may exist although the answer was lost. No other has its folder.
            found = find_job(spec.display_name, place)
            if found is None or found.folder != prepared.staged.folder:
                raise
            return found.name
    return job.resource_name


def _facts(configured: Configured, staged: job_files.Staged) -> Facts:
    def staged_as(name: str) -> str | None:
        return f"{staged.folder}/{name}" if name in staged.files else None

    return Facts(
        configuration=staged_as(CONFIGURATION),
        architecture=staged_as(ARCHITECTURE),
        output=configured.output and address_of(configured.output),
        mixture=configured.mixture,
        split=configured.split,
    )


# ---- Follows a job to its end and records what came of it ----------------------------------------

# The end is recorded the same however late and by any command: all of it is read from the bucket.


def follow(
    name: str,
    record: Record | None,
    place: Place,
    *,
    poll_seconds: float,
) -> tuple[Look, dict[str, float]]:
    """Waits for a job's end, uploading its metrics meanwhile if it is tracked, and records the end.

    Args:
      name: the job's resource name.
      record: what leads to its run; None if it is not tracked.
      place: project and location.
      poll_seconds: seconds between polls of the job and its results.

    Returns:
      The job in its final state, and its summary metrics.
    """
    with contextlib.ExitStack() as beside:
        if record is not None and record.output and record.tensorboard:
            where = (record.output, record.experiment, record.run_name, record.tensorboard)
            # If the end is recorded, everything has been uploaded.
            if not experiments.reopened(record, place).ended:
                beside.enter_context(uploading(*where, place, every=poll_seconds))
        seen = wait_until_ended(name, place, poll_seconds=poll_seconds)
    # After the upload: if this process dies before the end is recorded, the next command that
    # follows the job does both again.
    return seen, {} if record is None else record_end(seen, record, place)


def record_end(seen: Look, record: Record, place: Place) -> dict[str, float]:
    """Promotes the metrics of a job that has ended and sets its run's final state.

    Doing it twice has the same effect as doing it once.

    Returns:
      The summary metrics; see `results.best_metrics`.
    """
    found = experiments.reopened(record, place)
    metrics: dict[str, float] = {}
    if record.output is not None:
        with tempfile.TemporaryDirectory(prefix="t0repro-vertex-") as folder:
            copy_results(storage_client(place.project), record.output, Path(folder))
            metrics = best_metrics(Path(folder))
    # Another follower may have recorded the end already.
    if not found.ended:
        found.metrics(metrics)
        if seen.reason:
            found.parameters({"failure": seen.reason})
        found.end(seen.state)
    return metrics


def record_of(seen: Look, place: Place) -> Record | None:
    """What leads from a job to its run; None if it is not tracked."""
    from google.api_core import exceptions

    bucket, prefix = split_address(seen.folder)
    blob = storage_client(place.project).bucket(bucket).blob(f"{prefix}/{experiments.RECORD}")
    with cloud_errors("read what tracks the job", where=seen.folder):
        try:
            return Record(**json.loads(blob.download_as_bytes()))
        except exceptions.NotFound:
            return None


# ---- A job's configuration, as far as this machine knows it --------------------------------------


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


def _configured(arguments: Arguments) -> Configured:
    """Reads a job's gin files, as the container will.

    Raises:
      UserError: For macros without a value, misspelt names, values out of range, and whatever else
        the run would refuse; and if the results have no folder.
    """
    configured = _configured_by_mode(arguments)
    if not configured.output:
        raise UserError(
            "The job has no folder for its results.",
            where=f"--run_mode {arguments.mode}" if arguments.mode else "--model_dir",
            fix="Name one in the bucket: as --out for rank-eval, --model_dir for aux and"
            " t5_mesh_transformer, and in gin for the others.",
        )
    return configured


def _configured_by_mode(arguments: Arguments) -> Configured:
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
        warnings=configuration.warnings,
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
    configured = functools.cache(lambda: _configured(arguments))
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
    from t0repro.partitioning.costs import check_fits

    assert kind.memory is not None
    yield f"memory (estimated): {check_fits(run, kind.memory, kind.memory, devices)}"


def _on_slice(run: RunConfig, topology: str, count: int, compiles: bool) -> Iterator[str]:
    """What libtpu's compiler says of a run on a slice, or without `compiles` an estimate."""
    import importlib.util

    from t0repro.partitioning import topologies
    from t0repro.partitioning.costs import check_fits

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


CONFIGURATION, ARCHITECTURE = "config.gin", "model-info.txt"  # as T5X names them
