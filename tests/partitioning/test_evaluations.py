"""Evaluations by several devices or processes have one device's scores and texts."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from t0repro.config.t5x.run import read_eval_run
from t0repro.evaluation.outputs import read_task_scores

from ..cli.test_t5x_run import EVAL_MACROS, TASK, macros, run
from ..evaluation.small_model import save_model
from ..runs.tiny_gin import parsed, save_checkpoint
from .test_processes import free_port

pytestmark = pytest.mark.slow

RANK_EVAL = ("rank-eval", "--mixture=demo_eval_score_eval", "--module-import=t0repro.tasks.demo")
LENGTHS = ("--inputs-length=128", "--targets-length=32", "--limit=3")


def have_devices(count, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", f"--xla_force_host_platform_device_count={count}")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")


# ---- Rank evaluation ----------------------------------------------------------------------------


def rank_evaluated(model, out, processes=1, *arguments, cores=None):
    """What the first of so many processes printed; each may use these cores, by default all."""
    command = [sys.executable, "-P", "-m", "t0repro.cli", *RANK_EVAL, *LENGTHS, *arguments]
    command += [f"--checkpoint={model}", f"--out={out}"]
    if processes > 1:
        command += [f"--coordinator_address=127.0.0.1:{free_port()}"]
        command += [f"--process_count={processes}"]
    own = os.sched_getaffinity(0)
    # Those that are started inherit it. With a preexec_fn Python forks, which JAX warns of.
    os.sched_setaffinity(0, cores or own)
    started = [
        subprocess.Popen(
            command + ([f"--process_index={index}"] if processes > 1 else []),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for index in range(processes)
    ]
    os.sched_setaffinity(0, own)
    printed = [process.communicate()[0] for process in started]
    assert [process.returncode for process in started] == [0] * processes, printed
    return printed[0]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    """A folder with a checkpoint of a small model."""
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def ranked(model_dir, tmp_path_factory):
    """The results of one process with one device."""
    out = tmp_path_factory.mktemp("one")
    with pytest.MonkeyPatch.context() as patch:
        have_devices(1, patch)
        rank_evaluated(model_dir, out)
    return out


def sha256_of(out):
    """The SHA-256 of an evaluation's scores."""
    (facts,) = out.glob("*_eval/provenance.json")
    return json.loads(facts.read_text())["scores_sha256"]


def scores(out):
    (folder,) = out.glob("*_eval")
    return {each.task: each for each in read_task_scores(folder)}


@pytest.mark.parametrize(
    ("devices", "processes", "arguments", "layout"),
    [
        (1, 2, [], "devices: 2 x cpu, data 2, model 1"),
        (8, 1, ["--tokens-per-batch=1"], "devices: 8 x cpu, data 8, model 1"),
        (1, 4, ["--tokens-per-batch=9000"], "devices: 4 x cpu, data 4, model 1"),
        (8, 1, ["--model_parallelism=2"], "devices: 8 x cpu, data 4, model 2"),
    ],
)
def test_a_rank_evaluation_has_one_devices_scores(
    tmp_path,
    monkeypatch,
    model_dir,
    ranked,
    devices,
    processes,
    arguments,
    layout,
):
    have_devices(devices, monkeypatch)
    assert layout in rank_evaluated(model_dir, tmp_path, processes, *arguments)
    # A device that holds only a part of each layer adds up in another order.
    if "model 1" in layout:
        assert sha256_of(tmp_path) == sha256_of(ranked)
    found, one_device = scores(tmp_path), scores(ranked)
    assert found.keys() == one_device.keys()
    for task, one in one_device.items():
        a_token = np.abs(found[task].score - one.score) / one.target_length
        assert a_token.max() <= 1e-4, task


def test_twenty_batch_sizes_and_orders_of_tasks_processes_devices_and_cores_have_one_hash(
    tmp_path, monkeypatch, model_dir, ranked
):
    random, found = np.random.default_rng(57), set()
    tasks = sorted(scores(ranked))
    for number in range(20):
        out, groups = tmp_path / str(number), random.permutation(tasks)
        devices, processes = random.choice([(1, 1), (2, 1), (8, 1), (1, 2), (1, 4), (4, 2)])
        have_devices(devices, monkeypatch)
        tokens = int(2 ** random.uniform(0, 14))
        cores = random.choice([None, {min(os.sched_getaffinity(0))}])
        # Some tasks first, in any order; the last command finds their scores and adds the others.
        for task in groups[: random.integers(3)]:
            partly = [f"--mixture={task}", f"--tokens-per-batch={tokens}", "--force"]
            rank_evaluated(model_dir, out, processes, *partly, cores=cores)
        whole = [f"--tokens-per-batch={tokens}", "--force"]
        rank_evaluated(model_dir, out, processes, *whole, cores=cores)
        found.add(sha256_of(out))
    assert found == {sha256_of(ranked)}


# ---- T5X's modes --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A checkpoint of T5X's tiny model."""
    plan = read_eval_run(parsed("eval", "eval", *[f"{name} = 'x'" for name in EVAL_MACROS]))
    return save_checkpoint(tmp_path_factory.mktemp("model"), plan, 3)


T5X_LENGTHS = "--gin.TASK_FEATURE_LENGTHS={'inputs': 96, 'targets': 6}"


@pytest.mark.parametrize("mode", ["score", "predict"])
def test_infer_writes_one_devices_scores_and_texts(tmp_path, monkeypatch, checkpoint, mode):
    lines = {}
    for devices in (1, 8):
        have_devices(devices, monkeypatch)
        out = tmp_path / str(devices)
        code, _, said = run(
            "infer",
            *[each for each in macros(checkpoint, "") if "EVAL_OUTPUT" not in each],
            f"--gin.INFER_OUTPUT_DIR='{out}'",
            T5X_LENGTHS,
            f"--gin.infer.mode='{mode}'",
        )
        assert code == 0 and (devices == 1 or "devices: 8 x cpu" in said), said
        (written,) = out.glob(f"{TASK}-{mode}.jsonl*00000-of-00001")
        lines[devices] = [json.loads(line) for line in written.read_text().splitlines()]
    one, eight = lines[1], lines[8]
    assert len(one) == len(eight) > 0
    for first, other in zip(one, eight, strict=True):
        if mode == "predict":
            assert first == other
        else:
            # Six tokens at most.
            assert other.pop("score") == pytest.approx(first.pop("score"), abs=1e-4)
            assert first == other


def test_eval_has_one_devices_metrics(tmp_path, monkeypatch, checkpoint):
    metrics = {}
    for devices in (1, 8):
        have_devices(devices, monkeypatch)
        out = tmp_path / str(devices)
        arguments = [*macros(checkpoint, out), "--gin.seqio.Evaluator.num_examples=6"]
        code, _, said = run("eval", *arguments)
        assert code == 0 and (devices == 1 or "devices: 8 x cpu" in said), said
        text = (out / "inference_eval" / f"{TASK}-metrics.jsonl").read_text()
        metrics[devices] = json.loads(text)
    assert metrics[8] == pytest.approx(metrics[1], abs=1e-6)
