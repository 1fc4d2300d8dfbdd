"""`t0repro aux`: evaluates or fine-tunes every checkpoint of a training as it goes on."""

from __future__ import annotations

import json as json_format
import time
from pathlib import Path
from typing import Annotated

import typer

from t0repro.cli.gin_options import GinBindings, GinFiles, GinSearchPaths

app = typer.Typer(name="aux", invoke_without_command=True)

Mixtures = Annotated[
    str | None,
    typer.Option("--auxiliary_job_mixtures", help="Mixtures, joined by commas; a job for each."),
]
JobGinFile = Annotated[
    str | None, typer.Option("--auxiliary_job_gin_file", help="The gin file of the jobs.")
]
ReplaceGinFile = Annotated[
    bool,
    typer.Option("--replace_gin_file", help="Leave the training's gin files out of the jobs."),
]
FinalSteps = Annotated[
    int,
    typer.Option(
        "--final_auxiliary_job_steps",
        help="0 evaluates each checkpoint; N fine-tunes each for N steps.",
    ),
]
BuildTarget = Annotated[
    str,
    typer.Option(
        "--auxiliary_job_build_target_path",
        help="eval, train, rank-eval (options may follow), or any command.",
    ),
]
Platform = Annotated[
    str | None,
    typer.Option("--auxiliary_job_platform", help="An entry of the file of machines."),
]
Cell = Annotated[
    str | None, typer.Option("--auxiliary_job_cell", help="An entry of the file of machines.")
]
Machines = Annotated[
    Path | None,
    typer.Option("--machines", help="A YAML file: what platforms and cells stand for."),
]
LauncherName = Annotated[
    str | None, typer.Option("--launcher", help="Where jobs run: local, slurm or k8s.")
]
MaxParallel = Annotated[int, typer.Option("--max_parallel", min=1, help="The most jobs at a time.")]
PollSeconds = Annotated[
    float, typer.Option("--poll_seconds", min=0.01, help="Seconds between two looks.")
]
MaxFailures = Annotated[
    int, typer.Option("--max_failures", min=1, help="Failures after which a job is given up.")
]
TimeLimit = Annotated[
    float | None, typer.Option("--time_limit", help="Seconds that a job may take.")
]
Metric = Annotated[
    str | None, typer.Option("--main_metric", help="The TensorBoard tag to show; an accuracy.")
]


@app.callback()
def aux(
    context: typer.Context,
    model_dir: Annotated[Path | None, typer.Option(help="The training's folder.")] = None,
    auxiliary_job_mixtures: Mixtures = None,
    auxiliary_job_gin_file: JobGinFile = None,
    gin_file: GinFiles = None,
    gin_bindings: GinBindings = None,
    gin_search_paths: GinSearchPaths = ".",
    replace_gin_file: ReplaceGinFile = False,
    final_auxiliary_job_steps: FinalSteps = 0,
    auxiliary_job_build_target_path: BuildTarget = "eval",
    auxiliary_job_platform: Platform = None,
    auxiliary_job_cell: Cell = None,
    machines: Machines = None,
    launcher: LauncherName = None,
    max_parallel: MaxParallel = 1,
    poll_seconds: PollSeconds = 10.0,
    max_failures: MaxFailures = 3,
    time_limit: TimeLimit = None,
    main_metric: Metric = None,
    once: Annotated[
        bool, typer.Option("--once", help="End when the checkpoints that are there are done.")
    ] = False,
) -> None:
    """Auxiliary jobs: evaluate or fine-tune every checkpoint of a training as it goes on.

    One job starts for every new checkpoint and each mixture.
    In the jobs' gin files MODEL_DIR, MIXTURE_OR_TASK_NAME, INITIAL_CHECKPOINT_PATH, TRAIN_STEPS
    and EVAL_OUTPUT_DIR are set; any other command finds these names in its environment. If it is
    interrupted, starting it again continues where it stopped.

    Example:
      t0repro aux --model_dir runs/demo/model --auxiliary_job_mixtures demo_eval_score_eval
        --auxiliary_job_build_target_path "rank-eval --module_import t0repro.tasks.demo" --once
      t0repro aux status runs/demo/model --watch
    """
    if context.invoked_subcommand is not None:
        return
    from t0repro.errors import UserError
    from t0repro.jobs.beside import AuxiliaryOptions, make_controller

    if model_dir is None:
        raise UserError(
            "There is no folder to watch for checkpoints.",
            where="--model_dir",
            fix="Give the folder of the training; it may not exist yet.",
        )
    options = AuxiliaryOptions(
        mixtures=auxiliary_job_mixtures,
        gin_file=auxiliary_job_gin_file,
        train_gin_files=tuple(gin_file or ()),
        gin_bindings=tuple(gin_bindings or ()),
        gin_search_paths=gin_search_paths,
        replace_gin_file=replace_gin_file,
        final_steps=final_auxiliary_job_steps,
        build_target=auxiliary_job_build_target_path,
        platform=auxiliary_job_platform,
        cell=auxiliary_job_cell,
        machines=machines,
        launcher=launcher,
        max_parallel=max_parallel,
        poll_seconds=poll_seconds,
        max_failures=max_failures,
        time_limit=time_limit,
        main_metric=main_metric,
    )
    done = make_controller(model_dir, options, typer.echo).run(lambda: not once)
    raise typer.Exit(0 if done else 1)


@app.command()
def status(
    model_dir: Annotated[Path, typer.Argument(help="The training's folder.")],
    watch: Annotated[bool, typer.Option("--watch", help="Print it again as it changes.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
) -> None:
    """Shows every checkpoint's jobs: state, attempts, time, main metric; and the metric's curve.

    Example: t0repro aux status runs/demo/model --watch
    """
    from t0repro.jobs.status import HEADER, curves, read_status, rows, to_json
    from t0repro.terminal import print_table, terminal

    shown = None
    while True:
        found = read_status(model_dir)
        if found != shown:
            if json:
                typer.echo(json_format.dumps(to_json(found), indent=1))
            else:
                console = terminal()
                if console.is_terminal and watch:
                    console.clear()
                print_table(console, "", HEADER, rows(found), numbers=("attempts", "seconds"))
                for line in curves(found):
                    typer.echo(line)
            shown = found
        if not watch or all(each.is_final for each in found.values()):
            return
        time.sleep(1.0)
