"""The MTF dialect: what gin configured becomes a TrainRun, or an error that names the binding."""

import dataclasses

import pytest
import seqio

import gin
from t0repro.config.gin.errors import configuration_errors
from t0repro.config.model import Layout
from t0repro.config.mtf import dialect
from t0repro.config.mtf.parser import MeshInputs
from t0repro.config.optimizer import (
    AdamWeightDecayConfig,
    MomentumConfig,
    ScheduleConfig,
    SgdConfig,
)
from t0repro.config.run import TrainRun
from t0repro.errors import UserError

FILES = ("dataset.gin", "demo/t5.1.1.demo.gin", "learning_rate_schedules/constant_0_001.gin")
PARAMS = (
    "MIXTURE_NAME = 'demo_train'",
    "utils.run.mesh_shape = []",
    "utils.run.layout_rules = []",
    "run.train_steps = 20",
    "run.batch_size = ('tokens_per_batch', 512)",
    "run.sequence_length = {'inputs': 64, 'targets': 16}",
)


def load(*params: str, files: tuple[str, ...] = FILES, with_packages: bool = False) -> TrainRun:
    inputs = MeshInputs(
        "a_model_dir", files, (*PARAMS, *params), module_imports=("t0repro.tasks.demo",)
    )
    return dialect.load(inputs, with_packages=with_packages).run


def test_the_demo_recipe_becomes_the_run_that_its_gin_files_describe():
    config = load("serialize_num_microbatches.tokens_per_microbatch_per_replica = 256")
    model = config.model
    assert (model.d_model, model.d_ff, model.num_heads, model.d_kv) == (128, 256, 4, 32)
    assert (model.num_encoder_layers, model.num_decoder_layers) == (2, 2)
    assert model.activations == ("gelu", "linear") and not model.logits_from_embedding
    assert model.vocab_size % 128 == 0
    assert model.dropout_rate == 0.0
    assert config.batch_size == 512 // 64
    assert config.num_microbatches == 2
    assert config.schedule is not None and config.schedule.name == "constant_learning_rate"
    assert config.schedule.arguments == {"learning_rate": 0.001}
    assert config.plan.train_data is not None
    assert config.plan.train_data.mixture_or_task_name == "demo_train"
    assert config.dtypes.activation == "float32"


def test_every_value_says_which_file_and_line_or_override_set_it():
    places = load("mesh_train_dataset_fn.seed = 3").provenance
    assert places["model.d_model"].split(" ")[0].endswith("demo/t5.1.1.demo.gin:7")
    assert places["model.activations"].endswith("models/t5.1.1.base.gin:17")
    assert places["train_steps"] == "--gin_param 'run.train_steps = 20'"
    assert places["plan.train_data.seed"] == "--gin_param 'mesh_train_dataset_fn.seed = 3'"
    assert places["optimizer.beta1"] == "default of AdafactorOptimizer.beta1"


T5X_ONLY = (
    "momentum_slot", "weight_decay_rate", "weight_decay_rate_lr_exponent", "global_norm_clip",
    "max_parameter_scale", "skip_nan_updates", "factor_map",
)  # fmt: skip


def test_every_field_of_the_model_and_the_optimizer_says_where_it_came_from():
    config = load("LayerStack.recompute_grads = True")
    fields = dataclasses.fields(config.model) + dataclasses.fields(config.optimizer)
    prefixes = ["model"] * len(dataclasses.fields(config.model)) + ["optimizer"] * len(fields)
    missing = [
        f"{prefix}.{field.name}"
        for prefix, field in zip(prefixes, fields, strict=False)
        if f"{prefix}.{field.name}" not in config.provenance
    ]
    assert missing == [
        "model.scan_layers",  # which changes no result
        "model.scale_queries",
        "model.arithmetic",  # what Mesh TensorFlow does not have, only T5X's dialect can set
        *(f"optimizer.{name}" for name in T5X_ONLY),
    ]
    place = config.provenance["model.recompute"]
    assert place == "--gin_param 'LayerStack.recompute_grads = True'"


def test_an_override_wins_over_every_file_and_is_named_as_the_place():
    config = load("d_model = 256", "num_heads = 8")
    assert (config.model.d_model, config.model.num_heads) == (256, 8)
    assert config.provenance["model.d_model"].startswith("--gin_param 'd_model = 256'")


def test_t5_1_0_ties_its_embeddings_and_has_one_activation():
    config = load(files=("dataset.gin", "models/t5.1.0.small.gin"))
    assert config.model.activations == ("relu",)
    assert config.model.logits_from_embedding
    assert config.model.dropout_rate == 0.1
    assert config.schedule is not None and config.schedule.name == "learning_rate_schedule_noam"


@pytest.mark.parametrize(
    ("size", "sequences"),
    [
        ("12", 12),
        ("('sequences_per_batch', 5)", 5),
        ("('tokens_per_batch', 640)", 10),
        ("('sequences_per_replica', 3)", 3),
        ("('tokens_per_replica', 128)", 2),
    ],
)
def test_batch_size_in_its_forms_counts_sequences(size, sequences):
    assert load(f"run.batch_size = {size}").batch_size == sequences


def test_activation_and_epsilon_are_read_as_they_are_bound():
    model = load(
        "DenseReluDense.activation = ['swish', 'linear']", "sublayer_rms_norm.epsilon = 1e-5"
    ).model
    assert model.activations == ("swish", "linear")
    assert model.rms_norm_epsilon == 1e-5
    assert load().model.rms_norm_epsilon == 1e-6


@pytest.mark.parametrize(
    ("param", "name"),
    [
        ("DenseReluDense.use_bias = True", "DenseReluDense.use_bias"),
        ("DenseReluDense.activation = 'elu'", "DenseReluDense.activation"),
        ("decoder/SelfAttention.num_memory_heads = 1", "SelfAttention.num_memory_heads"),
        ("Unitransformer.token_dropout_rate = 0.1", "Unitransformer.token_dropout_rate"),
        ("encoder/Unitransformer.positional_embedding = True", "positional_embedding"),
        ("run.optimizer = @optimize.AdafactorWithMultiLRSchedule", "run.optimizer"),
        ("run.ensemble_inputs = 2", "run.ensemble_inputs"),
        ("get_variable_dtype.master_dtype = 'float16'", "master_dtype 'float16'"),
        # Mesh TensorFlow takes all of these for True.
        ("mesh_train_dataset_fn.shuffle = 'False'", "mesh_train_dataset_fn.shuffle is 'False'"),
        ("mesh_train_dataset_fn.pack = ['a']", "takes it for True"),
        ("mesh_train_dataset_fn.use_cached = 'no'", "mesh_train_dataset_fn.use_cached"),
        ("AdafactorOptimizer.factored = 'False'", "AdafactorOptimizer.factored"),
        (
            "Unitransformer.shared_embedding_and_softmax_weights = 'False'",
            "Unitransformer.shared_embedding_and_softmax_weights",
        ),
        ("LayerStack.recompute_grads = 'False'", "LayerStack.recompute_grads"),
        ("run.skip_seen_data = 'False'", "run.skip_seen_data"),
        ("tpu_estimator_model_fn.tpu_summaries = 'False'", "tpu_summaries"),
        ("run.model_type = 'aligned'", "run.model_type"),
        ("pack_dataset.use_custom_ops = True", "pack_dataset.use_custom_ops"),
        ("encoder/sublayer_rms_norm.epsilon = 1e-5", "sublayer_rms_norm.epsilon"),
        ("encoder/DenseReluDense.hidden_size = 512", "DenseReluDense.hidden_size"),
        ("encoder/sublayer_dropout.dropout_rate = 0.5", "sublayer_dropout.dropout_rate"),
    ],
)
def test_what_the_jax_stack_does_not_do_is_refused_by_name_and_place(param, name):
    with pytest.raises(UserError, match=name.replace(".", r"\.")) as error:
        load(param)
    assert error.value.where is None or param in error.value.where
    assert "--backend=mtf" in (error.value.fix or "")


def test_of_several_arguments_that_nothing_reads_the_first_that_is_bound_is_named():
    params = [f"SelfAttention.{name} = 3" for name in ("hyperprompt_hidden_dim", "z_loss_coeff")]
    for ordered in (params, params[::-1]):
        with pytest.raises(UserError) as error:
            load(*ordered)
        assert ordered[0] in (error.value.where or "")


def test_what_mesh_tensorflow_misreads_is_kept_for_its_own_run_to_warn_of():
    params = ("mesh_train_dataset_fn.shuffle = 'False'", "encodr/make_layer_stack.num_layers = 7")
    inputs = MeshInputs(
        "a_model_dir", FILES, (*PARAMS, *params), module_imports=("t0repro.tasks.demo",)
    )
    found = dialect.load(inputs).misread
    assert [str(error.where) for error in found] == [f"--gin_param {param!r}" for param in params]


@gin.configurable(module="users")
def choose_rows(shuffled: bool):
    """A user's function, whose annotation alone says what it takes."""
    return shuffled


def test_a_text_for_a_truth_value_of_a_users_function_is_misread_too():
    param = "users.choose_rows.shuffled = 'False'"
    inputs = MeshInputs(
        "a_model_dir", FILES, (*PARAMS, param), module_imports=("t0repro.tasks.demo",)
    )
    assert [str(error.where) for error in dialect.load(inputs).misread] == [
        f"--gin_param {param!r}"
    ]


def test_a_layer_of_another_family_is_refused_with_the_gin_file_that_asks_for_it():
    with pytest.raises(UserError, match="TalkingHeadsSelfAttention") as error:
        load(files=("dataset.gin", "models/t5.1.th.base.gin"))
    assert "t5.1.th.base.gin:" in str(error.value.where)


@pytest.mark.parametrize(
    ("param", "words"),
    [
        ("SelfAttention.num_hedas = 1", "doesn't have a parameter named 'num_hedas'"),
        ("nosuch.thing = 1", "No configurable matching 'nosuch'"),
    ],
)
def test_a_typo_fails_in_gins_own_words(param, words):
    with pytest.raises(UserError, match=words):
        load(param)


@pytest.mark.parametrize("name", ["'a,demo_train'", "['demo_train']"])
def test_several_mixtures_in_one_name_are_an_unknown_mixture_at_their_place(name):
    with pytest.raises(UserError, match="no task or mixture(.|\n)*Nearest: 'demo_train'") as error:
        load(f"MIXTURE_NAME = {name}")
    assert error.value.where.startswith("--gin_param") and name in error.value.where


def test_seqios_bare_word_on_a_name_of_another_type_is_an_unknown_mixture():
    for name in (5, ["demo_train"]):
        with pytest.raises(AssertionError) as seqios:
            seqio.get_mixture_or_task(name)
        message = f"There is no task or mixture .*{str(name)[-10:]}"
        with pytest.raises(UserError, match=message), configuration_errors():
            raise seqios.value


def test_a_list_of_factors_becomes_a_product_with_every_argument():
    config = load(
        "run.learning_rate_schedule = [0.5, %CONSTANT, @learning_rate_schedules.linear_warmup,"
        " @late/learning_rate_schedules.linear_decay]",
        "CONSTANT = 2.0",
        "linear_warmup.steps_or_fraction = 100",
        "late/linear_decay.steps_or_fraction = 0.5",
        "run.total_run_steps = 1000",
    )
    assert config.schedule == ScheduleConfig(
        "product_learning_rate",
        {
            "factors": [
                0.5,
                2.0,
                {"name": "linear_warmup", "arguments": {"steps_or_fraction": 100}},
                {"name": "linear_decay", "arguments": {"steps_or_fraction": 0.5}},
            ],
            "offset": 0,
        },
        1000,
    )
    assert TrainRun.from_json(config.to_json()) == config


@pytest.mark.parametrize(
    ("binding", "name", "arguments"),
    [
        ("0.25", "constant", {"value": 0.25}),
        ("None", "adafactor_default", {"multiply_by_parameter_scale": True}),
        ("@learning_rate_schedules.constant", "constant", {"value": 1.0}),
    ],
)
def test_a_schedule_may_be_a_number_or_missing_or_a_function(binding, name, arguments):
    config = load(f"run.learning_rate_schedule = {binding}")
    assert config.schedule == ScheduleConfig(name, arguments, 20)


def test_optimizers_are_read_with_names_of_variables_resolved_to_paths():
    config = load(
        "run.optimizer = @optimize.AdamWeightDecayOptimizer",
        "AdamWeightDecayOptimizer.weight_decay_rate = 0.01",
        "AdamWeightDecayOptimizer.exclude_from_weight_decay = ['rms_norm', 'encoder/.*/wo/']",
        "run.variable_filter = '^(encoder|decoder)/'",
    )
    optimizer = config.optimizer
    assert isinstance(optimizer, AdamWeightDecayConfig)
    assert (optimizer.weight_decay_rate, optimizer.beta_1) == (0.01, 0.9)
    assert "encoder/layers_1/mlp/wo/kernel" in optimizer.exclude_from_weight_decay
    assert "decoder/decoder_norm/scale" in optimizer.exclude_from_weight_decay
    assert "decoder/layers_1/mlp/wo/kernel" not in optimizer.exclude_from_weight_decay
    assert optimizer.frozen == ("token_embedder/embedding",)
    assert TrainRun.from_json(config.to_json()) == config


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (("run.optimizer = @optimize.SgdOptimizer",), SgdConfig()),
        (
            ("run.optimizer = @optimize.MomentumOptimizer", "MomentumOptimizer.momentum = 0.9"),
            MomentumConfig(0.9),
        ),
    ],
)
def test_every_optimizer_survives_json(params, expected):
    config = load(*params)
    assert config.optimizer == expected
    assert TrainRun.from_json(config.to_json()) == config


@pytest.mark.parametrize(
    ("params", "words"),
    [
        (("run.optimizer = @optimize.MomentumOptimizer",), "momentum is not bound"),
        (("run.variable_filter = 'nosuch'",), "matches no variable"),
        (("AdafactorOptimizer.stacked_dim_names = ['heads']",), "stacked dimensions"),
        (("AdafactorOptimizer.decay_rate = @optimize.adafactor_decay_rate_pow",), "decay_rate"),
        (("run.dataset_split = 'validation'",), "dataset_split"),
        (("run.sequence_length = None", "run.batch_size = 4"), "needs one"),
        (("make_bitransformer.encoder_name = 'other'",), "towers called"),
        (("Unitransformer.loss_on_targets_only = True",), "with an encoder"),
        (("run.model_type = 'lm'", "run.mode = 'infer'"), "without an encoder"),
        (("LayerStack.sublayers_final = [@transformer.sublayer_rms_norm]",), "sublayers"),
        (("Unitransformer.ensemble = 2",), "Unitransformer.ensemble"),
        (("run.predict_fn = @optimize.SgdOptimizer",), "run.predict_fn"),
        (("run.train_model_fn = @optimize.SgdOptimizer",), "run.train_model_fn"),
    ],
)
def test_options_that_mean_nothing_or_are_not_there_are_refused_with_their_place(params, words):
    with pytest.raises(UserError, match=words) as error:
        load(*params)
    assert error.value.where is not None and error.value.fix is not None


def test_auto_train_steps_counts_tokens():
    config = load(
        "run.train_steps = @utils.auto_train_steps", "auto_train_steps.train_tokens = 51200"
    )
    assert config.train_steps == 51200 // (8 * 64)


def test_a_mesh_counts_for_sizes_per_replica_and_microbatches_alone():
    replicas = load(
        "utils.run.mesh_shape = 'batch:4,model:2'",
        "utils.run.layout_rules = 'batch:batch,d_ff:model'",
        "run.batch_size = ('sequences_per_replica', 6)",
        "serialize_num_microbatches.tokens_per_microbatch_per_replica = 128",
    )
    assert (replicas.batch_size, replicas.num_microbatches) == (24, 3)
    alone = load("run.batch_size = 24")
    assert replicas.model == alone.model and replicas.optimizer == alone.optimizer


def test_a_tpu_mesh_without_its_topology_is_an_error_that_says_what_to_bind():
    with pytest.raises(UserError, match="tpu_topology") as error:
        load("utils.run.mesh_shape = @mesh_tensorflow.transformer.utils.tpu_mesh_shape()")
    assert "utils.run.mesh_shape = []" in str(error.value.fix)


@pytest.mark.parametrize("length", ["24", "{'inputs': 24, 'targets': 24}"])
def test_sequence_length_is_a_number_or_a_dictionary(length):
    config = load(f"run.sequence_length = {length}", "run.batch_size = 4")
    assert config.sequence_length == {"inputs": 24, "targets": 24}


def test_sixteen_bit_weights_are_refused_in_training_on_an_accelerator():
    inputs = MeshInputs(
        "a_model_dir",
        FILES,
        (*PARAMS, "get_variable_dtype.slice_dtype = 'bfloat16'"),
        module_imports=("t0repro.tasks.demo",),
    )
    with pytest.raises(UserError, match="slice_dtype"):
        dialect.load(inputs, float32_activations=False).run  # noqa: B018
    assert dialect.load(inputs).run.dtypes.slice == "float32"


def test_the_folder_of_tensorflow_datasets_is_handed_to_seqio(monkeypatch):
    import seqio

    monkeypatch.setattr(seqio.utils, "_TFDS_DATA_DIR_OVERRIDE", None)
    inputs = MeshInputs(
        "a_model_dir",
        FILES,
        PARAMS,
        module_imports=("t0repro.tasks.demo",),
        tfds_data_dir="elsewhere",
    )
    dialect.load(inputs)
    assert seqio.LazyTfdsLoader("a_dataset:1.0.0", data_dir="its_own").data_dir == "elsewhere"


@pytest.mark.parametrize(
    ("overrides", "layout"),
    [
        ([], Layout()),
        (["utils.run.mesh_shape = 'batch:4,model:2'"], Layout(data=4, model=2)),
        (["utils.run.mesh_shape = 'all:8'", "utils.run.layout_rules = 'batch:all'"], Layout(8, 1)),
        (["utils.run.mesh_shape = 'model:2'"], Layout(1, 2)),
        (
            [
                "utils.run.mesh_shape = @utils.tpu_mesh_shape()",
                "utils.tpu_mesh_shape.tpu_topology = 'v3-512'",
                "utils.tpu_mesh_shape.model_parallelism = 8",
            ],
            Layout(data=64, model=8, topology="v3-512"),  # T0's own
        ),
    ],
)
def test_mesh_shape_and_layout_rules_are_the_layout(overrides, layout):
    rules = "utils.run.layout_rules = 'batch:batch,d_ff:model,heads:model,vocab:model'"
    assert load("run.batch_size = 64", rules, *overrides).layout == layout


def test_a_rule_that_divides_d_model_is_refused():
    with pytest.raises(UserError, match="d_model"):
        load("utils.run.mesh_shape = 'model:2'", "utils.run.layout_rules = 'd_model:model'")


def test_a_scope_in_which_nothing_is_read_is_not_near_to_itself():
    for scope, near in (("encodr", "'encoder', 'decoder'"), ("encoder", "'decoder'")):
        with pytest.raises(UserError, match=rf"scope '{scope}' \(nearest scopes: {near}\)"):
            load(f"{scope}/sublayer_dropout.dropout_rate = 0.1")
