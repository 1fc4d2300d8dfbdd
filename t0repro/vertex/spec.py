"""What a job on Vertex AI is: an image, the container's arguments, and the machines it runs on.

Nothing here knows Google's client: a specification is printed and checked without a network.
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


@dataclasses.dataclass(frozen=True)
class Machines:
    """The machines of a job, all alike.

    Attributes:
      machine_type: Compute Engine's name, or `cloud-tpu`.
      accelerator_type: Vertex AI's name, such as TPU_V3 or NVIDIA_TESLA_A100; None for CPU alone.
      accelerator_count: TPU cores in all, or GPUs of each machine.
      replica_count: Number of machines.
    """

    machine_type: str
    accelerator_type: str | None = None
    accelerator_count: int = 0
    replica_count: int = 1

    def __post_init__(self) -> None:
        if self.replica_count < 1:
            raise UserError("A job needs a machine.", where="--replica_count", fix="Give 1.")
        if (self.accelerator_type is None) != (self.accelerator_count == 0):
            raise UserError(
                "An accelerator takes both a type and a count.",
                where="--accelerator_type, --accelerator_count",
                fix="Give both, or neither for a job on CPUs.",
            )

    def __str__(self) -> str:
        accelerators = f" with {self.accelerator_count} {self.accelerator_type}"
        each = f"{self.machine_type}{accelerators if self.accelerator_type else ''}"
        return each if self.replica_count == 1 else f"{self.replica_count} x {each}"


@dataclasses.dataclass(frozen=True)
class JobSpec:
    """A custom job as it is submitted.

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
            """Writes a part that occurs twice out twice, as no reader expects YAML's anchors."""

            def ignore_aliases(self, data: Any) -> bool:
                return True

        # Wide, so that an argument stays on one line and can be copied.
        return yaml.dump(fields, Dumper=Plain, sort_keys=False, allow_unicode=True, width=1000)

    def shell_command(self) -> str:
        """A command line that runs the same container on a machine with Docker."""
        # Docker's entry point is one word; the words after it stand behind the image.
        entry = [f"--entrypoint={self.command[0]}"] if self.command else []
        words = [*entry, self.image_uri, *self.command[1:], *self.arguments]
        return shlex.join(["docker", "run", "--rm", *words])


def override(binding: str) -> str:
    """The container argument for a gin statement: `--gin.NAME=VALUE`, with the value as written.

    Args:
      binding: `NAME = VALUE`, the value in gin's syntax.

    Raises:
      UserError: If it is not of that form.
    """
    name, equals, value = binding.partition("=")
    if not equals or not name.strip():
        raise UserError(
            f"{binding!r} binds nothing.", where="--gin", fix="Write it as --gin.NAME=VALUE."
        )
    return f"--gin.{name.strip()}={value.strip()}"
