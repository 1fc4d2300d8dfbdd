"""Template files in the forms that promptsource and its forks have written since 2021."""

from pathlib import Path

import jinja2
import pytest
import yaml

from t0repro.errors import UserError
from t0repro.tasks.rendering import compiled, fixed_choices
from t0repro.tasks.template_files import read_template_file

ROW = {"text": "A fine soup.", "options": ["tea", "soup", "bread"], "label": 1}

BASE = """\
dataset: my_reviews
templates:
  0f0c0000-0000-0000-0000-000000000001: !Template
    {choices}
    id: 0f0c0000-0000-0000-0000-000000000001
    jinja: "{{{{text}}}} {{{{answer_choices | join(', ')}}}}? ||| {{{{answer_choices[label]}}}}"
    metadata: !TemplateMetadata
      {metadata}
    name: which
    reference: ''
"""


def read(folder: Path, choices: str = "answer_choices: null", metadata: str = "metrics: []"):
    """The one template of a file that has these lines."""
    path = folder / "templates.yaml"
    path.write_text(BASE.format(choices=choices, metadata=metadata))
    (template,) = read_template_file(path).templates
    return template


def by_promptsource(path: Path):
    """The one template of a file, as promptsource's own loader makes it."""
    import promptsource.templates

    assert promptsource.templates.Template.yaml_tag == "!Template"
    (template,) = yaml.load(path.read_text(), Loader=yaml.FullLoader)["templates"].values()
    return template


@pytest.mark.parametrize(
    "metadata",
    [
        # promptsource's main, eval-hackathon's branch and xP3's
        "choices_in_prompt: true\n      languages:\n      - en\n      metrics:\n      - Accuracy\n"
        "      original_task: true",
        "languages: []\n      metrics: []\n      original_task: null",
    ],
)
def test_a_template_with_languages_renders_as_promptsource_renders_it(tmp_path, metadata):
    mine = read(tmp_path, "answer_choices: bad ||| good", metadata)
    theirs = by_promptsource(tmp_path / "templates.yaml")
    rendering = compiled(mine).render(ROW)
    assert [rendering.inputs, rendering.targets] == theirs.apply(ROW)
    assert rendering.answer_choices == theirs.get_answer_choices_list(ROW)
    for field in ("original_task", "choices_in_prompt", "metrics"):
        assert getattr(mine.metadata, field) == getattr(theirs.metadata, field, None)


@pytest.mark.parametrize(
    "choices",
    [
        "answer_choices: null\n    answer_choices_key: bad ||| good",
        "answer_choices: null\n    answer_choices_key: '{{options | join(\"|||\")}}'",
        # Where there were both, promptsource took the key's.
        "answer_choices: [never, this]\n    answer_choices_key: '{{options | join(\"|||\")}}'",
    ],
)
def test_answer_choices_key_is_the_jinja_of_the_choices(tmp_path, choices):
    mine = read(tmp_path, choices)
    theirs = by_promptsource(tmp_path / "templates.yaml")
    theirs.answer_choices = theirs.answer_choices_key  # promptsource's own change, in c8bacdeb
    rendering = compiled(mine).render(ROW)
    assert [rendering.inputs, rendering.targets] == theirs.apply(ROW)
    assert rendering.answer_choices == theirs.get_answer_choices_list(ROW)
    assert fixed_choices(mine) == (("bad", "good") if "bad" in choices else None)


def test_a_list_of_choices_is_the_variable_answer_choices_as_it_stands(tmp_path):
    import promptsource.templates

    mine = read(tmp_path, "answer_choices:\n    - bad, or worse\n    - 'good | \"fine\" {x}'")
    theirs = by_promptsource(tmp_path / "templates.yaml")
    rendering = compiled(mine).render(ROW)
    # `Template.apply` of that time passed the list to the template.
    rendered = promptsource.templates.env.from_string(theirs.jinja).render(
        **ROW, answer_choices=theirs.answer_choices
    )
    assert [rendering.inputs, rendering.targets] == [part.strip() for part in rendered.split("|||")]
    assert rendering.answer_choices == theirs.answer_choices == list(fixed_choices(mine))


@pytest.mark.parametrize("choices", ["answer_choices: ''", "answer_choices: []"])
def test_no_choices_may_be_written_as_an_empty_text_or_list(tmp_path, choices):
    template = read(tmp_path, choices)
    assert template.answer_choices is None and fixed_choices(template) is None


@pytest.mark.parametrize(
    ("choices", "metadata", "original"),
    [
        ("task_template: true", "task_template: null", True),
        ("task_template: false", "choices_in_prompt: null", False),
        ("answer_choices: null", "task_template: true", True),
        # promptsource's main has both in head_qa.
        ("task_template: true", "original_task: false", False),
        ("answer_choices: null", "metrics: null", None),
    ],
)
def test_task_template_is_the_former_name_of_original_task(tmp_path, choices, metadata, original):
    assert read(tmp_path, choices, metadata).metadata.original_task is original


def test_annotations_that_promptsource_never_read_are_checked_and_left_out(tmp_path):
    old = ("_do_train: true", "_do_eval: null", "counting: false", "metric: null")
    lines = "\n      ".join([*old, "task_format: Classification"])
    assert vars(read(tmp_path, metadata=lines).metadata) == vars(read(tmp_path).metadata) | {
        "metrics": None
    }
    for line in ("_do_train: yes please", "task_format: 3", "metric: BLEU", "languages: [no]"):
        with pytest.raises(UserError, match=f"{line.partition(':')[0]} is"):
            read(tmp_path, metadata=line)


def test_a_name_that_is_a_tuple_and_a_subset_called_config_are_read(tmp_path):
    text = BASE.format(choices="answer_choices: null", metadata="metrics: []")
    path = tmp_path / "templates.yaml"
    path.write_text("config: cs-en\n" + text.replace("name: which", "name: !!python/tuple [which]"))
    content = read_template_file(path)
    assert content.subset == "cs-en" and content.templates[0].name == "which"


def test_a_python_module_of_patterns_is_named_as_what_it_is(tmp_path):
    path = tmp_path / "templates.py"
    path.write_text('PATTERNS = {"rte": [("{premise}\\n{hypothesis}?", "{answer}")]}\n')
    with pytest.raises(UserError, match="a Python module, not a file of templates") as raised:
        read_template_file(path)
    assert "--module_import" in raised.value.fix


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ("answer_choices: [yes, no]", "the item True"),
        ("answer_choices: ['{{text}}', b]", "the item '{{text}}'"),
        ("answer_choices: [a ||| b, c]", r"the item 'a \|\|\| b'"),
        ("answer_choices: false", "answer_choices is False"),
        ("answer_choices: a ||| b\n    answer_choices_key: c ||| d", "different values"),
        ("answer_choices_key: '{{a'", "The answer_choices_key is not a Jinja template"),
    ],
)
def test_choices_that_could_mean_two_things_are_refused_by_their_line(tmp_path, choices, message):
    with pytest.raises(UserError, match=rf"{message}(.|\n)*line [45]") as raised:
        read(tmp_path, choices)
    assert raised.value.fix


def write_jinja(path, jinja):
    path.write_text(f"dataset: d\ntemplates:\n  a: !Template\n    name: n\n    jinja: {jinja}\n")
    return path


def test_both_halves_of_a_character_are_one_and_half_is_refused(tmp_path):
    """As programs that write JSON escape what is beyond U+FFFF."""
    path = write_jinja(tmp_path / "templates.yaml", '"{{text}} \\uD83D\\uDE00 ||| yes"')
    (template,) = read_template_file(path).templates
    assert template.jinja == "{{text}} \U0001f600 ||| yes"
    assert compiled(template).render({"text": "a"}, "s/0").inputs == "a \U0001f600"
    write_jinja(path, '"{{text}} \\uD83D ||| yes"')
    with pytest.raises(UserError, match="jinja has half of a character") as caught:
        read_template_file(path)
    assert caught.value.where == f"{path}, line 5"


def test_a_prompt_without_quotes_is_told_that_it_needs_them(tmp_path):
    path = write_jinja(tmp_path / "templates.yaml", "{{text}} ||| {{label}}")
    with pytest.raises(UserError, match="braces .*needs quotes") as caught:
        read_template_file(path)
    assert caught.value.where == f"{path}, line 5"


@pytest.mark.parametrize("body", ["{{- text -}} ?", "{% if text %}{{ text -}} {% endif %}"])
def test_a_prompt_that_promptsources_filter_breaks_is_told_so(tmp_path, body):
    path = write_jinja(tmp_path / "templates.yaml", f'"{body} ||| yes"')
    with pytest.raises(UserError, match="a filter before every }}") as caught:
        read_template_file(path)
    assert caught.value.where.startswith(f"{path}, line 5")
    with pytest.raises(jinja2.TemplateSyntaxError):
        by_promptsource(path).apply(ROW)
