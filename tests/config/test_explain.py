"""`explain` shows each value beside its place."""

from t0repro.config.configuration import flatten, render

from .test_mtf_gin import load


def test_every_leaf_of_the_run_config_has_a_line_with_its_value():
    config = load()
    lines = render(config).splitlines()
    shown = {line.split(" ")[0] for line in lines}
    assert shown == {name for name, _ in flatten(config) if name != "provenance"}
    assert any(line.startswith("train_steps ") and " 20 " in line for line in lines)


def test_the_place_stands_on_the_line_of_the_value():
    line = next(x for x in render(load()).splitlines() if x.startswith("model.activations"))
    assert "('gelu', 'linear')" in line and line.endswith("t5.1.1.base.gin:17")
