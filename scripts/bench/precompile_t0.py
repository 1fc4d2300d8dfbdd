"""Compiles T0's two commands at 3B and 11B for the TPU slices that the paper used.

    python scripts/bench/precompile_t0.py --layers 2          # 2 + 2 of the 24 + 24 layers
    python scripts/bench/precompile_t0.py                     # full depth: hours on two cores

Training is as in T0's README: 1,024 packed rows of 1,024 and 256 tokens, Adafactor, dropout 0.1,
bfloat16 activations, v3-512 with model_parallelism 8. Evaluation is score_eval, 262,144 tokens a
batch on v3-128 with model_parallelism 4. Needs libtpu (the extra tpu) and no TPU. No data is read:
the demo's mixture stands in for T0's, with T0's vocabulary of 32,128 rows.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from t0repro.config.run_config import RunConfig

os.environ["JAX_PLATFORMS"] = "cpu"

SIZES = {"3B": "models/t5.1.1.xl.gin", "11B": "models/t5.1.1.xxl.gin"}
COMMON = (
    "MIXTURE_NAME = 'demo_train'",
    "run.sequence_length = {'inputs': 1024, 'targets': 256}",
    "dropout_rate = 0.1",
)
COMMANDS: dict[str, dict[str, Any]] = {
    "train": {
        "topology": "v3-512",
        "files": ("learning_rate_schedules/constant_0_001.gin",),
        "params": (
            "run.train_steps = 1112200",
            "run.batch_size = ('tokens_per_batch', 1048576)",
            "utils.tpu_mesh_shape.model_parallelism = 8",
            "utils.tpu_mesh_shape.tpu_topology = 'v3-512'",
        ),
    },
    "evaluate": {
        "topology": "v3-128",
        "files": ("score_eval.gin",),
        "params": (
            "run.batch_size = ('tokens_per_batch', 262144)",
            "utils.tpu_mesh_shape.model_parallelism = 4",
            "utils.tpu_mesh_shape.tpu_topology = 'v3-128'",
        ),
    },
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--commands", nargs="+", choices=COMMANDS, default=list(COMMANDS))
    parser.add_argument("--layers", type=int, help="layers of each tower instead of all 24")
    parser.add_argument("--topology", help="a slice other than the paper's")
    parser.add_argument("--recompute", default="none", help="minimal or full recomputation")
    parser.add_argument("--param", nargs="*", default=[], help="more gin overrides")
    options = parser.parse_args()

    from t0repro.partitioning.topologies import devices_of
    from t0repro.runs.precompile import precompile

    for size in options.sizes:
        for name in options.commands:
            config = configured(size, name, options.layers, options.param)
            model = dataclasses.replace(config.model, recompute=options.recompute)
            config = dataclasses.replace(config, model=model)
            layers = f"{model.num_encoder_layers}+{model.num_decoder_layers} layers"
            topology = options.topology or COMMANDS[name]["topology"]
            parts = f"{config.batch_size} rows in {config.num_microbatches} microbatches"
            print(f"== T0 {size}, {name}, {layers}, {topology}, {parts}", flush=True)
            for line in precompile(config, *devices_of(topology)):
                print(line, flush=True)


def configured(
    size: str, command: str, layers: int | None = None, more: Sequence[str] = ()
) -> RunConfig:
    """A command of T0's, with so many layers in each tower and more gin overrides."""
    from t0repro.config.mtf.dialect import load
    from t0repro.config.mtf.parser import GinInputs

    files = ("dataset.gin", SIZES[size], *COMMANDS[command]["files"])
    params = (*COMMON, *COMMANDS[command]["params"], *more)
    if layers is not None:
        params = (*params, f"num_layers = {layers}")
    inputs = GinInputs("", files, params, module_imports=("t0repro.tasks.demo",))
    config = load(inputs, float32_activations=False).run
    return dataclasses.replace(config, model=dataclasses.replace(config.model, vocab_size=32128))


if __name__ == "__main__":
    main()
