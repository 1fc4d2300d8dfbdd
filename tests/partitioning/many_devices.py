"""Runs the layout of T0's command on virtual CPU devices and compares it with one device.

    XLA_FLAGS=--xla_force_host_platform_device_count=64 python -P many_devices.py

trains a tiny T5 1.1 on all devices, model 8 and the others along data. Prints JSON.

XLA computes on at most 256 threads, and the thread of each device waits for the others. T0's layout
on a v3-512 therefore needs two processes with 256 devices each. Each process takes the arguments
COORDINATOR COUNT INDEX: host:port of the first one, the number of processes, and its own number.
"""

import dataclasses
import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import numpy as np
from helpers.tiny_models import batches, model_config, run_config
from partitioning.device_steps import run_steps

from t0repro.config.model import Layout
from t0repro.config.optimizer import MomentumConfig
from t0repro.model.t5 import T5
from t0repro.partitioning.collectives import collectives, counts
from t0repro.partitioning.devices import choose, fetch
from t0repro.runs.programs import train_programs
from t0repro.training.optimizers import make_optimizer
from t0repro.training.schedules import make_schedule
from t0repro.training.train_state import unstack_state

MODEL_PARALLELISM = 8
MODEL = model_config(
    num_encoder_layers=2,
    num_decoder_layers=2,
    d_model=32,
    d_ff=64,
    num_heads=8,
    z_loss=1e-4,
    scan_layers=True,
)


def trained(config, devices, steps):
    """Losses, the last state and the program of a run's first steps, and its partitioning."""
    partitioning = choose(config.layout, MODEL, devices=devices)
    losses, state, compiled = run_steps(
        T5(MODEL, config.dtypes),
        make_optimizer(config.optimizer),
        make_schedule(config.schedule),
        batches(steps, rows=config.batch_size),
        partitioning,
        microbatches=config.num_microbatches,
    )
    state = unstack_state(jax.tree.map(fetch, state))
    return losses, state, compiled, partitioning


def largest(one, other):
    """The largest difference of an entry, as a share of its tensor's RMS."""

    def share(x, y):
        rms = np.sqrt(np.mean(np.square(y, dtype=np.float64)))
        return float(np.abs(x - y).max() / rms) if rms else 0.0

    return max(jax.tree.leaves(jax.tree.map(share, one, other)))


def compared(config, steps):
    """How a run on all devices differs from one on the first, and its program."""
    losses, state, compiled, partitioning = trained(config, jax.devices(), steps)
    alone = dataclasses.replace(config, layout=Layout())
    expected, wanted, *_ = trained(alone, jax.local_devices()[:1], steps)
    found = {
        "losses": max(abs(one / other - 1) for one, other in zip(losses, expected, strict=True)),
        "parameters": largest(state.params, wanted.params),
        "slots": largest(state.slots, wanted.slots),
    }
    return found, compiled, partitioning


def main():
    started = time.monotonic()
    if len(sys.argv) > 1:
        coordinator, count, index = sys.argv[1:]
        jax.distributed.initialize(coordinator, int(count), int(index))
    devices = jax.device_count()
    layout = Layout(devices // MODEL_PARALLELISM, MODEL_PARALLELISM)
    config = run_config("unused", 1, model=MODEL, layout=layout)
    config = dataclasses.replace(
        config, batch_size=layout.data * config.num_microbatches, num_microbatches=2
    )
    differences, compiled, partitioning = compared(config, steps=2)
    # After one step the slots of momentum are the gradients.
    gradients, *_ = compared(dataclasses.replace(config, optimizer=MomentumConfig(0.9)), steps=1)
    executed = collectives(compiled.as_text())
    (program,) = train_programs(config, partitioning)
    print(
        json.dumps(
            {
                "devices": devices,
                "layout": f"data {layout.data}, model {layout.model}",
                "rows": config.batch_size,
                "differences": {**differences, "gradients": gradients["slots"]},
                "collectives": counts(executed),
                "sent": sum(each.sent for each in executed),
                "precompiled": {"collectives": counts(program.communication), "sent": program.sent},
                "seconds": round(time.monotonic() - started),
            }
        )
    )


if __name__ == "__main__":
    main()
