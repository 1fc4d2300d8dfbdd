"""The part of a mixture that is available: rates kept, what is missing named."""

import dataclasses
import sys

import pytest
import seqio

from t0repro.cli.bodies.registration import drop_missing
from t0repro.config.data import SeqioDataConfig
from t0repro.errors import UserError
from t0repro.progress import heard_by
from t0repro.tasks.availability import drop_missing_splits, drop_missing_tasks
from t0repro.tasks.demo.datasets import FOLDER
from t0repro.tasks.registration import add_mixture, add_prompted_task
from t0repro.tasks.registry import (
    PromptedMixture,
    find_tasks,
    prompted_mixtures,
    record_mixture,
    record_task,
    task_descriptions,
)


def task(name: str, root, dataset: str = "synthetic_imdb") -> str:
    template = "Reviewer Sentiment Feeling"
    add_prompted_task(dataset, None, template, ["validation"], root=root, name=name)
    return name


@pytest.fixture
def mixture(tmp_path, request):
    """A mixture of two tasks whose rows are here and one whose rows are not."""
    prefix = f"{request.node.name}_"
    here, also = task(f"{prefix}here", FOLDER), task(f"{prefix}also", FOLDER)
    away = task(f"{prefix}away", tmp_path)
    add_mixture(f"{prefix}mixture", {here: 3.0, away: 100.0, also: 7.0})
    return f"{prefix}mixture", here, also, away


def rates(name: str) -> dict[str, float]:
    found = seqio.MixtureRegistry.get(name)
    return {task.name: found.get_rate(task) for task in found.tasks}


def test_what_is_missing_is_taken_out_and_named_and_rates_are_kept(mixture):
    name, here, also, away = mixture
    said = []
    with heard_by(said.append):
        drop_missing_tasks(name, "validation", use_cached=False)
    assert rates(name) == {here: 3.0, also: 7.0}
    assert said == [
        f"{name}: 2 of 3 tasks, with the rates that they have in the full mixture."
        f" Left out: {away} (rows not available)"
    ]


def test_rates_that_count_rows_are_those_of_what_is_kept(tmp_path):
    here, away = task("counts_here", FOLDER), task("counts_away", tmp_path)
    add_mixture("counts", [here, away], lambda rows: rows.num_input_examples("validation"))
    drop_missing_tasks("counts", "validation", use_cached=False)
    assert rates("counts") == {here: 64}


def test_of_cached_tasks_those_that_are_cached_are_kept(mixture, tmp_path, monkeypatch):
    name, here, also, away = mixture
    monkeypatch.setattr(seqio.TaskRegistry.get(also), "_cache_dir", str(tmp_path))
    said = []
    with heard_by(said.append):
        drop_missing_tasks(name, "validation", use_cached=True)
    assert rates(name) == {also: 7.0} and f"{here} (not cached)" in said[0]


def test_a_mixture_that_seqio_does_not_have_keeps_its_cached_tasks(tmp_path, monkeypatch):
    described = task_descriptions()[task("described_available", FOLDER)]
    for name in ("described_one", "described_two"):
        prompt = dataclasses.replace(described.prompt, name=name)
        record_task(dataclasses.replace(described, prompt=prompt))
    names = ("described_one", "described_two")
    record_mixture(PromptedMixture("described", names, {names[0]: 3.0, names[1]: 7.0}, None))
    (tmp_path / "described_two").mkdir()
    (tmp_path / "described_two" / "COMPLETED").touch()
    monkeypatch.setattr("t0repro.tasks.registry.cache_dirs", lambda: [str(tmp_path)])
    said = []
    with heard_by(said.append):
        drop_missing_tasks("described", "validation", use_cached=True)
    assert [task.name for task in find_tasks("described")] == ["described_two"]
    assert prompted_mixtures()["described"].rate("described_two") == 7.0
    assert "Left out: described_one (not cached)" in said[0]


def test_a_whole_mixture_is_left_as_it_is(tmp_path):
    here = task("whole_here", FOLDER)
    add_mixture("whole_mixture", {here: 2.0})
    before = seqio.MixtureRegistry.get("whole_mixture")
    with heard_by(pytest.fail):
        drop_missing_tasks("whole_mixture", "validation", use_cached=False)
    assert seqio.MixtureRegistry.get("whole_mixture") is before


def test_nothing_at_hand_is_an_error(tmp_path):
    away = task("nothing_away", tmp_path)
    add_mixture("nothing", {away: 2.0})
    with heard_by(pytest.fail), pytest.raises(UserError, match="'nothing' is available"):
        drop_missing_tasks("nothing", "validation", use_cached=False)


def test_a_split_that_is_only_evaluated_is_dropped_and_its_task_is_not(mixture, monkeypatch):
    name, here, also, away = mixture
    record_mixture(PromptedMixture(name, (here, also, away), {}, None))
    for has_seqio in (True, False):
        if not has_seqio:
            monkeypatch.delitem(sys.modules, "seqio")
        said = []
        with heard_by(said.append):
            for each in (name, name, "no_such_mixture"):
                drop_missing_splits(each, "validation", use_cached=False)
        assert said == [f"{name}: split 'validation' is left out of {away} (rows not available)"]
        having = [task.name for task in find_tasks(name) if "validation" in task.splits]
        assert sorted(having) == sorted([here, also])
        assert len(find_tasks(name)) == 3


def test_an_evaluation_takes_no_split_from_what_is_trained_on(mixture, monkeypatch):
    name, here, also, away = mixture
    record_mixture(PromptedMixture(name, (here, also, away), {}, None))
    for has_seqio in (True, False):
        if not has_seqio:
            monkeypatch.delitem(sys.modules, "seqio")
        # Not cached, but trained on from their rows; a described task shares them with its twin.
        for evaluated in (name, f"{here}_score_eval")[: 1 if has_seqio else 2]:
            with heard_by(pytest.fail):
                drop_missing_splits(evaluated, "validation", use_cached=True, kept=name)
        assert all("validation" in task.splits for task in find_tasks(name))
        drop_missing_splits(name, "validation", use_cached=True, kept=away)
        having = [task.name for task in find_tasks(name) if "validation" in task.splits]
        assert having == [away]


def test_an_evaluation_of_another_mixture_leaves_out_what_is_not_cached(
    mixture, tmp_path, monkeypatch
):
    name, here, also, away = mixture
    plain = f"{name}_plain"
    seqio.TaskRegistry.add(
        plain,
        seqio.FunctionDataSource(lambda split, shuffle_files: None, splits=["validation"]),
        preprocessors=[seqio.CacheDatasetPlaceholder()],
        output_features=seqio.TaskRegistry.get(here).output_features,
    )
    for each, tasks in {"trained": [here, plain], "evaluated": [here, also, away, plain]}.items():
        seqio.MixtureRegistry.add(f"{name}_{each}", tasks, default_rate=1.0)
    monkeypatch.setattr(seqio.TaskRegistry.get(also), "_cache_dir", str(tmp_path))
    datasets = [
        SeqioDataConfig(f"{name}_{each}", None, "validation", 1, False, 0, cached)
        for each, cached in (("trained", False), ("trained", True), ("evaluated", True))
    ]
    said: list[str] = []
    with heard_by(said.append):
        drop_missing(datasets)
    # What is trained on stays as it is.
    assert set(rates(f"{name}_trained")) == {here, plain}
    assert all("validation" in task.splits for task in find_tasks(f"{name}_trained"))
    assert len(said) == 2 and away in said[0] and plain in said[1]
    assert set(rates(f"{name}_evaluated")) == {also, away}
