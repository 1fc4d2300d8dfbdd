"""Several processes on loopback compute what one does, and end together."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import flax.traverse_util
import numpy as np
import pytest

from t0repro.errors import UserError
from t0repro.partitioning.joining import ProcessFlags, cluster, is_several, read_environment
from t0repro.storage import buckets, stores
from t0repro.training.bad_update import replay
from t0repro.training.checkpoints import list_checkpoints, load_tree, save_tree
from t0repro.training.hooks.stop_on_signal import PREEMPTED

from ..helpers.tiny_models import batches
from .member import evaluated, trained

MEMBER = Path(__file__).with_name("member.py")


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def by_variables(count):
    """Each process's own variables, where a user says it all."""
    address = {"T0REPRO_COORDINATOR_ADDRESS": f"127.0.0.1:{free_port()}"}
    count_said = address | {"T0REPRO_PROCESS_COUNT": str(count)}
    return [count_said | {"T0REPRO_PROCESS_INDEX": str(index)} for index in range(count)]


def by_kubernetes(count):
    """Those of the pods of an indexed job."""
    said = [dict(each) for each in by_variables(count)]
    return [each | {"JOB_COMPLETION_INDEX": each.pop("T0REPRO_PROCESS_INDEX")} for each in said]


def by_slurm(count):
    """Those of the tasks of a job step; JAX makes the first one's port from the job's number."""
    step = {"SLURM_JOB_ID": str(free_port()), "SLURM_STEP_NODELIST": "127.0.0.1"}
    step |= {"SLURM_NTASKS": str(count), "SLURM_STEP_NUM_TASKS": str(count)}
    return [step | dict.fromkeys(("SLURM_PROCID", "SLURM_LOCALID"), str(i)) for i in range(count)]


def by_open_mpi(count):
    """Those of Open MPI 4's processes; JAX makes the first one's port from the job's number."""
    first = {"OMPI_MCA_orte_hnp_uri": f"{free_port() << 16}.0;tcp://127.0.0.1:34911"}
    size = first | {"OMPI_COMM_WORLD_SIZE": str(count)}
    places = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK")
    return [size | dict.fromkeys(places, str(index)) for index in range(count)]


def by_vertex(count):
    """Those of a job's replicas: the first is a pool of its own."""
    names = [f"127.0.0.1:{free_port()}" for _ in range(count)]
    cluster = {"workerpool0": names[:1], "workerpool1": names[1:]}
    tasks = [("workerpool0", 0), *(("workerpool1", index) for index in range(count - 1))]
    return [
        {"CLUSTER_SPEC": json.dumps({"cluster": cluster, "task": {"type": pool, "index": index}})}
        for pool, index in tasks
    ]


def members(count, devices=1, told=by_variables, **asked):
    """Runs `count` processes with virtual devices each: exit codes, outputs and errors."""
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={devices}"
    environment = {
        **os.environ,
        "XLA_FLAGS": flags,
        "JAX_PLATFORMS": "cpu",
    }
    started = [
        subprocess.Popen(
            [sys.executable, str(MEMBER), json.dumps(asked)],
            env=environment | own,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for own in told(count)
    ]
    exits = {}
    while len(exits) < count:
        for index, process in enumerate(started):
            if process.poll() is not None:
                exits.setdefault(index, time.monotonic())
        time.sleep(0.05)
    outputs, errors = zip(*(process.communicate() for process in started), strict=True)
    codes = [process.returncode for process in started]
    return codes, outputs, errors, exits


def losses(folder):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row["loss"] for row in rows}


def counts(folder):
    """What each step's line of metrics counts."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [[row[name] for name in ("target_tokens", "input_tokens", "examples")] for row in rows]


def assert_same(folder, reference, step):
    one, other = (load_tree(each / f"checkpoint_{step}") for each in (reference, folder))
    assert one.keys() == other.keys()
    for name in one:
        np.testing.assert_allclose(other[name], one[name], rtol=0, atol=1e-5, err_msg=name)
    found, wanted = losses(folder), losses(reference)
    assert sorted(found) == sorted(wanted)
    for number, loss in wanted.items():
        assert found[number] == pytest.approx(loss, abs=1e-5)


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    """The folder of a training run of six steps in this process."""
    folder = tmp_path_factory.mktemp("one")
    trained(folder, 6)
    return folder


def test_two_processes_stop_at_one_step_and_one_goes_on(tmp_path, one_process):
    # The signal reaches process 1 alone; parameters and slots are divided between the two.
    codes, _, said, _ = members(
        2, folder=str(tmp_path), steps=6, fully_sharded=True, at={3: [1, signal.SIGTERM]}
    )
    assert codes == [PREEMPTED] * 2, said
    assert "processes: 2" in said[0] and "devices: 2 x cpu, data 2, model 1, fully" in said[0]
    assert "stopped by a signal" in said[0] and "train" not in said[1]
    assert list_checkpoints(tmp_path) == [2, 4]
    trained(tmp_path, 6)
    assert_same(tmp_path, one_process, 6)


def test_each_process_makes_the_shards_of_its_rows_and_the_batches_are_the_same(
    tmp_path, one_process
):
    codes, _, said, _ = members(
        2, 2, folder=str(tmp_path), steps=4, fully_sharded=True, in_shards=True
    )
    assert codes == [0, 0], said
    made = [json.loads((tmp_path / f"shards_{index}.json").read_text()) for index in range(2)]
    assert made == [[0, 1], [2, 3]]
    assert "data: 4 shards, of which this process reads 2" in said[0]
    # One process continues with all shards.
    trained(tmp_path, 6, in_shards=True)
    assert_same(tmp_path, one_process, 6)
    assert counts(tmp_path) == counts(one_process)


def test_each_process_reads_its_part_of_a_checkpoint_and_none_goes_on_with_a_damaged_one(tmp_path):
    codes, printed, said, _ = members(2, folder=str(tmp_path), read=True)
    assert codes == [0, 0], said
    found = json.loads(printed[0].splitlines()[-1])
    files = [file for file in (tmp_path / "checkpoint_0").rglob("*") if file.is_file()]
    size = sum(file.stat().st_size for file in files)
    assert found["rows"] == 512 and found["equal"]
    hosts = [f"process {index} on {socket.gethostname()}" for index in range(2)]
    assert found["refused"] == (
        f"The tasks of 'mixture' with the split 'train' differ between {hosts[0]} and {hosts[1]}:"
        f" only {hosts[0]} has task_0; only {hosts[1]} has task_1."
    )
    assert 0.4 * size < found["bytes"] < 0.6 * size
    # Whichever process finds it, both end.
    largest = max(files, key=lambda file: file.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)
    codes, _, said, _ = members(2, folder=str(tmp_path), read=True)
    assert all(codes) and any("its CRC-32 differs" in text for text in said), said


def test_a_bad_update_is_explained_where_each_process_holds_a_part_of_the_state(tmp_path):
    codes, _, said, _ = members(2, folder=str(tmp_path), overflows=True, fully_sharded=True)
    assert codes == [0, 0], said
    assert "step 1 was skipped: the activation encoder" in said[0]
    assert list_checkpoints(tmp_path) == [0]
    assert replay(tmp_path / "bad_update_1").kind == "activation"
    # Of the batch too each process made a part.
    with np.load(tmp_path / "bad_update_1" / "batch.npz") as kept:
        for name, wanted in batches(1, rows=8)[0].items():
            np.testing.assert_array_equal(kept[name], wanted)


@pytest.mark.slow
@pytest.mark.parametrize("index", [0, 1])
def test_at_jaxs_own_notice_to_one_all_stop_at_one_step_and_a_restart_goes_on(tmp_path, index):
    codes, _, said, _ = members(2, folder=str(tmp_path / "run"), steps=20, notice=index)
    assert codes == [PREEMPTED] * 2, said
    assert "jax reported" in said[0] and "s after the signal" in said[0]
    last = list_checkpoints(tmp_path / "run")[-1]
    assert 1 < last < 20 and max(losses(tmp_path / "run")) == last
    trained(tmp_path / "run", 20)
    trained(tmp_path / "whole", 20)
    assert_same(tmp_path / "run", tmp_path / "whole", 20)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "devices", "layout"),
    [(2, 2, {"data": 2, "model": 2}), (4, 1, {}), (4, 2, {"model": 2, "fully_sharded": True})],
)
def test_training_and_evaluation_are_one_processes(tmp_path, one_process, count, devices, layout):
    codes, printed, said, _ = members(
        count, devices, folder=str(tmp_path), steps=6, evaluate=True, **layout
    )
    assert codes == [0] * count, said
    assert_same(tmp_path, one_process, 6)
    found = json.loads(printed[0].splitlines()[-1])
    params = flax.traverse_util.unflatten_dict(
        {
            name.removeprefix("target/"): value
            for name, value in load_tree(one_process / "checkpoint_6").items()
            if name.startswith("target/")
        },
        sep="/",
    )
    wanted = evaluated(params)
    np.testing.assert_allclose(found["scores"], wanted["scores"], rtol=0, atol=1e-4)
    assert found["texts"] == wanted["texts"] and any(wanted["texts"][0])
    assert all("{" not in other for other in printed[1:]), "the others print nothing"


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 2])
def test_when_one_is_killed_the_others_say_which_and_a_restart_goes_on(
    tmp_path, one_process, victim
):
    codes, _, said, exits = members(
        4, folder=str(tmp_path), steps=6, at={5: [victim, signal.SIGKILL]}
    )
    assert max(exits.values()) - exits[victim] < 60
    assert codes[victim] == -signal.SIGKILL
    for index, (code, text) in enumerate(zip(codes, said, strict=True)):
        if index != victim:
            assert code == 1 and f"Process {victim} of 4" in text, text
    # Step 4 is written while step 5 is computed: the kill may come before the checkpoint is whole.
    assert list_checkpoints(tmp_path) in ([2], [2, 4])
    codes, _, said, _ = members(2, folder=str(tmp_path), steps=6, fully_sharded=True)
    assert codes == [0, 0], said
    assert_same(tmp_path, one_process, 6)


@pytest.mark.slow
@pytest.mark.parametrize("told", [by_kubernetes, by_slurm, by_open_mpi, by_vertex])
def test_processes_find_each_other_by_their_engines_variables(tmp_path, one_process, told):
    codes, _, said, _ = members(2, told=told, folder=str(tmp_path), steps=6)
    assert codes == [0, 0], said
    assert "processes: 2" in said[0] and "devices: 2 x cpu, data 2" in said[0]
    assert_same(tmp_path, one_process, 6)


@pytest.mark.parametrize(
    ("environment", "name"),
    [
        ({}, None),
        ({"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, None),
        ({"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "0"}, "Slurm"),
        ({"SLURM_NTASKS": "4"}, None),  # the batch script itself, which srun did not start
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "Open MPI"),
        ({"TPU_WORKER_HOSTNAMES": "a,b"}, "TPU pod"),
        ({"TPU_WORKER_HOSTNAMES": "localhost"}, None),
    ],
)
def test_launchers_are_recognized(environment, name):
    assert cluster(environment) == name
    assert is_several(ProcessFlags(), environment) == (name is not None)
    assert not is_several(ProcessFlags(count=1), environment)


def test_an_indexed_job_of_kubernetes_needs_only_its_size_and_address():
    environment = {
        "JOB_COMPLETION_INDEX": "3",
        "T0REPRO_PROCESS_COUNT": "4",
        "T0REPRO_COORDINATOR_ADDRESS": "train-0:8476",
    }
    assert read_environment(ProcessFlags(), environment) == ProcessFlags("train-0:8476", 4, 3)
    assert read_environment(ProcessFlags(index=1), environment).index == 1


def test_open_mpi_says_all_but_the_address():
    environment = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"}
    assert read_environment(ProcessFlags("first:8476"), environment) == ProcessFlags(
        "first:8476", 2, 1
    )
    assert read_environment(ProcessFlags(), environment) == ProcessFlags(), (
        "JAX finds out, with Open MPI 4"
    )


def cluster_spec(pool, index, others=2):
    cluster = {"workerpool0": ["first:2222"], "workerpool1": ["a:2222", "b:2222"][:others]}
    spec = {"cluster": cluster, "task": {"type": pool, "index": index}, "environment": "cloud"}
    return {"CLUSTER_SPEC": json.dumps(spec)}


def test_replicas_on_vertex_ai_are_told_everything():
    found = [
        read_environment(ProcessFlags(timeout=9), cluster_spec(*task))
        for task in (("workerpool0", 0), ("workerpool1", 0), ("workerpool1", 1))
    ]
    assert found == [ProcessFlags("first:2222", 3, index, timeout=9) for index in range(3)]
    # What is said otherwise counts, as for the commands that a process of several starts.
    assert not is_several(
        read_environment(ProcessFlags(count=1), cluster_spec("workerpool1", 1)), {}
    )
    alone = read_environment(ProcessFlags(), cluster_spec("workerpool0", 0, others=0))
    assert alone == ProcessFlags() and not is_several(alone, {})


@pytest.mark.parametrize("spec", ["{", "[]", '{"cluster": {}, "task": {}}'])
def test_a_cluster_that_cannot_be_read_is_refused(spec):
    with pytest.raises(UserError, match="which replica"):
        read_environment(ProcessFlags(), {"CLUSTER_SPEC": spec})


@pytest.mark.parametrize(
    "asked", [ProcessFlags(count=2, index=2), ProcessFlags(index=1), ProcessFlags(count=0)]
)
def test_impossible_numbers_are_refused(asked):
    with pytest.raises(UserError):
        read_environment(asked, {})


@pytest.mark.slow
def test_two_processes_write_one_checkpoint_to_a_bucket_as_one_process_does(
    bucket_servers, monkeypatch, one_process, tmp_path
):
    for name, value in bucket_servers["gs"].items():
        monkeypatch.setenv(name, value)
    stores.file_system.cache_clear()
    address = "gs://bucket/two_processes"
    codes, _, errors, _ = members(2, folder=address, steps=4, data=2)
    assert codes == [0, 0], errors
    assert list_checkpoints(address) == [2, 4]
    # Started again, both read their parts from the bucket.
    codes, _, errors, _ = members(2, folder=address, steps=6, data=2)
    assert codes == [0, 0], errors
    written = buckets.objects(f"{address}/checkpoint_6")
    assert any("ocdbt.process_1/" in name for name in written), written
    (tmp_path / "metrics.jsonl").write_bytes(buckets.read(f"{address}/metrics.jsonl"))
    save_tree(tmp_path / "checkpoint_6", load_tree(f"{address}/checkpoint_6"))
    assert_same(tmp_path, one_process, 6)
    stores.file_system.cache_clear()
