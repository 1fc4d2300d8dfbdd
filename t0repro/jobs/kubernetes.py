"""Runs jobs as Kubernetes Jobs, through kubectl."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from t0repro import yaml_files
from t0repro.errors import UserError
from t0repro.jobs.launcher import EngineState, Job
from t0repro.jobs.slurm import run_engine
from t0repro.jobs.worker import Limits

# A pod gets this condition before it is evicted, preempted or lost with its node.
_TELL_DISRUPTIONS = {
    "rules": [
        {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    ]
}


@dataclasses.dataclass(frozen=True)
class KubernetesLauncher:
    """Creates a Job for each job, with a pod that runs the worker.

    The pod sees the training's folder at the same path as this machine: `template` mounts it.

    Attributes:
      template: a Job manifest of the user's, whose first container is completed with the command;
        it gives the image, the volumes, the accelerator and whatever else the cluster requires.
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
        manifest, container = completed(self.template, _name(job), job.limits)
        python = container.pop("command", [sys.executable])[0]
        container["command"] = [python, "-m", "t0repro.jobs.worker", str(job.write())]
        if job.secrets:
            container["env"] = [*container.get("env", []), *variables(job.secrets)]
        # So that the Job's status says whether its pod failed or was evicted.
        manifest["spec"].setdefault("podFailurePolicy", _TELL_DISRUPTIONS)
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
        for condition in status.get("conditions", []):
            # Kubernetes names the pod's condition in a message: "... has condition DisruptionTarget
            # matching FailJob rule at index 0".
            if "condition DisruptionTarget" in condition.get("message", ""):
                return "preempted"
        ended = status.get("succeeded") or status.get("failed")
        # Accepted, but there is no pod yet: `active` counts pods that are pending as well.
        return "ended" if ended else "waiting"

    def cancel(self, job: Job) -> None:
        """Deletes a job's Job, and its pods with it."""
        run_engine("kubectl", "delete", "job", _name(job), "--ignore-not-found")

    def close(self) -> None:
        """Leaves the jobs to the engine; the next controller finds them by their names."""


def read_template(file: str | os.PathLike[str] | None) -> dict[str, Any]:
    """A user's Job manifest.

    Raises:
      UserError: if none is named, or the file cannot be read.
    """
    if file is None:
        raise UserError(
            "Jobs on Kubernetes need a Job manifest to start from.",
            where="--machines",
            fix="Give the platform a `template` in the file of machines (--machines).",
        )
    try:
        return _without_nulls(yaml_files.load(Path(file).read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise UserError(f"The Job manifest cannot be read: {reason}", where=str(file)) from error


def _without_nulls(value: Any) -> Any:
    """YAML without its empty keys, which mean to Kubernetes that nothing is said."""
    if isinstance(value, dict):
        return {key: _without_nulls(one) for key, one in value.items() if one is not None}
    return [_without_nulls(one) for one in value] if isinstance(value, list) else value


def completed(
    template: dict[str, Any], name: str, limits: Limits
) -> tuple[dict[str, Any], dict[str, Any]]:
    """A copy of a user's Job manifest with name and limits, and its container, for the command.

    Raises:
      UserError: if the template has no container.
    """
    # A deep copy, since the template serves every job. YAML's dates become text.
    manifest = json.loads(json.dumps(template, default=str))
    try:
        pod = manifest["spec"]["template"]["spec"]
        container = pod["containers"][0]
        container["name"]  # a list of names is no list of containers
    except (KeyError, IndexError, TypeError) as error:
        raise UserError(
            "The Job template lacks spec.template.spec.containers with a name.",
            fix="Give a whole Job manifest, with an image and the volume of the training.",
        ) from error
    manifest |= {"apiVersion": "batch/v1", "kind": "Job"}
    manifest["metadata"] = manifest.get("metadata", {}) | {"name": name}
    # Whoever created the Job starts it again if it failed, and counts how often.
    manifest["spec"]["backoffLimit"] = 0
    pod["restartPolicy"] = "Never"
    requests = container.setdefault("resources", {}).setdefault("requests", {})
    if limits.cpus:
        requests["cpu"] = str(limits.cpus)
    if limits.memory_gb is not None:
        requests["memory"] = f"{round(limits.memory_gb * 1000)}M"
    if limits.seconds is not None:
        manifest["spec"]["activeDeadlineSeconds"] = round(limits.seconds)
    return manifest, container


def variables(environment: Mapping[str, str]) -> list[dict[str, str]]:
    """A container's variables: Kubernetes replaces $(NAME) in a value, unless $ is doubled."""
    return [
        {"name": name, "value": value.replace("$", "$$")} for name, value in environment.items()
    ]


def _name(job: Job) -> str:
    return allowed_name(job.name)


def allowed_name(name: str) -> str:
    """A name as Kubernetes allows it: lower case letters, digits and dashes, at most 63."""
    # The end of a name tells attempts apart.
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[-63:].strip("-")
