"""A job's configuration, as far as this machine knows it."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from t0repro.cloud.vertex.command_line import Arguments, JobMode
from t0repro.config.model import ModelConfig
from t0repro.config.run import Run
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
    if arguments.mode in (JobMode.TRAIN, JobMode.PRECOMPILE):
        return _read_t5x_training(arguments)
    if arguments.mode in (JobMode.EVAL, JobMode.INFER):
        return _read_t5x_inference(arguments)
    # rank-eval and aux: their flags say everything about the job.
    checkpoints = (arguments.checkpoint,) if arguments.checkpoint else ()
    return JobConfig(output=arguments.output, checkpoints=checkpoints, mixture=arguments.mixture)


def _parse_t5x(arguments: Arguments) -> Any:
    from t0repro.config.t5x.gin_files import T5xInputs, parse

    if not arguments.gin_files:
        raise UserError(
            f"The run mode {arguments.mode} needs a gin file.", where="--gin_file", fix="Name one."
        )
    # The default of --gin_search_paths, by which the container will look, too.
    search = arguments.search_paths or (".",)
    return parse(T5xInputs(str(arguments.mode), arguments.gin_files, arguments.bindings, search))


def _read_t5x_training(arguments: Arguments) -> JobConfig:
    from t0repro.config.t5x.run import read_precompile_run, read_train_run

    parsed = _parse_t5x(arguments)
    # precompile.gin describes the training run whose step it compiles.
    compiles = arguments.mode is JobMode.PRECOMPILE
    run = (read_precompile_run if compiles else read_train_run)(parsed)
    data = run.plan.train_data
    return JobConfig(
        text=parsed.gin_text,
        warnings=parsed.warnings,
        run=run,
        architecture=_architecture(run.model),
        output=run.model_dir,
        checkpoints=run.plan.restore.paths if run.plan.restore else (),
        mixture=data and data.mixture_or_task_name,
        split=data and data.split,
    )


def _read_t5x_inference(arguments: Arguments) -> JobConfig:
    from t0repro.config.t5x.run import read_eval_run, read_infer_run

    parsed = _parse_t5x(arguments)
    plan = (read_eval_run if arguments.mode is JobMode.EVAL else read_infer_run)(parsed)
    return JobConfig(
        text=parsed.gin_text,
        warnings=parsed.warnings,
        architecture=_architecture(plan.model),
        output=plan.output_dir,
        checkpoints=plan.restore.paths,
        mixture=plan.data.mixture_or_task_name,
        split=plan.data.split,
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
