"""Vertex AI: a custom job for each auxiliary job."""

from __future__ import annotations

import dataclasses

from t0repro.cloud.launchers.machines import Machine
from t0repro.cloud.vertex.custom_jobs import cancel_job, find_job
from t0repro.cloud.vertex.google import Place, cloud_errors, connect
from t0repro.cloud.vertex.spec import MOUNT, JobSpec, Machines
from t0repro.config.settings import shared_values
from t0repro.errors import UserError
from t0repro.jobs.job import Job, LauncherState
from t0repro.jobs.launcher import Launcher
from t0repro.words import is_secret


def make_launcher(machine: Machine) -> Launcher:
    """The launcher of auxiliary jobs.

    Raises:
      UserError: if the machine's entry lacks `vertex`, or has variables that must stay secret.
    """
    settings = machine.read_settings("vertex", VertexMachine)
    if settings is None:
        raise UserError(
            "Jobs on Vertex AI need a project, a location, an image and a machine type.",
            where="--launcher",
            fix="Give the platform an entry `vertex` in the file of machines (--machines).",
        )
    secrets = [name for name, value in machine.environment.items() if is_secret(name, value)]
    if secrets:
        # A container inherits nothing from this machine, and its job's file is in a bucket.
        raise UserError(
            f"{', '.join(secrets)} would be readable in the job's file.",
            where="environment, in the file of machines",
            fix="Keep it in Secret Manager, and let the job's service account read it there.",
        )
    return VertexLauncher(settings)


@dataclasses.dataclass(frozen=True)
class VertexMachine:
    """A custom job's machine on Vertex AI, with the options of `t0repro vertex`.

    Attributes:
      image_uri: the image that the jobs run in.
      staging_bucket: `gs://BUCKET`, in which Vertex AI keeps a folder for each job.
    """

    project: str
    location: str
    image_uri: str
    machine_type: str
    staging_bucket: str
    accelerator_type: str | None = None
    accelerator_count: int = 0
    service_account: str | None = None
    network: str | None = None
    labels: dict[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class VertexLauncher(Launcher):
    """Submits a custom job for each job, whose container runs the worker.

    Containers open addresses, and see buckets as folders below /gcs, by Cloud Storage FUSE. If the
    training run's folder is such a folder, this machine must have the bucket mounted at the same
    path, because the job's file refers to it by path.

    Attributes:
      mount: where this machine has buckets mounted; what is in a job's file is not translated.
    """

    machine: VertexMachine
    mount: str = MOUNT

    @property
    def _place(self) -> Place:
        machine = self.machine
        return Place(machine.project, machine.location, machine.staging_bucket)

    def submit(self, job: Job) -> None:
        """Starts a job.

        Raises:
          UserError: if the service refuses it, or the container would not find its file.
        """
        in_mount = str(job.folder).startswith(f"{self.mount.rstrip('/')}/")
        if not (job.address or in_mount):
            raise UserError(
                f"A container on Vertex AI sees only folders below {self.mount}.",
                where=str(job.folder),
                fix="Train in the bucket, --model_dir=gs://BUCKET/..., or mount it here as"
                f" {self.mount}/BUCKET and give that.",
            )
        spec = self.specification(job)
        with cloud_errors("create the job", where=job.name):
            custom_job = connect(self._place).CustomJob(
                display_name=spec.display_name,
                worker_pool_specs=spec.worker_pool_specs,
                labels=dict(spec.labels),
            )
            custom_job.submit(service_account=spec.service_account, network=spec.network)

    def specification(self, job: Job) -> JobSpec:
        """The job to submit; writes the job's file."""
        machine, path = self.machine, job.write()
        return JobSpec(
            **shared_values(machine, JobSpec),
            display_name=job.name,
            machines=Machines(**shared_values(machine, Machines)),
            command=("python",),  # in place of the image's entry point
            # The same file as the container sees it.
            arguments=("-m", "t0repro.jobs.worker", path.replace(self.mount, MOUNT, 1)),
        )

    def state(self, job: Job) -> LauncherState:
        """A job's state; found by its display name."""
        found = find_job(job.name, self._place)
        if found is None:
            return job.unlisted_state
        if found.state == "waiting" or found.state == "running":
            return found.state
        return "ended"

    def cancel(self, job: Job) -> None:
        """Asks the service to end a job, if it is still running."""
        found = find_job(job.name, self._place)
        if found is not None and not found.has_ended:
            cancel_job(found.name, self._place)
