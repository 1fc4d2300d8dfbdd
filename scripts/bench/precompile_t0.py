"""Compiles T0's two commands at 3B and 11B, and its training for other machines; estimates costs.

    python scripts/bench/precompile_t0.py --layers 2          # 2 + 2 of the 24 + 24 layers
    python scripts/bench/precompile_t0.py                     # full depth: an hour on two cores

Training is as in T0's README: 1,024 packed rows of 1,024 and 256 tokens, Adafactor, dropout 0.1,
bfloat16 activations, v3-512 with model_parallelism 8, as much rematerialization as the memory
requires; and the same fully sharded. Evaluation is score_eval, 262,144 tokens per batch on v3-128
with model_parallelism 4. On v5p-128, v6e-256 and eight H200, neither has model parallelism, and
training is fully sharded, with `minimal` rematerialization.

XLA compiles for GPUs only with CUDA's plugin, which is not used here. The figures for eight H200
come from a program for eight virtual CPU devices with the same layout. Its memory is an estimate,
because XLA computes bfloat16 in float32 on CPU. Operations, bytes sent and the predicted step
follow from the layout.

    seconds of a step  = operations of a device / peak + bytes that it sends / link
    chip-hours         = 12,200 steps x seconds x chips / 3600
    cost               = chip-hours x PRICES

All from published peaks without overlap; no run reaches them. Needs libtpu (the extra tpu) and no
TPU. No data is read: the demo's mixture stands in for T0's, with T0's vocabulary of 32,128 rows.

T5 1.1's smaller sizes, with T0's batches, on the eight cores of a v3-8 (docs/what_fits.md):

    python scripts/bench/precompile_t0.py --sizes small base large \
      --commands "train on v3-8" "evaluate on v3-8"

Processor time that one compiled body for all layers saves, for one CPU device:

    python scripts/bench/precompile_t0.py --sizes 3B --commands "train on one CPU device"
    python scripts/bench/precompile_t0.py --sizes 3B --commands "train on one CPU device" --unrolled
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from t0repro.config.run import Run
    from t0repro.partitioning.devices import Partitioning

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

STEPS = 12_200  # of T0's training, from T5 1.1's LM-adapted checkpoint at 1,100,000
# Dollars for an hour of a chip, on demand, by SkyPilot's catalog of clouds (read 2026-11-22 and,
# for v6e, 2026-11-27): v5p and v6e in us-central1, eight H200 at Nebius for 28 an hour. Google
# lists no price of large v3 slices; the catalog assumes 512 an hour for a v3-512.
PRICES = {"v3": 2.00, "v5p": 4.20, "v6e": 2.70, "8 x NVIDIA H200": 3.50}
# T0's name of each size of T5 1.1 that T0 has; the other sizes keep T5 1.1's.
SIZES = {"3B": "xl", "11B": "xxl", "small": "small", "base": "base", "large": "large"}
COMMON = (
    "MIXTURE_NAME = 'demo_train'",
    "run.sequence_length = {'inputs': 1024, 'targets': 256}",
    "dropout_rate = 0.1",
)
TRAINING = {
    "topology": "v3-512",
    "files": ("learning_rate_schedules/constant_0_001.gin",),
    "params": (
        "run.train_steps = 1112200",
        "run.batch_size = ('tokens_per_batch', 1048576)",
        "utils.tpu_mesh_shape.model_parallelism = 8",
        "utils.tpu_mesh_shape.tpu_topology = 'v3-512'",
    ),
}
EVALUATION = {
    "topology": "v3-128",
    "files": ("score_eval.gin",),
    "params": (
        "run.batch_size = ('tokens_per_batch', 262144)",
        "utils.tpu_mesh_shape.model_parallelism = 4",
        "utils.tpu_mesh_shape.tpu_topology = 'v3-128'",
    ),
}
SHARDED = {"fully_sharded": True}
ALONE = {"model_parallelism": 1, "fully_sharded": True}
COMMANDS: dict[str, dict[str, Any]] = {
    "train": TRAINING,
    "train, fully sharded": {**TRAINING, "changes": SHARDED},
    "train on v5p-128": {
        **TRAINING,
        "topology": "v5p-128",
        "changes": {**ALONE, "num_microbatches": 4},
        "recompute": "minimal",
    },
    "train on v6e-256": {
        **TRAINING,
        "topology": "v6e-256",
        "changes": {**ALONE, "num_microbatches": 1},
        "recompute": "minimal",
    },
    "train on 8 H200": {
        **TRAINING,
        "topology": "8 x NVIDIA H200",
        "changes": {**ALONE, "num_microbatches": 32},
        "recompute": "minimal",
    },
    "train on one CPU device": {**TRAINING, "topology": "1 x cpu"},
    # 16 rows per microbatch, two on each core; each core holds the full model.
    "train on v3-8": {
        **TRAINING,
        "topology": "v3-8",
        "changes": {"model_parallelism": 1, "num_microbatches": 64},
    },
    "evaluate": EVALUATION,
    **{
        f"evaluate on {machine}": {
            **EVALUATION,
            "topology": topology,
            "changes": {"model_parallelism": 1},
        }
        for machine, topology in (
            ("v5p-128", "v5p-128"),
            ("v6e-256", "v6e-256"),
            ("8 H200", "8 x NVIDIA H200"),
        )
    },
    "evaluate on v3-8": {**EVALUATION, "topology": "v3-8", "changes": {"model_parallelism": 1}},
}
# The default: T0's sizes on suitable machines.
OF_T0 = [name for name in COMMANDS if not name.endswith(("on one CPU device", "on v3-8"))]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["3B", "11B"])
    parser.add_argument("--commands", nargs="+", choices=COMMANDS, default=OF_T0)
    parser.add_argument("--layers", type=int, help="layers of each tower instead of all 24")
    parser.add_argument("--topology", help="a slice other than the command's")
    parser.add_argument("--recompute", help="none, minimal or full, whatever the memory")
    parser.add_argument("--blocks", action="store_true", help="attention without a TPU's kernel")
    parser.add_argument("--unrolled", action="store_true", help="a body for each layer")
    parser.add_argument("--param", nargs="*", default=[], help="more gin overrides")
    options = parser.parse_args()
    if options.blocks:
        from t0repro.model import tpu_attention

        tpu_attention.supports = lambda device_kind: False
    for size in options.sizes:
        for name in options.commands:
            config = configured(SIZES[size], name, options.layers, options.param)
            model = config.model
            if options.recompute:
                model = dataclasses.replace(model, recompute=options.recompute)
            if options.unrolled:
                model = dataclasses.replace(model, scan_layers=False)
            config = dataclasses.replace(config, model=model)
            topology = options.topology or COMMANDS[name]["topology"]
            for line in compiled(f"T0 {size}, {name}", config, topology):
                print(line, flush=True)


def compiled(title: str, config: Run, topology: str) -> Iterator[str]:
    """Yields `t0repro precompile`'s figures of a command, and a training run's cost."""
    from t0repro.config.run import TrainRun
    from t0repro.partitioning.devices import describe_devices
    from t0repro.runs.precompile import describe_program, predict_seconds
    from t0repro.runs.programs import arrange_run, compile_programs

    devices, chip = machine(topology)
    config, partitioning, why = arrange_run(config, devices)
    model = config.model
    trains = isinstance(config, TrainRun)
    microbatches = config.num_microbatches if trains else 1
    parts = f"{config.batch_size} rows in {microbatches} microbatches"
    yield (
        f"== {title}, {model.num_encoder_layers}+{model.num_decoder_layers} layers, {topology},"
        f" {parts}, recompute {model.recompute!r}"
    )
    yield describe_devices(partitioning, config.layout)
    if why:
        yield why
    before = time.process_time()
    for program in compile_programs(config, partitioning):
        yield from describe_program(program, config, partitioning, chip)
        yield f"  {time.process_time() - before:.0f} s of processor time"
        before = time.process_time()
        if trains and chip is not None and not program.refused:
            yield cost(predict_seconds(program, partitioning, chip), partitioning, topology)


def cost(seconds: float, partitioning: Partitioning, topology: str) -> str:
    """A line on the duration and cost of T0's training at a number of seconds per step."""
    # A v3 chip has two devices, its cores.
    chips = partitioning.mesh.size // (2 if topology.startswith("v3") else 1)
    hours = STEPS * seconds / 3600
    line = (
        f"  {STEPS:,} such steps: {hours:.1f} hours on {chips} chips,"
        f" {hours * chips:,.0f} chip-hours"
    )
    price = PRICES.get(topology.partition("-")[0])
    return line if price is None else f"{line}, {hours * chips * price:,.0f} dollars at {price:.2f}"


def machine(topology: str) -> tuple[Sequence[Any], Any]:
    """The devices to compile for, and the published figures of the devices that they represent."""
    from t0repro.partitioning.topologies import devices_of, find_chip

    count, _, kind = topology.partition(" x ")
    if not kind:
        return devices_of(topology)
    import jax

    return jax.devices()[: int(count)], find_chip(kind)


def configured(size: str, command: str, layers: int | None = None, more: Sequence[str] = ()) -> Run:
    """One of COMMANDS for a size of T5 1.1, with layers per tower and more gin overrides."""
    from t0repro.config.mtf.dialect import load
    from t0repro.config.mtf.parser import MeshInputs
    from t0repro.runs.fitting import adjust_run

    about = COMMANDS[command]
    files = ("dataset.gin", f"models/t5.1.1.{size}.gin", *about["files"])
    params = (*COMMON, *about["params"], *more)
    if layers is not None:
        params = (*params, f"num_layers = {layers}")
    inputs = MeshInputs("", files, params, module_imports=("t0repro.tasks.demo",))
    config = load(inputs, float32_activations=False).run
    model = dataclasses.replace(config.model, vocab_size=32128, recompute=about.get("recompute"))
    return adjust_run(dataclasses.replace(config, model=model), **about.get("changes", {}))


if __name__ == "__main__":
    main()
