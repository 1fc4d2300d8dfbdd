"""A run survives JSON, and nothing in it is lost or invented on the way."""

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from t0repro.config.checkpoints import RestoreConfig
from t0repro.config.data import EvalDataConfig, TrainDataConfig
from t0repro.config.model import DTypePolicy, ModelConfig
from t0repro.config.optimizer import (
    AdafactorConfig,
    AdamWeightDecayConfig,
    MomentumConfig,
    ScheduleConfig,
    SgdConfig,
)
from t0repro.config.run import MeshEvalRun, TrainRun, mesh_transformer_plan
from t0repro.errors import UserError

from ..helpers.tiny_models import PLAN, run_config

# For the fields that no strategy is given for below: a NaN is not equal to itself.
st.register_type_strategy(float, st.floats(allow_nan=False, allow_infinity=False))

sizes = st.integers(1, 64)
fractions = st.floats(0, 1, allow_nan=False)
names = st.text(max_size=8)

models = st.builds(
    ModelConfig,
    num_encoder_layers=sizes,
    num_decoder_layers=sizes,
    d_model=sizes,
    d_ff=sizes,
    num_heads=sizes,
    d_kv=sizes,
    vocab_size=sizes,
    activations=st.sampled_from([("relu",), ("gelu", "linear")]),
    logits_from_embedding=st.booleans(),
    relative_attention_num_buckets=sizes,
    dropout_rate=fractions,
    label_smoothing=fractions,
    z_loss=fractions,
    loss_denominator=st.none() | fractions,
)
plans = st.builds(
    mesh_transformer_plan,
    st.none()
    | st.builds(
        TrainDataConfig,
        mixture_or_task_name=names,
        split=names,
        use_cached=st.booleans(),
        pack=st.booleans(),
        shuffle=st.booleans(),
        seed=st.none() | sizes,
    ),
    save_checkpoints_steps=sizes,
    keep_checkpoint_max=st.none() | sizes,
)
plans = st.builds(
    dataclasses.replace,
    plans | st.sampled_from([PLAN, dataclasses.replace(PLAN, save=None)]),
    restore=st.none() | st.builds(RestoreConfig, path=names, variable_filter=names),
)
shared = dict(
    model_dir=names,
    model=models,
    dtypes=st.builds(
        DTypePolicy,
        master=st.sampled_from(["float32", "bfloat16"]),
        slice=st.just("float32"),
        activation=st.just("bfloat16"),
    ),
    sequence_length=st.none() | st.fixed_dictionaries({"inputs": sizes, "targets": sizes}),
    batch_size=sizes,
    vocabulary=st.none() | names,
    provenance=st.dictionaries(names, names, max_size=3),
)
trainings = st.builds(
    TrainRun,
    **shared,
    mode=st.just("train"),
    optimizer=st.none()
    | st.builds(
        AdafactorConfig,
        multiply_by_parameter_scale=st.booleans(),
        decay_exponent=fractions,
        decay_offset=fractions,
        beta1=fractions,
        clipping_threshold=st.none() | fractions,
        factored=st.booleans(),
        epsilon1=fractions,
        epsilon2=fractions,
        min_dim_size_to_factor=sizes,
        decay_rate=st.none() | fractions,
        frozen=st.lists(names, max_size=2).map(tuple),
    )
    | st.builds(
        AdamWeightDecayConfig, exclude_from_weight_decay=st.lists(names, max_size=2).map(tuple)
    )
    | st.builds(MomentumConfig, frozen=st.lists(names, max_size=2).map(tuple))
    | st.builds(SgdConfig, frozen=st.lists(names, max_size=2).map(tuple)),
    schedule=st.none()
    | st.builds(
        ScheduleConfig,
        name=names,
        arguments=st.dictionaries(names, fractions, max_size=3),
        total_train_steps=sizes,
    ),
    num_microbatches=sizes,
    train_steps=sizes,
    plan=plans,
)
evaluations = st.builds(
    MeshEvalRun,
    **shared,
    mode=st.sampled_from(["eval", "score_eval", "perplexity_eval"]),
    eval_data=st.none()
    | st.builds(
        EvalDataConfig,
        mixture_or_task_name=names,
        split=names,
        use_cached=st.booleans(),
        pack=st.booleans(),
        num_eval_examples=sizes,
        shuffle_eval_examples=st.booleans(),
        seed=st.none() | sizes,
    ),
    eval_checkpoint_step=st.none() | sizes | st.lists(sizes).map(tuple) | st.just("all"),
    eval_summary_dir=st.none() | names,
    eval_dir_suffix=st.none() | names,
    output_eval_examples=st.booleans(),
    scores_filename=st.none() | names,
)


@given(trainings | evaluations)
def test_a_run_read_back_from_json_is_equal_in_every_field(config):
    read = type(config).from_json(config.to_json())
    assert read == config
    assert dataclasses.asdict(read) == dataclasses.asdict(config)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda values: values.pop("batch_size"), 'missing value for field "batch_size"'),
        (lambda values: values.update(nosuch=1), "nosuch"),
        (lambda values: values["model"].update(d_model="wide"), "model.d_model"),
        (lambda values: values["model"].update(activations=["nosuch"]), "model.activations"),
        (lambda values: values["optimizer"].update(beta3=0.5), "optimizer"),
    ],
    ids=["missing", "unknown", "type", "name", "unknown in an optimizer"],
)
def test_a_field_that_json_has_wrong_is_named(change, message):
    values = json.loads(run_config("a_model_dir", 10).to_json())
    change(values)
    with pytest.raises(UserError, match=message):
        TrainRun.from_json(json.dumps(values))


@pytest.mark.parametrize("text", ["", "{", "[]", '"text"', "{}"])
def test_text_that_is_no_configuration_is_refused(text):
    with pytest.raises(UserError, match="not a run configuration") as error:
        TrainRun.from_json(text, where="a_file.json")
    assert error.value.where == "a_file.json"
