"""The flags by which a command becomes one process of several; T5X's, for all commands."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Annotated, Any, ClassVar

import typer

from t0repro.errors import UserError


@dataclasses.dataclass(frozen=True)
class ProcessOptions:
    """T5X's flags for several processes; without them the environment decides."""

    HEADING: ClassVar = "Several processes"

    multiprocess_gpu: Annotated[
        bool,
        typer.Option(
            "--multiprocess_gpu",
            help="Join a multi-process run; JAX detects what you omit.",
        ),
    ] = False
    coordinator_address: Annotated[
        str | None,
        typer.Option(help="The address of process 0 for the others.", metavar="HOST:PORT"),
    ] = None
    process_count: Annotated[int | None, typer.Option(help="Number of processes.")] = None
    process_index: Annotated[int | None, typer.Option(help="This process's number, from 0.")] = None
    initialization_timeout: Annotated[
        int | None,
        typer.Option(min=1, help="Seconds to wait for the other processes.", show_default="300"),
    ] = None

    def __post_init__(self) -> None:
        """Refuses flags that do not fit together before any gin file is read.

        Raises:
          UserError: if the flags do not say where the first process is.
        """
        incomplete = self.coordinator_address is None or self.process_index is None
        if (self.process_count or 1) > 1 and incomplete and not self.multiprocess_gpu:
            raise UserError(
                f"--process_count={self.process_count} needs --coordinator_address and"
                " --process_index.",
                where="--process_count",
                fix="Give all three; or add --multiprocess_gpu where JAX knows the cluster.",
            )

    def joined(self) -> contextlib.AbstractContextManager[None]:
        """A context in which this process is one of those that flags or environment name."""
        from t0repro.partitioning import processes

        return processes.joined(
            processes.Asked(
                self.coordinator_address,
                self.process_count,
                self.process_index,
                self.initialization_timeout,
                detect=self.multiprocess_gpu,
            )
        )


def define() -> None:
    """Defines the same flags for t5_mesh_transformer."""
    # t5's command parses with absl, all others with Click.
    from absl import flags

    flags.DEFINE_boolean(
        "multiprocess_gpu", False, "Be one of several processes; JAX finds out what is not given."
    )
    flags.DEFINE_string("coordinator_address", None, "HOST:PORT where process 0 is reached.")
    flags.DEFINE_integer("process_count", None, "Number of processes.")
    flags.DEFINE_integer("process_index", None, "This process's number, from 0.")
    flags.DEFINE_integer("initialization_timeout", None, "Seconds to wait for the others.")


def of_absl(options: Any) -> ProcessOptions:
    """What parsed flags say."""
    # absl's flags have the names of the fields.
    names = [field.name for field in dataclasses.fields(ProcessOptions)]
    return ProcessOptions(**{name: options[name].value for name in names})
