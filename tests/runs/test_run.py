"""Modes of t5_mesh_transformer on JAX."""

import importlib

import pytest

from t0repro.runs import MODES


@pytest.mark.parametrize("mode", MODES)
def test_each_modes_function_is_where_the_table_says(mode):
    module, function = MODES[mode]
    assert callable(getattr(importlib.import_module(f"t0repro.runs.{module}"), function))
