"""Vertex AI on loopback: jobs, metadata, TensorBoard and logs, over gRPC with the services' types.

What is stored are the services' own messages, by resource name. A job's container is executed as a
process on this machine: the worker.
"""

from __future__ import annotations

import datetime
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Mapping
from concurrent import futures
from pathlib import Path
from types import MappingProxyType
from typing import Any

import grpc
from google.cloud import aiplatform_v1 as v1
from google.cloud.logging_v2.types import ListLogEntriesRequest, ListLogEntriesResponse, LogEntry
from google.longrunning import operations_pb2
from google.protobuf import any_pb2, empty_pb2

PROJECT, LOCATION = "p", "us-central1"
PARENT = f"projects/{PROJECT}/locations/{LOCATION}"
STORE = f"{PARENT}/metadataStores/default"
TENSORBOARD = f"{PARENT}/tensorboards/7"
JobState = v1.JobState


class Refused(Exception):
    """What a request is answered with instead of a result."""

    def __init__(self, code: grpc.StatusCode, message: str):
        self.code, self.message = code, message


class Services(grpc.GenericRpcHandler):
    """The services' state and methods.

    Attributes:
      faults: method -> what its next calls meet: a Refused to raise, or seconds to wait.
      calls: the methods that were called, in order.
      mount: the folder that holds the buckets; the worker has it in place of /gcs.
      run_jobs: whether jobs are executed; if not, tests set their states.
    """

    def __init__(self, mount: Path):
        self.mount = mount
        self.faults: dict[str, list[Refused | float]] = defaultdict(list)
        self.calls: list[str] = []
        self.run_jobs = False
        self.jobs: dict[str, Any] = {}
        self.logs: dict[str, str] = {}
        self.contexts: dict[str, Any] = {}
        self.artifacts: dict[str, Any] = {}
        self.executions: dict[str, Any] = {}
        self.events: list[Any] = []
        self.members: dict[str, set[str]] = defaultdict(set)  # context -> artifacts and executions
        self.tensorboard: dict[str, Any] = {
            TENSORBOARD: v1.Tensorboard(name=TENSORBOARD, blob_storage_path_prefix="blobs/x")
        }
        self.points: dict[tuple[str, str], dict[int, float]] = defaultdict(dict)
        self.workers: list[threading.Thread] = []

    # ---- gRPC ----------------------------------------------------------------------------------

    def service(self, handler_call_details):
        name = handler_call_details.method.rpartition("/")[2]
        method = getattr(self, name, None)
        if method is None:
            return None  # UNIMPLEMENTED
        request_type = (
            ListLogEntriesRequest if name == "ListLogEntries" else getattr(v1, f"{name}Request")
        )

        def answer(request, context):
            self.calls.append(name)
            try:
                if self.faults[name]:
                    fault = self.faults[name].pop(0)
                    if isinstance(fault, Refused):
                        raise fault
                    time.sleep(fault)
                return method(request)
            except Refused as refused:
                context.abort(refused.code, refused.message)

        return grpc.unary_unary_rpc_method_handler(
            answer,
            request_deserializer=request_type.deserialize,
            response_serializer=lambda m: (
                m.SerializeToString() if hasattr(m, "SerializeToString") else type(m).serialize(m)
            ),
        )

    # ---- Jobs ----------------------------------------------------------------------------------

    def CreateCustomJob(self, request):
        name = f"{request.parent}/customJobs/{1000 + len(self.jobs)}"
        job = v1.CustomJob(request.custom_job)
        job.name, job.state = name, JobState.JOB_STATE_PENDING
        job.create_time = datetime.datetime.now(datetime.UTC)
        self.jobs[name] = job
        if self.run_jobs:
            self.workers.append(threading.Thread(target=self._work, args=[job]))
            self.workers[-1].start()
        return job

    def GetCustomJob(self, request):
        return _found(self.jobs, request.name)

    def ListCustomJobs(self, request):
        wanted = re.fullmatch('display_name="(.*)"', request.filter)[1]
        found = [job for job in self.jobs.values() if job.display_name == wanted]
        return v1.ListCustomJobsResponse(custom_jobs=found[::-1])

    def CancelCustomJob(self, request):
        _found(self.jobs, request.name).state = JobState.JOB_STATE_CANCELLED
        return empty_pb2.Empty()

    def ListLogEntries(self, request):
        job = re.search('job_id="(.*?)"', request.filter)[1]
        found = next(text for name, text in self.logs.items() if name.endswith(f"/{job}"))
        entries = [
            LogEntry(
                log_name=f"projects/{PROJECT}/logs/ml",
                json_payload={"message": line},
                timestamp=datetime.datetime(2026, 11, 22, tzinfo=datetime.UTC),
            )
            for line in found.splitlines()
        ]
        return ListLogEntriesResponse(entries=entries[::-1])

    def _work(self, job):
        """Executes a job's container: the image's entry point, or the command in its place."""
        job.state = JobState.JOB_STATE_RUNNING
        pools = job.job_spec.worker_pool_specs
        replicas = [start_container(*args) for args in self._replicas(pools)]
        # The first writes into the log; the others say nothing.
        outputs = [each.communicate()[0] for each in replicas]
        self.logs[job.name] = outputs[0]
        failed = [at for at, each in enumerate(replicas) if each.returncode]
        if failed:
            status = replicas[failed[0]].returncode
            job.error.message = f"The replica workerpool0-{failed[0]} exited with status {status}."
        job.end_time = datetime.datetime.now(datetime.UTC)
        job.state = JobState.JOB_STATE_FAILED if failed else JobState.JOB_STATE_SUCCEEDED

    def _replicas(self, pools):
        """What `start_container` takes for each machine of a job."""
        with socket.create_server(("127.0.0.1", 0)) as server:
            address = f"127.0.0.1:{server.getsockname()[1]}"
        names = [f"workerpool{at}" for at in range(len(pools))]
        # All on this machine; only the first one's port is used.
        counts = [pool.replica_count for pool in pools]
        cluster = {name: [address] * n for name, n in zip(names, counts, strict=True)}
        for name, pool in zip(names, pools, strict=True):
            container = pool.container_spec
            for index in range(pool.replica_count):
                spec = {"cluster": cluster, "task": {"type": name, "index": index}}
                environment = {"CLUSTER_SPEC": json.dumps(spec)}
                yield container.command, container.args, self.mount, environment

    # ---- Metadata ------------------------------------------------------------------------------

    def GetMetadataStore(self, request):
        return v1.MetadataStore(name=request.name)

    def CreateContext(self, request):
        return _create(
            self.contexts, f"{request.parent}/contexts/{request.context_id}", request.context
        )

    def GetContext(self, request):
        return _found(self.contexts, request.name)

    def UpdateContext(self, request):
        return _update(self.contexts, request.context)

    def DeleteContext(self, request):
        return _delete(self.contexts, request.name)

    def ListContexts(self, request):
        found = list(self.contexts.values())
        if match := re.search('schema_title="(.*?)"', request.filter):
            found = [each for each in found if each.schema_title == match[1]]
        if match := re.search('parent_contexts:"(.*?)"', request.filter):
            found = [each for each in found if match[1] in each.parent_contexts]
        return v1.ListContextsResponse(contexts=found)

    def AddContextChildren(self, request):
        for child in request.child_contexts:
            parents = _found(self.contexts, child).parent_contexts
            parents.append(request.context)
        return v1.AddContextChildrenResponse()

    def AddContextArtifactsAndExecutions(self, request):
        self.members[request.context] |= {*request.artifacts, *request.executions}
        return v1.AddContextArtifactsAndExecutionsResponse()

    def CreateArtifact(self, request):
        given = request.artifact_id or f"a{len(self.calls)}"
        return _create(self.artifacts, f"{request.parent}/artifacts/{given}", request.artifact)

    def GetArtifact(self, request):
        return _found(self.artifacts, request.name)

    def DeleteArtifact(self, request):
        return _delete(self.artifacts, request.name)

    def CreateExecution(self, request):
        given = request.execution_id or f"e{len(self.calls)}"
        return _create(self.executions, f"{request.parent}/executions/{given}", request.execution)

    def GetExecution(self, request):
        return _found(self.executions, request.name)

    def UpdateExecution(self, request):
        return _update(self.executions, request.execution)

    def DeleteExecution(self, request):
        return _delete(self.executions, request.name)

    def ListExecutions(self, request):
        return v1.ListExecutionsResponse()

    def AddExecutionEvents(self, request):
        for event in request.events:
            event.execution = request.execution
            self.events.append(event)
        return v1.AddExecutionEventsResponse()

    # ---- TensorBoard ---------------------------------------------------------------------------

    def GetTensorboard(self, request):
        return _found(self.tensorboard, request.name)

    def GetTensorboardExperiment(self, request):
        return _found(self.tensorboard, request.name)

    def CreateTensorboardExperiment(self, request):
        name = f"{request.parent}/experiments/{request.tensorboard_experiment_id}"
        return _create(self.tensorboard, name, request.tensorboard_experiment)

    def GetTensorboardRun(self, request):
        return _found(self.tensorboard, request.name)

    def CreateTensorboardRun(self, request):
        name = f"{request.parent}/runs/{request.tensorboard_run_id}"
        return _create(self.tensorboard, name, request.tensorboard_run)

    def DeleteTensorboardRun(self, request):
        return _delete(self.tensorboard, request.name)

    def CreateTensorboardTimeSeries(self, request):
        if self._series(request.parent, request.tensorboard_time_series.display_name):
            raise Refused(grpc.StatusCode.INVALID_ARGUMENT, "the time series already exists")
        name = f"{request.parent}/timeSeries/{len(self.calls)}"
        return _create(self.tensorboard, name, request.tensorboard_time_series)

    def ListTensorboardTimeSeries(self, request):
        wanted = re.fullmatch('display_name = "(.*)"', request.filter)
        found = self._series(request.parent, wanted and wanted[1])
        return v1.ListTensorboardTimeSeriesResponse(tensorboard_time_series=found)

    def _series(self, run: str, display_name: str | None):
        return [
            each
            for name, each in self.tensorboard.items()
            if name.startswith(f"{run}/timeSeries/") and display_name in (None, each.display_name)
        ]

    def WriteTensorboardExperimentData(self, request):
        for of_run in request.write_run_data_requests:
            run = of_run.tensorboard_run
            for series in of_run.time_series_data:
                name = f"{run}/timeSeries/{series.tensorboard_time_series_id}"
                tag = _found(self.tensorboard, name).display_name
                for point in series.values:
                    self.points[run.rpartition("/")[2], tag][point.step] = point.scalar.value
        return v1.WriteTensorboardExperimentDataResponse()


def start_container(
    command, arguments, mount: Path, environment: Mapping[str, str] = MappingProxyType({})
) -> subprocess.Popen[str]:
    """Starts a container of the image for JAX as a process: its entry point, or a command."""
    entry = [sys.executable, "-m", "t0repro.cli", "run"]
    if command:
        entry = [str(Path(sys.executable).with_name(command[0]))]
    # Cloud Storage FUSE makes the buckets folders; a container's root is not this machine's.
    words = [word.replace("/gcs/", f"{mount}/") for word in arguments]
    return subprocess.Popen(
        [*entry, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **environment},
    )


def _create(stored: dict, name: str, message):
    if name in stored:
        raise Refused(grpc.StatusCode.ALREADY_EXISTS, f"{name} already exists")
    made = type(message)(message)
    made.name = name
    stored[name] = made
    return made


def _found(stored: dict, name: str):
    if name not in stored:
        raise Refused(grpc.StatusCode.NOT_FOUND, f"{name} not found")
    return stored[name]


def _update(stored: dict, message):
    kept = _found(stored, message.name)
    merged = type(message)(message)
    # The client sends the whole resource, so it replaces what was there.
    if hasattr(kept, "parent_contexts"):  # set by AddContextChildren alone
        merged.parent_contexts = kept.parent_contexts
    stored[message.name] = merged
    return merged


def _delete(stored: dict, name: str):
    _found(stored, name)
    del stored[name]
    done = any_pb2.Any()
    done.Pack(empty_pb2.Empty())
    return operations_pb2.Operation(name="operations/1", done=True, response=done)


def serving(services: Services, certificate: bytes, key: bytes) -> tuple[grpc.Server, int]:
    """A started server on a free port."""
    server = grpc.server(futures.ThreadPoolExecutor(16), handlers=[services])
    credentials = grpc.ssl_server_credentials([(key, certificate)])
    port = server.add_secure_port("localhost:0", credentials)
    server.start()
    return server, port
