"""`t0repro precompile`: whether a run fits on devices, here or not, and how long a step takes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from t0repro.cli.gin_options import (
    GinBindings,
    GinFiles,
    GinFolders,
    GinParams,
    GinSearchPaths,
    RunMode,
    RunModes,
    t5x_inputs,
)
from t0repro.cli.options import Modules

if TYPE_CHECKING:
    from t0repro.config.run_config import RunConfig


def precompile(
    gin_file: GinFiles = None,
    gin_param: GinParams = None,
    gin_location_prefix: GinFolders = None,
    module_import: Modules = None,
    topology: Annotated[
        str | None,
        typer.Option(help="v3-512, v4-128, v5e-256, ..., cpu-8; the devices at hand by default."),
    ] = None,
    model_parallelism: Annotated[
        int | None, typer.Option(min=1, help="Devices that share each layer, instead of gin's.")
    ] = None,
    fully_sharded: Annotated[
        bool, typer.Option("--fully_sharded", help="Divide parameters and slots among all devices.")
    ] = False,
    num_microbatches: Annotated[
        int | None, typer.Option(min=1, help="Microbatches of a batch, instead of gin's.")
    ] = None,
    hlo: Annotated[Path | None, typer.Option(help="Folder for the compiled programs.")] = None,
    suggest: Annotated[
        bool, typer.Option("--suggest", help="If a training does not fit, look for what would.")
    ] = False,
    run_mode: RunModes = None,
    gin_bindings: GinBindings = None,
    gin_search_paths: GinSearchPaths = ".",
) -> None:
    """Compile a run's steps and say what they need: memory, operations, communication, time.

    Compiles the train step, or scoring and generation, for a TPU slice (with libtpu, the extra
    tpu), for virtual CPU devices, or for the devices at hand. Nothing is allocated or run. With
    --run_mode train the gin files are T5X's.

    Example:
      t0repro precompile --topology v3-8 --module_import t0repro.tasks.demo --gin_file dataset.gin
        --gin_file demo/t5.1.1.demo.gin --gin_param "MIXTURE_NAME = 'demo_train'"
        --gin_param "run.train_steps = 100" --gin_param "utils.run.mesh_shape = []"
    """
    # Compiling for devices that are not here takes none of those that are.
    if topology is not None:
        # Before jax is imported: it reads the variable once.
        os.environ["JAX_PLATFORMS"] = "cpu"
    devices, chip, float32 = _devices(topology)
    if run_mode is not None:
        config = _t5x_config(run_mode, gin_file or (), gin_bindings or (), gin_search_paths)
    else:
        from t0repro.config.mtf.dialect import load
        from t0repro.config.mtf.parser import GinInputs

        inputs = GinInputs(
            model_dir="",
            gin_files=gin_file or (),
            gin_params=gin_param or (),
            location_prefixes=gin_location_prefix or (),
            module_imports=module_import or (),
        )
        config = load(inputs, float32_activations=float32).run
    from t0repro.runs.precompile import adjusted
    from t0repro.runs.precompile import precompile as compiled

    config = adjusted(config, model_parallelism, fully_sharded, num_microbatches)
    if suggest:
        # Trying out what fits replaces the report on the run as it stands.
        _suggest(config, devices, chip)
        return
    for line in compiled(config, devices, chip, hlo):
        typer.echo(line)


def _suggest(config: RunConfig, devices: Any, chip: Any) -> None:
    """Prints what is tried to make a training fit."""
    from t0repro.errors import UserError
    from t0repro.runs.suggestions import suggest

    if chip is None or config.mode != "train":
        raise UserError(
            "There is nothing to suggest: the devices' memory is not known."
            if chip is None
            else "Suggestions are for trainings.",
            where="--suggest",
            fix="Give a training, and a TPU slice as --topology.",
        )
    for line in suggest(config, devices, chip):
        typer.echo(line)


def _t5x_config(
    run_mode: RunMode, files: Sequence[str], bindings: Sequence[str], search_paths: str
) -> RunConfig:
    """The training that T5X's gin files describe."""
    from t0repro.config.gin_errors import configuration_errors
    from t0repro.config.t5x.gin_files import parse
    from t0repro.config.t5x.run import train_config
    from t0repro.errors import UserError

    if run_mode is not RunMode.TRAIN:
        raise UserError(
            f"Of T5X's runs, precompile takes a training, not {run_mode.value!r}.",
            where="--run_mode",
            fix="Give --run_mode train and the gin files of a training.",
        )
    with configuration_errors():
        return train_config(parse(t5x_inputs("train", files, bindings, search_paths)))


def _devices(topology: str | None) -> tuple:
    """What to compile for, what is published about it, and whether it computes in float32."""
    import jax

    from t0repro.errors import UserError
    from t0repro.partitioning import topologies

    if topology is not None and not topology.startswith("cpu"):
        return *topologies.devices_of(topology), False
    if topology is not None:
        count = topology.removeprefix("cpu-")
        if not count.isdigit() or not int(count):
            raise UserError(
                f"There is no topology {topology!r}.",
                where="--topology",
                fix="Give a number of virtual CPU devices, as cpu-8.",
            )
        # Before the first use of a device, after which the number is fixed.
        jax.config.update("jax_num_cpu_devices", int(count))
    devices = jax.devices()
    return devices, topologies.published(devices[0]), devices[0].platform == "cpu"
