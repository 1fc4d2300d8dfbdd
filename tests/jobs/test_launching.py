"""What engines get to start several processes; the script for Slurm really starts them."""

import dataclasses
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from kubeflow_trainer_api.models import JobsetV1alpha2JobSet
from typer.testing import CliRunner

from t0repro.cli.app import app
from t0repro.cli.gate import ErrorHandling
from t0repro.cloud.launchers.gcluster import gcluster_command
from t0repro.cloud.launchers.kubernetes import job_set, read_template
from t0repro.cloud.launchers.launch import Launch
from t0repro.cloud.launchers.machines import Machine, find_machine
from t0repro.cloud.launchers.skypilot import sky_task
from t0repro.cloud.launchers.slurm import slurm_script
from t0repro.cloud.launchers.tpu_vm import tpu_vm_commands
from t0repro.errors import UserError
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
    asked = launch("--partition=gpu", environment={"A": "b c"})
    script = slurm_script(dataclasses.replace(asked, name="t0-train"))
    checked = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr
    options = re.findall(r"^#SBATCH --([a-z-]+)=(.+)$", script, re.M)
    assert {name for name, _ in options} <= SBATCH
    assert dict(options) == {
        "job-name": "t0-train", "output": "t0-train-%j.log", "cpus-per-task": "8",
        "mem": "64000M", "time": "60", "ntasks": "4", "signal": "TERM@120", "partition": "gpu",
    }  # fmt: skip
    assert "export A='b c'\n" in script
    words = subprocess.run(
        ["bash", "-c", script.replace("srun", "printf '%s\\n'")], capture_output=True, text=True
    ).stdout.splitlines()
    assert words == ["--kill-on-bad-exit=1", "--label", *COMMAND]


# What a user may write: everything that a shell, Slurm or Kubernetes reads in its own way.
ODD = """a 'b' "c" \\d `e` $(HOME) $$ #f & ; * ~"""


def test_odd_words_arrive_as_they_are(tmp_path):
    (tmp_path / "srun").write_text('#!/bin/sh\nprintf \'%s\\n\' "$V" "$@"\n')
    (tmp_path / "srun").chmod(0o755)
    machine = Machine(options=[f"--comment={ODD}"], environment={"V": ODD})
    odd = Launch(ODD, ("t0repro", "train", ODD, ""), 2, machine)
    script = slurm_script(odd)
    # sbatch reads double quotes, backslashes and # in a script as a shell does.
    read = [
        shlex.split(line.removeprefix("#SBATCH"), comments=True)
        for line in script.splitlines()
        if line.startswith("#SBATCH")
    ]
    assert read[:2] == [[f"--job-name={ODD}"], [f"--output={ODD}-%j.log"]]
    assert read[-1] == [f"--comment={ODD}"]
    done = subprocess.run(
        ["bash"],
        input=script,
        env={**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"},
        capture_output=True,
        text=True,
    )
    # The script puts this Python's folder first, which has no srun.
    assert done.stdout.split("\n") == [
        *(ODD, "--kill-on-bad-exit=1", "--label", "t0repro", "train", ODD, "", ""),
    ], done.stderr
    (container,) = job_set(odd, TEMPLATE)["spec"]["replicatedJobs"][0]["template"]["spec"][
        "template"
    ]["spec"]["containers"]
    assert [word.replace("$$", "$") for word in container["command"]] == list(odd.command)
    assert container["env"][0] == {"name": "V", "value": ODD.replace("$", "$$")}
    ssh = tpu_vm_commands(Launch("t0", odd.command, 1, Machine(options=list(TPU))))[1]
    assert shlex.split(ssh[-1].removeprefix("--command="))[2:] == list(odd.command)


@pytest.mark.parametrize("name", ["9 Long " + "name " * 20, "-T0.Train_1-", "a" * 63])
def test_a_name_becomes_one_that_job_set_and_tpus_take(name):
    machine = Machine(options=list(TPU))
    label = job_set(Launch(name, COMMAND, 10_000, machine), TEMPLATE)["metadata"]["name"]
    assert re.fullmatch("[a-z]([-a-z0-9]*[a-z0-9])?", label)
    # JobSet checks the longest name of a pod against DNS's limit.
    assert len(f"{label}-processes-0-9999-abcde") <= 63 and len(label) <= 40
    assert tpu_vm_commands(Launch(name, COMMAND, 1, machine))[0][5] == label


GPUS = ["--image=example/t0:1", "--compute-type=h100-80gb-8"]


@pytest.mark.parametrize(
    ("to", "fields", "message"),
    [
        (slurm_script, {"options": ["partition=gpu"]}, "'partition=gpu' cannot be an option"),
        (slurm_script, {"options": ["--comment=a\nb"]}, "cannot be an option"),
        (slurm_script, {"options": ["--comment=a\n"]}, "cannot be an option"),
        (slurm_script, {"options": ["--comment=a\0"]}, "cannot be an option"),
        (slurm_script, {"options": ["--partition="]}, "cannot be an option"),
        (slurm_script, {"environment": {"A-B": "1"}}, "No variable can be called 'A-B'"),
        (tpu_vm_commands, {"options": ["--zone="]}, "without --zone"),
        (gcluster_command, {"options": ["--image=a"]}, "without --compute-type"),
        (gcluster_command, {"options": ["--compute-type=l4-1"]}, "without --image or --base-image"),
        (gcluster_command, {"options": [*GPUS, "--num-slices=2"]}, "the same index"),
        (gcluster_command, {"options": GPUS, "memory_gb": 8}, "no option for a process's proc"),
        (gcluster_command, {"options": GPUS, "environment": {"API_KEY": "a"}}, "API_KEY would be"),
    ],
)
def test_what_an_engine_would_refuse_is_refused_first(to, fields, message):
    with pytest.raises(UserError, match=message):
        to(Launch("t0", COMMAND, 2, Machine(**fields)))


def test_a_name_without_a_letter_is_refused():
    with pytest.raises(UserError, match="no letter"):
        job_set(Launch("***", COMMAND, 2, Machine()), TEMPLATE)


def test_a_template_with_empty_keys_and_its_own_command_is_completed(tmp_path):
    (tmp_path / "job.yaml").write_text(
        "metadata:\nspec: {template: {spec: {containers: [{name: main, image: a, env: ,"
        " resources: , command: [sleep], args: ['3']}]}}}\n"
    )
    manifest = job_set(launch(), read_template(tmp_path / "job.yaml"))
    pod = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    assert pod["containers"][0]["command"] == list(COMMAND)
    assert "args" not in pod["containers"][0]


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


def test_a_job_set_is_what_its_published_schema_says():
    # Kubeflow's trainer publishes models made from the schemas of JobSet and of its Jobs and pods.
    manifest = job_set(launch(environment={"A": "b"}), TEMPLATE)
    assert JobsetV1alpha2JobSet.from_dict(manifest).to_dict() == manifest, "no field is unknown"
    (job,) = manifest["spec"]["replicatedJobs"]
    for part, field, value in [
        (job, "replicas", "one"),
        (job["template"]["spec"], "parallelism", "four"),
        (job["template"]["spec"]["template"]["spec"]["containers"][0], "command", "t0repro"),
    ]:
        right, part[field] = part[field], value
        with pytest.raises(ValueError, match=field):
            JobsetV1alpha2JobSet.from_dict(manifest)
        part[field] = right


def test_a_task_for_skypilot_starts_one_process_a_node_that_knows_the_first():
    task = sky_task(launch(environment={"A": "b c", "API_KEY": "hidden"}))
    assert task == {
        "name": "t0-train",
        "num_nodes": 4,
        "resources": {"cpus": "8+", "memory": "64+"},
        "envs": {"A": "b c"},
        "run": task["run"],
    }
    nodes = {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NUM_NODES": "2"}
    script = task["run"].replace("timeout --kill-after=120 3600", "env; printf '%s\\n'")
    done = subprocess.run(
        ["bash", "-c", script],
        env={**nodes, "SKYPILOT_NODE_RANK": "1", "PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    assert done[-3:] == list(COMMAND)
    assert {
        "T0REPRO_COORDINATOR_ADDRESS=10.0.0.1:8476",
        "T0REPRO_PROCESS_COUNT=2",
        "T0REPRO_PROCESS_INDEX=1",
    } <= set(done)


def test_a_task_for_skypilot_is_what_its_own_schema_says():
    schemas = pytest.importorskip("sky.utils.schemas", reason="needs skypilot")
    jsonschema = pytest.importorskip("jsonschema")
    schema = schemas.get_task_schema()
    for fields in ({}, {"environment": {"A": "b"}}):
        jsonschema.validate(sky_task(launch(**fields)), schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(sky_task(launch()) | {"nodes": 2}, schema)


def test_skypilot_gets_the_task_in_a_file_and_secrets_by_name(tmp_path, monkeypatch):
    received = tmp_path / "received"
    (tmp_path / "sky").write_text(
        f'#!/bin/sh\necho "$@" > {received}\nfor last; do :; done\ncat "$last" >> {received}\n'
    )
    (tmp_path / "sky").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    machines = tmp_path / "machines.yaml"
    machines.write_text("platforms: {sky: {environment: {API_KEY: hidden}}}")
    arguments = ["launch", "--to", "skypilot", "--machines", str(machines), "--platform", "sky"]
    arguments += ["--option=--gpus=H100:8", "--", *COMMAND]
    done = CliRunner().invoke(app, arguments, obj=ErrorHandling())
    assert done.exit_code == 0, done.output
    words, _, task = received.read_text().partition("\n")
    start = "launch --yes --detach-run --gpus=H100:8 --secret=API_KEY /"
    assert words.startswith(start) and words.endswith("/task.yaml")
    assert json.loads(task)["num_nodes"] == 1 and "hidden" not in task


# Of gcluster 1.95.0, the flags of `gcluster job submit` that are used here or in the documentation.
GCLUSTER = {
    "name", "num-nodes", "restarts", "grace-period", "command", "image", "compute-type", "cluster",
    "location", "project", "queue", "num-slices",
}  # fmt: skip


def gcluster(*options, **fields):
    machine = Machine(options=list(options), **fields)
    command = gcluster_command(Launch("t0 Train " + "a" * 40, COMMAND, 4, machine))
    assert command[:3] == ["gcluster", "job", "submit"]
    flags = dict(word.removeprefix("--").split("=", 1) for word in command[3:])
    assert flags.keys() <= GCLUSTER and len(flags["name"]) <= 28
    return flags


def test_gcluster_gets_a_command_that_each_pod_runs_and_that_names_the_first(tmp_path):
    # Kubernetes replaces $$ by $; what it does with $(NAME) does not matter after that.
    flags = gcluster(*GPUS, "--restarts=0", time_limit=3600, environment={"V": ODD})
    (tmp_path / "t0repro").write_text('#!/bin/bash\nprintf \'%s\\n\' "$V" "$@"; env\n')
    (tmp_path / "t0repro").chmod(0o755)
    done = subprocess.run(
        ["/bin/bash", "-c", flags["command"].replace("$$", "$")],
        env={"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    assert done[: len(COMMAND)] == [ODD, *COMMAND[1:]]
    name = flags["name"]
    assert {
        f"T0REPRO_COORDINATOR_ADDRESS={name}-main-job-0-0.{name}:8476",
        "T0REPRO_PROCESS_COUNT=4",
    } <= set(done)
    assert "timeout --kill-after=120 3600 t0repro" in flags["command"]
    assert (flags["num-nodes"], flags["grace-period"]) == ("4", "120s")
    assert flags["restarts"] == "0", "the user's option overrides ours"


@pytest.mark.parametrize("kind", ["v6e-8", "v4-8", "v5litepod-16", "ct5p-hightpu-4t", "tpu7x"])
def test_gcluster_counts_a_tpus_pods_itself(kind):
    flags = gcluster("--image=a", f"--compute-type={kind}", "--num-slices=2")
    assert "num-nodes" not in flags
    assert "T0REPRO_PROCESS_COUNT=auto" in flags["command"]
    assert "COORDINATOR" not in flags["command"]


@pytest.mark.skipif(shutil.which("gcluster") is None, reason="gcluster is not here")
def test_gcluster_knows_every_flag():
    command = gcluster_command(Launch("t0", COMMAND, 4, Machine(options=GPUS)))
    done = subprocess.run([*command, "--no-such-flag"], capture_output=True, text=True)
    # It names the first flag that it does not know.
    assert "unknown flag: --no-such-flag" in done.stderr, done.stderr


TPU = ("--zone=europe-west4-a", "--accelerator-type=v3-512", "--version=tpu-ubuntu2204-base")


def test_a_tpu_gets_commands_that_create_it_run_on_all_hosts_and_delete_it():
    create, ssh, delete = tpu_vm_commands(launch(*TPU, "--project=p"))
    base = ["gcloud", "compute", "tpus", "tpu-vm"]
    assert create == [*base, "create", "t0-train", *TPU, "--project=p"]
    assert ssh[:-1] == [*base, "ssh", "t0-train", TPU[0], "--project=p", "--worker=all"]
    assert ssh[-1].startswith("--command=env T0REPRO_PROCESS_COUNT=auto t0repro train")
    assert delete == [*base, "delete", "t0-train", TPU[0], "--project=p", "--quiet"]
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
        return CliRunner().invoke(app, [*arguments, *more, "--", *COMMAND], obj=ErrorHandling())

    shown = called("--dry_run")
    assert shown.exit_code == 0 and not received.exists()
    done = called()
    assert done.exit_code == 0 and done.stdout == "17\n"
    assert received.read_text() == shown.stdout and "#SBATCH --ntasks=2" in shown.stdout


def test_a_secret_in_the_command_is_not_printed():
    command = ("env", "HF_TOKEN=s3cr3t", "t0repro", "train", "--base_url=https://h/x?sig=s3cr3t")
    for engine, options in (
        ("slurm", ()),
        ("tpu-vm", TPU),
        ("gcluster", ("--compute-type=n2", "--image=i")),
    ):
        arguments = ["launch", "--to", engine, *(f"--option={each}" for each in options)]
        shown = CliRunner().invoke(
            app, [*arguments, "--dry_run", "--", *command], obj=ErrorHandling()
        )
        said = shown.output + str(shown.exception)
        assert "s3cr3t" not in said and "HF_TOKEN=***" in said or "a secret of the command" in said


def test_a_zero_byte_in_the_file_of_machines_is_refused(tmp_path):
    for fields in ('{options: ["--a=\\0"]}', '{environment: {A: "\\0"}}'):
        (tmp_path / "machines.yaml").write_text(f"cells: {{here: {fields}}}")
        with pytest.raises(UserError, match="zero byte"):
            find_machine(tmp_path / "machines.yaml", None, "here")


def test_a_secret_is_not_printed_and_reaches_what_is_started(tmp_path, monkeypatch):
    for tool in ("sbatch", "kubectl"):
        (tmp_path / tool).write_text(f"#!/bin/sh\n(cat; env) > {tmp_path}/received\n")
        (tmp_path / tool).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    (tmp_path / "job.yaml").write_text(json.dumps(TEMPLATE))
    fields = {"environment": {"HF_TOKEN": "s3cr3t", "A": "b"}, "template": "job.yaml"}
    (tmp_path / "machines.yaml").write_text(json.dumps({"cells": {"here": fields}}))
    machine = [f"--machines={tmp_path / 'machines.yaml'}", "--cell=here"]
    for engine in ("slurm", "k8s"):
        arguments = ["launch", "--to", engine, *machine]
        shown = CliRunner().invoke(
            app, [*arguments, "--dry_run", "--", "true"], obj=ErrorHandling()
        )
        assert "HF_TOKEN" in shown.stdout and "s3cr3t" not in shown.stdout
        assert (
            CliRunner().invoke(app, [*arguments, "--", "true"], obj=ErrorHandling()).exit_code == 0
        )
        assert "s3cr3t" in (tmp_path / "received").read_text()
    for required in ("--zone=a", "--accelerator-type=b", "--version=c"):
        machine.append(f"--option={required}")
    refused = CliRunner().invoke(
        app, ["launch", "--to=tpu-vm", *machine, "--", "true"], obj=ErrorHandling()
    )
    assert "HF_TOKEN would be printed" in str(refused.exception)


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
