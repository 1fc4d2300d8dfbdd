"""Data that are not on this machine are named before a run builds or writes anything."""

import pytest

from t0repro import compat
from t0repro.data.checks import check_cached, check_rows
from t0repro.errors import UserError


@pytest.mark.parametrize("check", [check_cached, check_rows])
def test_a_task_without_its_data_is_named_with_where_to_put_them(check):
    """As a task of TensorFlow Datasets is on a machine that has not prepared them."""
    compat.install()
    import seqio

    source = seqio.FunctionDataSource(lambda split, shuffle_files, seed=None: None, splits=[])
    task = seqio.TaskRegistry.add("not_here", source, output_features={})
    try:
        with pytest.raises(UserError) as refused:
            check(task.name, "train")
    finally:
        seqio.TaskRegistry.remove(task.name)
    assert "The data of the task not_here" in str(refused.value)
    assert "--tfds_data_dir" in str(refused.value)
