"""`t0repro vertex`: runs of either stack as jobs on Vertex AI."""

from __future__ import annotations

import dataclasses
import datetime
import re
from typing import Annotated, Any, ClassVar

import typer
from absl import flags

from t0repro.cli import t5_mesh_transformer
from t0repro.cli.commands import App
from t0repro.cli.gin_options import GinFiles, GinParams
from t0repro.cli.groups import expand_groups
from t0repro.cli.options import AsJson
from t0repro.cli.results import echo, print_json
from t0repro.cli.spelling import canonical_arguments, translate_t5x_overrides
from t0repro.cloud.vertex.checks import check_fit, check_job
from t0repro.cloud.vertex.command_line import (
    MESH_TRANSFORMER,
    Arguments,
    check_not_export,
    override,
    read_arguments,
)
from t0repro.cloud.vertex.comparison import read_runs, table
from t0repro.cloud.vertex.custom_jobs import JobStatus, cancel_job, logs_of_job, read_job
from t0repro.cloud.vertex.experiments import Tracking
from t0repro.cloud.vertex.google import Place, check_login
from t0repro.cloud.vertex.job_config import JobConfig
from t0repro.cloud.vertex.outcome import follow, read_record
from t0repro.cloud.vertex.spec import JobSpec, Machines
from t0repro.cloud.vertex.submission import prepare, submit_and_track
from t0repro.cloud.vertex.submission import submit as submit_job
from t0repro.config.settings import shared_values
from t0repro.errors import UserError
from t0repro.storage.access import addresses_of_another_machine
from t0repro.terminal import print_table, terminal

app = App(
    "vertex",
    help="Submit, follow and compare jobs on Vertex AI (the extra vertex).",
    no_args_is_help=True,
    example="t0repro vertex status 1234567890 --project P --location europe-west4",
)

# The second names are those of run.py, T5X's script for Vertex AI, whose default is to wait.
Project = Annotated[
    str, typer.Option("--project", "--project_id", help="The Google Cloud project.")
]
Location = Annotated[
    str, typer.Option("--location", "--region", help="The region, such as europe-west4.")
]
Wait = Annotated[
    bool,
    typer.Option("--wait", "--sync", help="Follow the job, upload its metrics, record its end."),
]
PollSeconds = Annotated[
    float, typer.Option(min=0.01, help="With --wait: polling interval in seconds.")
]
Job = Annotated[str, typer.Argument(help="The job's number or resource name.")]

_ASKING = "asking Vertex AI ..."  # before Google's client, whose import takes seconds


@dataclasses.dataclass(frozen=True)
class JobOptions:
    """The machines of a job, and the account and network that it uses."""

    HEADING: ClassVar = "Machines"

    # T5X's script for Vertex AI always asks for this one.
    machine_type: Annotated[str, typer.Option(help="cloud-tpu, a2-highgpu-1g, ...")] = "cloud-tpu"
    accelerator_type: Annotated[
        str | None, typer.Option(help="TPU_V2, TPU_V3, NVIDIA_TESLA_A100, ...")
    ] = None
    accelerator_count: Annotated[
        int, typer.Option(min=0, help="TPU cores in all, or GPUs of each machine.")
    ] = 0
    replica_count: Annotated[int, typer.Option(min=1, help="Machines.")] = 1
    tpu_topology: Annotated[
        str | None, typer.Option(help="Chips of a slice of TPU v5e or newer: 4x4.")
    ] = None
    service_account: Annotated[
        str | None,
        typer.Option("--service_account", "--training_sa", help="The service account of the job."),
    ] = None
    network: Annotated[str | None, typer.Option(help="A network to peer with.")] = None
    labels: Annotated[list[str] | None, typer.Option(help="KEY=VALUE; repeatable.")] = None

    def specification(self, name: str, image_uri: str, words: tuple[str, ...]) -> JobSpec:
        """The job that runs these words in the image, before its files are staged."""
        return JobSpec(
            name,
            image_uri,
            Machines(**shared_values(self, Machines)),
            words,
            labels=_labels(self.labels or []),
            service_account=self.service_account,
            network=self.network,
        )


@dataclasses.dataclass(frozen=True)
class TrackingOptions:
    """Where a job is tracked."""

    HEADING: ClassVar = "Vertex AI Experiments"

    experiment: Annotated[
        str | None, typer.Option(help="Track the job in this experiment, which must exist.")
    ] = None
    run_name: Annotated[str | None, typer.Option(help="The run's name there; a new one.")] = None
    tensorboard: Annotated[
        str | None,
        typer.Option(help="A TensorBoard's number or resource name.", show_default="experiment's"),
    ] = None

    def tracking(self) -> Tracking | None:
        """The requested tracking; None if none was requested.

        Raises:
          UserError: If only one of experiment and name is given.
        """
        if self.experiment and self.run_name:
            return Tracking(self.experiment, self.run_name, self.tensorboard)
        if self.experiment is None and self.run_name is None:
            return None
        raise UserError(
            "A tracked job takes both an experiment and a name for the run.",
            where="--experiment, --run_name",
            fix="Give both, or neither.",
        )


def _not_export(run_mode: str | None) -> str | None:
    check_not_export(run_mode)
    return run_mode


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """The run mode of a job and its gin files; with none of these, a command follows `--`."""

    run_mode: Annotated[
        str | None,
        typer.Option(
            # Eager, so that export is refused before the options that it would also need.
            callback=_not_export,
            is_eager=True,
            help="train, eval, infer, precompile, rank-eval or aux.",
        ),
    ] = None
    gin_file: GinFiles = None
    gin_param: GinParams = None
    gin_search_paths: Annotated[
        str | None,
        typer.Option(help="Folders to look for gin files in, separated by commas."),
    ] = None
    tfds_data_dir: Annotated[
        str | None,
        typer.Option(help="The folder of TensorFlow Datasets' data, as the container sees it."),
    ] = None
    # As in T5X's run.py: --gin_file and --gin_param in one word each, separated by commas.
    gin_files: Annotated[str | None, typer.Option(hidden=True)] = None
    gin_overwrites: Annotated[str | None, typer.Option(hidden=True)] = None

    def words(self, command: list[str]) -> tuple[str, ...]:
        """The job's command line; `command` is what followed `--`.

        Raises:
          UserError: If there are gin files or bindings, but no run mode.
        """
        files = [*_comma_separated(self.gin_files), *(self.gin_file or [])]
        bindings = [*_comma_separated(self.gin_overwrites), *(self.gin_param or [])]
        folders = {"gin_search_paths": self.gin_search_paths, "tfds_data_dir": self.tfds_data_dir}
        flags = [
            *(f"--gin_file={name}" for name in files),
            *(override(binding) for binding in bindings),
            *(f"--{name}={value}" for name, value in folders.items() if value is not None),
        ]
        # As in run.py.
        run_mode = self.run_mode or ("train" if self.gin_files else None)
        if run_mode is not None:
            return f"--run_mode={run_mode}", *flags, *command
        if flags:
            raise UserError(
                "--gin_file, --gin, --gin_search_paths and --tfds_data_dir are for run modes.",
                where="the command line",
                fix="Add --run_mode, or give these flags after the command that follows `--`.",
            )
        return tuple(command)


def _comma_separated(text: str | None) -> list[str]:
    """A list as absl takes it: commas inside quotation marks, brackets or braces stay."""
    # Splits at a comma only if the brackets and quotes after it are balanced.
    outside = r"""("[^"]*"|'[^']*'|\([^)]*\)|\[[^\]]*\]|\{[^}]*\}|[^,])+"""
    return [item[0].strip() for item in re.finditer(outside, text or "")]


@dataclasses.dataclass(frozen=True)
class SubmissionOptions:
    """How a job is submitted, and whether this command then follows it."""

    dry_run: Annotated[
        bool, typer.Option("--dry_run", help="Check and print the specification; send nothing.")
    ] = False
    fit: Annotated[
        bool,
        typer.Option(
            "--fit", help="With --dry_run: compile the steps for the TPU slice (minutes)."
        ),
    ] = False
    wait: Wait = False
    # T5X's script asks as often.
    poll_seconds: PollSeconds = 15.0


@app.command()
@expand_groups
def submit(
    context: typer.Context,
    project: Project,
    location: Location,
    staging_bucket: Annotated[
        str, typer.Option(help="gs://BUCKET, or a folder in it, for the job's gin files.")
    ],
    image_uri: Annotated[str, typer.Option(help="The container's image.")],
    job: JobOptions,
    tracked: TrackingOptions,
    run: RunOptions,
    how: SubmissionOptions,
    display_name: Annotated[
        str | None,
        typer.Option(help="The job's name in the console.", show_default="t5x_job and the time"),
    ] = None,
    job_name_prefix: Annotated[str, typer.Option(hidden=True)] = "t5x_job",  # of T5X's run.py
    command: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[-- ARGUMENT...]",
            help="After `--`: more arguments of the run mode; or, without --run_mode, a whole"
            " command: t5_mesh_transformer ...",
        ),
    ] = None,
) -> None:
    r"""Submit a run as a custom job: checked here first, and tracked in Vertex AI Experiments.

    Gin files of this machine are copied to the staging bucket. Overrides are --gin.NAME=VALUE.
    Results and checkpoints belong in a bucket, which the container sees at /gcs/BUCKET.
    The flags of T5X's run.py (--project_id, --gin_files, --gin_overwrites, ...) work too.

    Example:
      t0repro vertex submit --project P --location europe-west4 \
        --staging_bucket gs://B --image_uri europe-docker.pkg.dev/P/r/t0repro \
        --display_name small --run_mode train --accelerator_type TPU_V3 \
        --accelerator_count 32 --gin_file my.gin \
        --gin.MODEL_DIR="'/gcs/B/small'" --experiment t5 --run_name small-1 \
        --wait
      t0repro vertex submit --project P --location europe-west4 \
        --staging_bucket gs://B --image_uri europe-docker.pkg.dev/P/r/t0repro \
        --display_name t0 -- t5_mesh_transformer --backend=mtf \
        --model_dir=gs://B/t0 --gin_file=gs://B/t0/operative_config.gin
    """
    echo("checking the job ...", err=True)

    place = Place(project, location, staging_bucket)
    name = display_name or f"{job_name_prefix}_{datetime.datetime.now():%Y%m%d%H%M%S}"
    asked = job.specification(name, image_uri, run.words(command or []))
    tracking = tracked.tracking()
    arguments = read_arguments(asked.arguments)
    if how.fit:
        check_fit(arguments, asked.machines, dry_run=how.dry_run)
    if not how.dry_run:
        # Before the checks, which read files and may compile for minutes.
        check_login()
    _check_options(context, arguments)
    # A dry run should be quick. A real job costs more than these minutes.
    compiles = how.fit or not how.dry_run
    config, lines = check_job(arguments, asked.machines, location, compiles=compiles)
    for line in lines:
        echo(line, err=True)
    if how.dry_run:
        spec = prepare(asked, config, place).spec
        # Nothing else goes to standard output, so that this can be redirected to a file.
        typer.echo(spec.to_yaml(), nl=False)
        echo(f"The same container with Docker: {spec.shell_command()}", err=True)
    else:
        _submit(asked, config, place, tracking, how)


def _check_options(context: typer.Context, arguments: Arguments) -> None:
    """Refuses options that the job's command would refuse in the container.

    Raises:
      UserError, click.UsageError: For an option that is unknown, incomplete or of the wrong type.
    """
    if arguments.mode is None:
        # absl has one set of flags per process; nothing else here reads it.
        t5_mesh_transformer.define_flags()
        try:
            flags.FLAGS([MESH_TRANSFORMER, *canonical_arguments(arguments.words)])
        except flags.Error as error:
            fix = f"{MESH_TRANSFORMER} --help lists its flags."
            raise UserError(f"{MESH_TRANSFORMER}: {error}.", where="after `--`", fix=fix) from error
        return
    root = context.find_root()
    group: Any = root.command
    # The first word is --run_mode=MODE, which the image's entry point parses.
    words = translate_t5x_overrides(arguments.words[1:])
    # Parsed as in the container, which has the credentials for its addresses, but not invoked.
    with addresses_of_another_machine():
        group.get_command(root, arguments.mode.value).make_context(
            arguments.mode.value, words, parent=root
        ).close()


def _labels(pairs: list[str]) -> dict[str, str]:
    wrong = [pair for pair in pairs if "=" not in pair]
    if wrong:
        raise UserError(f"{wrong[0]} is not a label.", where="--labels", fix="Write KEY=VALUE.")
    return dict(pair.split("=", 1) for pair in pairs)


def _submit(
    asked: JobSpec,
    config: JobConfig,
    place: Place,
    tracking: Tracking | None,
    how: SubmissionOptions,
) -> None:
    record = None
    if tracking is None:
        name = submit_job(asked, config, place)
    else:
        name, record = submit_and_track(asked, config, tracking, place)
    # Before the wait, so that a user who loses the connection has the job's name.
    typer.echo(f"submitted {name}")
    echo(f"to follow it: {_command('status', name)} --wait", err=True)
    if how.wait:
        job, metrics = follow(name, record, place, poll_seconds=how.poll_seconds)
        _print_end(job, metrics)


@app.command()
def status(
    job: Job,
    project: Project,
    location: Location,
    wait: Wait = False,
    poll_seconds: PollSeconds = 15.0,
) -> None:
    """Show a job's state; if it has ended and is tracked, record its metrics and end, too.

    Example:
      t0repro vertex status 1234567890 --project P --location europe-west4
    """
    echo(_ASKING, err=True)

    place = Place(project, location)
    now = read_job(job, place)
    typer.echo(f"{now.display_name} ({now.name}), submitted {now.created:%Y-%m-%d %H:%M:%S} UTC")
    if not (now.has_ended or wait):
        typer.echo(now.state)
        return
    # Following a finished job uploads the rest and records its end.
    end, metrics = follow(now.name, read_record(now, place), place, poll_seconds=poll_seconds)
    _print_end(end, metrics)


def _print_end(job: JobStatus, metrics: dict[str, float]) -> None:
    """Prints a job's end.

    Raises:
      UserError: If it failed.
    """
    for name, value in metrics.items():
        if not name.endswith("/step"):
            typer.echo(f"{name}: {value:.6g} at step {metrics[f'{name}/step']:.0f}")
    if job.state == "succeeded":
        typer.echo("succeeded")
        return
    # An error, so that scripts can see it from the exit code.
    what = "was canceled" if job.state == "canceled" else "failed"
    raise UserError(
        f"The job {what}{f': {job.reason}' if job.reason else ''}".rstrip(".") + ".",
        where=job.name,
        fix=f"Read its log: {_command('logs', job.name)}. Submitted again with the same folder of"
        " results, training continues from its latest checkpoint.",
    )


def _command(verb: str, name: str) -> str:
    """The command that asks about a job, given by its resource name."""
    # The name is projects/<project>/locations/<location>/customJobs/<number>.
    _, project, _, location, _, number = name.split("/")
    return f"t0repro vertex {verb} {number} --project {project} --location {location}"


@app.command()
def logs(
    job: Job,
    project: Project,
    location: Location,
    last: Annotated[int | None, typer.Option(min=1, help="Print only the last N lines.")] = None,
) -> None:
    r"""Print what a job's containers have logged so far.

    Example:
      t0repro vertex logs 1234567890 --project P --location europe-west4 \
        --last 100
    """
    echo(_ASKING, err=True)

    for line in logs_of_job(job, Place(project, location), last=last):
        echo(line)


@app.command()
def cancel(job: Job, project: Project, location: Location) -> None:
    """Ask Vertex AI to end a job.

    Example:
      t0repro vertex cancel 1234567890 --project P --location europe-west4
    """
    echo(_ASKING, err=True)

    cancel_job(job, Place(project, location))
    typer.echo("Asked to end; `t0repro vertex status` reports when it has ended.")


@app.command()
def compare(
    experiment: Annotated[str, typer.Argument(help="The experiment.")],
    project: Project,
    location: Location,
    run: Annotated[
        list[str] | None,
        typer.Option(help="A run; repeatable.", show_default="every job's run"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    r"""Compare the jobs of an experiment: state, machines, and the best of each metric.

    Example:
      t0repro vertex compare t5 --run small-1 --run small-2 --project P \
        --location europe-west4
    """
    echo(_ASKING, err=True)

    runs = read_runs(experiment, run or [], Place(project, location))
    if as_json:
        print_json(runs)
        return
    header, rows = table(runs)
    print_table(terminal(), experiment, header, rows)
