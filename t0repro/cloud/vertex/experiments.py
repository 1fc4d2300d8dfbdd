"""Jobs in Vertex AI Experiments: one experiment run for each job, with its lineage and metrics.

Everything is created before the job, so that no job runs untracked, and deleted again if the
service refuses the job. A run shows:

    parameters    the job, its command, machines and image
    artifacts     <run>-configuration (gin, whole), <run>-architecture (parameters and shapes),
                  <run>-dataset (task and split), <run>-model (the folder of results)
    execution     the custom job, with the first three as inputs and the model as output
    metrics       of each metric the maximum and its step, when the job has ended
    state         RUNNING, then COMPLETE, FAILED or CANCELLED
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from t0repro.cloud.vertex.custom_jobs import State
from t0repro.cloud.vertex.google import Place, cloud_errors, connect
from t0repro.cloud.vertex.spec import JobSpec
from t0repro.errors import UserError

RECORD = "job.json"
_FINAL = {"succeeded": "COMPLETE", "failed": "FAILED", "canceled": "CANCELLED"}


@dataclasses.dataclass(frozen=True)
class Tracking:
    """The experiment and run that track a job.

    Attributes:
      experiment: name of an experiment that exists.
      run_name: name of a run that does not.
      tensorboard: a TensorBoard's resource name or number; None for the experiment's own, if any.
    """

    experiment: str
    run_name: str
    tensorboard: str | None = None

    def __post_init__(self) -> None:
        # Vertex AI derives the name of an artifact from both, which leaves them 120 letters.
        whole = f"{self.experiment}-{self.run_name}"
        if not re.fullmatch(r"[a-z0-9][a-z0-9-]*", self.run_name) or len(whole) > 120:
            raise UserError(
                f"{self.run_name!r} cannot name a run.",
                where="--run_name",
                fix="Use lower case letters, digits and dashes, with the experiment's name at most"
                " 119 of them.",
            )


@dataclasses.dataclass(frozen=True)
class Facts:
    """A run's facts about its job, besides the specification.

    Attributes:
      configuration: address of the complete configuration; None for a command that reads no gin.
      architecture: address of the list of parameters; None if the configuration has none.
      output: address of the folder of results.
      mixture: tasks or mixtures that the job reads, joined by commas.
      split: the split of their examples.
    """

    configuration: str | None
    architecture: str | None
    output: str | None
    mixture: str | None
    split: str | None


def check_tracking(tracking: Tracking, place: Place) -> None:
    """Checks that a run can be created, and creates nothing.

    Raises:
      UserError: If the experiment or the TensorBoard is missing, the run's name is taken, or the
        service refuses.
    """
    aiplatform = connect(place)
    with cloud_errors("look for the experiment", where=f"--experiment {tracking.experiment}"):
        experiment = aiplatform.Experiment.get(tracking.experiment)
    if experiment is None:
        raise UserError(
            f"There is no experiment {tracking.experiment} in {place.project}, {place.location}.",
            where="--experiment",
            fix='Create it: python -c "from google.cloud.aiplatform import Experiment;'
            f" Experiment.create('{tracking.experiment}', project='{place.project}',"
            f" location='{place.location}')\"",
        )
    with cloud_errors("look for the run", where=f"--run_name {tracking.run_name}"):
        run = aiplatform.ExperimentRun.get(tracking.run_name, experiment=experiment)
    if run is not None:
        raise UserError(
            f"The experiment {tracking.experiment} has a run {tracking.run_name} already.",
            where="--run_name",
            fix="Choose another name; a run is never overwritten.",
        )
    if tracking.tensorboard is not None:
        with cloud_errors(
            "look for the TensorBoard", where=f"--tensorboard {tracking.tensorboard}"
        ):
            aiplatform.Tensorboard(tracking.tensorboard)


@contextlib.contextmanager
def create_run(
    tracking: Tracking, spec: JobSpec, facts: Facts, place: Place
) -> Iterator[ExperimentsRun]:
    """Creates the run for a job submitted in the block; deletes it if the block fails.

    Raises:
      UserError: If the service refuses, or another run took the name.
    """
    aiplatform = connect(place)
    # Undone in reverse order if anything fails; kept, by `pop_all`, once the job is submitted.
    with contextlib.ExitStack() as resources:
        with cloud_errors("make the run", where=f"--run_name {tracking.run_name}"):
            run = _create_run(aiplatform, tracking)
            # By default, deleting a run leaves its counterpart in the TensorBoard behind.
            resources.callback(_delete_if_possible, run, delete_backing_tensorboard_run=True)
            context = aiplatform.Context(run.resource_name)
            inputs, outputs = _create_artifacts(aiplatform, tracking, facts, resources)
            execution = _create_execution(aiplatform, tracking, spec)
            resources.callback(_delete_if_possible, execution)
            execution.assign_input_artifacts(inputs)
            execution.assign_output_artifacts(outputs)
            context.add_artifacts_and_executions(
                artifact_resource_names=[each.resource_name for each in (*inputs, *outputs)],
                execution_resource_names=[execution.resource_name],
            )
            created = ExperimentsRun(run, execution)
            created.log_parameters(_parameters(spec))
        yield created
        resources.pop_all()


def _create_run(aiplatform: Any, tracking: Tracking) -> Any:
    """Makes an ExperimentRun, and its run in the TensorBoard, or neither."""
    from google.api_core import exceptions

    experiment = aiplatform.Experiment(tracking.experiment)
    try:
        return aiplatform.ExperimentRun.create(
            tracking.run_name, experiment=experiment, tensorboard=tracking.tensorboard
        )
    except exceptions.AlreadyExists:
        raise  # another process made it after `check_tracking`
    except Exception:
        # Google's client takes back its ExperimentRun, but not what it made in the TensorBoard.
        board = tracking.tensorboard or experiment.backing_tensorboard_resource_name
        if board is not None:
            with contextlib.suppress(Exception):
                name = aiplatform.Tensorboard(board).resource_name
                runs = f"{name}/experiments/{tracking.experiment}/runs"
                aiplatform.TensorboardRun(f"{runs}/{tracking.run_name}").delete()
        raise


def _delete_if_possible(resource: Any, **options: Any) -> None:
    """Deletes a resource; one that cannot be deleted is left, since the first error says more."""
    with contextlib.suppress(Exception):
        resource.delete(**options)


def _parameters(spec: JobSpec) -> dict[str, str | int]:
    machines = spec.machines
    return {
        "command": shlex.join((*spec.command, *spec.arguments)),
        "image": spec.image_uri,
        "machine_type": machines.machine_type,
        "accelerator_type": machines.accelerator_type or "none",
        "accelerator_count": machines.accelerator_count,
        "replica_count": machines.replica_count,
    }


def _create_artifacts(
    aiplatform: Any, tracking: Tracking, facts: Facts, resources: contextlib.ExitStack
) -> tuple[list[Any], list[Any]]:
    """The artifacts that a job reads, and those that it writes; unknown ones are left out."""
    kinds = {
        "configuration": ("system.Artifact", facts.configuration, {}),
        "architecture": ("system.Artifact", facts.architecture, {}),
        # "" makes an artifact without an address, None makes none.
        "dataset": ("system.Dataset", "", {"mixture": facts.mixture, "split": facts.split}),
        "model": ("system.Model", facts.output, {}),
    }
    if facts.mixture is None:
        del kinds["dataset"]
    artifacts = {}
    for name, (schema, address, metadata) in kinds.items():
        if address is not None:
            artifacts[name] = aiplatform.Artifact.create(
                schema_title=schema,
                display_name=f"{tracking.run_name}-{name}",
                uri=address,
                metadata={key: value for key, value in metadata.items() if value is not None},
            )
            resources.callback(_delete_if_possible, artifacts[name])
    model = artifacts.pop("model", None)
    return list(artifacts.values()), [model] if model else []


def _create_execution(aiplatform: Any, tracking: Tracking, spec: JobSpec) -> Any:
    from google.cloud.aiplatform.metadata.schema.system import execution_schema

    return execution_schema.CustomJobExecution(
        display_name=f"{tracking.run_name}-job",
        state=aiplatform.gapic.Execution.State.NEW,
        metadata={"job_spec": json.dumps(spec.worker_pool_specs)},
    ).create()


@dataclasses.dataclass(frozen=True)
class ExperimentsRun:
    """The run of one job.

    Attributes:
      run: google.cloud.aiplatform's ExperimentRun.
      execution: its Execution, which stands for the custom job.
    """

    run: Any
    execution: Any

    def log_parameters(self, values: Mapping[str, str | int | float]) -> None:
        """Records the run's parameters."""
        with cloud_errors("record the run's parameters", where=self.run.name):
            self.run.log_params(dict(values))

    def log_metrics(self, values: Mapping[str, float]) -> None:
        """Records summary metrics; a later value of a name replaces the earlier one."""
        with cloud_errors("record the run's metrics", where=self.run.name):
            self.run.log_metrics(dict(values))

    def record_job(self, job_name: str) -> None:
        """Records which job this is, once the service has named it."""
        from google.cloud.aiplatform_v1 import Execution

        # By this parameter `compare` distinguishes jobs' runs from those that the uploader makes.
        self.log_parameters({"job": job_name})
        with cloud_errors("record the job", where=self.run.name):
            self.execution.update(
                state=Execution.State.RUNNING, metadata={"resource_name": job_name}
            )

    @property
    def tensorboard(self) -> str | None:
        """Resource name of the TensorBoard behind the run; None if there is none."""
        run = self.run._backing_tensorboard_run  # the client has no public name for it
        return run.resource.resource_name.partition("/experiments/")[0] if run else None

    @property
    def has_ended(self) -> bool:
        """Whether `record_end` was called, here or elsewhere."""
        return self.run.get_state() != "RUNNING"

    def record_end(self, state: State) -> None:
        """Records how the run ended."""
        from google.cloud.aiplatform_v1 import Execution

        final = Execution.State[_FINAL[state]]
        with cloud_errors("record the end", where=self.run.name):
            # The run last: `has_ended` reads its state, so an incomplete end is recorded again.
            self.execution.update(state=final)
            self.run.end_run(state=final)


@dataclasses.dataclass(frozen=True)
class Record:
    """Connects a job to its run: job.json in the job's folder in staging."""

    experiment: str
    run_name: str
    execution: str
    output: str | None
    tensorboard: str | None

    def to_json(self) -> bytes:
        """The contents of the file."""
        return (json.dumps(dataclasses.asdict(self), indent=1) + "\n").encode()


def open_run(record: Record, place: Place) -> ExperimentsRun:
    """The run of a job that was submitted earlier.

    Raises:
      UserError: If it was deleted, or the service refuses.
    """
    aiplatform = connect(place)
    with cloud_errors("open the run", where=f"{record.experiment}, {record.run_name}"):
        return ExperimentsRun(
            aiplatform.ExperimentRun(record.run_name, experiment=record.experiment),
            aiplatform.Execution(record.execution),
        )
