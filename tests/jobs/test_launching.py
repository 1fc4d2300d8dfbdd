"""What engines get to start several processes; the script for Slurm really starts them."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from t0repro.cli.app import app
from t0repro.cli.gate import Settings
from t0repro.errors import UserError
from t0repro.jobs.launching import Launch, job_set, slurm_script, tpu_vm_commands
from t0repro.jobs.machines import Machine
from t0repro.training.checkpoints import list_checkpoints

MEMBER = Path(__file__).parents[1] / "partitioning" / "member.py"
COMMAND = ("t0repro", "train", "--gin.MODEL_DIR='runs/a b'")
# Of sbatch's manual page, those that are used here or in the documentation.
SBATCH = {
    "job-name", "output", "cpus-per-task", "mem", "time", "ntasks", "signal", "partition",
    "gpus-per-task", "nodes", "ntasks-per-node",
}  # fmt: skip
# Starts the tasks as srun does: with these variables, and all ended when one fails.
SRUN = """#!{python}
import os, subprocess, sys
count = int(os.environ["SLURM_NTASKS"])
step = {{"SLURM_STEP_NUM_TASKS": str(count), "SLURM_STEP_NODELIST": "127.0.0.1"}}
command = [word for word in sys.argv[1:] if word not in ("--kill-on-bad-exit=1", "--label")]
tasks = [
    subprocess.Popen(
        command, env={{**os.environ, **step, "SLURM_PROCID": str(n), "SLURM_LOCALID": str(n)}}
    )
    for n in range(count)
]
sys.exit(max(task.wait() for task in tasks))
"""


def launch(*options, **fields):
    machine = Machine(options=list(options), cpus=8, memory_gb=64, time_limit=3600, **fields)
    return Launch("t0 Train", COMMAND, 4, machine)


def test_a_script_for_slurm_is_bash_with_slurms_options():
    script = slurm_script(launch("--partition=gpu", environment={"A": "b c"}))
    checked = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr
    options = re.findall(r"^#SBATCH --([a-z-]+)=(.+)$", script, re.M)
    assert {name for name, _ in options} <= SBATCH
    assert dict(options) == {
        "job-name": "t0 Train", "output": "t0 Train-%j.log", "cpus-per-task": "8",
        "mem": "64000M", "time": "60", "ntasks": "4", "signal": "TERM@120", "partition": "gpu",
    }  # fmt: skip
    assert "export A='b c'\n" in script
    words = subprocess.run(
        ["bash", "-c", script.replace("srun", "printf '%s\\n'")], capture_output=True, text=True
    ).stdout.splitlines()
    assert words == ["--kill-on-bad-exit=1", "--label", *COMMAND]


TEMPLATE = {
    "metadata": {"labels": {"team": "nlp"}},
    "spec": {"template": {"spec": {"containers": [{"name": "main", "image": "example/t0:1"}]}}},
}


def test_a_job_set_has_the_fields_of_its_schema_and_says_where_the_first_pod_is():
    manifest = job_set(launch(), TEMPLATE)
    # The fields of JobSet v1alpha2 that are used, with their types.
    assert manifest["apiVersion"] == "jobset.x-k8s.io/v1alpha2" and manifest["kind"] == "JobSet"
    assert manifest["metadata"] == {"labels": {"team": "nlp"}, "name": "t0-train"}
    spec = manifest["spec"]
    assert spec.keys() == {"failurePolicy", "network", "replicatedJobs"}
    assert spec["failurePolicy"] == {"maxRestarts": 3}
    assert spec["network"] == {"enableDNSHostnames": True}
    (replicated,) = spec["replicatedJobs"]
    assert replicated.keys() == {"name", "replicas", "template"} and replicated["replicas"] == 1
    job = replicated["template"]["spec"]
    assert (job["completionMode"], job["parallelism"], job["completions"]) == ("Indexed", 4, 4)
    (container,) = job["template"]["spec"]["containers"]
    assert container["command"] == list(COMMAND)
    # <jobset>-<replicated job>-<job>-<pod>.<jobset> is the name that JobSet gives a pod.
    assert container["env"] == [
        {"name": "T0REPRO_COORDINATOR_ADDRESS", "value": "t0-train-processes-0-0.t0-train:8476"},
        {"name": "T0REPRO_PROCESS_COUNT", "value": "4"},
    ]
    client = pytest.importorskip("kubernetes.client")
    read = client.ApiClient().deserialize(json.dumps(job), "V1JobSpec", "application/json")
    assert client.ApiClient().sanitize_for_serialization(read) == job, "no field is unknown"


def test_a_job_set_is_what_its_published_schema_says():
    # Kubeflow's trainer publishes models made from the schema of JobSet.
    models = pytest.importorskip("kubeflow_trainer_api.models")
    manifest = job_set(launch(environment={"A": "b"}), TEMPLATE)
    schema = models.JobsetV1alpha2JobSet
    assert schema.from_dict(manifest).to_dict() == manifest, "no field is unknown"
    manifest["spec"]["replicatedJobs"][0]["replicas"] = "one"
    with pytest.raises(ValueError, match="replicas"):
        schema.from_dict(manifest)


TPU = ("--zone=europe-west4-a", "--accelerator-type=v3-512", "--version=tpu-ubuntu2204-base")


def test_a_tpu_gets_commands_that_create_it_run_on_all_hosts_and_delete_it():
    create, ssh, delete = tpu_vm_commands(launch(*TPU, "--project=p"))
    base = ["gcloud", "compute", "tpus", "tpu-vm"]
    assert create == [*base, "create", "t0 Train", *TPU, "--project=p"]
    assert ssh[:-1] == [*base, "ssh", "t0 Train", TPU[0], "--project=p", "--worker=all"]
    assert ssh[-1].startswith("--command=env T0REPRO_PROCESS_COUNT=auto t0repro train")
    assert delete == [*base, "delete", "t0 Train", TPU[0], "--project=p", "--quiet"]
    with pytest.raises(UserError, match="--version"):
        tpu_vm_commands(launch(*TPU[:2]))


@pytest.mark.slow  # gcloud takes seconds to start
@pytest.mark.skipif(shutil.which("gcloud") is None, reason="gcloud is not here")
def test_gcloud_knows_every_flag():
    for command in tpu_vm_commands(launch(*TPU)):
        done = subprocess.run([*command, "--no-such-flag"], capture_output=True, text=True)
        # It lists all that it does not know; alone, it stands on the same line.
        assert "unrecognized arguments: --no-such-flag" in done.stderr, done.stderr


def test_the_command_submits_what_a_dry_run_prints(tmp_path, monkeypatch):
    received = tmp_path / "received"
    (tmp_path / "sbatch").write_text(f"#!/bin/sh\ncat > {received}\necho 17\n")
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    arguments = ["launch", "--to", "slurm", "--processes", "2", "--option=--partition=gpu"]

    def called(*more):
        return CliRunner().invoke(app, [*arguments, *more, "--", *COMMAND], obj=Settings())

    shown = called("--dry_run")
    assert shown.exit_code == 0 and not received.exists()
    done = called()
    assert done.exit_code == 0 and done.stdout == "17\n"
    assert received.read_text() == shown.stdout and "#SBATCH --ntasks=2" in shown.stdout


@pytest.mark.slow
def test_slurms_script_starts_processes_that_train_together(tmp_path):
    folder, tools = tmp_path / "model", tmp_path / "bin"
    tools.mkdir()
    (tools / "srun").write_text(SRUN.format(python=sys.executable))
    (tools / "srun").chmod(0o755)
    command = (sys.executable, str(MEMBER), json.dumps({"folder": str(folder), "steps": 4}))
    script = slurm_script(Launch("t0", command, 2, Machine(environment={"JAX_PLATFORMS": "cpu"})))
    environment = {
        **os.environ,
        "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}",
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_NTASKS": re.findall(r"--ntasks=(\d+)", script)[0],
    }
    done = subprocess.run(
        ["bash"], input=script, env=environment, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr
    assert "processes: 2, coordinated by 127.0.0.1:" in done.stderr
    assert "devices: 2 x cpu, data 2, model 1" in done.stderr
    assert list_checkpoints(folder) == [2, 4]
