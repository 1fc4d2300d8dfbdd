"""Commands in a bucket whose store fails, and that are killed at each kind of write."""

import dataclasses
import functools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request

import numpy as np
import pytest

from t0repro import storage
from t0repro.converters.convert import convert
from t0repro.converters.inspection import compare
from t0repro.errors import UserError
from t0repro.storage import buckets, input_path, stores
from t0repro.training.checkpoint_retention import remove_interrupted_saves
from t0repro.training.checkpoints import checkpoint_path, list_checkpoints, load_tree, save_tree

from ..helpers.bucket_servers import S3, GoogleStorage
from .faulty_store import FaultyStore
from .jobs import LAST_STEP, T0REPRO, Job, visible_files, write_checkpoint

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


SERVERS = {"gs": GoogleStorage, "s3": S3}
in_each_store = pytest.mark.parametrize("store", SERVERS, indirect=True)


@pytest.fixture(params=["gs"])
def store(monkeypatch, request):
    """A server, and a proxy in front of it; this process speaks with the server itself."""
    server = SERVERS[request.param]()
    proxy = FaultyStore(server.port, seed=request.node.name)
    # How often botocore asks again is its users' own.
    proxy.environment = {**server.environment(proxy.port), "AWS_MAX_ATTEMPTS": "5"}
    proxy.bucket = server.address
    for name, value in server.environment(server.port).items():
        monkeypatch.setenv(name, value)
    stores.file_system.cache_clear()
    storage.remove_all(server.address)  # moto's servers of one process share their objects
    yield proxy
    proxy.close()
    server.stop()
    storage.close_copies()
    stores.file_system.cache_clear()


def in_bucket(job, store, result, *options):
    """A job that writes into a bucket behind the proxy."""
    return dataclasses.replace(
        job,
        command=lambda folder: [*job.command(folder), *options],
        environment=lambda folder: {**job.environment(folder), **store.environment},
        result=result,
    )


@pytest.fixture
def training(whole, store):
    """The training job in a bucket behind the proxy, and its results with a local folder."""
    job, expected, _ = whole("train")
    return in_bucket(job, store, result, "--gin_param=run.keep_checkpoint_max = 2"), expected


@pytest.fixture
def caching(whole, store):
    """The caching job in a bucket behind the proxy, and its results with a local folder."""
    job, expected, _ = whole("cache")
    return in_bucket(job, store, visible_objects), expected


def visible_objects(address):
    """Every object below an address, except for leases."""
    names = [name for name in buckets.objects(address) if not name.startswith(".")]
    return {name: buckets.read(f"{address}/{name}") for name in names}


def make_unreliable(store):
    """From now on, the store fails now and then."""
    store.refused, store.cut_before, store.cut_after, store.slow = 0.06, 0.03, 0.03, 0.1
    store.lag = 2.0


def faults_of(store):
    """The faults so far, in words; there is one of each kind."""
    assert all(store.counts.values()), store.counts
    return ", ".join(f"{count} x {kind}" for kind, count in store.counts.items())


def runs_to_the_end(job, address, check):
    """How often a command has to be started in a store that fails; it ends in words or well."""
    for runs in range(1, 4):
        code, said = job.run(address)
        assert code in (0, 2) and "Traceback" not in said, said[-4000:]
        check(address)
        if code == 0:
            return runs
    raise AssertionError(said)


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


@in_each_store
def test_a_store_that_fails_now_and_then_changes_nothing(store, training, outcome):
    job, expected = training
    make_unreliable(store)
    address = f"{store.bucket}/run"
    runs = runs_to_the_end(job, address, assert_nothing_half_written)
    assert job.result(address) == expected
    outcome(f"a store that fails ({address}): {faults_of(store)}: {runs} runs, the same results")


def assert_complete_tasks_are_whole(expected, address):
    """Every task that is marked as cached has all that an undisturbed run writes."""
    there = buckets.objects(address)
    for task in [name.rpartition("/")[0] for name in there if name.endswith("/COMPLETED")]:
        for name in (name for name in expected if name.startswith(f"{task}/")):
            assert buckets.read(f"{address}/{name}") == expected[name], f"{name} is not whole"


@in_each_store
def test_a_cache_is_written_to_a_store_that_fails_and_read_there(
    store, caching, monkeypatch, outcome
):
    job, expected = caching
    make_unreliable(store)
    address = f"{store.bucket}/cache"
    check = functools.partial(assert_complete_tasks_are_whole, expected)
    runs = runs_to_the_end(job, address, check)
    assert job.result(address) == expected
    written = faults_of(store)
    for kind in store.counts:
        store.counts[kind] = 0
    for name, value in store.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(buckets, "_AHEAD_BYTES", 1 << 13)
    stores.file_system.cache_clear()
    task, refused = sorted({name.partition("/")[0] for name in expected})[0], 0
    # Listings are read when a copy is opened, once, so that all that is new is shown by now.
    del store.counts["hidden"]
    while not all(store.counts.values()):
        try:
            folder = input_path(f"{address}/{task}")
            for path in sorted(folder.iterdir()):
                with storage.open_file(path) as file:
                    assert file.read() == expected[f"{task}/{path.name}"], path.name
        except UserError as error:
            assert error.fix
            refused += 1
        storage.close_copies()
    outcome(
        f"a cache in a store that fails ({store.bucket}): written: {written}: {runs} runs, the same"
        f" {len(expected)} files; read: {faults_of(store)}: the same bytes, {refused} errors"
    )


def speak_with(store, monkeypatch):
    """From now on, this process speaks with the proxy."""
    address = f"http://127.0.0.1:{store.port}"
    for name, value in {**store.environment, "TENSORSTORE_GCS_HTTP_URL": address}.items():
        monkeypatch.setenv(name, value)
    stores.file_system.cache_clear()


@in_each_store
def test_a_conversion_between_addresses_of_a_store_that_fails_writes_the_same_bytes(
    store, monkeypatch, tmp_path, outcome
):
    # One that is in plain files, and one of which TensorStore reads a single store.
    sources = [f"{store.bucket}/mtf", f"{store.bucket}/jax"]
    storage.put_tree(write_checkpoint(tmp_path / "jax"), sources[1])
    convert(sources[1], sources[0], "mtf")
    for number, source in enumerate(sources):
        convert(source, tmp_path / f"here{number}", "hf")
    speak_with(store, monkeypatch)
    make_unreliable(store)
    # Until each kind of fault has happened; the requests of one conversion are few.
    for number in range(8):
        out, ended = f"{store.bucket}/out{number}", False
        while not ended:
            try:
                convert(sources[number % 2], out, "hf")
                ended = True
            except UserError as error:
                assert error.fix
                assert not storage.exists(f"{out}/config.json")
        # By name: listings lag.
        for path in (tmp_path / f"here{number % 2}").iterdir():
            assert buckets.read(f"{out}/{path.name}") == path.read_bytes(), path.name
        if number > 1 and all(store.counts.values()):
            break
    outcome(
        f"conversions in a store that fails ({store.bucket}): {faults_of(store)}: {number + 1}"
        " conversions, the same files"
    )


def killed_at(job, address, store, pattern, moment):
    """Kills a job when it writes, or removes, an object of some name; whether it did, and said."""
    process, struck = job.start(address), threading.Event()

    def strike(request):
        if (request.writes, request.moment) != (True, moment) or struck.is_set():
            return None
        if not re.search(pattern, f"{request.method} /{request.name}"):
            return None
        struck.set()
        os.killpg(process.pid, signal.SIGKILL)
        return 503  # so that the store never has a request during which the job was killed

    store.seen = strike
    said, _ = process.communicate(timeout=900)
    store.seen = lambda request: None
    # Else the job ended first, with nothing of this kind left to write.
    assert struck.is_set() or process.returncode == 0, said[-4000:]
    return struck.is_set()


@in_each_store
def test_killed_at_each_kind_of_write_and_resumed_a_run_ends_with_the_same_bytes(
    store, training, outcome
):
    job, expected = training
    address, deaths = f"{store.bucket}/run", []
    # Orbax's marker is at Google's only; elsewhere, the checksums are last.
    kinds = {kind for kind in WRITES if kind != "marker" or store.bucket.startswith("gs")}
    for kind, moment in MOMENTS:
        if kind in kinds and killed_at(job, address, store, WRITES[kind], moment):
            deaths.append(kind)
        assert_nothing_half_written(address)
    assert job.finish(address) == expected
    assert set(deaths) == kinds, deaths
    outcome(
        f"kill -9 at each kind of write to a bucket ({address}): died {len(deaths)} times at"
        f" {len(kinds)} kinds, and ended with the same {len(expected)} results"
    )


CACHE_WRITES = {
    "lock": r"/\.t0repro\.lease/",
    "shard": r"\.tfrecord-",
    "description": r"/info\.",
    "statistics": r"/stats\.",
    "origin": r"/provenance\.json$",
    "marker": r"/COMPLETED$",
}


@in_each_store
def test_killed_at_each_kind_of_write_a_cache_in_a_bucket_ends_with_the_same_bytes(
    store, caching, outcome
):
    job, expected = caching
    address, deaths = f"{store.bucket}/cache", 0
    for kind, moment in [*((kind, "before") for kind in CACHE_WRITES), ("marker", "after")]:
        deaths += killed_at(job, address, store, CACHE_WRITES[kind], moment)
        assert_complete_tasks_are_whole(expected, address)
    assert job.finish(address) == expected
    assert deaths == len(CACHE_WRITES) + 1
    outcome(
        f"kill -9 at each kind of write of a cache ({store.bucket}): died {deaths} times, and ended"
        f" with the same {len(expected)} files"
    )


def kind_of(request):
    """A pattern of what a conversion's request writes or removes; arrays are alike."""
    name = request.name.rpartition("/")[2]
    last = r"\d+(\.\d+)*" if re.fullmatch(r"\d+(\.\d+)*", name) else re.escape(name)
    return f"^{request.method} /.*/{last}$"


# Orbax's metadata have the time of the save, and the list of checksums theirs.
TIMED = ("_CHECKPOINT_METADATA", "integrity.json")


def same_files(some, others):
    """Whether files are equal, except for what has times in it."""
    timed = [{name for name in files if name.endswith(TIMED)} for files in (some, others)]
    kept = [
        {name: files[name] for name in files if name not in timed[0]} for files in (some, others)
    ]
    return timed[0] == timed[1] and kept[0] == kept[1]


@pytest.mark.parametrize(
    ("store", "to"),
    [("gs", "mtf"), ("gs", "jax"), ("s3", "hf"), ("s3", "t5x"), ("s3", "mtf")],
    indirect=["store"],
)
def test_killed_at_each_kind_of_write_a_conversion_to_a_bucket_starts_over(
    store, to, tmp_path, outcome
):
    source = write_checkpoint(tmp_path / "source")
    convert(source, tmp_path / "here", to)
    expected = visible_files(tmp_path / "here") | {
        str(path.relative_to(tmp_path / "here")): path.read_bytes()
        for path in (tmp_path / "here").rglob(".zarray")
    }

    def command(address):
        return [*T0REPRO, "convert", str(source), str(address), "--to", to]

    job = Job("convert", command, visible_objects, None, 0.0, lambda folder: store.environment)
    kinds = []
    store.seen = lambda request: kinds.append(kind_of(request)) if request.writes else None
    assert same_files(job.finish(f"{store.bucket}/undisturbed"), expected)
    address, whole = f"{store.bucket}/out", 0
    kinds = list(dict.fromkeys(kinds))
    for kind in kinds:
        assert killed_at(job, address, store, kind, "before"), kind
        try:
            found = compare(address, source)
        except UserError:
            assert not whole, kind
            continue
        assert not found.differences, kind
        whole += 1
    assert same_files(job.finish(address), expected)
    outcome(
        f"kill -9 at each kind of write of a conversion to {to} ({store.bucket}): died"
        f" {len(kinds)} times, {whole} times with all written, and ended with the same"
        f" {len(expected)} files"
    )


SMALL_TREE = {"state/step": np.int32(2), "target/a": np.arange(6, dtype=np.float32)}


# A checkpoint without the marker alone is complete.
@pytest.mark.parametrize(("kind", "status", "left"), [("array", 403, []), ("marker", 503, [2])])
def test_a_store_that_turns_away_during_a_save_is_named_and_nothing_half_written_is_listed(
    store, monkeypatch, kind, status, left
):
    speak_with(store, monkeypatch)
    path, away = checkpoint_path("gs://bucket/run", 2), threading.Event()
    tree = SMALL_TREE

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


def test_the_file_without_which_a_beginning_would_pass_for_a_checkpoint_is_written_first(
    store, monkeypatch
):
    speak_with(store, monkeypatch)
    written = []

    def delay(request):
        if request.writes and request.moment == "after":
            written.append(request.name.rpartition("/")[2])
        elif request.writes and request.name.endswith("_CHECKPOINT_METADATA") and not written:
            time.sleep(3)

    store.seen = delay
    save_tree("gs://bucket/run/checkpoint_2", SMALL_TREE)
    assert written[0] == "_CHECKPOINT_METADATA" and len(written) > 5


def test_a_checkpoint_of_which_a_late_removal_took_a_file_is_not_completed(store, monkeypatch):
    speak_with(store, monkeypatch)
    name = urllib.parse.quote("run/checkpoint_2/_METADATA", safe="")
    address = f"http://127.0.0.1:{store.target}/storage/v1/b/bucket/o/{name}"

    def remove_late(request):
        written = request.writes and request.moment == "after"
        if written and re.search(WRITES["index of arrays"], f"/{request.name}"):
            urllib.request.urlopen(urllib.request.Request(address, method="DELETE")).close()

    store.seen = remove_late
    with pytest.raises(UserError, match="was written and is gone"):
        save_tree("gs://bucket/run/checkpoint_2", SMALL_TREE)
    assert list_checkpoints("gs://bucket/run") == []


_SAVE = """
import sys
import numpy as np
from t0repro import buckets
buckets._SILENT_SECONDS = 3
from t0repro.training.checkpoints import save_tree
save_tree(sys.argv[1], {"state/step": np.int32(2), "target/a": np.arange(6, dtype=np.float32)})
"""


def test_a_request_that_the_store_never_answers_is_sent_again(store, outcome):
    kinds = ["array", "index of arrays", "description", "marker", "checksums"]
    unanswered, end = [], threading.Event()

    def swallow(request):
        for kind in kinds if request.writes else ():
            if kind not in unanswered and re.search(WRITES[kind], f"/{request.name}"):
                unanswered.append(kind)
                end.wait()
                return 503  # so that the store never has it
        return None

    store.seen = swallow
    patience = {"TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS": "3", "JAX_PLATFORMS": "cpu"}
    try:
        subprocess.run(
            [sys.executable, "-P", "-c", _SAVE, "gs://bucket/run/checkpoint_2"],
            env={**os.environ, **store.environment, **patience},
            check=True,
            timeout=300,
        )
    finally:
        end.set()
    assert len(unanswered) == len(kinds)
    assert load_tree("gs://bucket/run/checkpoint_2").keys() == SMALL_TREE.keys()
    outcome(f"a store that does not answer: {len(kinds)} requests were sent again")
