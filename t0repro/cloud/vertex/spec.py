"""What Vertex AI receives about a job.

Nothing here knows Google's client, so a specification can be compared and tested offline.
"""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Mapping
from typing import Any

from t0repro.errors import UserError

_LABEL = re.compile(r"[a-z0-9_-]{1,63}")
CLOUD_TPU = "cloud-tpu"
MOUNT = "/gcs"  # where Vertex AI mounts every bucket in a container, by Cloud Storage FUSE


@dataclasses.dataclass(frozen=True)
class Machines:
    """The machines of a job, all alike.

    Attributes:
      machine_type: Compute Engine's name, or `cloud-tpu`.
      accelerator_type: Vertex AI's name, such as TPU_V3 or NVIDIA_TESLA_A100; None for CPU alone.
      accelerator_count: TPU cores in all, or GPUs of each machine.
      replica_count: Number of machines.
      tpu_topology: chips of a slice of TPU v5e or newer, such as 4x4; its machine type says which
        TPU, so it has no accelerator type.
    """

    machine_type: str
    accelerator_type: str | None = None
    accelerator_count: int = 0
    replica_count: int = 1
    tpu_topology: str | None = None

    def __post_init__(self) -> None:
        if self.replica_count < 1:
            raise UserError(
                "A job needs at least one machine.", where="--replica_count", fix="Give 1 or more."
            )
        if (self.accelerator_type is None) != (self.accelerator_count == 0):
            raise UserError(
                "An accelerator takes both a type and a count.",
                where="--accelerator_type, --accelerator_count",
                fix="Give both, or neither for a job on CPUs.",
            )

    def __str__(self) -> str:
        accelerators = f" with {self.accelerator_count} {self.accelerator_type}"
        each = f"{self.machine_type}{accelerators if self.accelerator_type else ''}"
        each += f" in a slice of {self.tpu_topology}" if self.tpu_topology else ""
        return each if self.replica_count == 1 else f"{self.replica_count} x {each}"


@dataclasses.dataclass(frozen=True)
class JobSpec:
    """A custom job's specification.

    Attributes:
      arguments: the container's; no shell reads them, so each arrives as it is written here.
      command: replaces the image's entry point, which takes the run modes; empty keeps it.
      labels: shown in the console and usable in filters.
      service_account: what the job runs as; None for the project's default.
      network: full name of the network to peer with; None for none.
    """

    display_name: str
    image_uri: str
    machines: Machines
    arguments: tuple[str, ...]
    command: tuple[str, ...] = ()
    labels: Mapping[str, str] = dataclasses.field(default_factory=dict)
    service_account: str | None = None
    network: str | None = None

    def __post_init__(self) -> None:
        for key, value in self.labels.items():
            if not (_LABEL.fullmatch(key) and (not value or _LABEL.fullmatch(value))):
                raise UserError(
                    f"{key}={value} cannot be a label.",
                    where="--labels",
                    fix="Write KEY=VALUE in lower case letters, digits, _ and -, at most 63 of"
                    " each.",
                )

    @property
    def worker_pool_specs(self) -> list[dict[str, Any]]:
        """The worker pools, in the form of Vertex AI's CustomJobSpec."""
        machines, container = self.machines, {"image_uri": self.image_uri}
        machine: dict[str, Any] = {"machine_type": machines.machine_type}
        if machines.accelerator_type:
            machine["accelerator_type"] = machines.accelerator_type
            machine["accelerator_count"] = machines.accelerator_count
        if machines.tpu_topology:
            machine["tpu_topology"] = machines.tpu_topology
        if self.command:
            container |= {"command": list(self.command)}
        container |= {"args": list(self.arguments)}
        # The first pool is the primary replica and must be one machine; the second are the others.
        counts = [1, machines.replica_count - 1]
        return [
            {"machine_spec": machine, "replica_count": count, "container_spec": container}
            for count in counts
            if count
        ]

    def to_yaml(self) -> str:
        """The specification for people, in the layout of Vertex AI's documentation."""
        import yaml

        fields: dict[str, Any] = {
            "display_name": self.display_name,
            "worker_pool_specs": self.worker_pool_specs,
        }
        for name in ("labels", "service_account", "network"):
            if value := getattr(self, name):
                fields[name] = dict(value) if name == "labels" else value

        class Plain(yaml.SafeDumper):
            """Writes repeated parts out in full, since no reader expects YAML's anchors."""

            def ignore_aliases(self, data: Any) -> bool:
                return True

        # Use wide lines, so that an argument stays on one line and can be copied.
        return yaml.dump(fields, Dumper=Plain, sort_keys=False, allow_unicode=True, width=1000)

    def shell_command(self) -> str:
        """A command line that runs the same container on a machine with Docker."""
        # Docker's entry point is one word; the words after it stand behind the image.
        entry = [f"--entrypoint={self.command[0]}"] if self.command else []
        words = [*entry, self.image_uri, *self.command[1:], *self.arguments]
        return shlex.join(["docker", "run", "--rm", *words])
