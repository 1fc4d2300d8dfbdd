"""Writes the outputs that `encode` gives on as many devices as there are: python FILE MODEL OUT.

XLA_FLAGS=--xla_force_host_platform_device_count=8 makes eight of them.
"""

import json
import sys

import jax
import numpy as np

import t0repro

rows = json.loads(sys.stdin.read())
outputs = t0repro.encode(sys.argv[1], rows)
pooled = t0repro.encode(sys.argv[1], rows, pool="mean")
np.savez(sys.argv[2], np.concatenate(outputs), pooled, np.array(jax.device_count()))
