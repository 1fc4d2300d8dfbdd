"""What Vertex AI receives about a job: machines and command line, and what it would refuse.

Nothing here knows Google's client, so a specification can be compared and tested offline.
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
import math
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from t0repro.errors import UserError
from t0repro.partitioning.topologies import GIB

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


# ---- Which accelerators the machines of Vertex AI take, how much memory they have and where
# they are

# What is not in these tables is not refused: Google adds machines and regions. Sources, read in
# November 2026: Google Cloud's pages on TPU regions and zones, on Vertex AI's MachineSpec and
# training with TPUs, and on the machine types of Compute Engine with GPUs; for G4 and the hosts of
# TPU v5e, v5p and v6e, the machines that Google's Cluster Toolkit knows. No source that could be
# read says how much memory Google gives a GB200.


@dataclasses.dataclass(frozen=True)
class Accelerator:
    """One kind of accelerator.

    Attributes:
      machines: pattern of the machine types that take it.
      counts: how many a machine may have, where its name does not say.
      memory: bytes of each device, for GPUs; precompile knows a TPU's. None if it is not known.
      topology: the prefix of precompile's names, for TPUs.
      regions: region -> largest slice in cores, where that is published; None if it is not.
      per_device: what the number in a machine type's name counts for each device.
    """

    machines: str
    counts: tuple[int, ...]
    memory: int | None = None
    topology: str | None = None
    regions: dict[str, int] | None = None
    per_device: int = 1


def _gpu(machines: str, counts: tuple[int, ...], gigabytes: float) -> Accelerator:
    return Accelerator(machines, counts, memory=int(gigabytes * GIB))


# In cores, as Vertex AI counts: a chip of v2 or v3 has two.
_SLICES = (8, 32, 64, 128, 256, 512, 1024, 2048)
# GPUs that one machine of a series may have.
_A2, _A3 = (1, 2, 4, 8, 16), (1, 2, 4, 8)
_G4 = r"g4-standard-(48|96|192|384)"
ACCELERATORS = {
    "TPU_V2": Accelerator(
        CLOUD_TPU,
        (8, 32, 128, 256, 512),
        topology="v2",
        regions={"us-central1": 512, "europe-west4": 512, "asia-east1": 8},
    ),
    "TPU_V3": Accelerator(
        CLOUD_TPU, _SLICES, topology="v3", regions={"us-central1": 8, "europe-west4": 2048}
    ),
    "NVIDIA_TESLA_P4": _gpu(r"n1-\w+-\d+", (1, 2, 4), 8),
    "NVIDIA_TESLA_P100": _gpu(r"n1-\w+-\d+", (1, 2, 4), 16),
    "NVIDIA_TESLA_V100": _gpu(r"n1-\w+-\d+", (1, 2, 4, 8), 16),
    "NVIDIA_TESLA_T4": _gpu(r"n1-\w+-\d+", (1, 2, 4), 16),
    "NVIDIA_L4": _gpu(r"g2-standard-\d+", (1, 2, 4, 8), 24),
    "NVIDIA_TESLA_A100": _gpu(r"a2-(high|mega)gpu-(\d+)g", _A2, 40),
    "NVIDIA_A100_80GB": _gpu(r"a2-ultragpu-(\d+)g", _A2, 80),
    "NVIDIA_H100_80GB": _gpu(r"a3-(high|edge)gpu-(\d+)g", _A3, 80),
    "NVIDIA_H100_MEGA_80GB": _gpu(r"a3-megagpu-(\d+)g", (8,), 80),
    "NVIDIA_H200_141GB": _gpu(r"a3-ultragpu-(\d+)g", (8,), 141),
    "NVIDIA_B200": _gpu(r"a4-highgpu-(8)g", (8,), 180),
    "NVIDIA_GB200": Accelerator(r"a4x-highgpu-(4)g", (4,)),
    "NVIDIA_RTX_PRO_6000": Accelerator(_G4, (), memory=96 * GIB, per_device=48),
}
# Machine type of a TPU host, without the number of its chips at the end -> precompile's name of the
# TPU, by how much that name counts each chip, and the number of axes of its slices.
TPU_HOSTS = {
    "ct5lp-hightpu-": ("v5e", 1, 2),
    "ct5p-hightpu-": ("v5p", 2, 3),
    "ct6e-standard-": ("v6e", 1, 2),
}


def tpu_slice(machines: Machines) -> tuple[str, int] | None:
    """The slice that a TPU host's machine type and the topology make.

    Returns:
      Precompile's name of it, and its chips, each of which is one device; None for other machines.

    Raises:
      UserError: If the machine type and the topology do not belong together.
    """
    hosts = [host for host in TPU_HOSTS if machines.machine_type.startswith(host)]
    if not hosts:
        if machines.tpu_topology:
            raise UserError(
                f"{machines.machine_type} takes no --tpu_topology.",
                where="--tpu_topology",
                fix=f"Leave it out, or choose a machine type of {', '.join(TPU_HOSTS)}.",
            )
        return None
    family, per_chip, axes = TPU_HOSTS[hosts[0]]
    if machines.accelerator_type:
        raise UserError(
            f"The machine type {machines.machine_type} already says which TPU it has.",
            where="--accelerator_type",
            fix="Leave it and --accelerator_count out; the slice's size is --tpu_topology.",
        )
    example = "x".join(["2"] * axes)
    if not re.fullmatch("x".join([r"[1-9]\d*"] * axes), machines.tpu_topology or ""):
        raise UserError(
            f"A slice of {family} has {axes} axes, and --tpu_topology is {machines.tpu_topology}.",
            where="--tpu_topology",
            fix=f"Give the chips on each axis, such as {example}.",
        )
    chips = math.prod(int(size) for size in str(machines.tpu_topology).split("x"))
    host = re.fullmatch(r"([1-9]\d*)t", machines.machine_type.removeprefix(hosts[0]))
    if host is None or chips % int(host[1]):
        raise UserError(
            f"{machines.tpu_topology} has {chips} chips, which do not fill whole machines"
            f" {machines.machine_type}.",
            where="--machine_type, --tpu_topology",
            fix=f"Choose a topology of whole machines; {hosts[0]}4t has 4 chips.",
        )
    return f"{family}-{chips * per_chip}", chips


def check_machines(machines: Machines, location: str) -> list[str]:
    """Checks that machines of this kind exist, and where.

    Returns:
      What could not be checked, in words.

    Raises:
      UserError: For an accelerator that the machine does not take, in this number or region.
    """
    kind = ACCELERATORS.get(machines.accelerator_type or "")
    if machines.machine_type == CLOUD_TPU:
        if kind is None or kind.topology is None:
            tpus = [name for name, one in ACCELERATORS.items() if one.topology]
            raise UserError(
                f"{CLOUD_TPU} takes TPUs, not {machines.accelerator_type or 'CPUs alone'}.",
                where="--accelerator_type",
                fix=f"Give {' or '.join(tpus)}.",
            )
    slice_of_hosts = tpu_slice(machines)
    on_slice = slice_of_hosts is not None or machines.machine_type == CLOUD_TPU
    if on_slice and machines.replica_count != 1:
        size = "--accelerator_count" if slice_of_hosts is None else "--tpu_topology"
        raise UserError(
            "A TPU slice is one replica, however large it is.",
            where="--replica_count",
            fix=f"Leave it out, and say the slice's size as {size}.",
        )
    if slice_of_hosts is not None:
        return [
            f"warning: which regions have {machines.machine_type} is not known here; see your"
            f" project's quotas in {location}"
        ]
    if machines.accelerator_type is None:
        return []
    if kind is None:
        return [f"{machines.accelerator_type}: not in the table of accelerators, so not checked"]
    _check_fit(machines, kind)
    return _check_region(machines, kind, location)


def _check_fit(machines: Machines, kind: Accelerator) -> None:
    matched = re.fullmatch(kind.machines, machines.machine_type)
    if matched is None:
        raise UserError(
            f"{machines.machine_type} does not take {machines.accelerator_type}.",
            where="--machine_type",
            fix=f"Choose a machine type such as {_example(kind.machines)}.",
        )
    counts = kind.counts
    if matched.lastindex:
        counts = (int(matched[matched.lastindex]) // kind.per_device,)
    if machines.accelerator_count not in counts:
        raise UserError(
            f"{machines.machine_type} does not take {machines.accelerator_count}"
            f" {machines.accelerator_type}.",
            where="--accelerator_count",
            fix=f"Give {' or '.join(map(str, counts))}.",
        )


def _check_region(machines: Machines, kind: Accelerator, location: str) -> list[str]:
    if kind.regions is None:
        return [
            f"warning: which regions have {machines.accelerator_type} is not known here; see your"
            f" project's quotas in {location}"
        ]
    largest = kind.regions.get(location, 0)
    if machines.accelerator_count > largest:
        wide = [name for name, most in kind.regions.items() if most >= machines.accelerator_count]
        some = f"slices of up to {largest} cores of" if largest else "no"
        raise UserError(
            f"{location} has {some} {machines.accelerator_type}.",
            where="--location",
            fix=f"{machines.accelerator_count} cores are in {' and '.join(wide)}.",
        )
    return []


def _example(pattern: str) -> str:
    named = {CLOUD_TPU: CLOUD_TPU, r"n1-\w+-\d+": "n1-standard-8", _G4: "g4-standard-48"}
    simple = re.sub(r"\((high|\d)(\|\w+)?\)", r"\1", pattern)
    return named.get(pattern, simple.replace(r"(\d+)", "8").replace(r"\d+", "12"))


# ---- A job's command line, as it would be given on this machine ----------------------------------

# Two kinds of commands run as jobs: the run modes, which the image's entry point takes as
# `--run_mode=MODE ...`, and t5_mesh_transformer with the arguments of T0's README.

MESH_TRANSFORMER = "t5_mesh_transformer"
MOUNT = "/gcs"  # where Vertex AI mounts every bucket in a container, by Cloud Storage FUSE
_AUXILIARY = "--auxiliary_job_gin_file"


class JobMode(enum.StrEnum):
    """What the image's entry point runs: the command with this name."""

    TRAIN = "train"
    EVAL = "eval"
    INFER = "infer"
    PRECOMPILE = "precompile"
    RANK_EVAL = "rank-eval"
    AUX = "aux"


@dataclasses.dataclass(frozen=True)
class Arguments:
    """The parts of a job's command line that matter outside its container.

    Attributes:
      words: all arguments, in order.
      mode: the run mode; None for t5_mesh_transformer.
      backend: mtf or jax.
      auxiliary_gin_files: those of auxiliary jobs beside the run.
      search_paths: folders of gin files, from --gin_search_paths or --gin_location_prefix.
      bindings: overrides, from --gin.NAME=VALUE, --gin_bindings or --gin_param.
      output: the folder for results on the command line; gin names any others.
      mixture: what --mixture or --auxiliary_job_mixtures name.
    """

    words: tuple[str, ...]
    mode: JobMode | None
    backend: str
    gin_files: tuple[str, ...]
    auxiliary_gin_files: tuple[str, ...]
    search_paths: tuple[str, ...]
    bindings: tuple[str, ...]
    module_imports: tuple[str, ...]
    output: str | None
    checkpoint: str | None
    mixture: str | None

    @property
    def command(self) -> tuple[str, ...]:
        """Replaces the image's entry point; empty for run modes, which the entry point takes."""
        return (MESH_TRANSFORMER,) if self.mode is None else ()


def read_arguments(words: Sequence[str]) -> Arguments:
    """Reads a job's command line: `--run_mode=MODE ...` or `t5_mesh_transformer ...`.

    Raises:
      UserError: If it is neither, or has an option without its value.
    """
    if words and words[0] == MESH_TRANSFORMER:
        return _read(tuple(words[1:]), None)
    mode, _ = _parsed(_parser("--run_mode"), words)
    check_not_export(mode.run_mode)
    if mode.run_mode is None:
        raise UserError(
            "The job has nothing to do.",
            where="--run_mode",
            fix=f"Give one of {', '.join(JobMode)}, or a whole command after `--`:"
            f" -- {MESH_TRANSFORMER} --backend=mtf ...",
        )
    try:
        return _read(tuple(words), JobMode(mode.run_mode))
    except ValueError as error:
        raise UserError(
            f"There is no run mode {mode.run_mode!r}.",
            where="--run_mode",
            fix=f"One of {', '.join(JobMode)}.",
        ) from error


def check_not_export(run_mode: str | None) -> None:
    """Refuses T5X's run mode for SavedModels, and names the alternative.

    Raises:
      UserError: if it is `export`.
    """
    if run_mode == "export":
        raise UserError(
            "There is no run mode 'export': T5X's writes a SavedModel for TensorFlow Serving, and"
            " no model here is a TensorFlow graph.",
            where="--run_mode=export",
            fix="`t0repro convert CHECKPOINT OUT --to hf` writes a model that transformers loads;"
            " `--to t5x` writes a checkpoint that T5X itself exports.",
        )


def _read(words: tuple[str, ...], mode: JobMode | None) -> Arguments:
    single = ("--backend", "--model_dir", "--out", "--checkpoint", "--mixture")
    single += ("--auxiliary_job_mixtures", "--gin_search_paths", "--gin_location_prefix")
    parser = _parser(*single)
    # The commands take these several times; of the others, the last one counts.
    repeated = ("--gin_file", "--gin_param", "--gin_bindings")
    for name in (*repeated, _AUXILIARY, "--module_import"):
        parser.add_argument(name, action="append", default=[])
    found, rest = _parsed(parser, words)
    # argparse cannot declare --gin.NAME: they are among the words that it does not know.
    overrides = [word.removeprefix("--gin.") for word in rest if word.startswith("--gin.")]
    folders = found.gin_search_paths or found.gin_location_prefix
    return Arguments(
        words=words,
        mode=mode,
        # The commands' own defaults.
        backend=found.backend or ("mtf" if mode is None else "jax"),
        gin_files=tuple(map(_readable, found.gin_file)),
        auxiliary_gin_files=tuple(map(_readable, found.auxiliary_job_gin_file)),
        search_paths=tuple(folders.split(",")) if folders else (),
        bindings=(*overrides, *found.gin_bindings, *found.gin_param),
        module_imports=tuple(found.module_import),
        output=found.out or found.model_dir,
        checkpoint=found.checkpoint,
        mixture=found.mixture or found.auxiliary_job_mixtures,
    )


def address_of(path: str) -> str:
    """The address of a path below the mounted buckets; any other path as it is."""
    return re.sub(f"^{MOUNT}/", "gs://", path)


def _readable(name: str) -> str:
    """A gin file's name, or its address if only the container has the bucket mounted."""
    return name if os.path.exists(name) else address_of(name)


def gin_files_replaced(
    arguments: Arguments, places: Mapping[str, str], folder: str | None
) -> tuple[str, ...]:
    """The command line with other paths for gin files.

    Args:
      arguments: the command line, read.
      places: name on this machine -> path in the container; other names stay.
      folder: where the container finds included files; None if none are staged.
    """
    words: list[str] = []
    follows_file = False
    for word in arguments.words:
        name, equals, value = word.partition("=")
        # Both spellings: `--gin_file NAME` and `--gin_file=NAME`.
        if follows_file:
            word = places.get(word, word)
        elif name in ("--gin_file", _AUXILIARY) and equals:
            word = f"{name}={places.get(value, value)}"
        follows_file = word in ("--gin_file", _AUXILIARY)
        words.append(word)
    if folder is None:
        return tuple(words)
    option = "--gin_location_prefix" if arguments.mode is None else "--gin_search_paths"
    folders = ",".join((folder, *arguments.search_paths))
    return (*words, f"{option}={folders}")  # of two, the commands take the last


def _parser(*single: str) -> argparse.ArgumentParser:
    # No abbreviations: a word that is unknown here may be an option of the container's command.
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for name in single:
        parser.add_argument(name)
    return parser


def _parsed(
    parser: argparse.ArgumentParser, words: Sequence[str]
) -> tuple[argparse.Namespace, list[str]]:
    try:
        return parser.parse_known_args(list(words))
    except argparse.ArgumentError as error:
        raise UserError(
            f"The job's command line cannot be read: {error}.", fix="Write --option=value."
        ) from error
