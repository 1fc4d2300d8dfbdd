"""Trains with an interpreted kernel and without, on virtual CPU devices; prints the losses.

The argument is tpu or gpu. Run with XLA_FLAGS=--xla_force_host_platform_device_count=4.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
from helpers.tiny_models import ADAFACTOR, FLOAT32, SCHEDULE, batches, model_config
from partitioning.device_steps import run_steps

from t0repro.config.model import Layout
from t0repro.model import attention, gpu_attention, tpu_attention
from t0repro.model.t5 import T5
from t0repro.partitioning.devices import choose
from t0repro.training.optimizers import make_optimizer
from t0repro.training.schedules import make_schedule

MODEL = model_config(num_heads=2, d_kv=8, dropout_rate=0.1, scan_layers=True)


def losses(microbatches):
    partitioning = choose(Layout(2, 2), MODEL, rows=8, devices=jax.devices())
    found, state, _ = run_steps(
        T5(MODEL, FLOAT32),
        make_optimizer(ADAFACTOR),
        make_schedule(SCHEDULE),
        batches(3, rows=8),
        partitioning,
        microbatches=microbatches,
    )
    return found


without = [losses(count) for count in (1, 2)]
attention.KERNEL_FROM = 0
kernel = {"tpu": tpu_attention, "gpu": gpu_attention}[sys.argv[1]]
kernel.supports = lambda device: True
calls = []


def interpreted(*arguments):
    calls.append(None)
    return attention_of_kernel(*arguments, interpret=True)


attention_of_kernel, kernel.attention = kernel.attention, interpreted
attention.cpu_attention.available = lambda: False
within = [losses(count) for count in (1, 2)]
print(json.dumps({"without": without, "within": within, "calls": len(calls)}))
