"""A template is saved into a user's file in promptsource's form; nothing else in it changes."""

import pytest
import yaml

from t0repro.errors import UserError
from t0repro.tasks.template_files import read_template_file
from t0repro.tasks.template_saving import digest, save_template
from t0repro.tasks.templates import _loader, make_template

METADATA = {"original_task": True, "choices_in_prompt": None, "metrics": ["Accuracy"]}
FILE = """\
# my prompts
dataset: my
templates:
    a:  # the first
        !Template
        name: "one"   # double quotes
        jinja: |-
          {{text}}
          # not a comment
          ||| {{answer_choices[label]}}
        answer_choices: ["no", "yes!"]

    # about b
    b: !Template {name: two, jinja: "{{text}} ||| x"}
# before mixtures
mixtures:
  m: {my_one: 3}
"""


def template(identifier, name="was it good", jinja="{{text}}\nGood? ||| {{answer_choices[label]}}"):
    return make_template(name, jinja, "no ||| yes", METADATA, identifier=identifier, reference="")


TEXTS = [
    "{{text}} ||| x",
    "{{text}}\nGood? ||| {{answer_choices[label]}}",
    "  two spaces first\n{{text}} ||| x\n\n",
    "trailing \n{{text}}\t||| x",
    "- a\n# b\n: c {{text}} ||| 'd' \"e\" \\n",
    "é \u2028 \U0001f600 {{text}} ||| \x85",
    "a" * 500 + " {{text}} ||| " + "b " * 500,
    "yes ||| no",
    "{% if text %}\n\n\n{{text}}\n{% endif %} ||| {{ label }}",
]


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_any_text_is_read_back_as_it_was_by_us_and_by_promptsources_loader(tmp_path, text):
    path = tmp_path / "new.yaml"
    save_template(path, "my", None, template("one", "a", text))
    save_template(path, "my", None, template("two", "b: #c", text))
    assert [each.jinja for each in read_template_file(path).templates] == [text, text]
    theirs = yaml.load(path.read_text(), Loader=_loader())
    assert theirs["dataset"] == "my" and theirs["subset"] is None
    assert [each.name for each in theirs["templates"].values()] == ["a", "b: #c"]
    assert theirs["templates"]["one"].jinja == text
    assert theirs["templates"]["one"].metadata.metrics == ["Accuracy"]


def test_the_lines_of_everything_else_stay(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(FILE)
    first, second = read_template_file(path).templates
    changed = template("a", "one", "{{text}} is new ||| x")
    save_template(path, "my", None, changed, digest(first))
    text = path.read_text()
    assert text.startswith("# my prompts\ndataset: my\ntemplates:\n    a: !Template\n")
    assert text.endswith(FILE[FILE.index("    # about b") :]) and "not a comment" not in text
    save_template(path, "my", None, template("c", "three"))
    lines = path.read_text().splitlines()
    assert lines.index("    c: !Template") == lines.index(FILE.splitlines()[13]) + 1
    assert lines[-3:] == FILE.splitlines()[-3:]
    assert digest(read_template_file(path).templates[1]) == digest(second)
    assert read_template_file(path).mixtures == {"m": {"my_one": 3.0}}


def refuse(path, dataset, new, base=None):
    before = path.read_bytes()
    with pytest.raises(UserError) as error:
        save_template(path, dataset, None, new, base)
    assert path.read_bytes() == before and str(path) in (error.value.where or "")
    assert [each.name for each in path.parent.iterdir()] == [path.name]
    return error.value.what


def test_nothing_is_written_where_the_file_would_not_be_valid_or_is_another(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(FILE)
    (first, _) = read_template_file(path).templates
    assert "prompts of 'my'" in refuse(path, "other", template("c"))
    assert "was changed in the file" in refuse(path, "my", template("a"), "an older one")
    assert "would both be the task" in refuse(path, "my", template("c", "one"))
    assert "no target" in refuse(path, "my", template("a", "one", "{{text}}"), digest(first))
    assert "not a Jinja" in refuse(path, "my", template("a", "one", "{{ ||| x"), digest(first))
    path.write_text("{dataset: my, templates: {a: !Template {name: one, jinja: 'b ||| c'}}}")
    assert "cannot edit" in refuse(path, "my", template("c"))
    path.write_text("dataset: [")
    with pytest.raises(UserError, match="not valid"):
        save_template(path, "my", None, template("c"))
