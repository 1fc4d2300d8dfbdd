"""Runs jobs as Vertex AI custom jobs, through Google's client."""

from __future__ import annotations

import dataclasses

from t0repro.errors import UserError
from t0repro.jobs.launcher import EngineState, Job
from t0repro.jobs.machines import VertexMachine
from t0repro.vertex import jobs, staging
from t0repro.vertex.cloud import Place, cloud_errors, connect
from t0repro.vertex.spec import JobSpec, Machines


@dataclasses.dataclass(frozen=True)
class VertexLauncher:
    """Submits a custom job for each job, whose container runs the worker.

    Containers see buckets as folders below /gcs, by Cloud Storage FUSE. This machine must have the
    training's bucket mounted at the same path, because the job's file refers to the rest by path.

    Attributes:
      mount: where this machine has buckets mounted; what is in a job's file is not translated.
    """

    machine: VertexMachine
    mount: str = staging.MOUNT

    @property
    def _place(self) -> Place:
        machine = self.machine
        return Place(machine.project, machine.location, machine.staging_bucket)

    def submit(self, job: Job) -> None:
        """Starts a job.

        Raises:
          UserError: if the service refuses it, or the container would not find its file.
        """
        if not str(job.folder).startswith(f"{self.mount.rstrip('/')}/"):
            raise UserError(
                f"A container on Vertex AI sees only folders below {self.mount}.",
                where=str(job.folder),
                fix=f"Mount the bucket here as {self.mount}/BUCKET, and give that --model_dir.",
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
        """What is submitted; writes the job's file."""
        machine, path = self.machine, str(job.write())
        return JobSpec(
            display_name=job.name,
            image_uri=machine.image_uri,
            machines=Machines(
                machine.machine_type, machine.accelerator_type, machine.accelerator_count
            ),
            command=("python",),  # in place of the image's entry point
            # The same file as the container sees it.
            arguments=("-m", "t0repro.jobs.worker", path.replace(self.mount, staging.MOUNT, 1)),
            labels=machine.labels,
            service_account=machine.service_account,
            network=machine.network,
        )

    def state(self, job: Job) -> EngineState:
        """Where a job is; it is found by its display name."""
        found = jobs.find(job.name, self._place)
        # A job that the service does not list is judged by its exit file.
        if found is None:
            return "ended" if job.ending is not None else "unknown"
        if found.state == "waiting" or found.state == "running":
            return found.state
        return "ended"

    def cancel(self, job: Job) -> None:
        """Asks the service to end a job, if it is still running."""
        found = jobs.find(job.name, self._place)
        if found is not None and not found.ended:
            jobs.cancel(found.name, self._place)

    def close(self) -> None:
        """Leaves the jobs to the service; the next controller finds them by their names."""
