import pytest

from t0repro.evaluation import code_version
from t0repro.evaluation.code_version import code_digest, collect_modules, read_source


def with_a_change_in(changed):
    """Reads the installed sources, one of them changed."""

    def read(name):
        source = read_source(name)
        return source + "\n# changed\n" if name == changed and source is not None else source

    return read


PARTS = {
    "scoring": code_version._SCORING,
    "generation": code_version._GENERATION,
    "rendering": code_version._RENDERING,
}


@pytest.mark.parametrize(
    ("part", "module"),
    [
        ("scoring", "t0repro.training.token_losses"),
        ("scoring", "t0repro.model.t5"),
        ("scoring", "t0repro.model.layers"),
        ("scoring", "t0repro.model.attention.cc"),
        ("scoring", "t0repro.evaluation.grouping"),
        ("generation", "t0repro.model.decoding"),
        ("generation", "t0repro.model.layers"),
        ("generation", "t0repro.evaluation.generation"),
        ("rendering", "t0repro.tasks.prompted_examples"),
        ("rendering", "t0repro.tasks.vocabulary"),
    ],
)
def test_results_of_other_code_are_not_taken_over(part, module):
    roots = PARTS[part]
    assert code_digest(roots, ["jax"], with_a_change_in(module)) != code_digest(roots, ["jax"])


def test_code_that_results_do_not_depend_on_leaves_the_digest_alone():
    for module in ("t0repro.reports.report", "t0repro.training.trainer"):
        assert read_source(module)
        changed = code_digest(PARTS["scoring"], ["jax"], with_a_change_in(module))
        assert changed == code_digest(PARTS["scoring"], ["jax"])


def test_another_version_of_a_package_gives_another_digest(monkeypatch):
    before = code_digest(PARTS["scoring"], ["jax"])
    monkeypatch.setattr(code_version.importlib.metadata, "version", lambda name: "0.0.1")
    assert code_digest(PARTS["scoring"], ["jax"]) != before


def test_imports_are_followed_wherever_they_stand_but_for_type_checkers():
    sources = {
        "t0repro": "",
        "t0repro.a": "def f():\n    from t0repro import b\n",
        "t0repro.b": "from t0repro.c.d import name\nimport numpy\n",
        "t0repro.c": "",
        "t0repro.c.d": (
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import t0repro.e\n"
        ),
        "t0repro.e": "",
    }
    found = collect_modules(["t0repro.a"], sources.get)
    assert set(found) == {"t0repro", "t0repro.a", "t0repro.b", "t0repro.c", "t0repro.c.d"}


def test_every_task_module_counts_for_rendering():
    digest = code_version.rendering_digest()
    assert len(digest) == 16 and digest == code_version.rendering_digest()
