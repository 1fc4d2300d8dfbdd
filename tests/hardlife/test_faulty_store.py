"""A training run in a bucket whose store fails now and then, behind a proxy on loopback."""

import dataclasses
import json

import numpy as np
import pytest

from t0repro import buckets
from t0repro.training.checkpoints import list_checkpoints, load_tree

from ..bucket_servers import GoogleStorage
from ..faulty_store import FaultyStore
from .jobs import LAST_STEP

pytestmark = pytest.mark.hardlife


@pytest.fixture
def store(monkeypatch, request):
    """A server, and a proxy in front of it; this process speaks with the server itself."""
    server = GoogleStorage()
    proxy = FaultyStore(server.port, seed=request.node.name)
    for name, value in server.environment(server.port).items():
        monkeypatch.setenv(name, value)
    buckets.file_system.cache_clear()
    yield proxy
    proxy.close()
    server.stop()
    buckets.file_system.cache_clear()


@pytest.fixture
def training(whole, store):
    """The training job in a bucket behind the proxy, and what it gives on a disk."""
    job, expected, _ = whole("train")
    environment = GoogleStorage.environment(None, store.port)
    in_bucket = dataclasses.replace(
        job,
        command=lambda folder: [*job.command(folder), "--gin_param=run.keep_checkpoint_max = 2"],
        environment=lambda folder: {**job.environment(folder), **environment},
        result=result,
    )
    return in_bucket, expected


def result(address):
    """Losses by step and the last checkpoint's arrays, as `jobs.train_job` gives them."""
    lines = buckets.read(f"{address}/metrics.jsonl").splitlines()
    rows = [row for row in map(json.loads, lines) if row.get("split") == "train"]
    losses = {f"loss {row['step']}": repr(row["loss"]).encode() for row in rows}
    assert len(losses) == len(rows)  # each step at most once
    tree = load_tree(f"{address}/checkpoint_{LAST_STEP}")
    return {**{name: np.asarray(value).tobytes() for name, value in tree.items()}, **losses}


def assert_nothing_half_written(address):
    """What is listed as a checkpoint has all of its arrays and its position in the data."""
    for step in list_checkpoints(address):
        tree = load_tree(f"{address}/checkpoint_{step}")
        assert int(tree["state/step"]) == step
        json.loads(buckets.read(f"{address}/checkpoint_{step}/data/position.json"))


def test_a_store_that_fails_now_and_then_changes_nothing(store, training, outcome):
    job, expected = training
    store.refused, store.cut_before, store.cut_after, store.slow = 0.06, 0.03, 0.03, 0.1
    store.lag = 2.0
    runs = 0
    code = 2
    while code == 2 and runs < 3:
        runs += 1
        code, said = job.run("gs://bucket/run")
        assert code in (0, 2) and "Traceback" not in said, said[-4000:]
        assert_nothing_half_written("gs://bucket/run")
    assert code == 0 and job.result("gs://bucket/run") == expected
    faults = ", ".join(f"{count} x {kind}" for kind, count in store.counts.items())
    outcome(f"a store that fails: {faults}: {runs} runs ended with the same results")
    assert all(store.counts.values())
