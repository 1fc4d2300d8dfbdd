"""T0's tasks and mixtures, against a table that was counted without this package."""

import functools
import importlib
import json
from collections import Counter
from pathlib import Path

import pytest
import seqio
from t5.data import glue_utils
from t5.evaluation import metrics

from t0repro.tasks import prompted_tasks
from t0repro.tasks.catalog import catalog, features_of, rounds_of, t0_datasets
from t0repro.tasks.metrics import metric_names
from t0repro.tasks.registry import prompted_mixtures
from t0repro.tasks.schema import columns_of_dataset
from t0repro.tasks.templates import task_name, template_names

TABLE = json.loads((Path(__file__).parent / "t0_mixtures.json").read_text())
MIXTURES = list(TABLE["mixtures"].values())
# Tasks and dataset configurations of each, ANLI counted once: T0's paper and threads.
SIZES = {
    "t0_train": (313, 38),
    "t0+_train": (392, 48),
    "t0++_train": (464, 54),
    "t0_eval_score_eval": (116, 9),
    "t0_train_score_eval": (87, 13),
    "t0_train_one_og_prompt": (35, 35),
    "t0_train_all_og_prompts": (222, 35),
    "bias_fairness_eval_score_eval": (16, 2),
}


@pytest.fixture(scope="module", autouse=True)
def t0():
    """T0's tasks, registered."""
    return importlib.import_module("t0repro.tasks.t0")


def expected_tasks(mixture):
    """Names of the tasks of a mixture in the table -> the dataset they are of."""
    letter = {name: letter for letter, name in TABLE["mixtures"].items()}[mixture]
    suffix = "_score_eval" if mixture.endswith("eval") else ""
    return {
        dataset + template + suffix: dataset
        for dataset, templates in TABLE["tasks"].items()
        for template, letters in templates.items()
        if letter in letters
    }


@pytest.mark.parametrize("mixture", MIXTURES)
def test_a_mixture_has_t0s_tasks_by_name_and_by_dataset(mixture):
    tasks = [task.name for task in seqio.get_mixture_or_task(mixture).tasks]
    expected = expected_tasks(mixture)
    assert sorted(tasks) == sorted(expected)
    prompted = prompted_tasks()
    by_dataset = Counter((prompted[name].dataset, prompted[name].subset) for name in tasks)
    assert (sum(by_dataset.values()), len(by_dataset)) == SIZES[mixture]
    assert sorted(by_dataset.values()) == sorted(Counter(expected.values()).values())


@pytest.mark.parametrize("mixture", [name for name in MIXTURES if not name.endswith("eval")])
def test_every_mixing_rate_is_t0s(mixture):
    trained = seqio.get_mixture_or_task(mixture)
    expected = {name: TABLE["rates"][data] for name, data in expected_tasks(mixture).items()}
    assert {task.name: trained.get_rate(task) for task in trained.tasks} == expected


def test_the_rates_sum_to_t0s():
    sums = {
        name: sum(mixture.get_rate(task) for task in mixture.tasks)
        for name in ("t0_train", "t0+_train")
        for mixture in [seqio.get_mixture_or_task(name)]
    }
    assert sums == {"t0_train": 17_277_798, "t0+_train": 20_672_671}


def test_evaluations_are_rated_by_their_size_up_to_500000(monkeypatch):
    monkeypatch.setenv("T0REPRO_DATA_DIR", "absent")  # nothing is read for it
    held_out = seqio.get_mixture_or_task("t0_eval_score_eval")
    rates = {task.name: held_out.get_rate(task) for task in held_out.tasks}
    assert rates["super_glue_rte_GPT_3_style_score_eval"] == 2490
    assert rates["anli_GPT_3_style_r3_score_eval"] == 100_459
    assert rates["story_cloze_2016_Answer_Given_options_score_eval"] == 1871
    assert max(rates.values()) <= 500_000


def test_every_template_of_the_table_is_a_task_with_all_splits_of_t0s_time():
    for entry in t0_datasets():
        if entry.dataset == "jigsaw_toxicity_pred":
            continue
        suffixes = rounds_of(entry.dataset) or ("",)
        for template in template_names(entry.dataset, entry.subset):
            for suffix in suffixes:
                name = task_name(entry.dataset, entry.subset, template) + suffix
                twin = f"{name}_score_eval" in seqio.TaskRegistry.names()
                assert prompted_tasks()[name].has_answer_choices == twin
    anli = seqio.TaskRegistry.get("anli_GPT_3_style_r2")
    assert set(anli.splits) == {"train", "validation", "test"}
    assert anli.source.files_of_splits["validation"].file == "dev_r2"
    assert set(seqio.TaskRegistry.get("imdb_Reviewer_Enjoyment").splits) == {
        "train",
        "test",
        "unsupervised",
    }


def test_metrics_are_t5s_for_glue_and_super_glue_and_the_templates_for_others():
    def of(name):
        return seqio.TaskRegistry.get(name).metric_fns

    assert of("glue_mrpc_equivalent") == glue_utils.get_glue_metric("mrpc")
    assert of("super_glue_cb_GPT_3_style") == glue_utils.get_super_glue_metric("cb")
    assert of("super_glue_wsc.fixed_p_is_are_r") == [metrics.accuracy]
    assert of("xsum_DOC_tldr") == [metrics.rouge] or metrics.rouge in of("xsum_DOC_tldr")


def function_names(task):
    """Of a SeqIO task's metrics."""
    found = []
    for metric in seqio.TaskRegistry.get(task).metric_fns:
        while isinstance(metric, functools.partial):
            metric = metric.func
        found.append(metric.__name__)
    return tuple(found)


def test_metrics_are_named_as_t5s_functions_or_by_what_they_return():
    # t5 wraps two of T0's metrics in functions of no name of their own.
    wrapped = {"fn": "mean_3class_f1", "_deduplicated_metric": "squad"}
    (f1, _), (matthews,) = (
        glue_utils.get_super_glue_metric("cb"),
        glue_utils.get_glue_metric("cola"),
    )
    assert list(f1([0, 1, 2], [0, 1, 1])) == ["mean_3class_f1"]
    assert list(matthews([0, 1], [0, 1])) == ["matthews_corrcoef"]
    tasks = {task for mixture in MIXTURES for task in prompted_mixtures()[mixture].tasks}
    for name in tasks:
        expected = tuple(wrapped.get(each, each) for each in function_names(name))
        assert metric_names(prompted_tasks()[name]) == expected, name


@pytest.mark.parametrize("mixture", MIXTURES)
def test_rates_without_seqio_are_seqios(mixture):
    ours, theirs = prompted_mixtures()[mixture], seqio.MixtureRegistry.get(mixture)
    assert sorted(ours.tasks) == sorted(task.name for task in theirs.tasks)
    assert all(ours.rate(task.name) == theirs.get_rate(task) for task in theirs.tasks)


def test_the_catalog_has_every_dataset_of_the_table_and_every_column_that_a_template_reads():
    for entry in t0_datasets():
        known = catalog()[entry.dataset, entry.subset]
        assert known.splits and (known.hub is not None or known.dataset in MANUAL)
        if entry.train_size and entry.dataset != "anli":
            assert known.splits["train"] == entry.train_size
        features = features_of(entry.dataset, entry.subset) or {}
        read = columns_of_dataset(entry.dataset, entry.subset)
        held = {column.replace("-", "_") for column in features}
        assert read - {"zip"} <= held, known.label  # `zip` is promptsource's function


MANUAL = ("story_cloze", "jigsaw_toxicity_pred")


def test_what_is_at_hand_and_t0_can_be_imported_in_one_process_in_either_order(
    t0, rows_root, monkeypatch
):
    monkeypatch.setenv("T0REPRO_DATA_DIR", str(rows_root))
    # The import registers too, and this process may have T0's tasks with another vocabulary.
    for registry in (seqio.TaskRegistry, seqio.MixtureRegistry):
        monkeypatch.setattr(registry, "_REGISTRY", {})
    monkeypatch.setattr("t0repro.tasks.registry._tasks", {})
    local = importlib.import_module("t0repro.tasks.local")
    name = "super_glue_rte_GPT_3_style"
    for order in ((local.register_local, t0.register_t0), (t0.register_t0, local.register_local)):
        for registry in (seqio.TaskRegistry, seqio.MixtureRegistry):
            monkeypatch.setattr(registry, "_REGISTRY", {})
        monkeypatch.setattr("t0repro.tasks.registry._tasks", {})
        for register in order:
            register(*([rows_root] if register is local.register_local else []))
            if register is order[0] is local.register_local:
                assert set(seqio.TaskRegistry.get(name).splits) == {"train", "validation"}
        for twin in (name, f"{name}_score_eval"):
            assert set(seqio.TaskRegistry.get(twin).splits) == {"train", "validation", "test"}
        assert len(seqio.get_mixture_or_task("t0_train").tasks) == 313
