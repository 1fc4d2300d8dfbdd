"""YAML that would exhaust memory or recurse without end is refused, wherever it is read."""

import json

import pytest
import yaml

from t0repro import yaml_files
from t0repro.cloud.launchers.kubernetes import complete_template, read_template
from t0repro.cloud.launchers.machines import find_machine
from t0repro.errors import UserError
from t0repro.jobs.job import Limits
from t0repro.tasks.template_files import read_template_file

BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 10)
)
HOSTILE = {
    "bomb": (BOMB + "platforms: {p: *a9}\n", r"its aliases repeat [\d,]+ parts"),
    "bomb of maps": (
        "a0: &a0 {k: v, l: w}\n"
        + "".join(f"a{n}: &a{n} {{k: *a{n - 1}, l: *a{n - 1}}}\n" for n in range(1, 30)),
        r"its aliases repeat [\d,]+ parts",
    ),
    "bomb of merges": (
        "a0: &a0 {k: v}\n"
        + "".join(f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 10)}]}}\n" for n in range(1, 9)),
        r"its aliases repeat [\d,]+ parts",
    ),
    "recursive": ("spec: &a {template: *a}\n", "inside the part that it stands for"),
    "recursive list": ("spec: &a [*a]\n", "inside the part that it stands for"),
    "recursive merge": ("spec: &a {<<: *a}\n", "inside the part that it stands for"),
    "a key twice": ("platforms: {}\nplatforms: {}\n", "key 'platforms' of line 1: is there twice"),
    "a key twice inside": ("spec:\n  a: 1\n  'a': 2\n", "key 'a' of line 2: is there twice"),
    "deep": ("a: " + "[" * 9000, "nested too deeply"),
    "deep and closed": ("a: " + "[" * 150 + "]" * 150, "nested too deeply"),
}
READERS = {
    "machines": lambda path: find_machine(path, "p", None),
    "template of a Job": read_template,
    "prompts": read_template_file,
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_refused_with_its_name_in_a_few_words(reader, name, tmp_path):
    text, reason = HOSTILE[name]
    path = tmp_path / "hostile.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=reason) as error:
        READERS[reader](path)
    assert str(path) in str(error.value.where) and error.value.fix
    assert len(str(error.value)) < 2000 and "<unicode string>" not in str(error.value)


ODD = [0, True, 2.5, "false", [], [1], [None], {}, {"q": 4}]


@pytest.mark.parametrize("part", ["metadata", "resources", "env"])
def test_an_odd_part_of_a_job_is_refused_by_its_name(part):
    def job(**parts):
        container = {"name": "c", **{k: v for k, v in parts.items() if k != "metadata"}}
        spec = {"template": {"spec": {"containers": [container]}}}
        return {"spec": spec, "metadata": parts.get("metadata", {})}

    for odd in ODD if part != "env" else [*ODD, [{"name": 1}], [{"value": "a"}]]:
        if odd in ([[]] if part == "env" else [{}, {"q": 4}]):
            complete_template(job(**{part: odd}), "job", Limits())
        else:
            with pytest.raises(UserError, match=f"The Job template's {part}"):
                complete_template(job(**{part: odd}), "job", Limits())


@pytest.mark.parametrize("field", ["options", "cpus", "memory_gb", "time_limit", "environment"])
def test_an_odd_value_of_a_machine_is_refused_by_its_field(field, tmp_path):
    right = {"options": [[]], "cpus": [], "memory_gb": [2.5], "time_limit": [2.5]}
    for odd in [*ODD, 10**400]:
        if odd in right.get(field, [{}]):
            continue
        (tmp_path / "machines.yaml").write_text(json.dumps({"cells": {"here": {field: odd}}}))
        with pytest.raises(UserError, match=field):
            find_machine(tmp_path / "machines.yaml", None, "here")


def test_ordinary_aliases_and_merges_still_work():
    text = "base: &b {x: 1, y: [1, 2]}\none: {<<: *b, x: 2}\ntwo: *b\n"
    loaded = yaml_files.load(text)
    assert loaded["one"] == {"x": 2, "y": [1, 2]} and loaded["two"] == {"x": 1, "y": [1, 2]}
    assert loaded == yaml.safe_load(text)


def test_a_long_value_in_a_file_of_machines_is_not_printed_whole(tmp_path):
    path = tmp_path / "machines.yaml"
    for entry in ("['" + "x" * 10**5 + "']", "{cpus: '" + "x" * 10**5 + "'}"):
        path.write_text(f"platforms: {{p: {entry}}}")
        with pytest.raises(UserError) as error:
            find_machine(path, "p", None)
        assert len(str(error.value)) < 2000
