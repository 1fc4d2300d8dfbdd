"""Runs jobs as Kubernetes Jobs, through kubectl."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from typing import Any

from t0repro.errors import UserError
from t0repro.jobs.launcher import EngineState, Job
from t0repro.jobs.slurm import run_engine


@dataclasses.dataclass(frozen=True)
class KubernetesLauncher:
    """Creates a Job for each job, with a pod that runs the worker.

    The pod sees the training's folder at the same path as this machine: `template` mounts it.

    Attributes:
      template: a Job manifest of the user's, whose first container is completed with the command;
        it says the image, the volumes, the accelerator and whatever else the cluster wants.
    """

    template: dict[str, Any]

    def submit(self, job: Job) -> None:
        """Creates a Job.

        Raises:
          UserError: if kubectl refuses it, or the template has no container.
        """
        run_engine("kubectl", "create", "--filename=-", text=json.dumps(self.manifest(job)))

    def manifest(self, job: Job) -> dict[str, Any]:
        """The manifest of a job."""
        # # A deep copy, since the template serves every job.
        manifest = json.loads(json.dumps(self.template))
        try:
            pod = manifest["spec"]["template"]["spec"]
            container = pod["containers"][0]
        except (KeyError, IndexError, TypeError) as error:
            raise UserError(
                "The Job template lacks spec.template.spec.containers.",
                fix="Give a whole Job manifest, with an image and the volume of the training.",
            ) from error
        manifest |= {"apiVersion": "batch/v1", "kind": "Job"}
        manifest["metadata"] = manifest.get("metadata", {}) | {"name": _name(job)}
        # The controller starts failed jobs again, and counts them.
        manifest["spec"]["backoffLimit"] = 0
        pod["restartPolicy"] = "Never"
        # # The image's own Python, if the template names one.
        python = container.pop("command", [sys.executable])[0]
        container["command"] = [python, "-m", "t0repro.jobs.worker", str(job.write())]
        requests = container.setdefault("resources", {}).setdefault("requests", {})
        if job.limits.cpus:
            requests["cpu"] = str(job.limits.cpus)
        if job.limits.memory_gb is not None:
            requests["memory"] = f"{round(job.limits.memory_gb * 1000)}M"
        if job.limits.seconds is not None:
            manifest["spec"]["activeDeadlineSeconds"] = round(job.limits.seconds)
        return manifest

    def state(self, job: Job) -> EngineState:
        """Where a job is, from its Job's status."""
        found = run_engine(
            "kubectl", "get", "job", _name(job), "--ignore-not-found", "--output=json"
        )
        if not found:
            return "ended" if job.ending is not None else "unknown"
        status = json.loads(found).get("status", {})
        if status.get("active"):
            return "running"
        ended = status.get("succeeded") or status.get("failed")
        # # Accepted, but no pod has started.
        return "ended" if ended else "waiting"

    def cancel(self, job: Job) -> None:
        """Deletes a job's Job, and its pods with it."""
        run_engine("kubectl", "delete", "job", _name(job), "--ignore-not-found")

    def close(self) -> None:
        """Leaves the jobs to the engine; the next controller finds them by their names."""


def _name(job: Job) -> str:
    """A job's name as Kubernetes allows it: lower case letters, digits and dashes, at most 63."""
    # # The end of a name tells attempts apart.
    return re.sub(r"[^a-z0-9]+", "-", job.name.lower()).strip("-")[-63:].strip("-")
