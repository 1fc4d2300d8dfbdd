"""Slurm and Kubernetes get the commands that their manuals ask for; stand-ins record and obey them.

The stand-ins keep their jobs in files and run a job's worker at once, so that what comes back is
what a job really wrote.
"""

import dataclasses
import json
import os
import sys
from pathlib import Path

import pytest
from kubeflow_trainer_api.models import IoK8sApiBatchV1JobSpec

from t0repro.cloud.launchers.kubernetes import KubernetesLauncher
from t0repro.cloud.launchers.slurm import SlurmLauncher
from t0repro.errors import UserError
from t0repro.jobs.job import Job, Limits

STAND_IN = """#!{python}
import json, os, pathlib, shlex, subprocess, sys
folder = pathlib.Path({folder!r})
name = pathlib.Path(sys.argv[0]).name
arguments = sys.argv[1:]
with open(folder / "calls.jsonl", "a") as calls:
    calls.write(json.dumps([name, *arguments]) + "\\n")
(folder / "environment.json").write_text(json.dumps(dict(os.environ)))
options = dict(word.removeprefix("--").split("=", 1) for word in arguments if "=" in word)
queue = folder / "queue.json"
jobs = json.loads(queue.read_text()) if queue.exists() else {{}}
if (folder / "broken").exists():
    sys.exit((folder / "broken").read_text())
if name == "sbatch":
    jobs[options["job-name"]] = "PENDING"
    print("17;cluster")
elif name == "squeue":
    state = jobs.get(options["name"])
    if state in ("PENDING", "RUNNING"):
        print(state)
elif name == "sacct":
    state = jobs.get(options["name"])
    if state:
        print("  " + state + "  ")
elif name == "scancel":
    jobs[options["name"]] = "CANCELLED by 0"
elif name == "kubectl" and arguments[0] == "create":
    manifest = json.load(sys.stdin)
    (folder / "manifest.json").write_text(json.dumps(manifest))
    jobs[manifest["metadata"]["name"]] = {{"active": 1}}
elif name == "kubectl" and arguments[0] == "get":
    if arguments[2] in jobs:
        print(json.dumps({{"status": jobs[arguments[2]]}}))
elif name == "kubectl" and arguments[0] == "delete":
    jobs.pop(arguments[2], None)
queue.write_text(json.dumps(jobs))
"""


@pytest.fixture
def engine(tmp_path, monkeypatch):
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("sbatch", "squeue", "sacct", "scancel", "kubectl"):
        (folder / name).write_text(STAND_IN.format(python=sys.executable, folder=str(folder)))
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return folder


def calls(engine: Path) -> list[list[str]]:
    return [json.loads(line) for line in (engine / "calls.jsonl").read_text().splitlines()]


def set_state(engine: Path, name: str, state) -> None:
    (engine / "queue.json").write_text(json.dumps({name: state}))


def job(folder: Path, **limits) -> Job:
    return Job(
        "t0repro-12ab-3-1", folder, ("true",), {"A": "b"}, Limits(**limits), ("--partition=gpu",)
    )


def test_slurm_gets_a_named_job_with_its_limits(tmp_path, engine):
    one = job(tmp_path / "job", cpus=2, memory_gb=3.5, seconds=90.0)
    SlurmLauncher().submit(one)
    assert calls(engine)[0] == [
        *("sbatch", "--parsable", "--job-name=t0repro-12ab-3-1"),
        f"--output={tmp_path}/job/t0repro-12ab-3-1.slurm.log",
        *("--cpus-per-task=2", "--mem=3500M", "--time=2", "--partition=gpu"),
        f"--wrap={sys.executable} -m t0repro.jobs.worker {tmp_path}/job/t0repro-12ab-3-1.json",
    ]


@pytest.mark.parametrize(
    ("state", "meaning"),
    [
        ("PENDING", "waiting"), ("RUNNING", "running"), ("COMPLETED", "ended"),
        ("FAILED", "ended"), ("CANCELLED by 1000", "ended"), ("TIMEOUT", "ended"),
        ("OUT_OF_MEMORY", "ended"), ("NODE_FAIL", "preempted"), ("PREEMPTED", "preempted"),
    ],
)  # fmt: skip
def test_slurms_states_by_the_jobs_name(tmp_path, engine, state, meaning):
    set_state(engine, "t0repro-12ab-3-1", state)
    assert SlurmLauncher().state(job(tmp_path)) == meaning


def test_a_job_that_slurm_has_never_had_is_unknown_and_canceling_names_it(tmp_path, engine):
    assert SlurmLauncher().state(job(tmp_path)) == "unknown"
    SlurmLauncher().cancel(job(tmp_path))
    assert calls(engine)[-1] == ["scancel", "--name=t0repro-12ab-3-1"]


def test_an_engines_complaint_is_passed_on(tmp_path, engine, monkeypatch):
    (engine / "broken").write_text("sbatch: error: invalid partition specified: gpu")
    with pytest.raises(UserError, match="sbatch failed: sbatch: error: invalid partition"):
        SlurmLauncher().submit(job(tmp_path))
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UserError, match="There is no command squeue here"):
        SlurmLauncher().state(job(tmp_path))


TEMPLATE = {
    "metadata": {"labels": {"team": "nlp"}},
    "spec": {
        "template": {"spec": {"containers": [{"name": "main", "image": "example/t0repro:1"}]}}
    },
}


def test_kubernetes_gets_the_users_manifest_completed(tmp_path, engine):
    launcher = KubernetesLauncher(TEMPLATE)
    one = job(tmp_path / "job", cpus=2, memory_gb=2.0, seconds=60.0)
    launcher.submit(one)
    manifest = json.loads((engine / "manifest.json").read_text())
    assert manifest["apiVersion"] == "batch/v1" and manifest["kind"] == "Job"
    assert manifest["metadata"] == {"labels": {"team": "nlp"}, "name": "t0repro-12ab-3-1"}
    assert manifest["spec"]["backoffLimit"] == 0
    assert manifest["spec"]["activeDeadlineSeconds"] == 60
    pod = manifest["spec"]["template"]["spec"]
    assert pod["restartPolicy"] == "Never"
    assert pod["containers"][0]["resources"] == {"requests": {"cpu": "2", "memory": "2000M"}}
    assert pod["containers"][0]["command"][1:] == [
        *("-m", "t0repro.jobs.worker"),
        f"{tmp_path}/job/t0repro-12ab-3-1.json",
    ]
    # By Kubernetes' own schema: an evicted pod is to be told from one that failed.
    spec = IoK8sApiBatchV1JobSpec.from_dict(manifest["spec"])
    (rule,) = spec.pod_failure_policy.rules
    assert rule.on_pod_conditions[0].type == "DisruptionTarget"
    assert launcher.state(one) == "running"
    launcher.cancel(one)
    assert launcher.state(one) == "unknown"
    assert TEMPLATE["spec"]["template"]["spec"]["containers"][0].keys() == {"name", "image"}


def failed(message: str) -> dict:
    # Worded as Kubernetes does in pod_failure_policy.go.
    condition = {"type": "Failed", "status": "True", "reason": "PodFailurePolicy"}
    return {"failed": 1, "conditions": [condition | {"message": message}]}


@pytest.mark.parametrize(
    ("status", "meaning"),
    [
        ({}, "waiting"),
        ({"active": 1}, "running"),
        ({"succeeded": 1}, "ended"),
        ({"failed": 1}, "ended"),
        (failed("Pod ns/a has condition DisruptionTarget matching FailJob rule at"), "preempted"),
        (failed("Container main for pod ns/a failed with exit code 1 matching FailJob"), "ended"),
    ],
)
def test_kubernetes_states(tmp_path, engine, status, meaning):
    set_state(engine, "t0repro-12ab-3-1", status)
    assert KubernetesLauncher(TEMPLATE).state(job(tmp_path)) == meaning


def test_a_template_without_a_container_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"lacks spec\.template\.spec\.containers"):
        KubernetesLauncher({"spec": {}}).manifest(job(tmp_path))


def test_a_secret_is_handed_to_the_engine_and_stands_in_no_file(tmp_path, engine):
    one = dataclasses.replace(job(tmp_path / "job"), environment={"HF_TOKEN": "s3c$ret", "A": "b"})
    SlurmLauncher().submit(one)
    assert json.loads((engine / "environment.json").read_text())["HF_TOKEN"] == "s3c$ret"
    assert "s3c$ret" not in (engine / "calls.jsonl").read_text()
    manifest = KubernetesLauncher(TEMPLATE).manifest(one)
    (container,) = manifest["spec"]["template"]["spec"]["containers"]
    assert container["env"] == [{"name": "HF_TOKEN", "value": "s3c$$ret"}]
    files = [*(tmp_path / "job").iterdir()]
    assert files and not any("s3c" in file.read_text() for file in files)
