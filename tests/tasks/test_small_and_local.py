"""Tasks on real rows: what is held out, and row counts equal to those of the released P3 cache."""

import importlib
import json

import pytest
import seqio

from t0repro.tasks import prompted_tasks

# Tasks of datasets whose named split lies in ../shared/data in full.
WHOLE_SPLITS = [
    ("ag_news_classify", "test"),
    ("anli_GPT_3_style_r1", "validation"),
    ("cos_e_v1.11_question_option_description_id", "validation"),
    ("glue_mrpc_generate_sentence", "train"),
    ("rotten_tomatoes_Movie_Expressed_Sentiment", "validation"),
    ("super_glue_cb_can_we_infer", "train"),
    ("super_glue_copa__As_a_result_C1_or_C2_", "validation"),
    ("super_glue_rte_GPT_3_style", "train"),
    ("super_glue_rte_GPT_3_style", "validation"),
    ("super_glue_wsc.fixed_p_is_are_r", "validation"),
    ("trec_fine_grained_LOC", "test"),
    ("winogrande_winogrande_xl_Replace", "validation"),
]


@pytest.fixture
def local(shared_data, monkeypatch):
    """The tasks of every dataset that is available, and no others."""
    monkeypatch.setenv("T0REPRO_DATA_DIR", str(shared_data))
    # The import registers too, and this process may have T0's tasks with another vocabulary.
    for registry in (seqio.TaskRegistry, seqio.MixtureRegistry):
        monkeypatch.setattr(registry, "_REGISTRY", {})
    monkeypatch.setattr("t0repro.tasks.registry._tasks", {})
    importlib.import_module("t0repro.tasks.local").register_local(shared_data)


@pytest.mark.parametrize(("name", "split"), WHOLE_SPLITS)
def test_examples_are_as_many_as_in_p3(local, t0_facts, name, split):
    sizes = json.loads((t0_facts / "p3_sizes.json").read_text())
    source = seqio.TaskRegistry.get(name).source
    assert sum(1 for _ in source.examples(split)) == sizes[name][split]


def test_pairs_of_a_twin_are_as_many_as_in_p3(local, t0_facts, shared_vocab):
    sizes = json.loads((t0_facts / "p3_sizes.json").read_text())
    name = "super_glue_cb_GPT_3_style_score_eval"
    examples = seqio.TaskRegistry.get(name).source.examples("validation")
    pairs = sum(len(example["answer_choices"]) for example in examples)
    assert pairs == sizes[name]["validation"] == 168


def test_anlis_rounds_are_tasks_with_plain_split_names(local):
    task = seqio.TaskRegistry.get("anli_can_we_infer_r2_score_eval")
    assert set(task.splits) == {"train", "validation"}
    assert task.source.reader("validation").path.name == "dev_r2.jsonl"


def test_local_tasks_have_t0s_names(local, t0_facts):
    mixtures = json.loads((t0_facts / "mixtures_0.1.0.json").read_text())
    held_out = {name for name in mixtures["t0_eval_score_eval"] if "story_cloze" not in name}
    assert held_out <= set(prompted_tasks())


def test_small_trains_on_no_prompt_and_no_dataset_that_it_holds_out():
    importlib.import_module("t0repro.tasks.examples.small")

    def prompts(mixture):
        return [prompted_tasks()[task.name] for task in seqio.get_mixture_or_task(mixture).tasks]

    trained, evaluated = prompts("small_train"), prompts("small_eval_score_eval")
    assert not {task.template_id for task in trained} & {task.template_id for task in evaluated}
    datasets = {task.dataset for task in trained}
    assert datasets == {"rotten_tomatoes", "ag_news", "trec", "glue"}
    only_evaluated = {
        (task.dataset, task.subset) for task in evaluated if task.dataset not in datasets
    }
    assert only_evaluated == {
        ("super_glue", "rte"),
        ("super_glue", "cb"),
        ("super_glue", "copa"),
        ("anli", None),
    }


def test_small_reads_its_rows_with_t0s_rates(shared_data, monkeypatch):
    monkeypatch.setenv("T0REPRO_DATA_DIR", str(shared_data))
    importlib.import_module("t0repro.tasks.examples.small")
    mixture = seqio.get_mixture_or_task("small_train")
    rates = {task.source.dataset: mixture.get_rate(task) for task in mixture.tasks}
    assert rates == {"rotten_tomatoes": 5000, "ag_news": 5000, "trec": 5000, "glue": 3668}
    for task in seqio.get_mixture_or_task("small_eval_score_eval").tasks:
        assert sum(1 for _ in task.source.examples("validation")) in (56, 100)
