"""Times the train step on this machine's devices, from a run's JSON and batches in an .npz file.

    python scripts/bench/train_step.py RUN.json BATCHES.npz --steps 20
    python scripts/bench/train_step.py RUN.json BATCHES.npz --attention blocks   # no kernel

Needs jax, flax, optax and orbax alone, so it runs on an accelerator machine as it is; no file is
written. RUN.json is TrainRun.to_json's (scripts/bench/train.py writes both files). The arrays of
BATCHES.npz are [batches, rows, length], by feature. Prints one line of JSON:

    first_step     seconds from the start of Python to the end of the first step
    step           seconds of a step: the median, each with a batch from the host
    input          seconds that the host takes for a batch; most of them while the device computes
    tokens         input and target tokens per second, padding included
    flops          FLOPs of a step's matmuls, without rematerialization
    rate, peak     FLOP/s of the step, and the device's published peak or, if there is none, the
                   throughput of a float32 matmul measured here
    mfu            rate / peak
    memory         most bytes in use, on a device or, on CPU, of the process
"""

import argparse
import dataclasses
import json
import resource
import statistics
import sys
import time
from pathlib import Path
from typing import Any

_STARTED = time.perf_counter()

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

from t0repro.adapters import Adapter  # noqa: E402
from t0repro.config.model import Arithmetic, DTypePolicy, Layout, ModelConfig  # noqa: E402
from t0repro.config.optimizer import AdafactorConfig, ScheduleConfig  # noqa: E402
from t0repro.model import attention  # noqa: E402
from t0repro.model.t5 import T5, initial_adapter, initial_parameters  # noqa: E402
from t0repro.partitioning import memory as device_memory  # noqa: E402
from t0repro.partitioning.devices import choose  # noqa: E402
from t0repro.partitioning.flops import count_flops  # noqa: E402
from t0repro.partitioning.topologies import find_chip  # noqa: E402
from t0repro.training.optimizers import make_optimizer  # noqa: E402
from t0repro.training.schedules import make_schedule  # noqa: E402
from t0repro.training.t5_model import T5Model  # noqa: E402
from t0repro.training.train_state import new_train_state, state_shapes  # noqa: E402
from t0repro.training.train_step import (  # noqa: E402
    jit_train_step,
    make_train_step,
    stack_builtin_state,  # noqa: E402
)


def main() -> None:
    """Trains a few steps and prints the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("run", type=Path)
    parser.add_argument("batches", type=Path)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--attention", choices=("full", "blocks"), help="instead of a kernel")
    options = parser.parse_args()
    if options.attention:
        attention.KERNEL_FROM = sys.maxsize
    if options.attention == "full":
        device_memory.ATTENTION_BLOCK_BYTES = sys.maxsize
    values = json.loads(options.run.read_text())
    arrays = dict(np.load(options.batches))
    count = len(arrays["targets"])
    batches = [{name: x[n % count] for name, x in arrays.items()} for n in range(options.steps + 1)]
    print(json.dumps(measured(values, batches)), flush=True)


def measured(values: dict[str, Any], batches: list[dict[str, np.ndarray]]) -> dict[str, Any]:
    """The figures that the module's docstring lists, for a run and one batch per step."""
    model = model_of(values)
    rows = values["batch_size"] // values["num_microbatches"]
    partitioning = choose(Layout(**values["layout"]), model.config, rows=rows)
    step, state, loss = made(model, values, partitioning, batches[0])
    first = time.perf_counter() - _STARTED
    seconds, fetching = [], []
    for batch in batches[1:]:
        before = time.perf_counter()
        on_device = partitioning.put_batch(batch)
        fetching.append(time.perf_counter() - before)
        state, metrics = step(state, on_device)
        loss = float(metrics["loss"])
        seconds.append(time.perf_counter() - before)
    seconds_a_step = statistics.median(seconds)
    flops, peak = operations(model, values, batches[0]), peak_rate(partitioning.mesh.size)
    tokens = sum(batches[0][name].size for name in ("inputs", "targets"))
    return {
        "device": f"{partitioning}, jax {jax.__version__}",
        "first_step": first,
        "step": seconds_a_step,
        "input": statistics.median(fetching),
        "tokens": tokens / seconds_a_step,
        "flops": flops,
        "rate": flops / seconds_a_step,
        "peak": peak,
        "mfu": flops / seconds_a_step / peak,
        "memory": memory(),
        "loss": loss,
    }


def model_of(values: dict[str, Any]) -> T5:
    """The model of a TrainRun's JSON; dacite, which reads the rest of it, may be absent here."""
    model = {**values["model"], "activations": tuple(values["model"]["activations"])}
    model["arithmetic"] = Arithmetic(**model["arithmetic"])
    if adapter := model["adapter"]:
        model["adapter"] = Adapter(**{**adapter, "targets": tuple(adapter["targets"])})
    return T5(ModelConfig(**model), DTypePolicy(**values["dtypes"]))


def made(model: T5, values: dict[str, Any], partitioning: Any, batch: Any) -> Any:
    """The compiled step, the state after one of them, and its loss."""
    several = partitioning if partitioning.mesh.size > 1 else None
    optimizer = make_optimizer(AdafactorConfig(**values["optimizer"]))
    train_step = make_train_step(
        model,
        optimizer,
        make_schedule(ScheduleConfig(**values["schedule"])),
        num_microbatches=values["num_microbatches"],
        dropout_key=jax.random.key(1),
        partitioning=several,
    )

    def fresh() -> Any:
        key, adapter = jax.random.key(0), model.config.adapter
        params = initial_parameters(model, key)
        if adapter is None:
            return new_train_state(params, optimizer)
        base = jax.tree.map(lambda x: x.astype(adapter.base_dtype), params)
        return new_train_state(initial_adapter(model, key), optimizer).replace(frozen=base)

    shardings = partitioning.shardings(jax.eval_shape(fresh))
    state = jax.jit(fresh, out_shardings=None if several is None else shardings)()
    state = stack_builtin_state(T5Model(model), state)  # as a trainer does
    on_device = partitioning.put_batch(batch)
    with partitioning.active():
        step = jit_train_step(train_step, state, several).lower(state, on_device).compile()
    state, metrics = step(state, on_device)
    return step, state, float(metrics["loss"])


def operations(model: T5, values: dict[str, Any], batch: Any) -> int:
    """FLOPs of a step without rematerialization; dropout has no matmuls."""
    config = dataclasses.replace(model.config, recompute="none", dropout_rate=0.0)
    model, optimizer = (
        T5(config, model.dtypes),
        make_optimizer(AdafactorConfig(**values["optimizer"])),
    )
    step = make_train_step(model, optimizer, make_schedule(ScheduleConfig(**values["schedule"])))
    state = state_shapes(model, optimizer)
    return count_flops(jax.make_jaxpr(step)(state, batch).jaxpr)


def peak_rate(devices: int) -> float:
    """FLOP/s of all devices: published, or of a large matmul measured now."""
    if chip := find_chip(jax.devices()[0].device_kind):
        return chip.flops * devices
    x = jnp.ones((2048, 2048), jnp.float32)
    product = jax.jit(jnp.dot)
    product(x, x).block_until_ready()
    seconds = []
    for _ in range(10):
        before = time.perf_counter()
        product(x, x).block_until_ready()
        seconds.append(time.perf_counter() - before)
    return 2 * 2048**3 / min(seconds)


def memory() -> int:
    """Most bytes in use so far."""
    of_process = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", of_process)


if __name__ == "__main__":
    main()
