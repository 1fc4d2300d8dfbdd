"""Templates: T0's names, and its rules for rendering a row."""

import json
import subprocess
import sys

import pytest

from t0repro.errors import UserError
from t0repro.tasks.catalog import rounds_of, t0_datasets
from t0repro.tasks.rendering import fixed_choices, render
from t0repro.tasks.templates import load_template, task_name, template_datasets, template_names

MRPC = {"sentence1": "A cat sat.", "sentence2": "A cat was sitting.", "label": 1, "idx": 0}


def all_task_names() -> set[str]:
    prompted = set(template_datasets())
    return {
        task_name(entry.dataset, entry.subset, template) + suffix
        for entry in t0_datasets()
        if (entry.dataset, entry.subset) in prompted
        for suffix in (rounds_of(entry.dataset) or ("",))
        for template in template_names(entry.dataset, entry.subset)
    }


def test_a_task_is_named_after_dataset_subset_and_template():
    assert task_name("ag_news", None, "classify") == "ag_news_classify"
    assert task_name("super_glue", "wsc.fixed", "p is/are r") == "super_glue_wsc.fixed_p_is_are_r"
    assert task_name("super_glue", "copa", "…why? C1 or C2") == "super_glue_copa__why_C1_or_C2"
    assert task_name("rotten_tomatoes", None, "Sentiment with choices ").endswith("_choices_")


def test_every_task_of_t0s_mixtures_is_named_as_there(t0_facts):
    mixtures = json.loads((t0_facts / "mixtures_0.1.0.json").read_text())
    wanted = {name.removesuffix("_score_eval") for names in mixtures.values() for name in names}
    assert wanted <= all_task_names()


def test_t0s_table_gives_562_templates_and_592_tasks_with_anlis_rounds():
    prompted = set(template_datasets())
    pairs = [(entry.dataset, entry.subset) for entry in t0_datasets()]
    assert [pair for pair in pairs if pair not in prompted] == [("jigsaw_toxicity_pred", None)]
    assert sum(len(template_names(*pair)) for pair in pairs if pair in prompted) == 562
    assert len(all_task_names()) == 592
    assert len([name for name in all_task_names() if name.startswith("anli_")]) == 45


def test_a_row_is_rendered_to_input_target_and_choices():
    template = load_template("glue", "mrpc", "same thing")
    rendering = render(template, MRPC)
    assert rendering is not None
    assert rendering.inputs == (
        "Do the following two sentences mean the same thing?\nA cat sat.\nA cat was sitting."
    )
    assert (rendering.targets, rendering.answer_choices) == ("yes", ["no", "yes"])
    assert fixed_choices(template) == ("no", "yes")


def test_choices_that_depend_on_the_row_are_not_fixed():
    template = load_template("super_glue", "copa", "choose")
    row = {"premise": "It rained.", "question": "effect", "label": 0}
    rendering = render(template, {**row, "choice1": "He got wet.", "choice2": "He slept."})
    assert fixed_choices(template) is None
    assert rendering is not None
    assert rendering.answer_choices == ["He got wet.", "He slept."]


def test_hyphens_in_field_names_become_underscores():
    row = {"text": "Who wrote it ?", "label-coarse": 3, "label-fine": 4}
    rendering = render(load_template("trec", None, "trec1"), row)
    assert rendering is not None and rendering.targets == "Person"


def test_variables_are_cut_at_2048_characters():
    words = "word " * 1000
    rendering = render(load_template("ag_news", None, "classify"), {"text": words, "label": 0})
    assert rendering is not None
    text, _, question = rendering.inputs.rpartition("\n")
    assert question == "What label best describes this news article?"
    assert len(text.strip()) <= 2048 and text.strip().endswith("...")


def test_an_empty_target_becomes_no_label():
    row = {"premise": "It rained.", "hypothesis": "It was wet.", "label": -1, "idx": 0}
    rendering = render(load_template("super_glue", "rte", "GPT-3 style"), row)
    assert rendering is not None and rendering.targets == "<NO LABEL>"


def test_a_row_that_the_template_skips_is_dropped():
    template = load_template("glue", "mrpc", "generate_paraphrase")
    assert render(template, {**MRPC, "label": 0}) is None
    assert render(template, MRPC) is not None


def test_separators_in_the_data_do_not_split_the_rendering():
    row = {"text": "one ||| two", "label": 1}
    rendering = render(load_template("ag_news", None, "classify"), row)
    assert rendering is not None and rendering.inputs.startswith("one ||| two")


def test_draws_repeat_for_a_key_and_vary_between_keys():
    template = load_template("sciq", None, "Multiple Choice (Closed Book)")
    row = {f"distractor{number}": f"wrong {number}" for number in (1, 2, 3)}
    row |= {"correct_answer": "right", "question": "Which?", "support": ""}

    def options(key: str) -> str:
        rendering = render(template, row, draw_key=key)
        assert rendering is not None
        return rendering.inputs

    assert options("task/train/7") == options("task/train/7")
    assert len({options(f"task/train/{index}") for index in range(40)}) > 10


def test_an_unknown_dataset_is_answered_with_the_nearest_names():
    with pytest.raises(UserError, match="super_glue/rte"):
        template_names("super_glue", "rtee")


def test_an_unknown_template_is_answered_with_the_nearest_names():
    with pytest.raises(UserError, match="GPT-3 style"):
        load_template("super_glue", "rte", "GPT3 style")


def test_templates_are_read_without_pandas_which_their_reader_imports_when_it_is_used():
    script = """
import sys
from t0repro.tasks.templates import template_names
assert template_names("ag_news", None) and "pandas" not in sys.modules
from promptsource import templates
frame = templates.pd.DataFrame({"column": [1]})
assert type(frame).__module__.startswith("pandas") and "pandas" in sys.modules
"""
    done = subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
