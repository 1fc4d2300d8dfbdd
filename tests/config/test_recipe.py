"""A configuration made in Python is the one that T0's gin files give."""

import dataclasses

import pytest

from t0repro.config.model import DTypePolicy
from t0repro.config.mtf import dialect
from t0repro.config.mtf.parser import MeshInputs
from t0repro.config.recipe import t5_1_1, training_config
from t0repro.errors import UserError

LENGTHS = {"inputs": 64, "targets": 16}
DEMO = t5_1_1(num_layers=2, d_model=128, d_ff=256, num_heads=4, d_kv=32, vocab_size=1408)


@pytest.mark.mtf
def test_the_values_are_those_of_t0s_gin_files_and_mesh_tensorflows_defaults():
    files = ("dataset.gin", "demo/t5.1.1.demo.gin", "learning_rate_schedules/constant_0_001.gin")
    params = (
        "MIXTURE_NAME = 'demo_train'",
        "run.train_steps = 10",
        "run.batch_size = ('tokens_per_batch', 1024)",
        f"run.sequence_length = {LENGTHS}",
        "mesh_train_dataset_fn.use_cached = True",
        "pack_dataset.use_custom_ops = False",
        "utils.run.mesh_shape = []",
    )
    inputs = MeshInputs("a_dir", files, params, module_imports=("t0repro.tasks.demo",))
    theirs = dialect.load(inputs).run
    ours = training_config("a_dir", DEMO, train_steps=10, batch_size=16, sequence_length=LENGTHS)
    # In Python the data are given beside the configuration, and checkpoints hold float32.
    data = {name: getattr(theirs, name) for name in
            ("vocabulary", "vocabulary_extra_ids")}  # fmt: skip
    data["plan"] = dataclasses.replace(ours.plan, train_data=theirs.plan.train_data)
    assert theirs.dtypes == DTypePolicy("bfloat16", "float32", "float32")
    assert dataclasses.replace(ours, **data) == dataclasses.replace(theirs, dtypes=ours.dtypes)


def test_a_number_outside_its_range_is_refused_by_name():
    with pytest.raises(UserError, match="batch_size"):
        training_config("d", DEMO, train_steps=1, batch_size=0, sequence_length=LENGTHS)


@pytest.mark.parametrize("lengths", [128, {"inputs": 64, "target": 16}, {"inputs": 64}])
def test_lengths_of_other_features_are_refused(lengths):
    with pytest.raises(UserError, match="'inputs' and 'targets', or of 'targets' alone"):
        training_config("d", DEMO, train_steps=1, batch_size=1, sequence_length=lengths)


def test_position_buckets_that_hold_no_distance_are_refused():
    model = dataclasses.replace(DEMO, relative_attention_max_distance=16)
    with pytest.raises(UserError, match="at least 17, or fewer buckets"):
        training_config("d", model, train_steps=1, batch_size=1, sequence_length=LENGTHS)
