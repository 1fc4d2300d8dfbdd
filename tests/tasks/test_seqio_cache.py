"""Caching: the plan that scripts/cache.sh follows, and the real seqio_cache_tasks."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import seqio
import tensorflow as tf

from t0repro.errors import UserError
from t0repro.storage import lock_folder
from t0repro.tasks.prompt_cache import seqio_plan
from t0repro.tasks.prompt_cache.cache import cache_tasks
from t0repro.tasks.prompt_cache.plan import Request, make_plan

from ..helpers import commands
from ..helpers.own_lines import foreign_lines

ROOT = Path(__file__).resolve().parents[2]
TASK = "demo_synthetic_glue_mrpc_want_to_know_score_eval"


@pytest.fixture(scope="module", autouse=True)
def registered():
    """The demo's tasks and mixtures."""
    import t0repro.tasks.demo  # noqa: F401 - registers


def test_tasks_are_selected_by_mixture_and_by_pattern_once():
    tasks = seqio_plan.choose_tasks(["demo_eval_score_eval"], ["demo_synthetic_imdb_.*", TASK])
    names = [task.name for task in tasks]
    assert len(names) == len(set(names)) == 9 + 3  # imdb's three tasks beside their twins
    assert TASK in names


def test_an_unknown_mixture_or_pattern_is_answered_with_the_nearest_names():
    with pytest.raises(UserError, match="demo_train"):
        seqio_plan.choose_tasks(["demo_trian"], [])
    with pytest.raises(UserError, match="demo_synthetic_ag_news_classify"):
        seqio_plan.choose_tasks([], ["demo_synthetic_ag_news_clasify"])


def test_an_interrupted_cache_is_removed_and_a_complete_one_kept(tmp_path):
    whole, half, absent = seqio_plan.choose_tasks([], ["demo_synthetic_imdb_.*_score_eval"])
    for task in (whole, half):
        (tmp_path / task.name).mkdir()
        (tmp_path / task.name / "train.tfrecord-00000-of-00064").touch()
    (tmp_path / whole.name / "COMPLETED").touch()
    left = seqio_plan.list_uncached([whole, half, absent], tmp_path)
    assert left == [half, absent]
    assert seqio_plan.remove_interrupted(left, tmp_path) == [half.name]
    assert (tmp_path / whole.name).is_dir() and not (tmp_path / half.name).exists()


def test_a_folder_with_other_files_is_not_removed(tmp_path):
    (task,) = seqio_plan.choose_tasks([], [TASK])
    (tmp_path / TASK).mkdir()
    (tmp_path / TASK / "thesis.tex").touch()
    with pytest.raises(UserError, match=r"thesis\.tex"):
        seqio_plan.remove_interrupted([task], tmp_path)
    assert (tmp_path / TASK / "thesis.tex").exists()


def test_tasks_are_spread_evenly_by_splits():
    tasks = seqio_plan.choose_tasks(["demo_train", "demo_eval_score_eval"], [])
    shares = seqio_plan.spread(tasks, 2)
    splits = [sum(len(seqio.TaskRegistry.get(name).splits) for name in share) for share in shares]
    assert sum(splits) == 14 + 9 and abs(splits[0] - splits[1]) <= 1
    assert sorted(name for share in shares for name in share) == sorted(t.name for t in tasks)
    assert seqio_plan.spread(tasks[:1], 2) == [[tasks[0].name]]


def plan(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    module = "t0repro.tasks.prompt_cache.seqio_plan"
    return commands.run(module, *arguments, env={**os.environ, **environment})


def test_missing_rows_end_with_one_message_and_exit_code_2(tmp_path):
    done = plan(
        "--module_import=t0repro.tasks.examples.small",
        "--mixtures=small_train",
        f"--output_cache_dir={tmp_path / 'cache'}",
        T0REPRO_DATA_DIR=str(tmp_path),
        T0REPRO_VOCAB=str(ROOT / "tasks" / "demo" / "sentencepiece.model"),
    )
    assert done.returncode == 2 and done.stdout == ""
    assert "train.jsonl" in done.stderr and "fix:" in done.stderr
    assert "Traceback" not in done.stderr and not (tmp_path / "cache").exists()


def run_script(folder: Path) -> subprocess.CompletedProcess:
    return subprocess.run(
        ["bash", str(ROOT / "scripts" / "cache.sh")],
        capture_output=True,
        text=True,
        # Relative to where it is called, as in scripts/train.sh.
        cwd=folder.parent,
        env={**os.environ, "TASKS": TASK, "CACHE_DIR": folder.name, "PROCESSES": "1"},
    )


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """A cache of one task, made by the command, over an interrupted call's shards."""
    folder = tmp_path_factory.mktemp("cache")
    (folder / TASK).mkdir()
    (folder / TASK / "validation.tfrecord-00000-of-00064").write_bytes(b"half a record")
    done = run_script(folder)
    assert done.returncode == 0, done.stdout + done.stderr
    # The libraries' own lines are in the logs that it names.
    assert "1 task cached in" in done.stdout and foreign_lines(done.stderr) == []
    # What takes seconds is told before it begins.
    importing, reading = (
        done.stderr.index("importing the tasks, with TensorFlow and SeqIO ..."),
        done.stderr.index("reading rows and vocabulary of 1 task once ..."),
    )
    assert 0 == importing < reading < done.stderr.index("1 of 1 task to cache in")
    return folder


def test_cached_examples_equal_those_rendered_on_the_fly(cache, monkeypatch):
    task = seqio.TaskRegistry.get(TASK)
    monkeypatch.setattr(task, "_cache_dir", str(cache / TASK))

    def examples(use_cached: bool):
        dataset = task.get_dataset(None, "validation", use_cached=use_cached, shuffle=False)
        return sorted(
            [(key, np.asarray(value).tolist()) for key, value in sorted(example.items())]
            for example in dataset.as_numpy_iterator()
        )

    cached = examples(True)
    assert cached == examples(False) and len(cached) == 128


def records(folder: Path) -> list[str]:
    """The examples of a cached task's files, as text, sorted."""
    files = [str(path) for path in folder.glob("*.tfrecord-*")]
    return sorted(
        str(tf.train.Example.FromString(record))
        for record in tf.data.TFRecordDataset(files).as_numpy_iterator()
    )


def test_t0repro_cache_writes_what_seqio_cache_tasks_writes(cache, tmp_path):
    request = Request(modules=(), patterns=(TASK,), mixtures=(), folder=str(tmp_path), min_shards=4)
    cache_tasks(request, 1, lambda _: contextlib.nullcontext(lambda _: None), make_plan)
    theirs, ours = cache / TASK, tmp_path / TASK
    names = {path.name for path in theirs.iterdir()}
    assert {path.name for path in ours.iterdir()} == names | {"provenance.json"}
    for name in ("info.validation.json", "stats.validation.json", "COMPLETED"):
        assert (ours / name).read_bytes() == (theirs / name).read_bytes()
    assert records(ours) == records(theirs) and len(records(ours)) == 128


def test_neither_command_caches_into_a_folder_that_the_other_holds(tmp_path):
    with lock_folder(tmp_path, "caching"):
        done = run_script(tmp_path)
    assert done.returncode == 2 and "another run is caching into" in done.stderr

    # The script's lock, as a worker of seqio_cache_tasks inherits it.
    hold = f'exec 9>"{tmp_path}/.t0repro.lock"; flock --nonblock 9; echo held; exec sleep 60'
    with subprocess.Popen(["bash", "-c", hold], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
        with pytest.raises(UserError, match="holds this folder"), lock_folder(tmp_path, "caching"):
            pass
        holder.kill()


def test_a_complete_cache_is_left_alone(cache):
    marker = cache / TASK / "COMPLETED"
    before = marker.stat().st_mtime_ns
    arguments = ("--module_import=t0repro.tasks.demo", f"--tasks={TASK}")
    done = plan(*arguments, f"--output_cache_dir={cache}")
    assert done.returncode == 0 and done.stdout == "" and "0 of 1 task " in done.stderr
    assert marker.stat().st_mtime_ns == before


@pytest.mark.slow  # Beam starts two more processes, each of which imports SeqIO
def test_beams_multi_process_runner_caches_the_same_examples(cache, tmp_path):
    options = "--runner=FnApiRunner,--direct_running_mode=multi_processing,--direct_num_workers=2"
    done = subprocess.run(
        [
            str(Path(sys.executable).with_name("seqio_cache_tasks")),
            "--module_import=t0repro.tasks.demo",
            f"--tasks={TASK}",
            f"--output_cache_dir={tmp_path}",
            "--min_shards=4",
            f"--pipeline_options={options}",
        ],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert records(tmp_path / TASK) == records(cache / TASK)
