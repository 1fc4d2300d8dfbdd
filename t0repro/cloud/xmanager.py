"""Jobs as experiments of XManager, on Vertex AI or in containers on this machine.

XManager keeps its own record of experiments, in `~/.xmanager`. Its executors choose a machine by
what a job requires, and support fewer parts of a specification than Vertex AI; what they would drop
or change is refused before anything is sent.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from t0repro.cloud.google import Place, cloud_errors, connect, find_job
from t0repro.cloud.spec import CLOUD_TPU, JobSpec, Machines
from t0repro.errors import UserError

# GiB of memory for each virtual CPU of Compute Engine's N1 machines.
_N1_MEMORY = {"standard": 3.75, "highmem": 6.5, "highcpu": 0.9}


class Executor(enum.StrEnum):
    """Where XManager runs a job."""

    VERTEX = "vertex"
    LOCAL = "local"


def check(spec: JobSpec, executor: Executor) -> None:
    """Checks without a network that XManager would run exactly this job.

    Raises:
      UserError: If its executor has no such machine, or cannot be given a part of the
        specification; or if XManager is not installed.
    """
    _xmanager()
    if spec.command:
        raise UserError(
            f"XManager starts an image's own entry point, so it cannot run {spec.command[0]}.",
            where="after `--`",
            fix="Give a --run_mode, or submit without --xmanager.",
        )
    for name in ("labels", "service_account", "network", "tpu_topology"):
        if getattr(spec, name, None) or getattr(spec.machines, name, None):
            raise UserError(
                f"XManager's executors take no {name.replace('_', ' ')}.",
                where=f"--{name}",
                fix="Leave it out, or submit without --xmanager.",
            )
    if executor is Executor.VERTEX:
        _vertex_executors(spec.machines)
    elif spec.machines.replica_count != 1:
        raise UserError(
            "This machine is one replica.", where="--replica_count", fix="Leave it out."
        )
    elif not Path("~/gcs").expanduser().is_dir():
        raise UserError(
            "There is no folder ~/gcs, which XManager shows to containers as /gcs.",
            where="--xmanager local",
            fix="Mount the buckets there: mkdir ~/gcs && gcsfuse --implicit-dirs ~/gcs.",
        )


def launch(spec: JobSpec, executor: Executor, place: Place) -> str:
    """Starts a checked job as an experiment of its name; a local one is followed to its end.

    Returns:
      On Vertex AI the job's resource name; on this machine the experiment's number.

    Raises:
      UserError: If the service or Docker refuses.
    """
    import asyncio

    # XManager also raises the errors that it logs with a traceback.
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    with _errors(spec.display_name):
        experiment, unit = asyncio.run(_launched(spec, executor, place))
    if executor is Executor.LOCAL:
        return f"XManager's experiment {experiment.experiment_id}"
    # XManager's own name for the job, which no other job on the service has.
    found = find_job(f"{spec.display_name}_{unit.experiment_unit_name}", place)
    assert found is not None
    return found.name


async def _launched(spec: JobSpec, executor: Executor, place: Place) -> tuple[Any, Any]:
    """The experiment and its one unit of work: sent to Vertex AI, or ended on this machine."""
    _, xm_local = _xmanager()
    async with xm_local.create_experiment(experiment_title=spec.display_name) as experiment:
        on_vertex = executor is Executor.VERTEX
        group = _on_vertex(spec, place) if on_vertex else _here(spec, experiment)
        unit = await experiment.add(group)
    return experiment, unit


def _xmanager() -> tuple[Any, Any]:
    """The modules xm and xm_local.

    Raises:
      UserError: If XManager is not installed.
    """
    try:
        from absl import flags
        from xmanager import xm, xm_local
    except ImportError as error:
        raise UserError(
            f"XManager is not installed: {error}.",
            where="--xmanager",
            fix="Install the extra xmanager: EXTRAS=vertex,xmanager bash scripts/setup.sh.",
        ) from error
    if not flags.FLAGS.is_parsed():
        flags.FLAGS(["t0repro"])  # XManager reads its own flags, which have their defaults here
    return xm, xm_local


@contextlib.contextmanager
def _errors(display_name: str) -> Iterator[None]:
    """Turns what XManager, Google's client or Docker raise into a UserError."""
    import docker.errors
    import httplib2
    from googleapiclient.errors import HttpError  # pyright: ignore[reportMissingImports]

    with cloud_errors("create the job", where=display_name):
        try:
            yield
        except docker.errors.DockerException as error:
            raise UserError(
                f"Docker refuses: {' '.join(str(error).split())}",
                where="--xmanager local",
                fix="Start Docker, and look at --image_uri.",
            ) from error
        # Before a job XManager looks for its own service account, and makes it if there is none.
        except (HttpError, httplib2.HttpLib2Error) as error:
            raise UserError(
                f"XManager has no service account: {' '.join(str(error).split())}",
                where=display_name,
                fix="Have an administrator run XManager once, or submit without --xmanager.",
            ) from error
        # XManager's message for an image that is neither here nor in its registry.
        except ValueError as error:
            raise UserError(f"XManager refuses: {error}.", where=display_name) from error


# ---- Vertex AI -----------------------------------------------------------------------------------


def _on_vertex(spec: JobSpec, place: Place) -> Any:
    """The jobs of an experiment on Vertex AI, one for each pool of machines."""
    xm, xm_local = _xmanager()
    from xmanager.cloud import vertex  # pyright: ignore[reportMissingImports]
    from xmanager.xm_local import executables  # pyright: ignore[reportMissingImports]

    # XManager takes project and bucket from the environment, and the region from its client.
    os.environ["GOOGLE_CLOUD_PROJECT"] = place.project
    os.environ["GOOGLE_CLOUD_BUCKET_NAME"] = (place.staging_bucket or "").removeprefix("gs://")
    vertex.set_default_client(vertex.Client(place.project, place.location))
    connect(place)  # after XManager's client, which would set Google's own address again
    # Not by `experiment.package`, which would pull the image here and push it to another registry.
    image = executables.GoogleContainerRegistryImage(
        name=spec.display_name, image_path=spec.image_uri, args=_arguments(xm, spec)
    )
    return xm.JobGroup(
        **{
            f"pool{at}": xm.Job(executable=image, executor=executor)
            for at, executor in enumerate(_vertex_executors(spec.machines))
        }
    )


def _vertex_executors(machines: Machines) -> list[Any]:
    """XManager's executors of a job's machines: the primary replica's, and that of the others.

    Raises:
      UserError: If XManager would choose another machine.
    """
    xm, xm_local = _xmanager()
    from xmanager.cloud import vertex  # pyright: ignore[reportMissingImports]

    def executor(replicas: int) -> Any:
        return xm_local.Vertex(xm.JobRequirements(_requirements(machines), replicas=replicas))

    primary = executor(1)
    try:
        chosen = vertex.get_machine_spec(xm.Job(executable=None, executor=primary))["machine_type"]
    except ValueError as error:
        chosen = f"none: {error}"
    if chosen != machines.machine_type:
        raise UserError(
            f"For {machines} XManager would choose {chosen}.",
            where="--machine_type",
            fix="Choose a machine that XManager supports, or submit without --xmanager.",
        )
    others = machines.replica_count - 1
    return [primary, executor(others)] if others else [primary]


def _requirements(machines: Machines) -> dict[Any, float]:
    """The requirements for which XManager chooses such a machine.

    Raises:
      UserError: If XManager does not know the accelerator.
    """
    xm, _ = _xmanager()
    required: dict[Any, float] = {}
    if machines.accelerator_type:
        required[_resource(machines.accelerator_type)] = machines.accelerator_count
    # The size of these machines is in their names; that of the others follows from their GPUs.
    if sized := re.fullmatch(rf"(n1|g2)-({'|'.join(_N1_MEMORY)})-(\d+)", machines.machine_type):
        required[xm.ResourceType.CPU] = int(sized[3])
        if sized[1] == "n1":
            required[xm.ResourceType.RAM] = int(_N1_MEMORY[sized[2]] * int(sized[3])) * xm.GiB
    return required


def _resource(accelerator_type: str) -> Any:
    """XManager's name for an accelerator of Vertex AI."""
    xm, _ = _xmanager()
    from xmanager.cloud import vertex  # pyright: ignore[reportMissingImports]

    for resource in (*xm.TpuType, *xm.GpuType):
        # XManager raises ValueError for those that Vertex AI lacks, which are most.
        with contextlib.suppress(ValueError):
            tpu = resource in xm.TpuType
            named = resource.name if tpu else vertex.aip_v1_gpu_accelerator_type_str(resource)
            if named == accelerator_type:
                return resource
    raise UserError(
        f"XManager has no {accelerator_type} on Vertex AI.",
        where="--accelerator_type",
        fix="Submit without --xmanager.",
    )


# ---- This machine --------------------------------------------------------------------------------


def _here(spec: JobSpec, experiment: Any) -> Any:
    """The job in a container on this machine, with the GPUs that it asks for."""
    xm, xm_local = _xmanager()
    gpus = 0 if spec.machines.machine_type == CLOUD_TPU else spec.machines.accelerator_count
    required = {xm.ResourceType.LOCAL_GPU: gpus} if gpus else {}
    container = xm.Container(image_path=spec.image_uri)
    (image,) = experiment.package(
        [xm.Packageable(container, xm_local.Local.Spec(), args=_arguments(xm, spec))]
    )
    executor = xm_local.Local(xm.JobRequirements(required))
    return xm.JobGroup(pool0=xm.Job(executable=image, executor=executor))


def _arguments(xm: Any, spec: JobSpec) -> Any:
    """The container's arguments, each of which XManager passes on as it is."""
    return xm.SequentialArgs.from_collection(list(spec.arguments))
