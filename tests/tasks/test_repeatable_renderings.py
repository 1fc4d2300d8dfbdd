"""A rendering depends on template, row and key alone, not on the process or the clock."""

import json
import os
import subprocess
import sys

import pytest

from t0repro.tasks.prompt_environment import PromptEnvironment, TemplateFailure
from t0repro.tasks.rendering import fixed_choices
from t0repro.tasks.templates import Rendering, promptsource_environment

from . import generated_templates
from .generated_templates import ROW, Plain, own, rendered
from .prompt_caches import files, make
from .test_user_templates import HEAD, data, forget, write  # noqa: F401 - fixtures

both = pytest.mark.parametrize("kind", [Plain, own])


DRAWS = [
    "{{ words | random }}",
    "{{ words | choice }}{{ words | random }}",
    "{{ [words, words] | map('random') | join }}",
    "{% filter upper %}{{ words | random }}{% endfilter %}",
    "{% macro one() %}{{ words | random }}{% endmacro %}{{ one() }}",
]


@both
@pytest.mark.parametrize("jinja", DRAWS)
def test_every_draw_is_decided_by_its_key(kind, jinja):
    template = kind(jinja + "||| x")
    one, other = (
        [rendered(template, key=f"task/train/{number}") for number in range(40)] for _ in "12"
    )
    assert one == other
    assert len({each.inputs for each in one}) > 3, "and the rows draw differently"


@both
@pytest.mark.parametrize(
    "choices",
    [
        "{{ ['a ||| b', 'b ||| a'] | random }}",
        "{{ [['a ||| b', 'b ||| a']] | map('choice') | join }}",
    ],
)
def test_choices_that_are_drawn_are_not_fixed(kind, choices):
    template = kind("{{ text }} ||| {{ answer_choices[0] }}", choices)
    assert fixed_choices(template) is None
    found = {tuple(rendered(template, key=str(n)).answer_choices) for n in range(20)}
    assert found == {("a", "b"), ("b", "a")}


def test_random_of_nothing_is_undefined_as_in_jinja():
    assert rendered(Plain("x{{ [] | random }} ||| y")) == Rendering("x", "y", None)


REFUSED = {
    "{{ lipsum() }}": "lipsum' is undefined",
    "{{ text.upper }}": r"write upper\(\)",
    "{{ more['items'] }}": r"write items\(\)",
    "{{ [text.upper] | reverse | list }}": r"write upper\(\)",
    "{{ words | map('upper') }}": r"before \| list or \| join",
    "{{ ('so: ' ~ (words | select)) | reverse }}": r"before \| list or \| join",
    "{{ [cycler('a')] }}": "is not text",
    "{{ more.keys() - ['z'] }}": "no fixed order",
    "{% for key in more.keys() - [] %}{{ key }}{% endfor %}": "no fixed order",
}


@both
@pytest.mark.parametrize("jinja", REFUSED)
def test_what_would_differ_between_processes_is_refused(kind, jinja):
    # In this process an exception of Jinja's own is reported by whoever asked for the rendering.
    with pytest.raises(Exception, match=REFUSED[jinja]):
        rendered(kind(jinja + " ||| x"))


@pytest.mark.parametrize("method", ["now()", "today()", "timestamp()", "astimezone()"])
@both
def test_a_date_of_a_row_reads_no_clock_and_no_time_zone(kind, method):
    import datetime

    row = {"day": datetime.datetime(2021, 10, 15, 12)}
    with pytest.raises(Exception, match="unsafe"):
        rendered(kind(f"{{{{ day.{method} }}}} ||| x"), row)
    assert rendered(kind("{{ day.year }} ||| x"), row).inputs == "2021"


@both
def test_a_row_may_quote_an_address(kind):
    row = {"text": "Why does it print <function f at 0x7f00aa11> here?"}
    assert "0x7f00aa11" in rendered(kind("{{ text }} ||| x"), row).inputs


def test_both_environments_are_the_repeatable_one():
    from t0repro.tasks import sandbox_worker

    for environment in (promptsource_environment(), sandbox_worker.StrictEnvironment()):
        assert isinstance(environment, PromptEnvironment)
        assert "lipsum" not in environment.globals


@both
def test_methods_and_lazy_filters_work_where_they_are_not_printed(kind):
    jinja = """{{ text.upper().split() | map('lower') | select | list | join('-') }}
        {%- set next = cycler('x', 'y') %}{{ next.next() }}{{ next.next() }}
        {{- '{}!'.format(label) }}
        {%- block b %}{{ 'in' }}{% endblock %}{{ self.b() }}{{ text.upper is callable }} ||| x"""
    assert rendered(kind(jinja)).inputs == "a-b-c-d-e-fxy1!ininTrue"


def test_generated_templates_render_alike_in_processes_with_other_hash_seeds():
    found = []
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-W", "ignore", generated_templates.__file__],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        )
        found.append(json.loads(done.stdout))
    one, other = found
    assert len(one) == 2 * generated_templates.COUNT
    assert [before for before, after in zip(one, other, strict=True) if before != after] == []
    assert sum(text.startswith("Rendering") for _, text in one) > len(one) // 4


# Caches -----------------------------------------------------------------------------------------

RANDOM = """\
  one: !Template
    name: drawn
    jinja: '{{ ["Read", "See", "Judge"] | random }}: {{ text.split() | random }} ||| {{ text }}'
"""


@pytest.mark.usefixtures("forget")
def test_two_caches_of_the_same_rows_are_equal_and_so_is_beams(data, tmp_path):  # noqa: F811
    from t0repro.tasks.template_registration import register_templates

    register_templates(write(tmp_path, HEAD + RANDOM))
    caches = []
    for name, options in (("one", None), ("two", None), ("beam", ["--runner=FnApiRunner"])):
        make(tmp_path / name, "my_reviews_drawn", beam_options=options)
        caches.append(files(tmp_path / name))
    assert caches[0] == caches[1] == caches[2]


def test_a_label_without_its_choice_is_named():
    with pytest.raises(TemplateFailure, match="^label is 7, but there are 2 choices$"):
        rendered(
            own("{{ text }} ||| {{ answer_choices[label] }}", "no ||| yes"), {**ROW, "label": 7}
        )
    with pytest.raises(TemplateFailure, match="^the index from label is 6, but there are 2"):
        rendered(own("{{ text }} ||| {{ ['a', 'b'][label - 1] }}"), {**ROW, "label": 7})
    assert rendered(own("{{ ['a'][label] | default('none') }} ||| x"), {**ROW, "label": 7})
