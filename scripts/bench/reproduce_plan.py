"""How far the plan of `t0repro reproduce` is from what the run takes, in processor seconds.

    export T0REPRO_DATA_DIR=... T0REPRO_VOCAB=...
    .venv/bin/python scripts/bench/reproduce_plan.py FOLDER [LIMIT]

One command, from nothing to the report, twice killed while it scores: random parameters of T0_3B's
width and two layers, on a hub of this machine, and the rows of T0REPRO_DATA_DIR. Processor time is
what a loaded machine leaves comparable; it is counted over all threads, in the plan's minute as in
the run.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import flax.traverse_util
import numpy as np

from t0repro.config.model import DTypePolicy
from t0repro.converters import released
from t0repro.converters.convert import convert
from t0repro.converters.hf_config import Computation
from t0repro.evaluation.opened import make_scoring_config
from t0repro.model.t5 import T5, parameter_shapes
from t0repro.training.checkpoints import save_tree

ROOT = Path(__file__).parents[2]
NAME = "bigscience/T0_3B"
DRIVER = f"""
import dataclasses, time, types
from t0repro.cli import app
from t0repro.converters import released
from t0repro.evaluation import rank_run
from t0repro.runs import reproduction

found = released.find({NAME!r})
shape = dataclasses.replace(found.shape, num_encoder_layers=2, num_decoder_layers=2)
released.catalog()[{NAME!r}] = dataclasses.replace(found, shape=shape)
clock = types.SimpleNamespace(monotonic=time.process_time)
reproduction.time = rank_run.time = clock
app.main()
"""


def save_hub(folder: Path) -> None:
    """Writes a hub with the model's weights; none if it is there already."""
    if (folder / NAME / "config.json").is_file():
        return
    found = released.find(NAME)
    shape = dataclasses.replace(found.shape, num_encoder_layers=2, num_decoder_layers=2)
    config = make_scoring_config(shape, Computation(("gelu", "linear")), "")
    shapes = parameter_shapes(T5(config, DTypePolicy("float32", "float32", "float32")))
    generator = np.random.default_rng(0)
    tree = {
        f"target/{name}": generator.standard_normal(leaf.shape, np.float32)
        * np.float32(0.02 if len(leaf.shape) > 1 else 1)
        for name, leaf in flax.traverse_util.flatten_dict(shapes, sep="/").items()
    }
    jax_form = folder / "jax"
    save_tree(jax_form / "checkpoint_0", {**tree, "state/step": np.int32(0)})
    convert(jax_form, folder / NAME, "hf", vocabulary=os.environ["T0REPRO_VOCAB"])


def main() -> None:
    """Runs the command and prints the plan's figures beside the run's."""
    folder, limit = Path(sys.argv[1]), (sys.argv[2:] or ["1"])[0]
    save_hub(folder / "hub")
    server = subprocess.Popen(
        [sys.executable, ROOT / "tests/tasks/hub_server.py", folder / "hub"],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert server.stdout is not None
    environment = {
        **os.environ,
        "HF_ENDPOINT": server.stdout.readline().strip(),
        "HF_HOME": str(folder / "huggingface"),
        "HF_HUB_DISABLE_XET": "1",
    }
    for kills in (0, 2):
        out = folder / f"limit_{limit}_kills_{kills}"
        print(f"{kills} kills; load", *os.getloadavg(), flush=True)
        for remaining in reversed(range(kills + 1)):
            printed = run(out, limit, environment, kill=remaining > 0)
        plan = json.loads((out / "plan.json").read_text())["plan"]
        took = json.loads((out / "report.json").read_text())["provenance"]["duration_seconds"]
        print(f"planned {plan['seconds']:.1f} processor s, took {took:.1f}; {plan['speed']}")
        print(*re.findall(r"memory: planned .*|SHA-256 of the scores: .*", printed), sep="\n")
    server.terminate()


def run(out: Path, limit: str, environment: dict[str, str], *, kill: bool) -> str:
    """What the command prints; it is killed after its first scores if asked for."""
    words = ["reproduce", NAME, "--out", str(out), "--limit", limit, "--yes"]
    log = out.with_suffix(".txt")
    with open(log, "w") as file:
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", DRIVER, *words],
            stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, env=environment,
        )  # fmt: skip
        before = journal_bytes(out)
        while kill and process.poll() is None and journal_bytes(out) <= before:
            time.sleep(0.2)
        if kill:
            process.send_signal(signal.SIGKILL)
        process.wait()
    return log.read_text()


def journal_bytes(out: Path) -> int:
    """Bytes of the scored pairs so far."""
    return sum(path.stat().st_size for path in out.glob("scores/*/pairs.bin"))


if __name__ == "__main__":
    main()
