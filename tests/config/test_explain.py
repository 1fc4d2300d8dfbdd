"""`explain` shows each value beside its place."""

import pytest

from t0repro.config.table import flatten, render

from ..cli.commands import run
from .test_mtf_gin import FILES, PARAMS, load


def test_every_leaf_of_the_run_config_has_a_line_with_its_value():
    config = load()
    lines = render(config).splitlines()
    shown = {line.split(" ")[0] for line in lines}
    assert shown == {name for name, _ in flatten(config) if name != "provenance"}
    assert any(line.startswith("train_steps ") and " 20 " in line for line in lines)


def test_the_place_stands_on_the_line_of_the_value():
    line = next(x for x in render(load()).splitlines() if x.startswith("model.activations"))
    assert "('gelu', 'linear')" in line and line.endswith("t5.1.1.base.gin:17")


@pytest.mark.mtf
@pytest.mark.parametrize(
    ("flags", "code"),
    [
        ((), 2),
        (("--skip_all_gin_unknowns",), 0),
        (("--additional_deprecated_gin_references=gone,also_gone",), 0),
        (("--additional_deprecated_gin_references=gone",), 2),
    ],
)
def test_names_that_are_gone_are_skipped_as_t5_mesh_transformer_skips_them(
    flags, code, tmp_path, monkeypatch, capsys
):
    (tmp_path / "old.gin").write_text("gone.a = 1\nalso_gone.b = 2\nd_kv = 8\n")
    given = [f"--gin_file={name}" for name in (*FILES, str(tmp_path / "old.gin"))]
    given += [f"--gin_param={each}" for each in PARAMS]
    line = ("explain", "--module_import=t0repro.tasks.demo", *given, *flags)
    ended, out, err = run(monkeypatch, capsys, *line)
    assert ended == code, err
    assert ("gone" in err and "old.gin" in err) if code else "old.gin:3" in out
