"""The prompt cache: rebuilt byte for byte, killed and resumed, and what it says of mistakes."""

import functools
import json
import os
import pickle
import random
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import seqio

from t0repro.data import checks
from t0repro.errors import UserError
from t0repro.tasks import registry
from t0repro.tasks.availability import drop_missing_tasks
from t0repro.tasks.prompt_cache import shards
from t0repro.tasks.prompt_cache.cache import _workers, cache_tasks
from t0repro.tasks.prompt_cache.folders import (
    MARKER,
    STAGING,
    lock_cache,
    put_in_place,
    read_skipped,
)
from t0repro.tasks.prompt_cache.plan import make_plan
from t0repro.tasks.registration import add_mixture, add_prompted_task
from t0repro.tasks.registry import select_tasks, tasks_of_mixture
from t0repro.tasks.showing import show_task

from .prompt_caches import files, make, request, silent

ROOT = Path(__file__).resolve().parents[2]
DEMO = ("demo_synthetic_glue_*", "demo_synthetic_openbookqa_*", "demo_synthetic_imdb_*")


@pytest.fixture(scope="module", autouse=True)
def registered():
    """The demo's tasks."""
    import t0repro.tasks.demo  # noqa: F401 - registers


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A cache of some of the demo's tasks, and its files."""
    folder = tmp_path_factory.mktemp("whole")
    make(folder, *DEMO)
    return folder, files(folder)


def rte(root: Path, name: str, splits=("validation",), **row) -> Path:
    """Registers a task of a file of rows like RTE's; returns the file."""
    folder = root / "super_glue" / "rte"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "validation.jsonl"
    example = {"premise": "It rained.", "hypothesis": "It was wet.", "label": 0, "idx": 0} | row
    path.write_text("".join(json.dumps(example | {"idx": i}) + "\n" for i in range(40)))
    vocabulary = seqio.SentencePieceVocabulary(
        str(ROOT / "tasks" / "demo" / "sentencepiece.model"), 100
    )
    add_prompted_task(
        "super_glue", "rte", "GPT-3 style", splits,
        root=root, vocabulary=vocabulary, name=name,
    )  # fmt: skip
    return path


# The same bytes ----------------------------------------------------------------------------------


@pytest.mark.always
def test_a_cache_made_twice_is_the_same_byte_for_byte_whatever_the_workers(whole, tmp_path):
    make(tmp_path, *DEMO, workers=3)
    assert files(tmp_path) == whole[1]


def test_draws_are_decided_by_the_seed(tmp_path, monkeypatch):
    folder = tmp_path / "rows" / "sciq" / "default"
    folder.mkdir(parents=True)
    row = {f"distractor{number}": f"wrong {number}" for number in (1, 2, 3)}
    row |= {"correct_answer": "right", "question": "Which?", "support": ""}
    (folder / "train.jsonl").write_text((json.dumps(row) + "\n") * 60)
    add_prompted_task(
        "sciq", None, "Multiple Choice (Closed Book)", ("train",),
        root=tmp_path / "rows", name="draws_sciq",
        vocabulary=seqio.TaskRegistry.get("demo_synthetic_imdb_Reviewer_Sentiment_Feeling")
        .output_features["inputs"].vocabulary,
    )  # fmt: skip
    made = []
    for index, seed in enumerate((0, 0, 7)):
        make(tmp_path / str(index), "draws_sciq", seed=seed)
        made.append(files(tmp_path / str(index) / "draws_sciq"))
    assert made[0] == made[1]

    def inputs(index):
        task = seqio.TaskRegistry.get("draws_sciq")
        monkeypatch.setattr(task, "_cache_dir", str(tmp_path / str(index) / "draws_sciq"))
        dataset = task.get_dataset(None, "train", use_cached=True, shuffle=False)
        return sorted(each["inputs_pretokenized"] for each in dataset.as_numpy_iterator())

    assert len(set(inputs(0))) > 10 and inputs(0) != inputs(2)


def test_shards_are_shuffled_and_together_hold_every_row_once():
    orders = [shards.shard_order(1000, shard, 7, "seed/task/train").tolist() for shard in range(7)]
    assert sorted(place for order in orders for place in order) == list(range(1000))
    assert all(order != sorted(order) for order in orders)
    assert shards.number_of_shards(10, 16) == 16
    assert shards.number_of_shards(1_000_000, 16) == 62


# What is there already -------------------------------------------------------------------------


def test_a_finished_task_is_never_done_again(whole, tmp_path):
    folder, before = whole
    stamps = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    summary = make(folder, *DEMO)
    assert summary.cached == [] and summary.selected > 5
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()} == {
        path: stamp for path, stamp in stamps.items() if path.is_file()
    }


def test_splits_can_be_added_to_a_finished_task(tmp_path):
    path = rte(tmp_path / "rows", "two_splits_rte", splits=("train", "validation"))
    path.with_name("train.jsonl").write_text(path.read_text() * 2)
    make(tmp_path / "one", "two_splits_rte")
    for split in ("validation", "train"):
        make(tmp_path / "two", "two_splits_rte", splits=(split,))
    assert files(tmp_path / "one") == files(tmp_path / "two")


def test_a_cache_with_another_seed_is_not_taken_for_this_one(whole):
    with pytest.raises(UserError, match="another seed"):
        make(whole[0], *DEMO, seed=3)


def test_a_twin_numbers_only_the_rows_that_its_template_keeps(tmp_path, monkeypatch):
    template = "{% if idx % 3 %}{{premise}} ||| {{answer_choices[label]}}{% endif %}"
    plan, asked = plan_of(tmp_path, "numbers_rte", jinja=template)
    cache_tasks(asked, 1, silent, lambda _: plan)
    task = seqio.TaskRegistry.get("numbers_rte_score_eval")
    monkeypatch.setattr(task, "_cache_dir", str(tmp_path / "cache" / task.name))
    dataset = task.get_dataset(None, "validation", use_cached=True, shuffle=False)
    found = sorted(tuple(example["idx"].tolist()) for example in dataset.as_numpy_iterator())
    kept = sum(1 for index in range(40) if index % 3)
    assert found == [(index, choice) for index in range(kept) for choice in range(2)]
    provenance = json.loads((tmp_path / "cache" / task.name / "provenance.json").read_text())
    (dropped,) = provenance["splits"]["validation"]["dropped"].items()
    assert "one input and one target" in dropped[0]
    assert dropped[1]["rows"] == 14 and dropped[1]["first"][:3] == [0, 3, 6]
    assert provenance["splits"]["validation"]["rows"] == 40


def plan_of(tmp_path, name, jinja):
    """The plan of an RTE task with another prompt."""
    import dataclasses

    rte(tmp_path / "rows", name)
    asked = request(tmp_path / "cache", f"{name}*")
    plan = make_plan(asked)
    prompts = tuple(
        dataclasses.replace(prompt, template=dataclasses.replace(prompt.template, jinja=jinja))
        for prompt in plan.prompts
    )
    return dataclasses.replace(plan, prompts=prompts), asked


# Interrupted -------------------------------------------------------------------------------------


def start(tmp_path: Path, folder: Path, workers: int = 2) -> subprocess.Popen:
    """Starts a run in a process group of its own, and waits until it works."""
    asked = request(folder, *DEMO)
    plan = tmp_path / "plan.pickle"
    plan.write_bytes(pickle.dumps((make_plan(asked), asked)))
    process = subprocess.Popen(
        [sys.executable, "-P", str(Path(__file__).with_name("run_plan.py")), plan, str(workers)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None and process.stdout.readline() == "planned\n"
    return process


def test_a_run_killed_at_any_moment_leaves_nothing_half_and_is_resumed(whole, tmp_path):
    begun = time.monotonic()
    process = start(tmp_path, tmp_path / "whole")
    assert process.wait() == 0, process.stderr and process.stderr.read()
    length = time.monotonic() - begun
    process.communicate()
    resumed = tmp_path / "resumed"
    seen = set()
    for moment in (0.3, 0.5, 0.6, 0.7, 0.8, 0.9):
        process = start(tmp_path, resumed)
        time.sleep(moment * length * 0.9)
        process.kill()  # the workers end with it
        process.communicate(timeout=20)
        tasks = [path for path in resumed.glob("*") if path.is_dir() and path.name != STAGING]
        seen.add(len(tasks))
        for task in tasks:
            assert (task / MARKER).is_file()
            for path in task.iterdir():
                assert path.read_bytes() == whole[1][f"{task.name}/{path.name}"]
    make(resumed, *DEMO)
    assert files(resumed) == whole[1]
    assert not (resumed / STAGING).exists()


def test_what_seqio_left_unfinished_is_made_anew(tmp_path):
    (tmp_path / "demo_synthetic_imdb_Reviewer_Sentiment_Feeling").mkdir()
    stray = (
        tmp_path
        / "demo_synthetic_imdb_Reviewer_Sentiment_Feeling"
        / "train.tfrecord-00000-of-00064"
    )
    stray.write_bytes(b"half a record")
    make(tmp_path, "demo_synthetic_imdb_Reviewer_Sentiment_Feeling")
    assert not stray.exists() and (stray.parent / MARKER).is_file()


def test_two_runs_on_one_folder_at_once_end_with_one_clear_error(tmp_path):
    with (
        lock_cache(tmp_path / "cache"),
        pytest.raises(UserError, match=rf"Another run .* caching \(process {os.getpid()} "),
    ):
        make(tmp_path / "cache", *DEMO)
    assert make(tmp_path / "cache", "demo_synthetic_imdb_Reviewer_Sentiment_Feeling").cached


def test_who_is_refused_leaves_the_holders_staging_alone(tmp_path):
    with lock_cache(tmp_path) as staging:
        (staging / "rows").touch()
        with pytest.raises(UserError, match="Another run"):
            make(tmp_path, *DEMO)
        assert (staging / "rows").exists()
    assert not staging.exists()


def check_race(tmp_path: Path, whole: dict[str, bytes], delays: list[float]) -> None:
    """Starts pairs of runs on one folder, so many seconds apart; every whole task is whole."""
    refused = 0
    for number, delay in enumerate(delays):
        folder = tmp_path / f"race-{number}"
        processes = [start(tmp_path, folder, workers=1)]
        time.sleep(delay)
        processes.append(start(tmp_path, folder, workers=1))
        for process in processes:
            _, error = process.communicate(timeout=120)
            assert process.returncode in (0, 2), error
            if process.returncode:
                assert "Another run holds this folder for caching" in error
                refused += 1
        assert files(folder) == whole, delay
        assert not (folder / STAGING).exists()
    assert refused


def test_two_processes_on_one_folder_leave_one_whole_cache(whole, tmp_path):
    check_race(tmp_path, whole[1], [0.0, 0.2, 0.9])


@pytest.mark.slow
@pytest.mark.hardlife
def test_two_processes_on_one_folder_leave_one_whole_cache_whenever_they_start(whole, tmp_path):
    draw = random.Random(13)
    check_race(tmp_path, whole[1], [draw.uniform(0, 2.5) for _ in range(40)])


def test_a_task_is_not_put_in_place_without_its_shards(tmp_path):
    make(tmp_path / "made", "demo_synthetic_imdb_Reviewer_Sentiment_Feeling")
    (task,) = (path for path in (tmp_path / "made").iterdir() if path.is_dir())
    (task / "validation.tfrecord-00003-of-00016").unlink()
    with pytest.raises(UserError, match="shards of split 'validation' are gone"):
        put_in_place(task, tmp_path / "cache" / task.name, ["validation"])
    assert not (tmp_path / "cache").exists()


def test_an_interrupted_run_ends_its_workers(tmp_path):
    process = start(tmp_path, tmp_path / "cache")
    time.sleep(0.4)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=20)  # ends when the last worker has closed the pipe
    with lock_cache(tmp_path / "cache") as staging:
        time.sleep(0.3)
        assert list(staging.iterdir()) == []


# No space ----------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 3 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(folder)]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("mounting a tmpfs is not permitted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def check_full(process: subprocess.Popen, folder: Path, whole: dict[str, bytes]) -> None:
    _, error = process.communicate()
    assert process.returncode == 2, error
    assert "disk is full" in error and "Traceback" not in error
    assert not (folder / STAGING).exists()
    for task in (path for path in folder.iterdir() if path.is_dir()):
        assert (task / MARKER).is_file()
        for path in task.iterdir():
            assert path.read_bytes() == whole[f"{task.name}/{path.name}"]


def test_a_full_disk_is_said_and_nothing_half_is_left(whole, tmp_path, small_disk):
    folder = small_disk / "cache"
    check_full(start(tmp_path, folder), folder, whole[1])


def test_a_file_size_limit_is_said_and_nothing_half_is_left(whole, tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    asked = request(tmp_path / "cache", *DEMO)
    plan = make_plan(asked)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
        with pytest.raises(UserError, match="disk is full"):
            cache_tasks(asked, 1, silent, lambda _: plan)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not (tmp_path / "cache" / STAGING).exists()


# Bad input ---------------------------------------------------------------------------------------


def test_a_template_that_is_not_jinja_is_named_with_its_task(tmp_path):
    plan, asked = plan_of(tmp_path, "broken_rte", jinja="{{premise} ||| {{answer_choices[label]}}")
    with pytest.raises(UserError, match=r"'GPT-3 style' is not valid Jinja") as caught:
        cache_tasks(asked, 1, silent, lambda _: plan)
    assert "broken_rte" in str(caught.value)
    assert files(tmp_path / "cache") == {}


def test_a_template_that_fails_on_a_row_is_named_with_task_and_row(tmp_path):
    template = "{% if idx == 11 %}{{ idx.nothing.at_all }}{% endif %}{{premise}} ||| no"
    plan, asked = plan_of(tmp_path, "fails_rte", jinja=template)
    with pytest.raises(UserError, match="nothing") as caught:
        cache_tasks(asked, 1, silent, lambda _: plan)
    assert "GPT-3 style" in str(caught.value) and "fails_rte" in str(caught.value)
    assert "validation.jsonl, line 12" in str(caught.value)


def test_a_folder_in_which_seqio_would_not_find_the_cache_is_refused(tmp_path):
    with pytest.raises(UserError, match="Caches cannot be written where .* brackets") as caught:
        make(tmp_path / "cache[1]", *DEMO)
    assert caught.value.where == str(tmp_path / "cache[1]") and not list(tmp_path.iterdir())


def test_a_cut_line_is_named_by_file_and_number(tmp_path):
    path = rte(tmp_path / "rows", "cut_rte")
    path.write_text(path.read_text()[:-20])
    with pytest.raises(UserError, match="not a row in JSON") as caught:
        make(tmp_path / "cache", "cut_rte*")
    assert str(caught.value.where) == f"{path}, line 40"
    assert files(tmp_path / "cache") == {}


@pytest.mark.parametrize(("column", "value"), [("premise", None), ("label", 5), ("label", "maybe")])
def test_a_row_that_does_not_fit_its_schema_is_named(tmp_path, column, value):
    path = rte(tmp_path / "rows", f"unfit_{column}_{value}", **{column: value})
    with pytest.raises(UserError, match=column) as caught:
        make(tmp_path / "cache", f"unfit_{column}_{value}*")
    assert str(path) in str(caught.value.where) and "line 1" in str(caught.value.where)


def test_missing_rows_stop_the_run_unless_only_those_at_hand_are_wanted(tmp_path):
    path = rte(tmp_path / "rows", "away_rte")
    rte(tmp_path / "other", "here_rte")
    path.unlink()
    with pytest.raises(UserError, match=r"validation.* missing") as caught:
        make(tmp_path / "cache", "away_rte", "here_rte")
    assert "--skip_missing" in str(caught.value)
    summary = make(tmp_path / "cache", "away_rte", "here_rte", skip_missing=True)
    assert summary.cached == ["here_rte"]
    assert [entry[:2] for entry in summary.left_out] == [("away_rte", "validation")]


def test_a_split_that_nobody_trains_on_or_ranks_does_not_stop_the_run(tmp_path):
    path = rte(tmp_path / "rows", "untested_rte", ("train", "validation", "test"))
    with pytest.raises(UserError, match="rows of 1 split are missing: super_glue/rte train"):
        make(tmp_path / "cache", "untested_rte*")
    path.with_name("train.jsonl").write_bytes(path.read_bytes())
    summary = make(tmp_path / "cache", "untested_rte*")
    assert len(summary.cached) == 2 and {split for _, split, _ in summary.left_out} == {"test"}
    assert not summary.skipped and not (tmp_path / "cache" / "skipped.json").exists()
    with pytest.raises(UserError, match="super_glue/rte test"):  # asked for by its name
        make(tmp_path / "cache", "untested_rte", splits=("test",))


def test_a_cache_remembers_what_was_skipped_until_it_has_it(tmp_path, monkeypatch):
    path = rte(tmp_path / "rows", "skips_rte", ("train", "validation"))
    rte(tmp_path / "other", "whole_rte", ("train", "validation"))
    train = tmp_path / "other" / "super_glue" / "rte" / "train.jsonl"
    train.write_bytes(path.read_bytes())
    summary = make(tmp_path / "cache", "skips_rte", "whole_rte", skip_missing=True)
    assert summary.skipped == ["skips_rte"]
    assert read_skipped(tmp_path / "cache")["skips_rte"].keys() == {"train"}
    add_mixture("skips_mixture", {"skips_rte": 3.0, "whole_rte": 4.0})
    for name in ("skips_rte", "whole_rte"):
        task = seqio.TaskRegistry.get(name)
        monkeypatch.setattr(task, "_cache_dir", str(tmp_path / "cache" / name))
    monkeypatch.setattr(checks, "cache_dirs", lambda: [str(tmp_path / "cache")])
    with pytest.raises(UserError, match=r"skips_rte(.|\n)*made with --skip_missing: give it here"):
        checks.check_readable("skips_mixture", "train", use_cached=True)
    drop_missing_tasks("skips_mixture", "train", use_cached=True)
    checks.check_readable("skips_mixture", "train", use_cached=True)
    assert [task.name for task in seqio.MixtureRegistry.get("skips_mixture").tasks] == ["whole_rte"]
    path.with_name("train.jsonl").write_bytes(path.read_bytes())
    make(tmp_path / "cache", "skips_rte")
    assert read_skipped(tmp_path / "cache") == {}


def test_a_name_of_the_demo_is_answered_with_its_module_until_that_is_imported(monkeypatch):
    show = functools.partial(show_task, split=None, rows=1)
    for name in ("demo_trian", "synthetic_imbd"):
        monkeypatch.setattr(registry, "DEMO_MODULE", "t0repro.not_imported")
        for ask in (tasks_of_mixture, lambda name: select_tasks(dataset=name), show):
            with pytest.raises(UserError, match="--module_import t0repro.not_imported"):
                ask(name)
        monkeypatch.undo()
        with pytest.raises(UserError, match="Nearest: (?!.*not_imported)"):
            select_tasks(dataset=name)


def test_a_subsets_name_alone_is_answered_with_its_dataset_in_the_mixture():
    with pytest.raises(UserError, match="Nearest: 'synthetic_glue/mrpc'[.]"):
        select_tasks("demo_eval_score_eval", "mrpc")


def test_a_datasets_name_in_place_of_a_mixture_is_answered_with_its_tasks():
    with pytest.raises(UserError) as error:
        tasks_of_mixture("synthetic_imdb")
    assert error.value.fix and "no mixture, but tasks 'demo_synthetic_imdb_" in error.value.fix


def test_a_task_in_place_of_a_mixture_and_the_reverse_are_answered_with_the_option(tmp_path):
    task = "demo_synthetic_imdb_Reviewer_Sentiment_Feeling"
    with pytest.raises(UserError, match=f"{task!r} is a task, not a mixture") as error:
        tasks_of_mixture(task)
    assert error.value.fix and f"--tasks {task}" in error.value.fix
    with pytest.raises(UserError, match="'demo_train' is a mixture, not a task") as error:
        make(tmp_path / "cache", "demo_train")
    assert error.value.fix == "Give it as --mixture demo_train."
    with pytest.raises(UserError, match="'demo_train' is a mixture, not a task") as error:
        show_task("demo_train", None, 1)
    assert error.value.fix and "tasks ls --mixture demo_train" in error.value.fix


def test_unknown_names_are_answered_with_the_nearest(tmp_path):
    with pytest.raises(UserError, match="demo_synthetic_imdb_Reviewer_Sentiment_Feeling"):
        make(tmp_path, "demo_synthetic_imdb_Reviewer_Sentiment_Feelin")
    with pytest.raises(UserError, match=r"not \.\*"):
        make(tmp_path, "demo_synthetic_imdb_.*")
    with pytest.raises(UserError, match="demo_train"):
        make(tmp_path, mixtures=("demo_trian",))


def test_a_split_that_no_task_has_is_refused_before_anything_is_written(tmp_path):
    task = "demo_synthetic_imdb_Reviewer_Sentiment_Feeling"
    with pytest.raises(UserError, match=r"'validatoin'(.|\n)*Their splits: validation\."):
        make(tmp_path / "cache", task, splits=("validation", "validatoin"))
    assert files(tmp_path / "cache") == {}


def test_a_folder_with_other_files_is_not_touched(tmp_path):
    (tmp_path / "demo_synthetic_imdb_Reviewer_Sentiment_Feeling").mkdir()
    (tmp_path / "demo_synthetic_imdb_Reviewer_Sentiment_Feeling" / "thesis.tex").touch()
    with pytest.raises(UserError, match=r"thesis\.tex"):
        make(tmp_path, "demo_synthetic_imdb_Reviewer_Sentiment_Feeling")
    assert (tmp_path / "demo_synthetic_imdb_Reviewer_Sentiment_Feeling" / "thesis.tex").exists()


def test_workers_start_with_ctrl_c_blocked_which_would_end_their_imports():
    with _workers(2) as pool:
        states = [Path(f"/proc/{number}/status").read_text() for number in pool._processes]
    blocked = [int(re.search(r"SigBlk:\s*(\w+)", state)[1], 16) for state in states]
    assert len(blocked) == 2 and all(each >> (signal.SIGINT - 1) & 1 for each in blocked)
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
