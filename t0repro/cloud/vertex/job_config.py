"""A job's configuration, as far as this machine knows it."""

from __future__ import annotations

import dataclasses
import math

from t0repro.cloud.vertex.command_line import Arguments, JobMode
from t0repro.config.model import ModelConfig
from t0repro.config.run import Run, TrainRun
from t0repro.errors import UserError


@dataclasses.dataclass(frozen=True)
class JobConfig:
    """A job's configuration, as far as this machine knows it.

    Attributes:
      text: the complete configuration in gin; "" for commands that read no gin.
      warnings: bindings in gin files that nothing reads.
      run: a training run or scoring that precompile can compile; None for any other job.
      architecture: the model's parameters and their shapes; "" if the configuration has none.
      output: the folder of the results.
      checkpoints: paths or addresses that parameters are restored from.
      mixture: a mixture or task, or several joined by commas.
      split: the split of its examples.
    """

    text: str = ""
    warnings: tuple[str, ...] = ()
    run: Run | None = None
    architecture: str = ""
    output: str | None = None
    checkpoints: tuple[str, ...] = ()
    mixture: str | None = None
    split: str | None = None


def read_job_config(arguments: Arguments) -> JobConfig:
    """Reads a job's gin files, as the container will.

    Raises:
      UserError: For macros without a value, misspelled names, values out of range, and
        whatever else the run would refuse; and if the results have no folder.
    """
    config = _read_by_mode(arguments)
    if not config.output:
        raise UserError(
            "The job has no folder for its results.",
            where=f"--run_mode {arguments.mode}" if arguments.mode else "--model_dir",
            fix="Name one in the bucket: as --out for rank-eval, --model_dir for aux and"
            " t5_mesh_transformer, and in gin for the others.",
        )
    return config


def _read_by_mode(arguments: Arguments) -> JobConfig:
    if arguments.mode is None:
        return _read_mesh_transformer(arguments)
    if arguments.mode not in (JobMode.RANK_EVAL, JobMode.AUX):
        return _read_t5x(arguments)
    # Their flags say everything about the job.
    checkpoints = (arguments.checkpoint,) if arguments.checkpoint else ()
    return JobConfig(output=arguments.output, checkpoints=checkpoints, mixture=arguments.mixture)


def _read_t5x(arguments: Arguments) -> JobConfig:
    from t0repro.config.t5x.gin_files import T5xInputs, parse
    from t0repro.config.t5x.run import read_run

    if not arguments.gin_files:
        raise UserError(
            f"The run mode {arguments.mode} needs a gin file.", where="--gin_file", fix="Name one."
        )
    # The default of --gin_search_paths, by which the container will look, too.
    search = arguments.search_paths or (".",)
    inputs = T5xInputs(str(arguments.mode), arguments.gin_files, arguments.bindings, search)
    parsed = parse(inputs)
    run = read_run(parsed)
    # precompile.gin describes the training run whose step it compiles.
    if isinstance(run, TrainRun):
        data, restore, output = run.plan.train_data, run.plan.restore, run.model_dir
    else:
        data, restore, output = run.data, run.restore, run.output_dir
    return JobConfig(
        text=parsed.gin_text,
        warnings=parsed.warnings,
        run=run if isinstance(run, TrainRun) else None,
        architecture=_architecture(run.model),
        output=output,
        checkpoints=restore.paths if restore else (),
        mixture=data and data.mixture_or_task_name,
        split=data and data.split,
    )


def _read_mesh_transformer(arguments: Arguments) -> JobConfig:
    from t0repro.config.configuration import NotOnJax
    from t0repro.config.mtf.dialect import load
    from t0repro.config.mtf.parser import MeshInputs

    inputs = MeshInputs(
        model_dir=arguments.output or "",
        gin_files=arguments.gin_files,
        gin_params=arguments.bindings,
        location_prefixes=arguments.search_paths,
        module_imports=arguments.module_imports,
    )
    # Accelerators' dtypes; float32 is for CPUs, such as this machine's.
    configuration = load(inputs, float32_activations=False)
    try:
        run = configuration.run
    except NotOnJax:
        if arguments.backend == "jax":
            raise
        run = None  # only what the JAX stack supports can be compiled
    return JobConfig(
        text=configuration.gin_text,
        warnings=configuration.warnings,
        run=run,
        architecture=_architecture(run.model) if run else "",
        output=arguments.output,
        checkpoints=(start,) if (start := configuration.inputs.init_checkpoint) else (),
        mixture=configuration.inputs.mixture_or_task_name,
        split=configuration.inputs.split,
    )


def _architecture(model: ModelConfig) -> str:
    """The model's parameters, one per line; only the devices know how they shard them."""
    # The lines of T5X's model-info.txt, without logical axes and partition specs.
    shapes = sorted(model.shape.parameters().items())
    lines = [
        f"Variable    {name:<80} size {math.prod(shape):<12} shape {shape}"
        for name, shape in shapes
    ]
    total = sum(math.prod(shape) for _, shape in shapes)
    return "\n".join([*lines, f"Total number of parameters: {total}", ""])
