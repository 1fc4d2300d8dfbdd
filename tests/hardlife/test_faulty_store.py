"""A training run in a bucket whose store fails, and one that is killed at each kind of write."""

import dataclasses
import functools
import json
import os
import re
import signal
import threading

import numpy as np
import pytest

from t0repro import buckets
from t0repro.converters.convert import convert
from t0repro.errors import UserError
from t0repro.training.checkpoints import checkpoint_path, list_checkpoints, load_tree, save_tree
from t0repro.training.commits import remove_interrupted_saves

from ..bucket_servers import GoogleStorage
from ..faulty_store import FaultyStore
from .jobs import LAST_STEP, write_checkpoint

pytestmark = pytest.mark.hardlife

# Kind of write -> what its objects are called, in the order in which a run first writes them.
WRITES = {
    "lock": r"/\.t0repro\.lease/",
    "record": r"/trained_with\.json$",
    "configuration": r"/operative_config\.gin$",
    "event file": r"/events\.out\.tfevents",
    "metrics": r"/metrics\.jsonl$",
    "state of the run": r"/run_state\.json$",
    "array": r"/checkpoint_\d+/(ocdbt\.process_0/)?d/",
    "index of arrays": r"/checkpoint_\d+/manifest\.ocdbt$",
    "description": r"/checkpoint_\d+/_METADATA$",
    "data position": r"/checkpoint_\d+/data/position\.json$",
    "marker": r"/checkpoint_\d+/commit_success\.txt$",
    "checksums": r"/checkpoint_\d+/integrity\.json$",
}
# Kill before the store has the object; for some kinds, also after it has it but has not answered.
MOMENTS = [*((kind, "before") for kind in WRITES), ("metrics", "after"), ("marker", "after")]


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
    """The training job in a bucket behind the proxy, and its results with a local folder."""
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
    """Every listed checkpoint has all of its arrays and its data position."""
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


def test_a_conversion_between_addresses_of_a_store_that_fails_writes_the_same_bytes(
    store, monkeypatch, tmp_path, outcome
):
    convert(write_checkpoint(tmp_path / "jax"), "gs://bucket/start", "mtf")
    convert("gs://bucket/start", tmp_path / "here", "hf")
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{store.port}")
    buckets.file_system.cache_clear()
    store.refused, store.cut_before, store.cut_after, store.slow = 0.06, 0.03, 0.03, 0.1
    store.lag = 2.0
    # Until each kind of fault has happened; the requests of one conversion are few.
    for number in range(1, 9):
        out, ended = f"gs://bucket/out{number}", False
        while not ended:
            try:
                convert("gs://bucket/start", out, "hf")
                ended = True
            except UserError as error:
                assert error.fix
                assert not buckets.exists(f"{out}/config.json")
        # By name: listings lag.
        for path in (tmp_path / "here").iterdir():
            assert buckets.read(f"{out}/{path.name}") == path.read_bytes(), path.name
        if number > 2 and all(store.counts.values()):
            break
    faults = ", ".join(f"{count} x {kind}" for kind, count in store.counts.items())
    outcome(f"conversions in a store that fails: {faults}: {number} gave the same files")
    assert all(store.counts.values())


def strike(process, kind, moment, struck, request):
    """Kills a job once a request writes an object of a kind."""
    if (request.writes, request.moment) != (True, moment) or struck.is_set():
        return
    if re.search(WRITES[kind], f"/{request.name}"):
        struck.set()
        os.killpg(process.pid, signal.SIGKILL)


def test_killed_at_each_kind_of_write_and_resumed_a_run_ends_with_the_same_bytes(
    store, training, outcome
):
    job, expected = training
    address, deaths = "gs://bucket/run", []
    for kind, moment in MOMENTS:
        process = job.start(address)
        struck = threading.Event()
        store.seen = functools.partial(strike, process, kind, moment, struck)
        said, _ = process.communicate(timeout=900)
        store.seen = lambda request: None
        if not struck.is_set():  # the job ended first, with nothing of this kind left to write
            assert process.returncode == 0, said[-4000:]
        else:
            deaths.append((kind, moment))
        assert_nothing_half_written(address)
    assert job.finish(address) == expected
    assert {kind for kind, _ in deaths} == set(WRITES), deaths
    outcome(
        f"kill -9 at each kind of write to a bucket: died {len(deaths)} times at"
        f" {len(WRITES)} kinds, and ended with the same {len(expected)} results"
    )


# A checkpoint without the marker alone is complete.
@pytest.mark.parametrize(("kind", "status", "left"), [("array", 403, []), ("marker", 503, [2])])
def test_a_store_that_turns_away_during_a_save_is_named_and_nothing_half_written_is_listed(
    store, monkeypatch, kind, status, left
):
    for variable in ("STORAGE_EMULATOR_HOST", "TENSORSTORE_GCS_HTTP_URL"):
        monkeypatch.setenv(variable, f"http://127.0.0.1:{store.port}")
    buckets.file_system.cache_clear()
    path, away = checkpoint_path("gs://bucket/run", 2), threading.Event()
    tree = {"state/step": np.int32(2), "target/a": np.arange(6, dtype=np.float32)}

    def refusal(request):
        if request.writes and re.search(WRITES[kind], f"/{request.name}"):
            away.set()
        return status if away.is_set() else None

    store.seen = refusal
    with pytest.raises(UserError, match="The store did not answer as it should") as error:
        save_tree(path, tree)
    assert away.is_set() and error.value.where.startswith(str(path)) and error.value.fix
    store.seen = lambda request: None
    remove_interrupted_saves("gs://bucket/run")
    assert list_checkpoints("gs://bucket/run") == left
    if not left:
        save_tree(path, tree)
    assert load_tree(path).keys() == tree.keys()
