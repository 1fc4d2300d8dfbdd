"""Settings that only the JAX stack has: bound by gin, and refused by Mesh TensorFlow."""

import re

import pytest

from t0repro.adapters import lora
from t0repro.config.choices import ChoiceLoss
from t0repro.config.combinations import check_has_base
from t0repro.config.configuration import Configuration
from t0repro.config.mtf import dialect
from t0repro.config.mtf.parser import MeshInputs
from t0repro.config.run import TrainRun
from t0repro.errors import UserError
from t0repro.runs.preflight import check_mesh_transformer

pytestmark = pytest.mark.mtf

FIELDS = {
    "relative_attention_max_distance = 64": ("relative_attention_max_distance", 64),
    "exact_gelu = True": ("activations", ("gelu_exact", "linear")),
    "scale_tied_logits = False": ("scale_tied_logits", False),
    "recompute = 'minimal'": ("recompute", "minimal"),
}


def configured(*params: str) -> Configuration:
    return dialect.load(
        MeshInputs(
            "a_model_dir",
            ("dataset.gin", "models/t5.1.1.small.gin"),
            (
                "MIXTURE_NAME = 'demo_train'",
                "run.train_steps = 1",
                "run.batch_size = 2",
                "utils.run.mesh_shape = []",
                *params,
            ),
            module_imports=("t0repro.tasks.demo",),
        )
    )


def load(*params: str) -> TrainRun:
    return configured(*params).run


def refusal_of(*params: str) -> str:
    """What a run on Mesh TensorFlow says of the bindings, before it looks for a checkpoint."""
    run = configured(*params, "utils.run.init_checkpoint = '/absent/model.ckpt-1'")
    with pytest.raises(UserError) as refused:
        check_mesh_transformer(run, jax=False, skip_missing=False)
    assert refused.value == run.only_on_jax
    return str(refused.value)


@pytest.mark.parametrize("binding", FIELDS)
def test_a_binding_sets_a_field_of_the_model_and_no_run_on_mesh_tensorflow(binding):
    field, value = FIELDS[binding]
    config = load(f"t0repro.jax_model.{binding}")
    assert getattr(config.model, field) == value
    argument = binding.partition(" ")[0]
    if field == argument:
        assert binding in config.provenance[f"model.{field}"]
    refusal = refusal_of(f"t0repro.jax_model.{binding}")
    assert re.search(rf"t0repro\.jax_model\.{argument} is (?s:.*)--backend=jax", refusal)


def test_a_distance_that_leaves_no_bucket_for_several_distances_is_refused():
    buckets = "SelfAttention.relative_attention_num_buckets"
    distance = "t0repro.jax_model.relative_attention_max_distance"
    for bindings, at_least in (
        ([f"{buckets} = 8", f"{distance} = 4"], 5),
        ([f"{buckets} = 256"], 129),  # where Mesh TensorFlow divides by zero
        ([f"{distance} = 16"], 17),
    ):
        with pytest.raises(UserError, match=f"Bind a distance of at least {at_least}") as caught:
            load(*bindings)
        assert bindings[-1] in caught.value.where
    assert load(f"{buckets} = 8", f"{distance} = 5").model.relative_attention_max_distance == 5


def test_an_adapter_to_start_from_needs_an_adapter_to_train_and_a_base():
    adapter = "t0repro.jax_training.adapter = @t0repro.adapters.lora()"
    start = "t0repro.jax_training.init_adapter = 'pretrained'"
    base = "utils.run.init_checkpoint = 'base'"
    config = load(adapter, start, base)
    assert config.plan.restore.adapter == "pretrained" and config.plan.restore.path == "base"
    assert "init_adapter" in config.provenance["plan.restore.adapter"]
    with pytest.raises(UserError, match="its base is not given"):
        load(adapter, start)
    with pytest.raises(UserError, match="trains the whole model, but pretrained"):
        load(start, base)


def test_an_adapter_is_bound_in_training_and_its_errors_name_the_binding():
    adapter = "t0repro.jax_training.adapter = @t0repro.adapters.lora()"
    base = "utils.run.init_checkpoint = 'base'"
    config = load(adapter, base, "t0repro.adapters.lora.rank = 2")
    assert config.model.adapter == lora(rank=2)
    assert "jax_training.adapter" in config.provenance["model.adapter"]
    assert TrainRun.from_json(config.to_json()) == config
    assert re.search(r"jax_training\.adapter is (?s:.*)--backend=jax", refusal_of(adapter, base))
    for wrong, said in (
        ("targets = 'decoder/query'", "matches no kernel"),
        ("targets = '('", "is not a regular expression"),
        ("rank = 500", "rank = 500 is above"),
    ):
        with pytest.raises(UserError, match=said) as caught:
            load(adapter, f"t0repro.adapters.lora.{wrong}")
        assert wrong in caught.value.where or "lora.rank" in caught.value.where
    with pytest.raises(UserError, match="one optimizer"):
        load(adapter, base, "utils.run.variable_filter = 'decoder'")
    with pytest.raises(UserError, match="its base is not given") as caught:
        check_has_base(load(adapter))
    assert "jax_training.adapter" in caught.value.where
    for wrong, kind in (("@t0repro.adapters.lora", "function"), ("'lora'", "str")):
        with pytest.raises(UserError, match=f"is not an adapter, but a {kind}") as caught:
            load(f"t0repro.jax_training.adapter = {wrong}", base)
        assert wrong in caught.value.where and "with the parentheses" in caught.value.fix


def test_a_loss_over_choices_is_bound_in_training():
    loss = "t0repro.jax_training.choice_loss = @t0repro.ChoiceLoss()"
    unpacked = "mesh_train_dataset_fn.pack = False"
    config = load(loss, "t0repro.ChoiceLoss.choices = 2", unpacked)
    assert config.model.choice_loss == ChoiceLoss(choices=2)
    assert "jax_training.choice_loss" in config.provenance["model.choice_loss"]
    assert re.search(
        r"jax_training\.choice_loss is (?s:.*)--backend=jax", refusal_of(loss, unpacked)
    )
    with pytest.raises(UserError, match="pack = False"):
        load(loss)
    with pytest.raises(UserError, match="divided by the number of their tokens"):
        load(loss, unpacked, "Unitransformer.loss_denominator = 100.0")
    with pytest.raises(UserError, match="choices"):
        load(loss, unpacked, "t0repro.ChoiceLoss.choices = 1")


def test_what_is_recomputed_is_open_unless_gin_binds_it():
    assert load().model.recompute is None
    assert load("LayerStack.recompute_grads = False").model.recompute is None
    assert load("t0repro.jax_model.recompute = 'none'").model.recompute == "none"
    with pytest.raises(UserError, match="jax_model.recompute is 'all'.*'full'") as error:
        load("t0repro.jax_model.recompute = 'all'")
    assert "recompute = 'all'" in (error.value.where or "")


def test_a_training_measures_its_weights_every_so_many_steps_if_gin_says_so():
    assert load().weight_metrics_every == 0
    config = load("t0repro.jax_training.weight_metrics_every = 10")
    assert config.weight_metrics_every == 10
    assert "= 10" in config.provenance["weight_metrics_every"]
    refusal = refusal_of("t0repro.jax_training.weight_metrics_every = 10")
    assert "t0repro.jax_training.weight_metrics_every is 10" in refusal
    with pytest.raises(UserError, match="weight_metrics_every"):
        load("t0repro.jax_training.weight_metrics_every = -1")


def test_the_data_of_a_training_are_divided_into_as_many_shards_as_gin_says():
    assert load().plan.train_data.num_shards == 1
    config = load("t0repro.jax_training.data_shards = 2")
    assert config.plan.train_data.num_shards == 2
    assert "= 2" in config.provenance["plan.train_data.num_shards"]
    refusal = refusal_of("t0repro.jax_training.data_shards = 2")
    assert "t0repro.jax_training.data_shards is 2" in refusal
    for bindings, message in (
        (["t0repro.jax_training.data_shards = 3"], "data_shards = 3 does not divide the batch of"),
        (["t0repro.jax_training.data_shards = 0"], "data_shards is 0"),
        (
            ["t0repro.jax_training.data_shards = 2", "run.checkpoint_input_pipeline = True"],
            "in several shards cannot be saved",
        ),
    ):
        with pytest.raises(UserError, match=message) as caught:
            load(*bindings)
        assert bindings[-1] in caught.value.where


def test_their_defaults_are_what_mesh_tensorflow_computes():
    plain = configured()
    default = configured("t0repro.jax_model.relative_attention_max_distance = 128")
    assert default.run.model == plain.run.model
    assert default.only_on_jax is None and plain.only_on_jax is None
