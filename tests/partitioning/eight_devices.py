"""Trains, scores and generates on eight virtual CPU devices; prints what came out as JSON.

Run with XLA_FLAGS=--xla_force_host_platform_device_count=8: the number of devices of a process
cannot be changed once JAX has started.
"""

import dataclasses
import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import numpy as np
from helpers.near_ties import near_ties
from helpers.tiny_models import ADAFACTOR, FLOAT32, batches, model_config, run_config
from partitioning.device_steps import run_steps

from t0repro.config.decoding import DecodingConfig, DecodingPlan
from t0repro.config.model import Layout
from t0repro.config.optimizer import (
    AdamWeightDecayConfig,
    MomentumConfig,
    ScheduleConfig,
    SgdConfig,
)
from t0repro.evaluation.engine import score_examples
from t0repro.evaluation.generation import generate_tokens
from t0repro.evaluation.model_functions import ModelFunctions
from t0repro.model.t5 import T5, initial_parameters
from t0repro.partitioning import memory
from t0repro.partitioning.collectives import collectives, counts
from t0repro.partitioning.devices import choose
from t0repro.progress import heard_by
from t0repro.runs.perplexity import perplexity_metrics
from t0repro.runs.train import train
from t0repro.training.checkpoints import load_tree
from t0repro.training.optimizers import make_optimizer
from t0repro.training.schedules import make_schedule

MODEL = model_config(d_model=32, d_ff=64, num_heads=4, d_kv=8, z_loss=1e-4)
LAYOUTS = {
    "one": None,
    "data 8": Layout(8, 1),
    "data 4, model 2": Layout(4, 2),
    "data 2, model 4": Layout(2, 4),
    "data 8, fully sharded": Layout(8, 1, fully_sharded=True),
    "data 4, model 2, fully sharded": Layout(4, 2, fully_sharded=True),
}
STEPS = 10


def packed(batch):
    """Two examples in a row of inputs and targets."""
    segments = {
        f"{name}_segmentation": np.where(x == 0, 0, 1 + (np.arange(x.shape[1]) >= 2)).astype(
            np.int32
        )
        for name, x in batch.items()
    }
    return batch | segments


def devices_of(layout):
    """All eight devices in a layout, or the first alone."""
    if layout is None:
        return choose(Layout(), MODEL, devices=jax.devices()[:1])
    return choose(layout, MODEL)


def trained(layout, *, optimizer=ADAFACTOR, microbatches=2, pack=True, stacks=True, **changes):
    """Losses of ten steps, a sum over the state after them, and the step's collectives."""
    data = batches(STEPS, rows=16)
    losses, state, compiled = run_steps(
        T5(dataclasses.replace(MODEL, **changes), FLOAT32),
        make_optimizer(optimizer),
        make_schedule(ScheduleConfig("constant_learning_rate", {"learning_rate": 0.01}, 100)),
        [packed(batch) for batch in data] if pack else data,
        devices_of(layout),
        microbatches=microbatches,
        stacks=stacks,
    )
    size = sum(float(np.abs(np.asarray(leaf)).sum()) for leaf in jax.tree.leaves(state))
    return {"losses": losses, "size": size, "collectives": counts(collectives(compiled.as_text()))}


def evaluated(layout):
    """Scores of 13 pairs, texts of 5 inputs and teacher-forced metrics; no number divides by 8."""
    partitioning, model = devices_of(layout), T5(MODEL, FLOAT32)
    params = initial_parameters(model, jax.random.key(0))
    if layout is not None:
        params = jax.device_put(params, partitioning.shardings(params))
    generator = np.random.default_rng(0)
    examples = [
        {
            "inputs": generator.integers(2, 128, 3 + n % 7),
            "targets": generator.integers(2, 128, 1 + n % 4),
        }
        for n in range(13)
    ]
    inputs = [example["inputs"].astype(np.int32) for example in examples[:5]]
    options = {
        "greedy": DecodingConfig(prefilter=2),
        "beam": DecodingConfig(beam_size=3, prefilter=2),
        "sampled": DecodingConfig(temperature=1.0, keep_top_k=5, prefilter=2),
    }
    return {
        "scores": score_examples(params, model, examples, None).tolist(),
        "texts": {
            name: generate_tokens(params, model, inputs, config, length=8, batch_size=5)
            for name, config in options.items()
        },
        "metrics": perplexity_metrics(params, model, batches(2, rows=5), 2),
    }


def tied(layout):
    """Outputs and scores of 40 inputs by a model whose tokens tie but for rounding."""
    model = T5(MODEL, FLOAT32)
    params = near_ties(initial_parameters(model, jax.random.key(0)))
    if layout is not None:
        params = jax.device_put(params, devices_of(layout).shardings(params))
    inputs = [np.random.default_rng(n).integers(2, 128, 1 + n).astype("i") for n in range(40)]
    plan, options = DecodingPlan(), {"temperature": 1.0, "keep_top_k": 5}
    examples = [
        (n, {"encoder_input_tokens": np.pad(row, (0, 40 - len(row))),
             "decoder_target_tokens": np.zeros(8, "i")})
        for n, row in enumerate(inputs)
    ]  # fmt: skip
    pairs = [{"inputs": row, "targets": row[:6]} for row in inputs]
    return {
        "greedy": generate_tokens(params, model, inputs, DecodingConfig(), length=8),
        "sampled": generate_tokens(params, model, inputs, DecodingConfig(**options), length=8),
        "t5x": ModelFunctions(model, params, plan, 5, "encoder_decoder").predict_with_aux(examples),
        "scores": score_examples(params, model, pairs, None).tolist(),
    }


def drawn():
    """Whether devices that draw a part of the parameters each draw what one device draws."""
    model, key = T5(MODEL, FLOAT32), jax.random.key(3)
    one = initial_parameters(model, key)
    shardings = choose(Layout(4, 2, fully_sharded=True), MODEL).shardings(one)
    parts = initial_parameters(model, key, shardings)
    assert parts["token_embedder"]["embedding"].addressable_shards[0].data.size < 128 * 32
    return jax.tree.all(jax.tree.map(np.array_equal, one, parts))


def resumed():
    """A run that changes its layout at step 3, and one that does not: their lines and losses."""
    data, runs = batches(6, rows=8), {}
    for name, layouts in {
        "changed": [Layout(4, 2), Layout(2, 4, fully_sharded=True)],
        "same": [Layout(topology="v3-8"), Layout(topology="v3-8")],
    }.items():
        with tempfile.TemporaryDirectory() as folder:
            lines = []
            for steps, layout in zip((3, 6), layouts, strict=True):
                config = run_config(folder, steps, model=MODEL, batch_size=8, layout=layout)
                with heard_by(lines.append):
                    train(config, data[steps - 3 : steps])
            tree = load_tree(Path(folder) / "checkpoint_6")
        size = sum(float(np.abs(value).sum()) for value in tree.values())
        runs[name] = {"lines": lines, "size": size}
    return runs


OPTIMIZERS = {
    "adafactor, not factored, with momentum": dataclasses.replace(
        ADAFACTOR, factored=False, beta1=0.9
    ),
    "adam": AdamWeightDecayConfig(0.01, 0.9, 0.999, 1e-6),
    "momentum": MomentumConfig(0.9),
    "sgd": SgdConfig(),
}


def scanned():
    """Unrolled layers on one device, and scanned layers in two layouts."""
    deep = {"num_encoder_layers": 2, "num_decoder_layers": 2}
    return {
        "one": trained(None, scan_layers=False, **deep),
        "data 4, model 2": trained(Layout(4, 2), scan_layers=True, **deep),
        "fully sharded": trained(Layout(4, 2, fully_sharded=True), scan_layers=True, **deep),
        "by layer": trained(Layout(4, 2), scan_layers=True, stacks=False, **deep),
    }


def in_blocks():
    """Attention of whole matrices on one device, and of blocks of queries in two layouts."""
    one = trained(None, dropout_rate=0.1)
    memory.ATTENTION_BLOCK_BYTES = 64
    return {
        "one": one,
        "data 4, model 2": trained(Layout(4, 2), dropout_rate=0.1),
        "fully sharded": trained(Layout(4, 2, fully_sharded=True), dropout_rate=0.1),
    }


def combinations():
    """Every layout with every optimizer, number of microbatches and kind of rows, and evaluated."""
    changes = {name: {"optimizer": config} for name, config in OPTIMIZERS.items()} | {
        "one batch": {"microbatches": 1},
        "microbatches, not packed": {"pack": False},
        "one batch, not packed": {"microbatches": 1, "pack": False},
    }
    return {
        "trained": {
            name: {key: trained(layout, **change) for key, layout in LAYOUTS.items()}
            for name, change in changes.items()
        },
        "evaluated": {name: evaluated(layout) for name, layout in LAYOUTS.items()},
    }


def every_layout():
    """Losses, scores and texts of all layouts."""
    return {
        "layouts": {name: trained(layout) for name, layout in LAYOUTS.items()},
        "optimizers": {
            name: [trained(each, optimizer=OPTIMIZERS[name]) for each in (None, Layout(4, 2))]
            for name in ("adafactor, not factored, with momentum", "adam")
        },
        "dropout": [trained(each, dropout_rate=0.1) for each in (None, Layout(4, 2))],
        "one batch, not packed": [
            trained(each, microbatches=1, pack=False) for each in (None, Layout(4, 2))
        ],
        "evaluated": {
            name: evaluated(LAYOUTS[name]) for name in ("one", "data 8", "data 2, model 4")
        },
        "tied": {name: tied(LAYOUTS[name]) for name in ("one", "data 8")},
        "resumed": resumed(),
        "drawn": drawn(),
    }


if __name__ == "__main__":
    cases = (every_layout, combinations, scanned, in_blocks)
    print(json.dumps({case.__name__: case for case in cases}[sys.argv[1]]()))
