"""Compiled templates render what promptsource itself renders, byte for byte, on real rows."""

import itertools
import json
import random

import pytest

from t0repro.tasks.catalog import p3_sizes, rounds_of, t0_datasets
from t0repro.tasks.prompt_cache.prompts import PlainTemplate, Prompt, RowsOfSplit
from t0repro.tasks.prompt_cache.shards import compiled_template, reader_of, render_row, rows_of
from t0repro.tasks.rendering import compiled
from t0repro.tasks.rows import read_rows
from t0repro.tasks.schema import columns_read
from t0repro.tasks.templates import (
    NO_LABEL,
    Drop,
    Rendering,
    load_template,
    task_name,
    template_datasets,
    template_names,
)


def held(root):
    """(dataset, subset, files) of each dataset with templates whose rows are here."""
    for dataset, subset in template_datasets():
        folder = root / dataset / (subset or "default")
        if folder.is_dir():
            yield dataset, subset, sorted(folder.glob("*.jsonl"))


def by_promptsource(template, row):
    """What T0 did: `Template.apply` on every row."""
    fields = {name.replace("-", "_"): value for name, value in row.items()}
    try:
        parts = template.apply(fields)
        choices = template.get_answer_choices_list(fields)
    except Exception as error:
        return repr(error)
    if len(parts) != 2:
        return Drop.NOT_A_PAIR
    return Rendering(parts[0], parts[1] or NO_LABEL, choices) if parts[0] else Drop.EMPTY_INPUT


def by_compiled(template, row):
    """What the cache does."""
    try:
        return compiled(template).render(row)
    except Exception as error:
        return repr(error)


def check_equal(root, rows_of_file):
    """Compares every template on so many rows of every file; returns how many renderings."""
    compared = 0
    state = random.getstate()
    for dataset, subset, paths in held(root):
        templates = [
            load_template(dataset, subset, name) for name in template_names(dataset, subset)
        ]
        for path in paths:
            for row in itertools.islice(read_rows(path), rows_of_file):
                for template in templates:
                    random.seed(compared)
                    wanted = by_promptsource(template, row)
                    random.seed(compared)
                    assert by_compiled(template, row) == wanted, (path, template.name)
                    compared += 1
    random.setstate(state)
    return compared


def test_every_template_of_every_dataset_at_hand_renders_as_by_promptsource(shared_data):
    assert check_equal(shared_data, 2) > 1000


@pytest.mark.slow  # promptsource compiles a template again for each of 20,000 renderings
def test_every_template_renders_forty_rows_of_every_file_as_by_promptsource(shared_data):
    assert check_equal(shared_data, 40) > 15_000


@pytest.mark.parametrize(
    "row",
    [
        {"text": "a ||| b", "label": 0},
        {"text": "x" * 3000, "label": 1},
        {"text": "word " * 1000, "label": 1},
        {"text": "", "label": -1},
        {"text": None, "label": 2},
        {"text": "3ed2dface8203c4c9dfb1a5dc58e41e0", "label": 3},
        {"text": "{{ label }} <b>&amp;</b>", "label": "0"},
        {"label": 0},
        {"text": "answer_choices is taken", "label": 0, "answer_choices": ["a"]},
    ],
)
def test_odd_rows_render_or_fail_as_by_promptsource(row):
    for name in template_names("ag_news", None):
        template = load_template("ag_news", None, name)
        wanted, found = by_promptsource(template, row), by_compiled(template, row)
        if isinstance(wanted, str) and wanted.startswith("ValueError"):
            assert str(found).startswith("ValueError")
        else:
            assert found == wanted


# Counts ------------------------------------------------------------------------------------------


def held_in_full(root):
    """(dataset, subset, file) of the manifest's splits that have all rows of the dataset."""
    manifest = root / "manifest.json"
    if not manifest.is_file():
        pytest.skip("the folder of data has no manifest.json")
    for entry in json.loads(manifest.read_text()):
        if entry["rows"] == entry["hf_rows"]:
            yield entry["hf_name"], entry["subset"], entry["split"]


def prompts_of(root, dataset, subset, file):
    """(split, prompts) of T0's tasks that read a file."""
    rounds = rounds_of(dataset) or {"": {file: file}}
    for suffix, splits in rounds.items():
        for split, source in splits.items():
            if source != file:
                continue
            prompts = []
            for name in template_names(dataset, subset):
                template = load_template(dataset, subset, name)
                columns = tuple(sorted(columns_read(template)))
                rows = RowsOfSplit(str(root), dataset, subset, file, None, None, columns, 0)
                plain = PlainTemplate(
                    template.name, template.id, template.jinja, template.answer_choices
                )
                source_name = task_name(dataset, subset, name) + suffix
                prompts.append(
                    Prompt(source_name, dataset, subset, plain, {split: rows}, (), "", {})
                )
            yield split, prompts


def count_examples(prompts, split):
    """Yields (task, number of examples) of prompts that read the same rows, which are read once.

    A task's twin, <task>_score_eval, has an example per answer choice.
    """
    rows = prompts[0].rows[split]
    numbered = list(rows_of(rows, reader_of(rows)))
    for prompt in prompts:
        template = compiled_template(prompt)
        found = [render_row(prompt, template, split, number, row, 0) for number, row in numbered]
        examples = [rendering for rendering in found if not isinstance(rendering, Drop)]
        yield prompt.source, len(examples)
        yield (
            f"{prompt.source}_score_eval",
            sum(len(example.answer_choices or ()) for example in examples),
        )


def check_counts(root, most_rows):
    """Compares counts with P3's for files of at most so many rows; returns how many."""
    sizes, checked = p3_sizes(), 0
    t0 = {(entry.dataset, entry.subset) for entry in t0_datasets()} & set(template_datasets())
    for dataset, subset, file in held_in_full(root):
        if (dataset, subset) not in t0:
            continue
        path = root / dataset / (subset or "default") / f"{file}.jsonl"
        if path.read_bytes().count(b"\n") > most_rows:
            continue
        for split, prompts in prompts_of(root, dataset, subset, file):
            for task, found in count_examples(prompts, split) if prompts else ():
                released = sizes.get(task, {}).get(split)
                if released is not None:
                    assert found == released, (task, split)
                    checked += 1
    return checked


def test_counts_of_small_splits_held_in_full_equal_p3s(shared_data):
    assert check_counts(shared_data, 600) > 100


@pytest.mark.slow  # some 600,000 renderings
def test_counts_of_every_split_held_in_full_equal_p3s(shared_data):
    assert check_counts(shared_data, 10**9) >= 500
