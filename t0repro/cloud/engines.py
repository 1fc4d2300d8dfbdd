"""The engines that run jobs (Slurm, Kubernetes, Vertex AI), on machines of the user's file."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import reprlib
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import dacite

from t0repro import yaml_files
from t0repro.cloud.google import Place, cancel_job, cloud_errors, connect, find_job
from t0repro.cloud.spec import MOUNT, JobSpec, Machines
from t0repro.errors import UserError, nearest_names
from t0repro.jobs.worker import EngineState, Job, Launcher, Limits, LocalLauncher
from t0repro.words import is_secret, shortened


def make_launcher(name: str, machine: Machine) -> Launcher:
    """The engine of a name, local included.

    Raises:
      UserError: if there is none, or the machine's entry lacks what it needs.
    """
    if name == "local":
        return LocalLauncher()
    if name == "slurm":
        return SlurmLauncher()
    if name == "k8s":
        return KubernetesLauncher(read_template(machine.template))
    if name == "vertex":
        if machine.vertex is None:
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
        return VertexLauncher(machine.vertex)
    raise UserError(
        f"There is no launcher {name}.", where="--launcher", fix=f"One of {', '.join(_LAUNCHERS)}."
    )


# ---- Slurm ---------------------------------------------------------------------------------------

_WAITING = {"PENDING", "CONFIGURING", "REQUEUED", "SUSPENDED", "RESIZING"}
_RUNNING = {"RUNNING", "COMPLETING", "STAGE_OUT", "SIGNALING"}
# Interruptions, not failures of the job: its nodes failed or went to another job.
_PREEMPTED = {"PREEMPTED", "NODE_FAIL", "BOOT_FAIL", "REVOKED"}


class SlurmLauncher(Launcher):
    """Submits each job as a batch script that runs the worker; jobs are found by their names."""

    def submit(self, job: Job) -> None:
        """Queues a job.

        Raises:
          UserError: if sbatch refuses it.
        """
        worker = shlex.join([sys.executable, "-m", "t0repro.jobs.worker", job.write()])
        # The file for Slurm's own output; the job's output is in its log.
        log = os.devnull if job.address else str(job.folder / f"{job.name}.slurm.log")
        limits = options(job.name, log, job.limits)
        # sbatch hands its own environment to the job.
        run_engine(
            *("sbatch", "--parsable", *limits, *job.options, f"--wrap={worker}"),
            environment=job.secrets,
        )

    def state(self, job: Job) -> EngineState:
        """A job's state, from the queue, or from the accounts once it has left the queue."""
        queued = run_engine("squeue", "--noheader", f"--name={job.name}", "--format=%T")
        states = queued.split()
        # A job that has ended leaves the queue; the accounts keep it.
        if not states:
            accounts = run_engine(
                "sacct", "--noheader", "--allocations", f"--name={job.name}", "--format=State%30"
            )
            # Of several with one name, the latest.
            states = accounts.split("\n")[-1:] if accounts else []
        if not states:
            return job.unlisted_state
        state = states[-1].split()[0]  # "CANCELLED by 0" names who did it
        if state in _WAITING:
            return "waiting"
        if state in _PREEMPTED:
            return "preempted"
        return "running" if state in _RUNNING else "ended"

    def cancel(self, job: Job) -> None:
        """Cancels a job by its name."""
        run_engine("scancel", f"--name={job.name}")


def options(name: str, log: str, limits: Limits) -> list[str]:
    """The options that sbatch gets for any job: its name, its log and what each process may use."""
    flags = [f"--job-name={name}", f"--output={log}"]
    if limits.cpus:
        flags.append(f"--cpus-per-task={limits.cpus}")
    if limits.memory_gb is not None:
        flags.append(f"--mem={math.ceil(limits.memory_gb * 1000)}M")
    # Slurm counts minutes.
    if limits.seconds is not None:
        flags.append(f"--time={math.ceil(limits.seconds / 60)}")
    return flags


def run_engine(
    *command: str, text: str | None = None, environment: Mapping[str, str] | None = None
) -> str:
    """The output of an engine's command, without surrounding whitespace.

    Args:
      *command: Its words.
      text: Its standard input.
      environment: Variables to add to this process's own.

    Raises:
      UserError: if the command is missing or fails, with the first line of its complaint.
    """
    try:
        done = subprocess.run(
            command,
            input=text,
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, **(environment or {})},
        )
    except FileNotFoundError as error:
        raise UserError(
            f"There is no command {command[0]} here.",
            fix="Start this on a machine that can submit jobs, or choose another engine.",
        ) from error
    if done.returncode:
        complaint = (done.stderr or done.stdout).strip().split("\n")[0]
        raise UserError(
            f"{command[0]} failed: {complaint or f'exit code {done.returncode}'}",
            where=shlex.join(command),
        )
    return done.stdout.strip()


# ---- Kubernetes ----------------------------------------------------------------------------------


# A pod gets this condition before it is evicted, preempted or lost with its node.
_TELL_DISRUPTIONS = {
    "rules": [
        {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    ]
}


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
        run_engine("kubectl", "create", "--filename=-", text=json.dumps(self.manifest(job)))

    def manifest(self, job: Job) -> dict[str, Any]:
        """The manifest of a job."""
        manifest, container = completed(self.template, allowed_name(job.name), job.limits)
        python = container.pop("command", [sys.executable])[0]
        container["command"] = [python, "-m", "t0repro.jobs.worker", job.write()]
        if job.secrets:
            container["env"] = [*container.get("env", []), *variables(job.secrets)]
        # Makes the Job's status show whether its pod failed or was evicted.
        manifest["spec"].setdefault("podFailurePolicy", _TELL_DISRUPTIONS)
        return manifest

    def state(self, job: Job) -> EngineState:
        """A job's state, from its Job's status."""
        found = run_engine(
            "kubectl", "get", "job", allowed_name(job.name), "--ignore-not-found", "--output=json"
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
        run_engine("kubectl", "delete", "job", allowed_name(job.name), "--ignore-not-found")


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
    return _without_nulls(yaml_files.read(file, "The Job manifest"))


def _without_nulls(value: Any) -> Any:
    """YAML without its empty keys, which Kubernetes treats as absent."""
    if isinstance(value, dict):
        return {key: _without_nulls(one) for key, one in value.items() if one is not None}
    return [_without_nulls(one) for one in value] if isinstance(value, list) else value


def completed(
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
        container["name"]  # a list of names is no list of containers
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


def variables(environment: Mapping[str, str]) -> list[dict[str, str]]:
    """A container's variables: Kubernetes replaces $(NAME) in a value, unless $ is doubled."""
    return [
        {"name": name, "value": value.replace("$", "$$")} for name, value in environment.items()
    ]


def allowed_name(name: str) -> str:
    """A name as Kubernetes allows it: lower case letters, digits and dashes, at most 63."""
    # Keep the end of a name, which distinguishes attempts.
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[-63:].strip("-")


# ---- Vertex AI -----------------------------------------------------------------------------------


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
            display_name=job.name,
            image_uri=machine.image_uri,
            machines=Machines(
                machine.machine_type, machine.accelerator_type, machine.accelerator_count
            ),
            command=("python",),  # in place of the image's entry point
            # The same file as the container sees it.
            arguments=("-m", "t0repro.jobs.worker", path.replace(self.mount, MOUNT, 1)),
            labels=machine.labels,
            service_account=machine.service_account,
            network=machine.network,
        )

    def state(self, job: Job) -> EngineState:
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
        if found is not None and not found.ended:
            cancel_job(found.name, self._place)


# ---- The user's file of machines, which defines the labels of cells and platforms ----------------

# It is YAML, with two tables of entries; a cell's fields override a platform's:
#
# platforms:
#   jf_2x2:                      # any name: what --auxiliary_job_platform is given
#     launcher: slurm            # local, slurm, k8s or vertex
#     options: [--partition=gpu, --gres=gpu:1]
#     memory_gb: 64
# cells:
#   iz:                          # what --auxiliary_job_cell is given
#     environment: {CUDA_VISIBLE_DEVICES: "1"}

_LAUNCHERS = ("local", "slurm", "k8s", "vertex")


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
class Machine:
    """Where jobs run, and their resource limits there.

    Attributes:
      options: for the engine's own command that submits (sbatch).
      template: the file of a Job manifest, for Kubernetes; relative to the file of machines.
      vertex: the machine on Vertex AI.
      cpus: processors of each job.
      time_limit: seconds that a job may take.
      environment: variables for the jobs.
    """

    launcher: str = "local"
    options: list[str] = dataclasses.field(default_factory=list)
    template: str | None = None
    vertex: VertexMachine | None = None
    cpus: int | None = None
    memory_gb: float | int | None = None
    time_limit: float | int | None = None
    environment: dict[str, str] = dataclasses.field(default_factory=dict)


def find_machine(file: Path | None, platform: str | None, cell: str | None) -> Machine:
    """The machine that the two labels stand for.

    Without a file, labels have no effect and jobs run on this machine.

    Raises:
      UserError: if the file cannot be read, or lacks a label.
    """
    if file is None:
        return Machine()
    # An empty file is None in YAML.
    known = yaml_files.read(file, "The file of machines") or {}
    fields: dict[str, Any] = {}
    for kind, label in (("platforms", platform), ("cells", cell)):
        fields |= _entry(known, kind, label, file)
    try:
        # strict: dacite would ignore a misspelled field.
        machine = dacite.from_dict(Machine, fields, dacite.Config(strict=True))
    # A ValueError comes of a mapping in place of a list.
    except (dacite.DaciteError, ValueError) as error:
        raise UserError(
            f"An entry of the file of machines is wrong: {_what_is_wrong(error, fields)}.",
            where=str(file),
            fix=f"Its fields: {', '.join(one.name for one in dataclasses.fields(Machine))}."
            " The values of environment are texts: write a number in quotes.",
        ) from error
    for name in ("cpus", "memory_gb", "time_limit"):
        limit = getattr(machine, name)
        # NaN is not within the limits, and True is an int for Python.
        if limit is not None and (isinstance(limit, bool) or not 0 < limit < 10**9):
            raise UserError(
                f"An entry of the file of machines is wrong: {name} is {limit}.",
                where=str(file),
                fix="Give a number above 0 and below 10**9, or leave it out for no limit.",
            )
    texts = (*machine.options, *machine.environment, *machine.environment.values())
    for text in (machine.template or "", machine.launcher or "", *texts):
        if "\0" in text:
            raise UserError(
                f"An entry of the file of machines is wrong: {shortened(repr(text), 100)} has a"
                " zero byte, which no command takes.",
                where=str(file),
                fix="Remove it.",
            )
    # Relative to the file that names it, so that a command works from any folder.
    if machine.template is not None:
        machine = dataclasses.replace(machine, template=str(file.parent / machine.template))
    return machine


def _what_is_wrong(error: Exception, fields: Mapping[str, Any]) -> str:
    # For a string in place of a list, dacite would show the generator that it made of it.
    name = getattr(error, "field_path", None)
    if not isinstance(error, dacite.DaciteError) or name == "options":
        given = reprlib.repr(fields.get("options"))
        return f"options should be a list, as [--partition=gpu], and is {given}"
    return shortened(str(error), 500)


def _entry(known: Any, kind: str, label: str | None, file: Path) -> dict[str, Any]:
    if label is None:
        return {}
    entries = known.get(kind) if isinstance(known, dict) else None
    entry = entries.get(label) if isinstance(entries, dict) else None
    if entry is not None and not isinstance(entry, dict):
        raise UserError(
            f"{label} among the {kind} is not a table of fields: {reprlib.repr(entry)}.",
            where=str(file),
            fix=f"Write them as {label}: {{launcher: slurm}}.",
        )
    if entry is None:
        names = list(entries) if isinstance(entries, dict) else []
        raise UserError(
            f"There is no {label} among the {kind}.",
            where=str(file),
            fix=f"Add it; nearest: {nearest_names(label, names, count=3)}.",
        )
    return entry
