"""Kubernetes: a Job for each auxiliary job; a JobSet that starts several processes."""

from __future__ import annotations

import dataclasses
import json
import os
import reprlib
import sys
from collections.abc import Mapping
from typing import Any

from t0repro import yaml_files
from t0repro.cloud.launchers.launch import (
    PORT,
    RESTARTS,
    Launch,
    environment_of,
    make_allowed_name,
    resource_name,
    run_command,
)
from t0repro.cloud.launchers.machines import Machine
from t0repro.errors import UserError
from t0repro.jobs.job import Job, LauncherState, Limits
from t0repro.jobs.launcher import Launcher

_PODS = "processes"
# A pod gets this condition before it is evicted, preempted or lost with its node.
_TELL_DISRUPTIONS = {
    "rules": [
        {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    ]
}


def make_launcher(machine: Machine) -> Launcher:
    """The launcher of auxiliary jobs.

    Raises:
      UserError: if the machine names no Job manifest, or it cannot be read.
    """
    return KubernetesLauncher(read_template(machine.path("template")))


def start(launch: Launch, *, dry_run: bool) -> str:
    """Creates a JobSet, or only shows its manifest, without secrets.

    Returns:
      What kubectl says, or the manifest.
    """
    template = read_template(launch.machine.path("template"))
    manifest = json.dumps(job_set(launch.shown if dry_run else launch, template), indent=2)
    if dry_run:
        return manifest
    options = launch.machine.options
    return run_command("kubectl", "create", "--filename=-", *options, text=manifest + "\n")


@dataclasses.dataclass(frozen=True)
class KubernetesLauncher(Launcher):
    """Creates a Job for each job, with a pod that runs the worker.

    The pod sees the training run's folder at the same path as this machine: `template` mounts it.

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
        run_command("kubectl", "create", "--filename=-", text=json.dumps(self.manifest(job)))

    def manifest(self, job: Job) -> dict[str, Any]:
        """The manifest of a job."""
        manifest, container = complete_template(
            self.template, make_allowed_name(job.name), job.limits
        )
        python = container.pop("command", [sys.executable])[0]
        container["command"] = [python, "-m", "t0repro.jobs.worker", job.write()]
        if job.secrets:
            container["env"] = [*container.get("env", []), *env_entries(job.secrets)]
        # Makes the Job's status show whether its pod failed or was evicted.
        manifest["spec"].setdefault("podFailurePolicy", _TELL_DISRUPTIONS)
        return manifest

    def state(self, job: Job) -> LauncherState:
        """A job's state, from its Job's status."""
        found = run_command(
            "kubectl",
            "get",
            "job",
            make_allowed_name(job.name),
            "--ignore-not-found",
            "--output=json",
        )
        if not found:
            return job.unlisted_state
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
        run_command("kubectl", "delete", "job", make_allowed_name(job.name), "--ignore-not-found")


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
    return _remove_nulls(yaml_files.read(file, "The Job manifest"))


def _remove_nulls(value: Any) -> Any:
    """YAML without its empty keys, which Kubernetes treats as absent."""
    if isinstance(value, dict):
        return {key: _remove_nulls(one) for key, one in value.items() if one is not None}
    return [_remove_nulls(one) for one in value] if isinstance(value, list) else value


def complete_template(
    template: dict[str, Any], name: str, limits: Limits
) -> tuple[dict[str, Any], dict[str, Any]]:
    """A copy of a user's Job manifest with name and limits, and its container, for the command.

    Raises:
      UserError: if the template has no container, or a part of another kind than Kubernetes'.
    """
    # A deep copy, since the template serves every job. YAML's dates become text.
    manifest = json.loads(json.dumps(template, default=str))
    try:
        pod = manifest["spec"]["template"]["spec"]
        container = pod["containers"][0]
        container["name"]  # a list of names is not a list of containers
    except (KeyError, IndexError, TypeError) as error:
        raise UserError(
            "The Job template lacks spec.template.spec.containers with a name.",
            fix="Give a whole Job manifest, with an image and the volume of the training.",
        ) from error
    _check_parts(manifest, container)
    manifest |= {"apiVersion": "batch/v1", "kind": "Job"}
    manifest["metadata"] = manifest.get("metadata", {}) | {"name": name}
    # The controller that created the Job restarts it after a failure, and counts failures.
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


def _check_parts(manifest: Mapping[str, Any], container: Mapping[str, Any]) -> None:
    """Raises a UserError unless the parts that are completed are what Kubernetes has there."""
    resources, variables = container.get("resources", {}), container.get("env", [])
    requests = resources.get("requests", {}) if isinstance(resources, dict) else {}
    named = isinstance(variables, list) and all(
        isinstance(one, dict) and isinstance(one.get("name"), str) for one in variables
    )
    for name, part, is_right, kind in (
        ("metadata", manifest.get("metadata", {}), None, "a mapping"),
        ("resources", resources, None, "a mapping"),
        ("resources.requests", requests, None, "a mapping"),
        ("env", variables, named, "a list of variables with names"),
    ):
        if not (isinstance(part, dict) if is_right is None else is_right):
            raise UserError(
                f"The Job template's {name} is {reprlib.repr(part)}, not {kind}.",
                fix="Write it as Kubernetes documents a Job.",
            )


def env_entries(environment: Mapping[str, str]) -> list[dict[str, str]]:
    """A container's variables: Kubernetes replaces $(NAME) in a value, unless $ is doubled."""
    return [
        {"name": name, "value": value.replace("$", "$$")} for name, value in environment.items()
    ]


def job_set(launch: Launch, template: dict[str, Any]) -> dict[str, Any]:
    """A JobSet with an indexed Job, one pod for each process; it starts again if one fails.

    Args:
      launch: the command.
      template: a Job manifest of the user's, as for auxiliary jobs.

    Raises:
      UserError: if the template has no container, or the name no letter.
    """
    name = resource_name(launch.name)
    job, container = complete_template(template, name, launch.limits)
    # Kubernetes also replaces $(NAME) in a command.
    container["command"] = [word.replace("$", "$$") for word in launch.command]
    # The template's arguments belong to the command that is replaced here.
    container.pop("args", None)
    variables = {
        **dict(environment_of(launch)),
        "T0REPRO_COORDINATOR_ADDRESS": f"{name}-{_PODS}-0-0.{name}:{PORT}",
        "T0REPRO_PROCESS_COUNT": str(launch.processes),
    }
    # Our variables override the template's: a pod must not see another coordinator.
    kept = [one for one in container.get("env", []) if one.get("name") not in variables]
    container["env"] = kept + env_entries(variables)
    size = launch.processes
    job["spec"] |= {"parallelism": size, "completions": size, "completionMode": "Indexed"}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": job["metadata"],
        "spec": {
            "failurePolicy": {"maxRestarts": RESTARTS},
            "network": {"enableDNSHostnames": True},
            "replicatedJobs": [
                {"name": _PODS, "replicas": 1, "template": {"spec": job["spec"]}},
            ],
        },
    }
