"""Strangers' templates: what they cannot do, and that the others render as they always did."""

import decimal
import functools
import itertools
import json
import os
import random
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jinja2
import jinja2.meta
import pytest

from t0repro.tasks import sandbox, sandbox_worker
from t0repro.tasks.prompt_environment import TemplateFailure, UndefinedVariable
from t0repro.tasks.rendering import compiled, fixed_choices
from t0repro.tasks.rows import read_rows
from t0repro.tasks.schema import columns_read
from t0repro.tasks.templates import (
    NO_LABEL,
    CompiledTemplate,
    Drop,
    Rendering,
    load_template,
    make_template,
    promptsource_environment,
    template_datasets,
    template_names,
)

SAMPLES = Path(__file__).resolve().parents[3] / "shared" / "data-samples"


def own(jinja: str, choices: str | None = None):
    """A template of somebody's own."""
    return make_template("mine", jinja, choices, {}, identifier="mine", reference="")


def render(jinja: str, row: dict, choices: str | None = None):
    return compiled(own(jinja, choices)).render(row)


# What they cannot do -----------------------------------------------------------------------------

ESCAPES = [
    "{{ cycler.__init__.__globals__.os.system('touch MADE') }} ||| x",
    "{{ cycler | attr('__init__') }} ||| x",
    "{{ ''.__class__.__mro__[1].__subclasses__() }} ||| x",
    "{{ zip.__class__ }} ||| x",
    "{{ text.__class__.__base__ }} ||| x",
    "{{ '{0.__class__.__init__.__globals__}'.format(text) }} ||| x",
    "{{ lipsum.__globals__ }} ||| x",
    "{{ namespace.__init__.__globals__ }} ||| x",
    "{{ self._TemplateReference__context.eval_ctx.environment }} ||| x",
    "{% set f = text.format_map %}{{ f }}{{ joiner.__init__.__globals__ }} ||| x",
]


@pytest.mark.parametrize("jinja", ESCAPES)
def test_no_way_that_is_known_leads_out(jinja, tmp_path):
    made = tmp_path / "made"
    with pytest.raises(TemplateFailure):
        render(jinja.replace("MADE", str(made)), {"text": "a"})
    assert not made.exists()


@pytest.mark.parametrize("jinja", ESCAPES)
def test_promptsources_own_environment_is_sandboxed_too(jinja, tmp_path):
    template = load_template("ag_news", None, "classify")
    other = type(template)("x", jinja.replace("MADE", str(tmp_path / "made")), "")
    for way in (CompiledTemplate(other).render, other.apply):
        try:
            rendered = str(way({"text": "a"}))
        except (jinja2.TemplateError, TemplateFailure, TypeError, AttributeError):
            continue
        # Undefined prints as nothing there; a part of Python would print as <...>.
        assert rendered in ("Drop.EMPTY_INPUT", "['', 'x']"), rendered
    assert not (tmp_path / "made").exists()


ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %} ||| x"


def test_a_template_without_end_is_ended_and_the_next_row_is_rendered():
    with pytest.raises(TemplateFailure, match="ran for more than 2 s of processor time"):
        render(ENDLESS, {})
    assert render("{{text}} ||| x", {"text": "a"}) == Rendering("a", "x", None)


@pytest.mark.parametrize(
    "jinja",
    [
        "{{ 'a' | center(4000000000) }} ||| x",
        "{% set a = 'a' * 4000000000 %} b ||| x",
        "{% set a = 'aaaa' %}{% set n = namespace(a=a) %}{% for i in range(60) %}"
        "{% set n.a = n.a ~ n.a %}{% endfor %}{{ n.a }} ||| x",
        "{% set a = '%4000000000d' % 1 %} b ||| x",
    ],
)
def test_a_template_cannot_eat_the_memory(jinja):
    with pytest.raises(TemplateFailure, match="512 MB of memory"):
        render(jinja, {})
    assert render("{{text}} ||| x", {"text": "a"}) == Rendering("a", "x", None)


def test_what_is_huge_is_found_before_it_is_sent():
    with pytest.raises(TemplateFailure, match="renders to .* characters"):
        render("{% for i in range(20) %}{% filter center(1000000) %}a{% endfilter %}{% endfor %}"
               "b ||| {% for i in range(20) %}{% set x = 'a' | center(1000000) %}{{ x }}"
               "{% endfor %}" + "".join("{% filter center(9000000) %}.{% endfilter %}."
                                        for _ in range(3)), {})  # fmt: skip


@pytest.mark.parametrize("text", ["{{ 'a' | center(4000000000) }}", "{{ 9**9**9**9 }}"])
def test_compiling_and_looking_at_a_template_evaluates_nothing_here(text):
    # Jinja evaluates what is constant when it compiles, and when it lists variables.
    before = max_memory()
    for look in (sandbox.check_jinja, sandbox.variables, sandbox.fixed_choices):
        try:
            look(text)
        except TemplateFailure:
            pass
    assert max_memory() - before < 64 << 10  # KB


def max_memory() -> int:
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def test_the_process_is_started_again_after_it_was_killed():
    assert sandbox.variables("{{a}}") == {"a"}
    process = sandbox._process._process
    assert process is not None
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    with pytest.raises(TemplateFailure, match="was ended"):
        sandbox.variables("{{b}}")
    assert sandbox.variables("{{b}}") == {"b"}


def test_threads_get_their_own_answers():
    template = compiled(own("{{text}} ||| x"))
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda i: template.render({"text": f"row {i}"}), range(200)))
    assert [each.inputs for each in found] == [f"row {i}" for i in range(200)]


# What is missing is not passed over --------------------------------------------------------------


@pytest.mark.parametrize(
    ("jinja", "row", "name"),
    [
        ("{{txet}} ||| x", {"text": "a"}, "'txet' is undefined"),
        ("{{text}} ||| {{txet}}", {"text": "a"}, "'txet' is undefined"),
        ("{% if txet %}b{% endif %}a ||| x", {"text": "a"}, "'txet' is undefined"),
        ("{{answers.txet}} ||| x", {"answers": {"text": "a"}}, "no attribute 'txet'"),
        ("{{text}} ||| x", {"text": None}, "null"),
    ],
)
def test_a_variable_that_a_row_lacks_is_an_error_that_names_it(jinja, row, name):
    with pytest.raises(UndefinedVariable, match=name):
        render(jinja, row)


def test_what_may_be_missing_can_be_said_to():
    assert render("{{ x | default('none') }} ||| x", {}) == Rendering("none", "x", None)
    assert render("{% if x is defined %}{{x}}{% else %}n{% endif %} ||| x", {}).inputs == "n"


@pytest.mark.parametrize("label", [-1, None])
@pytest.mark.parametrize(
    ("jinja", "choices"),
    [
        ("{{text}} ||| {{answer_choices[label]}}", "no ||| yes"),
        ("{{text}} ||| {{['no', 'yes'][label]}}", None),
    ],
)
def test_a_row_without_a_label_is_no_example_rather_than_the_last_choice(jinja, choices, label):
    assert render(jinja, {"text": "a", "label": label}, choices) is Drop.NO_LABEL


@pytest.mark.parametrize(
    ("jinja", "row", "message"),
    [
        ("{{answer_choices[label]}}", {"label": -2}, "^label is -2, but there are 2 choices$"),
        ("{{['a', 'b'][label - 1]}}", {"label": 0}, "^the index from label is -1, but there are 2"),
        ("{{('a', 'b')[label - 1]}}", {"label": 0}, "the index from label is -1"),
        ("{{'ab'[answer | int - 1]}}", {"answer": "0"}, "the index from answer is -1"),
        ("{{texts[0][label]}}", {"texts": [["a"]], "label": -3}, "label is -3, but there is 1"),
        ("{% set i = label - 1 %}{{'ab'[i]}}", {"label": 0}, "the index from i is -1"),
        (
            "{{answer_choices[label]}}",
            {"label": 0.5},
            "the index is 0.5, which is not a whole number",
        ),
        (
            "{{answer_choices[label]}}",
            {"label": 1.0},
            "1.0, which is not an int: (.|\n)*empty cell (.|\n)*write it with the",
        ),
        ("{{answer_choices[label]}}", {"label": "1"}, "the index is '1', which is text; write it"),
        (
            "{{answer_choices[label]}}",
            {"label": "yes"},
            r"which is text; make the labels 0, 1, .*as the target, such as `\|\|\| {{label}}`",
        ),
    ],
)
def test_a_computed_index_takes_no_item_from_the_end(jinja, row, message):
    with pytest.raises(TemplateFailure, match=message):
        render("{{text}} ||| " + jinja, {"text": "a", **row}, "no ||| yes")


def test_an_index_that_the_row_lacks_is_named():
    with pytest.raises(UndefinedVariable, match="^'label' is undefined$"):
        render("{{text}} ||| {{answer_choices[label]}}", {"text": "a", " label": 1}, "no ||| yes")


@pytest.mark.parametrize(
    ("jinja", "row"),
    [
        ("{{answer_choices[label - 1]}}", {"label": -1}),
        # Winogrande's test split
        ("{{answer_choices[answer | int - 1]}}", {"answer": ""}),
    ],
)
def test_a_hidden_label_is_no_example_where_labels_count_from_one(jinja, row):
    assert render("{{text}} ||| " + jinja, {"text": "a", **row}, "no ||| yes") is Drop.NO_LABEL


@pytest.mark.parametrize("label", [None, ""])
@pytest.mark.parametrize(
    "target", ["{{answer_choices[label | int]}}", "{{'yes' if label | int else 'no'}}"]
)
def test_a_label_that_is_missing_is_no_zero(label, target):
    assert render("{{text}} ||| " + target, {"text": "a", "label": label}) is Drop.NO_LABEL
    given = target.replace("| int", "| int(1)")
    choices = "no ||| yes"
    assert render("x ||| " + given, {"label": label}, choices) == Rendering(
        "x", "yes", ["no", "yes"]
    )


def test_text_that_is_no_number_is_no_zero():
    jinja = "x ||| {{['no', 'yes'][label | int]}}"
    assert render(jinja, {"label": "1.0"}).targets == "yes"
    with pytest.raises(TemplateFailure, match="`| int` gets 'positive', which is no number"):
        render(jinja, {"label": "positive"})


@pytest.mark.parametrize(
    ("jinja", "row", "target"),
    [
        ("{{answer_choices[label - 1]}}", {"label": 1}, "no"),
        ("{{answer_choices[-1]}}", {}, "yes"),
        ("{{words[-2]}}", {"words": ["a", "b"]}, "a"),
        ("{{names[label]}}", {"names": {-2: "x"}, "label": -2}, "x"),
        ("{{words[label:]}}", {"words": "abc", "label": -2}, "bc"),
        ("{% for w in words %}{{words[loop.index - 1]}}{% endfor %}", {"words": ["a", "b"]}, "ab"),
    ],
)
def test_other_indices_are_pythons(jinja, row, target):
    assert render("{{text}} ||| " + jinja, {"text": "a", **row}, "no ||| yes").targets == target


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (float("nan"), "its column 'text' is nan; write a number, or null"),
        (float("-inf"), "its column 'text' is -inf"),
        ([0.5, {"score": float("inf")}], "its column 'text' is inf"),
        (decimal.Decimal("NaN"), "its column 'text' is NaN"),
        (b"a", "its column 'text' is binary; write it as text"),
        (["a", b"b"], "its column 'text' is binary"),
    ],
)
def test_values_that_print_as_python_are_refused_in_columns_that_a_prompt_reads(value, message):
    for jinja in ("{{text}} ||| x", "{% if text %}a{% endif %} ||| x"):
        with pytest.raises(TemplateFailure, match=message):
            render(jinja, {"text": value})
    with pytest.raises(TemplateFailure, match=message):
        render("a ||| x", {"text": value}, "{{text}} ||| b")
    with pytest.raises(TemplateFailure, match=message.replace("'text'", "'the-text'")):
        render("{{the_text}} ||| x", {"the-text": value})
    assert render("a ||| x", {"text": value}) == Rendering("a", "x", None)


def test_the_last_of_a_list_can_still_be_named():
    assert render("{{words[-1]}} ||| x", {"words": ["a", "b"]}).inputs == "b"


@pytest.mark.parametrize("target", ["", "{{ text[:0] }}", NO_LABEL])
def test_an_empty_target_is_no_example(target):
    assert render("{{text}} ||| " + target, {"text": "a"}) is Drop.NO_TARGET


# Nothing else changes ----------------------------------------------------------------------------


def plain_environment() -> jinja2.Environment:
    """promptsource 0.1.0's environment as it makes it, except for draws that can be repeated."""
    environment = jinja2.Environment(loader=jinja2.BaseLoader())
    environment.globals.update(zip=zip)
    environment.filters.update(promptsource_environment().filters)
    # promptsource compiles a template for each row again, which takes most of its time.
    environment.from_string = functools.lru_cache(maxsize=16)(environment.from_string)
    return environment


def sample_rows(dataset: str, subset: str | None) -> list[dict]:
    """A few rows of every split; for datasets that are not here, rows of any likely values."""
    folder = SAMPLES / dataset / (subset or "default")
    files = sorted(folder.glob("*.jsonl"))
    return [row for path in files for row in itertools.islice(read_rows(path), 1)]


def made_up_rows(template) -> list[dict]:
    """Rows of one kind of value each, whatever the template reads."""
    values = ["some text ||| with a bar", 1, ["one", "two", "three"], [{"text": "a"}], None, 0.5]
    values.append({"text": ["a", "b"], "label": [0, 1]})
    return [{name: value for name in columns_read(template)} for value in values]


def by(compiled_template, row):
    """A rendering, or the kind of error."""
    random.seed(7)
    try:
        return compiled_template.render(row)
    except Exception as error:
        return type(error).__name__


def by_promptsource(environment, monkeypatch, template, row):
    import promptsource.templates as module

    random.seed(7)
    with monkeypatch.context() as patched:
        patched.setattr(module, "env", environment)
        fields = {name.replace("-", "_"): value for name, value in row.items()}
        try:
            # T0 renders the choices twice; the first time decides what the second one draws.
            parts = template.apply(fields)
            choices = fields.get("answer_choices")
        except Exception as error:
            return type(error).__name__
    del choices
    if len(parts) != 2:
        return Drop.NOT_A_PAIR
    return (parts[0], parts[1] or NO_LABEL) if parts[0] else Drop.EMPTY_INPUT


def test_all_1966_prompts_render_byte_for_byte_as_without_a_sandbox_in_both_ways(monkeypatch):
    if not SAMPLES.is_dir():
        pytest.skip("samples of the datasets (../shared/data-samples) are not here")
    plain, prompts, real, compared = plain_environment(), 0, 0, 0
    for dataset, subset in template_datasets():
        rows = sample_rows(dataset, subset)
        for name in template_names(dataset, subset):
            template = load_template(dataset, subset, name)
            prompts += 1
            real += bool(rows)
            unboxed = CompiledTemplate(template, environment=plain)
            for row in rows or made_up_rows(template):
                wanted, here = by(unboxed, row), by(compiled(template), row)
                assert here == wanted, (dataset, subset, name)
                pair = wanted[:2] if isinstance(wanted, Rendering) else wanted
                assert by_promptsource(plain, monkeypatch, template, row) == pair, name
                compared += 1
    assert prompts == 1966 and real > 450 and compared > 5000


def test_prompts_of_promptsource_given_as_ones_own_render_the_same_where_nothing_is_missing():
    if not SAMPLES.is_dir():
        pytest.skip("samples of the datasets (../shared/data-samples) are not here")
    same = stricter = 0
    for dataset, subset in template_datasets():
        rows = sample_rows(dataset, subset)[:2]
        for name in template_names(dataset, subset) if rows else ():
            theirs = load_template(dataset, subset, name)
            mine = make_template(
                name, theirs.jinja, theirs.answer_choices, {}, identifier="x", reference=""
            )
            assert fixed_choices(mine) == fixed_choices(theirs)
            assert columns_read(mine) == columns_read(theirs)
            for row in rows:
                key = f"{dataset}/{name}"
                try:
                    found = compiled(mine).render(row, key)
                except TemplateFailure:
                    stricter += 1
                    continue
                if found in (Drop.NO_LABEL, Drop.NO_TARGET):
                    stricter += 1
                    continue
                assert found == compiled(theirs).render(row, key), key
                same += 1
    assert same > 500 and stricter < same / 5, (same, stricter)


def test_answers_of_the_process_are_json_and_hold_nothing_to_run():
    # Whatever a template made of its process, the worst that it could send is text.
    answer = json.loads(json.dumps(sandbox_worker._answer("render", {})))
    assert answer.keys() == {"failure", "message", "line"}
