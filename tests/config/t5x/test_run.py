"""T5X's gin files -> TrainRun: each value that decides the numbers, and what is refused."""

import dataclasses
import re
from pathlib import Path

import jax.numpy as jnp
import pytest

from t0repro.config.checkpoints import (
    BestCheckpoints,
    RestoreConfig,
    SaveConfig,
)
from t0repro.config.data import EvaluatorConfig
from t0repro.config.gin.folders import shipped_files
from t0repro.config.model import Arithmetic
from t0repro.config.optimizer import (
    AdafactorConfig,
    OptaxConfig,
    ScheduleConfig,
)
from t0repro.config.run import EarlyStoppingConfig, TrainRun
from t0repro.config.t5x.arguments import MODULES, parameters_of
from t0repro.config.t5x.gin_files import T5xInputs, parse
from t0repro.config.t5x.layout import list_differences
from t0repro.config.t5x.run import read_train_run
from t0repro.config.table import render
from t0repro.config.translation import translate
from t0repro.converters.released import catalog
from t0repro.errors import UserError
from t0repro.parameters.shape import ALL_HEURISTIC
from t0repro.training.schedules import make_schedule

from ..t5x_trainings import (
    BIDIRECTIONAL,
    FINETUNE,
    MODEL,
    PASSED_THROUGH,
    PRETRAIN,
    REQUIRED,
    config,
    decoder_only_config,
)

BASE = "t5x/examples/t5/t5_1_1/base.gin"


def from_file(tmp_path, text: str) -> TrainRun:
    path = tmp_path / "run.gin"
    path.write_text(
        "from __gin__ import dynamic_registration\nimport __main__ as my_script\n"
        f"{text.partition('---')[0]}\ninclude '{MODEL}'\ninclude '{PRETRAIN}'\n"
        f"{text.partition('---')[2]}\n"
    )
    return config(files=[str(path)])


def test_a_pretraining_becomes_a_run_config_that_json_keeps():
    ours = config()
    assert (ours.model.d_model, ours.model.d_ff, ours.model.num_heads) == (512, 1024, 6)
    assert ours.model.activations == ("gelu", "linear") and ours.model.dropout_rate == 0.1
    assert ours.model.arithmetic == Arithmetic(False, *[True] * 8)
    assert ours.dtypes.activation == "bfloat16" and ours.dtypes.master == "float32"
    assert ours.sequence_length == {"inputs": 8, "targets": 6} and ours.batch_size == 128
    assert isinstance(ours.schedule, ScheduleConfig) and ours.optimizer == AdafactorConfig(
        multiply_by_parameter_scale=True,
        decay_exponent=0.8,
        decay_offset=0,
        beta1=0.0,
        clipping_threshold=1.0,
        factored=True,
        epsilon1=1e-30,
        epsilon2=1e-3,
        min_dim_size_to_factor=128,
        factor_map=ALL_HEURISTIC,
    )
    assert ours.plan.train_data.pack and ours.plan.train_eval_data.split == "validation"
    assert ours.plan.save == SaveConfig(1000, (), None, "float32", False, None, None)
    assert ours.plan.restore is None and ours.weight_metrics_every
    assert TrainRun.from_json(ours.to_json()) == ours


def test_weights_are_measured_every_so_many_steps_or_not_at_all():
    every = config("trainer.WeightMetricsComputer.every = 10")
    assert every.weight_metrics_every == 10
    assert "every" in every.provenance["weight_metrics_every"]
    assert config("trainer.Trainer.weight_metrics_computer = None").weight_metrics_every == 0


def test_a_fine_tuning_has_three_datasets_and_a_checkpoint_to_start_from():
    ours = config("INITIAL_CHECKPOINT_PATH = 'a/checkpoint_5'", files=[MODEL, FINETUNE])
    assert ours.plan.restore == RestoreConfig(
        "a/checkpoint_5", "specific", "float32", (), True, False
    )
    assert ours.plan.infer_eval_data.sequence_length is None
    assert [logger.name for logger in ours.plan.evaluator.loggers] == ["py", "tensorboard", "json"]
    assert ours.schedule.arguments["base_learning_rate"] == 0.001


def test_hardware_random_numbers_are_not_drawn_and_that_is_told_by_name():
    def warnings(*bindings):
        inputs = T5xInputs("train", (MODEL, PRETRAIN), bindings)
        return list(list_differences(parse(inputs).program))

    assert warnings(*REQUIRED) == []
    (told,) = warnings(*REQUIRED, "USE_HARDWARE_RNG = True")
    assert "pretrain.gin:" in told and "use_hardware_rng = True: JAX's default generator" in told


def test_an_evaluation_has_t5xs_evaluator_unless_told_otherwise_and_none_is_refused():
    binding = "train_script.train.infer_eval_dataset_cfg = @train_eval/utils.DatasetConfig()"
    assert config(binding).plan.evaluator == EvaluatorConfig((), None, True)
    with pytest.raises(UserError, match="needs an evaluator") as caught:
        config(binding, "train_script.train.inference_evaluator_cls = None")
    assert "inference_evaluator_cls = None" in caught.value.where


def test_what_only_a_later_evaluation_would_stumble_over_is_refused_before_the_training():
    mine = "models.EncoderDecoderModel.decode_fn = @utils.CheckpointConfig()"
    assert config(mine).plan.infer_eval_data is None
    with pytest.raises(UserError, match="beam search or by sampling") as caught:
        config("INITIAL_CHECKPOINT_PATH = 'a'", mine, files=[MODEL, FINETUNE])
    assert mine in caught.value.where


def test_contrib_gpus_network_is_that_of_t5_and_can_scale_queries(tmp_path):
    (tmp_path / "mine.gin").write_text(
        Path(shipped_files(), BASE).read_text().replace("t5x.examples.t5 ", "t5x.contrib.gpu.t5 ")
    )
    files, plain = (str(tmp_path / "mine.gin"), PRETRAIN), config(files=[BASE, PRETRAIN]).model
    assert config(files=files).model == plain
    scaled = config("network.T5Config.scale_attn_logits = True", files=files).model
    assert scaled == dataclasses.replace(plain, scale_queries=True)


def test_each_value_has_the_place_that_set_it():
    text = render(config("train_script.train.eval_period = 500"))
    line = next(row for row in text.splitlines() if row.startswith("plan.eval_period"))
    assert "--gin_bindings 'train_script.train.eval_period = 500'" in line
    line = next(row for row in text.splitlines() if row.startswith("model.d_model"))
    assert "t5_1_1/small.gin:" in line


@pytest.mark.parametrize(
    "factor, denominator",
    [
        ("None", 1.0),
        ("262144", 262144.0),
        ("'NUM_TOTAL_TARGET_TOKENS'", None),
        ("'num_real_target_tokens'", "NUM_REAL_TARGET_TOKENS"),
        ("'AVERAGE_PER_SEQUENCE'", "AVERAGE_PER_SEQUENCE"),
    ],
)
def test_loss_normalizing_factors(factor, denominator):
    ours = config(f"LOSS_NORMALIZING_FACTOR = {factor}")
    assert ours.model.loss_denominator == denominator
    assert TrainRun.from_json(ours.to_json()) == ours


@pytest.mark.parametrize("beta1, decay, slot", [("None", 0.0, False), ("0.0", 0.0, True)])
def test_a_beta1_of_zero_keeps_a_slot_and_none_does_not(beta1, decay, slot):
    optimizer = config(f"adafactor.Adafactor.beta1 = {beta1}").optimizer
    assert (optimizer.beta1, optimizer.momentum_slot) == (decay, slot)


def test_every_option_of_adafactor_arrives():
    given = {
        "multiply_by_parameter_scale": False,
        "decay_rate": 0.7,
        "step_offset": 5,
        "clipping_threshold": 2.0,
        "weight_decay_rate": 0.01,
        "weight_decay_rate_lr_exponent": 2.0,
        "min_dim_size_to_factor": 64,
        "epsilon1": 1e-20,
        "epsilon2": 0.1,
        "global_norm_clip_threshold": 1.5,
        "max_parameter_scale": 0.5,
        "skip_nan_updates": True,
        "factored": False,
        "beta1": 0.9,
    }
    optimizer = config(*[f"adafactor.Adafactor.{k} = {v}" for k, v in given.items()]).optimizer
    expected = AdafactorConfig(
        multiply_by_parameter_scale=False,
        decay_exponent=0.7,
        decay_offset=5,
        beta1=0.9,
        clipping_threshold=2.0,
        factored=False,
        epsilon1=1e-20,
        epsilon2=0.1,
        min_dim_size_to_factor=64,
        momentum_slot=True,
        weight_decay_rate=0.01,
        weight_decay_rate_lr_exponent=2.0,
        global_norm_clip=1.5,
        max_parameter_scale=0.5,
        skip_nan_updates=True,
        factor_map=ALL_HEURISTIC,
    )
    assert optimizer == expected


def test_a_chain_of_optax_is_plain_data(tmp_path):
    ours = from_file(
        tmp_path,
        """
from t5x import optimizers
import optax
---
OPTIMIZER = @optimizers.chain()
optimizers.chain.transformations = [@optax.adamw()]
optax.adamw.learning_rate = @optax.warmup_cosine_decay_schedule()
optax.warmup_cosine_decay_schedule:
  init_value = 0.0
  peak_value = 1e-4
  warmup_steps = 10
  decay_steps = %TRAIN_STEPS
""",
    )
    schedule = {"init_value": 0.0, "peak_value": 1e-4, "warmup_steps": 10, "decay_steps": 10}
    rate = {"function": "warmup_cosine_decay_schedule", "arguments": schedule}
    call = {"function": "adamw", "arguments": {"learning_rate": rate}}
    assert ours.optimizer == OptaxConfig((call,))
    assert TrainRun.from_json(ours.to_json()) == ours


RATE = "from t5x import utils\n---\nutils.create_learning_rate_scheduler:\n  factors = '{}'\n  {}\n"


@pytest.mark.parametrize(
    ("factors", "binding", "first"),
    [
        ("constant", "warmup_steps = 0", 1.0),
        ("constant * decay_every", "warmup_steps = 0", 1.0),
        # It subtracts the warm-up and does not divide by it.
        ("constant * cosine_decay", "warmup_steps = 0", 1.0),
        ("constant", "steps_per_decay = 0", 1.0),
        ("rsqrt_decay", "steps_per_cycle = -1", 10000**-0.5),
    ],
)
def test_an_argument_of_a_schedule_may_be_anything_to_factors_that_ignore_it(
    tmp_path, factors, binding, first
):
    ours = from_file(tmp_path, RATE.format(factors, binding))
    assert float(make_schedule(ours.schedule)(jnp.int32(0))) == pytest.approx(first)


@pytest.mark.parametrize(
    ("factors", "binding"),
    [
        # T5X divides by these.
        ("rsqrt_decay", "warmup_steps = 0"),
        ("constant * linear_warmup", "warmup_steps = 0"),
        ("cosine_decay * linear_decay", "warmup_steps = 0"),
        ("rsqrt_normalized_decay", "warmup_steps = 0"),
        ("constant*decay_every", "steps_per_decay = 0"),
        ("cosine_decay", "steps_per_cycle = 0"),
        ("cosine_decay", "warmup_steps = -1"),
        ("constant", "base_learning_rate = -1.0"),
        ("constant", "min_learning_rate = -1.0"),
    ],
)
def test_an_argument_that_a_factor_reads_is_in_its_range(tmp_path, factors, binding):
    with pytest.raises(UserError, match=binding.replace(" =", " is")) as error:
        from_file(tmp_path, RATE.format(factors, binding))
    assert "run.gin:" in str(error.value.where)


def test_actions_and_the_best_checkpoints(tmp_path):
    text = """
from t5x import checkpoints
from t5x import trainer
from t5x import utils
---
my_script.train.actions = {'TRAIN_EVAL': [@trainer.EarlyStoppingAction()]}
trainer.EarlyStoppingAction:
  metric = ('a_task', 'loss')
  mode = 'min'
  patience = 4
utils.SaveCheckpointConfig:
  checkpointer_cls = @checkpoints.SaveBestCheckpointer
  keep = 2
  checkpoint_steps = [3, 7]
checkpoints.SaveBestCheckpointer.metric_name_to_monitor = 'train/loss'
checkpoints.SaveBestCheckpointer.metric_mode = 'min'
checkpoints.SaveBestCheckpointer.force_keep_period = 500
"""
    ours = from_file(tmp_path, text)
    stopping = EarlyStoppingConfig("a_task", "loss", "min", 4, 0.0, 0.0)
    assert ours.plan.actions == {"TRAIN_EVAL": (stopping,)}
    assert ours.plan.save.best == BestCheckpoints("train/loss", "min", True)
    assert ours.plan.save.steps == (3, 7) and ours.plan.save.keep_period == 500
    assert TrainRun.from_json(ours.to_json()) == ours
    assert "run.gin:" in ours.provenance["plan.save.keep_period"]
    with pytest.raises(UserError, match="SaveBestCheckpointer.force_keep_period is -1") as refused:
        from_file(tmp_path, text.replace("= 500", "= -1"))
    assert "run.gin:" in str(refused.value.where)


@pytest.mark.parametrize(
    "binding, complaint",
    [
        ("adafactor.Adafactor.factor_map = {'a': 1}", "Adafactor.factor_map"),
        ("adafactor.Adafactor.dtype_momentum = 'bfloat16'", "dtype_momentum"),
        ("train/utils.DatasetConfig.use_custom_packing_ops = True", "train/[^$]*compiled packing"),
        ("network.T5Config.mlp_activations = ('gelu', 'swoosh')", "no activation 'swoosh'"),
        ("network.T5Config.dtype = 'float16'", "float32 or bfloat16"),
        ("LOSS_NORMALIZING_FACTOR = 'NUM_TOKENS'", "loss_normalizing_factor = 'NUM_TOKENS'"),
        ("train/utils.DatasetConfig.mixture_or_task_name = 3", "name of a registered task"),
        ("seqio.SentencePieceVocabulary.use_fast_tokenizer = True", "SentencePiece itself"),
        *(
            (f"train_script.train.{name} = 1", f"train.{name} = 1: this function[^$]*replaced")
            for name in (
                "get_dataset_fn",
                "train_eval_get_dataset_fn",
                "verify_matching_vocabs_fn",
                "train_state_initializer_cls",
            )
        ),
        ("train_script.train.summarize_config_fn = 1", "always written as config.gin"),
        ("models.EncoderDecoderModel.feature_converter_cls = 1", "no other converter"),
        ("utils.SaveCheckpointConfig.checkpointer_cls = 1", "written in one way"),
        ("utils.SaveCheckpointConfig.checkpoint_manager_cls = 1", "written in one way"),
        ("utils.SaveCheckpointConfig.state_transformation_fns = [1]", "assignment_map alone"),
        ("utils.RestoreCheckpointConfig.path = ['a', 'b']", "a single checkpoint"),
        ("trainer.Trainer.num_microbatches = 3", "does not divide the batch of 128"),
        ("train/utils.DatasetConfig.num_shards = 3", "does not divide the batch of 128"),
        ("train_eval/utils.DatasetConfig.num_shards = 2", "only the data of a training"),
        ("train_script.train.eval_period = 1500", "not a multiple of [^$]*period = 1000"),
        ("train_script.train.eval_steps = 0", "train.eval_steps is 0"),
        ("train_script.train.actions = {'EVAL': []}", "'TRAIN_EVAL'"),
        ("trainer.Trainer.learning_rate_fn = None", "learning_rate_fn"),
        ("TRAIN_STEPS = -1", "train.total_steps is -1"),
    ],
)
def test_what_has_no_counterpart_is_refused_with_its_place(binding, complaint):
    with pytest.raises(UserError, match=complaint) as caught:
        config(binding)
    assert binding.partition(" =")[0].partition("(")[0] in (caught.value.where or "")


@pytest.mark.parametrize(
    "argument, complaint",
    [
        ("state_transformation_fns = [1]", "assignment_map alone"),
        ("checkpointer_cls = 1", "written in one way"),
        ("checkpoint_manager_cls = 1", "written in one way"),
        ("restore_dataset = True", "resumed from model_dir's own"),
    ],
)
def test_what_a_restore_cannot_do_is_refused_with_its_place(argument, complaint):
    binding = f"utils.RestoreCheckpointConfig.{argument}"
    with pytest.raises(UserError, match=complaint) as caught:
        config("INITIAL_CHECKPOINT_PATH = 'a'", binding, files=[MODEL, FINETUNE])
    assert binding in (caught.value.where or "")


def test_every_argument_has_a_row_in_the_docs():
    text = (Path(__file__).parents[3] / "docs" / "t5x_arguments.md").read_text()
    table = text.partition("## Every argument")[2].partition("\n## ")[0]
    rows = set(re.findall(r"`(\w+)`", table))
    for contents in MODULES.values():
        for configurable in contents.values():
            assert parameters_of(configurable).keys() <= rows, configurable


def test_restoring_all_checkpoints_is_refused():
    with pytest.raises(UserError, match="a single checkpoint"):
        config(
            "INITIAL_CHECKPOINT_PATH = 'a'",
            "utils.RestoreCheckpointConfig.mode = 'all'",
            files=[MODEL, FINETUNE],
        )


def test_scanned_layers_are_refused_where_t5x_would_factor_what_is_kept_here(tmp_path):
    text = """
from t5x.examples.t5 import network
from t5x.examples.scalable_t5 import network as scanned
---
network.Transformer.config = @scanned.T5Config()
scanned.T5Config:
  vocab_size = 32128
  num_heads = {heads}
  dropout_rate = 0.0
"""
    model = from_file(tmp_path, text.format(heads=8)).model
    assert model.num_heads == 8
    assert model.position_bias_per_layer  # as scalable_t5 has, unlike T5X's t5
    with pytest.raises(UserError, match="a side of 64"):
        from_file(tmp_path, text.format(heads=1))


@pytest.mark.parametrize("family", ["t5_1_1", "mt5"])
@pytest.mark.parametrize("size", ["small", "base", "large", "xl", "xxl"])
def test_scanned_models_have_the_shape_of_the_others_and_a_bias_in_each_layer(family, size):
    scanned = config(files=[f"t5x/examples/scalable_t5/{family}/{size}.gin", PRETRAIN]).model
    other = config(files=[f"t5x/examples/t5/{family}/{size}.gin", PRETRAIN]).model
    assert scanned.position_bias_per_layer and scanned.recompute != "none"  # remat_policy
    same = dataclasses.replace(scanned, position_bias_per_layer=False, recompute="none")
    assert same == other


def test_mt0s_recipe_has_the_figures_that_its_trainer_gave():
    # Without the bindings of `config`, which would hide the recipe's.
    files = ("t5x/examples/t5/mt5/xxl.gin", "t5x/configs/runs/mt0.gin")
    required = (
        "MIXTURE_OR_TASK_NAME = 'xp3'",
        "MODEL_DIR = 'runs/mt0'",
        "INITIAL_CHECKPOINT_PATH = 'runs/mt5'",
        "TRAIN_STEPS = 1030000",
    )
    ours = read_train_run(parse(T5xInputs("train", files, required)))
    assert ours.model.shape == catalog()["mt5_xxl"].shape
    assert ours.model.loss_denominator == "AVERAGE_PER_SEQUENCE"
    data = ours.plan.train_data
    assert (data.batch_size, data.pack) == (512, False)
    assert dict(data.sequence_length) == {"inputs": 1024, "targets": 1024}


UMT5 = "t5x/examples/scalable_t5/umt5"


# Released name's beginning -> where T5X's list of models has their files.
MODELS = {
    "t5_1_1_lm100k_": "t5x/google/examples/flaxformer_t5/configs/models/t5_1_1_",
    "t5_1_1_": "t5x/examples/t5/t5_1_1/",
    "flan_t5_": "t5x/examples/t5/t5_1_1/",
    "mt5_": "t5x/examples/t5/mt5/",
    "byt5_": "t5x/examples/t5/byt5/",
    "t5_": "t5x/examples/t5/t5_1_0/",
}


def test_each_released_checkpoint_of_t5x_has_a_model_file_of_its_shape():
    releases = [release for release in catalog().values() if release.format == "t5x"]
    for release in releases:
        if release.family in ("umT5", "UL2"):  # see below; T5X has no file for UL2
            continue
        start = next(start for start in MODELS if release.name.startswith(start))
        path = f"{MODELS[start]}{release.name.removeprefix(start)}.gin"
        assert config(files=[path, PRETRAIN]).model.shape == release.shape, release.name


@pytest.mark.parametrize("family", ["t5_1_0", "t5_1_1", "mt5", "byt5"])
def test_each_family_has_a_tiny_model(family):
    model = config(files=[f"t5x/examples/t5/{family}/tiny.gin", PRETRAIN]).model
    assert (model.d_model, model.num_encoder_layers) == (8, 2)


@pytest.mark.parametrize(
    "size, d_model",
    [("tiny", 8), ("small", 512), ("base", 768), ("large", 1024), ("xl", 2048), ("xxl", 4096)],
)
def test_umt5_is_pretrained_deterministically_with_its_own_vocabulary(size, d_model):
    ours = config(
        "TRAIN_EVAL_MIXTURE_OR_TASK_NAME = 'held_out'", files=[f"{UMT5}/pretrain_{size}.gin"]
    )
    assert (ours.model.d_model, ours.model.vocab_size) == (d_model, 256384)
    assert ours.vocabulary_extra_ids == 300 and not ours.plan.train_data.pack
    assert (ours.plan.random_seed, ours.plan.train_data.seed, ours.plan.save.data) == (0, 42, True)
    assert ours.plan.train_eval_data.mixture_or_task_name == "held_out"
    released = catalog().get(f"umt5_{size}")
    assert released.shape == ours.model.shape if released else size in ("tiny", "large")


@pytest.mark.parametrize(
    "module, name",
    [
        ("models", "EncoderOnlyModel"),
        ("checkpoints", "Checkpointer"),
        ("contrib.moe", "models"),
    ],
)
def test_what_t5x_has_and_this_has_not_is_refused_by_name_and_line(tmp_path, module, name):
    path = tmp_path / "mine.gin"
    package, _, last = module.rpartition(".")
    path.write_text(
        "from __gin__ import dynamic_registration\n"
        f"from t5x{'.' + package if package else ''} import {last}\n"
        f"include '{MODEL}'\ninclude '{PRETRAIN}'\nMODEL = @{last}.{name}()\n"
    )
    with pytest.raises(UserError, match=name if "." not in module else "t5x.contrib") as caught:
        config(files=[str(path)])
    assert "mine.gin:" in str(caught.value)


def test_umt5s_fine_tuning_of_a_user_and_the_loader_that_it_may_name(tmp_path):
    """As T5X's tydiqa_base.gin is put together, and with the loader that its pretraining names."""
    includes = ("mt5/base", "umt5/architectures/encoder_decoder", "umt5/runs/finetuning_common")
    includes += ("umt5/optimizer/adafactor", "umt5/vocab")
    text = "from __gin__ import dynamic_registration\nfrom t5x import adafactor\n" + "".join(
        f"include 't5x/examples/scalable_t5/{name}.gin'\n" for name in includes
    )
    path = tmp_path / "mine.gin"
    path.write_text(text + "adafactor.Adafactor.step_offset = 1_000_000\n")
    ours = config("INITIAL_CHECKPOINT_PATH = 'a'", files=[str(path)])
    assert ours.optimizer.decay_offset == 1_000_000 and ours.model.position_bias_per_layer
    loader = "train_script.train.train_eval_get_dataset_fn = @utils.get_training_eval_datasets\n"
    imports = "import __main__ as train_script\nfrom t5x import utils\nfrom t5x import adafactor\n"
    text = path.read_text().replace("from t5x import adafactor\n", imports)
    path.write_text(text + loader)
    assert config("INITIAL_CHECKPOINT_PATH = 'a'", files=[str(path)]) == ours


@pytest.mark.parametrize(
    ("binding", "recompute", "scan_layers"),
    [
        ("remat_policy = 'none'", "none", None),
        ("remat_policy = 'minimal'", "minimal", None),
        ("remat_policy = 'full'", "full", None),
        ("scan_layers = False", "none", False),
    ],
)
def test_what_is_computed_again_and_scanned_is_as_scalable_t5_says(
    tmp_path, binding, recompute, scan_layers
):
    text = f"""
from t5x.examples.t5 import network
from t5x.examples.scalable_t5 import network as scanned
---
network.Transformer.config = @scanned.T5Config()
scanned.T5Config:
  vocab_size = 32128
  dropout_rate = 0.0
  {binding}
"""
    model = from_file(tmp_path, text).model
    assert (model.recompute, model.scan_layers) == (recompute, scan_layers)


def test_fields_that_only_t5x_sets_have_mesh_tensorflows_meaning_by_default():
    assert not any(dataclasses.astuple(Arithmetic())[1:]) and Arithmetic().float32_attention_logits


def test_t5xs_own_defaults_may_be_named(tmp_path):
    plain, named = (
        from_file(tmp_path, "---"),
        from_file(
            tmp_path,
            """from t5x import checkpoints
from t5x import utils
from t5x import models
import seqio
---
my_script.train:
  get_dataset_fn = @utils.get_dataset
  train_eval_get_dataset_fn = @utils.get_training_eval_datasets
  train_state_initializer_cls = @utils.TrainStateInitializer
  verify_matching_vocabs_fn = @utils.verify_matching_vocabs
utils.SaveCheckpointConfig:
  checkpointer_cls = @checkpoints.Checkpointer
  checkpoint_manager_cls = @checkpoints.OrbaxCheckpointManagerInterface
models.EncoderDecoderModel.feature_converter_cls = @seqio.EncDecFeatureConverter
""",
        ),
    )
    assert named == plain
    with pytest.raises(UserError, match=r"get_dataset_fn[^$]*replaced"):
        from_file(
            tmp_path,
            "from t5x import utils\n---\n"
            "my_script.train.get_dataset_fn = @utils.get_training_eval_datasets",
        )


def test_a_module_of_t5x_imported_for_its_tasks_is_a_warning_with_its_line(tmp_path):
    path = tmp_path / "mine.gin"
    path.write_text(
        "import t5x.contrib.gpu.scripts_gpu.seqio_tasks\nimport t5x.examples.t5.network\n"
        f"include '{MODEL}'\ninclude '{PRETRAIN}'\n"
    )
    inputs = T5xInputs("train", (str(path),), REQUIRED, (str(tmp_path),))
    (warning,) = parse(inputs).warnings
    assert warning.startswith(f"{path}:1: ") and "scripts_gpu.seqio_tasks" in warning
    assert "--module_import" in warning


# ---- Decoder-only --------------------------------------------------------------------------------


def test_t5xs_decoder_only_model_is_a_language_model(tmp_path):
    ours = decoder_only_config(tmp_path)
    model = ours.model
    assert (model.model_type, model.num_encoder_layers, model.num_decoder_layers) == ("lm", 0, 2)
    assert not model.input_full_attention and not model.position_bias_per_layer
    assert model.arithmetic == Arithmetic(False, *[True] * 8) and model.z_loss == 0.01
    assert ours.plan.train_data.converter == ours.plan.train_eval_data.converter == "decoder"
    assert ours.provenance["model.num_decoder_layers"].endswith("decoder_only.gin:19")
    ours = decoder_only_config(tmp_path, BIDIRECTIONAL, PASSED_THROUGH)
    assert ours.model.input_full_attention and ours.plan.train_data.converter == "pass_through"


def test_it_samples_outputs_of_inputs_and_targets_unless_told_otherwise(tmp_path):
    lines = [
        "from t5x import utils",
        "from t5x import decoding",
        "train_script.train.infer_eval_dataset_cfg = @infer_eval/utils.DatasetConfig()",
        "train_script.train.inference_evaluator_cls = @seqio.Evaluator",
        "infer_eval/utils.DatasetConfig.mixture_or_task_name = 'a_task'",
        "infer_eval/utils.DatasetConfig.task_feature_lengths = None",
        "infer_eval/utils.DatasetConfig.split = 'test'",
        "infer_eval/utils.DatasetConfig.batch_size = 4",
        "infer_eval/utils.DatasetConfig.shuffle = False",
        "infer_eval/utils.DatasetConfig.seed = 0",
        "models.DecoderOnlyModel.predict_batch_with_aux.num_decodes = 3",
    ]
    plan = decoder_only_config(tmp_path, *lines).plan
    assert plan.infer_eval_data.converter == "decoder"
    assert (plan.decoding.method, plan.decoding.num_decodes) == ("temperature_sample", 3)
    searches = "models.DecoderOnlyModel.decode_fn = @decoding.beam_search"
    assert decoder_only_config(tmp_path, *lines, searches).plan.decoding.method == "beam_search"
    passed = decoder_only_config(tmp_path, *lines, PASSED_THROUGH).plan
    assert passed.infer_eval_data.converter == "pass_through"


def test_neither_its_inputs_nor_what_is_passed_through_has_words_in_mesh_tensorflows_dialect(
    tmp_path,
):
    missing = translate(decoder_only_config(tmp_path, BIDIRECTIONAL), "mtf").missing
    assert "plan.train_data.converter = decoder" in missing
    assert "model.arithmetic.one_way_position_buckets = True" in missing


def test_an_encoder_decoders_features_may_be_passed_through(tmp_path):
    assert config().plan.train_data.converter == "encoder_decoder"
    passed = (
        "models.EncoderDecoderModel.feature_converter_cls = @seqio.PassThroughFeatureConverter\n"
    )
    imports = "import seqio\nfrom t5x import models\n---"
    ours = from_file(tmp_path, f"{imports}{passed}my_script.train.infer_eval_dataset_cfg = None")
    assert ours.plan.train_data.converter == "pass_through"


@pytest.mark.parametrize(
    ("bindings", "why"),
    [
        (
            [
                "from t5x import utils",
                BIDIRECTIONAL,
                "train/utils.DatasetConfig.task_feature_lengths = {'targets': 6}",
            ],
            "inputs_bidirectional_attention = True: the data have no length for inputs",
        ),
        (
            [
                "from t5x import utils",
                BIDIRECTIONAL,
                "train_eval/utils.DatasetConfig.task_feature_lengths = {'targets': 6}",
            ],
            "inputs_bidirectional_attention = True: the data have no length for inputs",
        ),
        (
            [
                "from t5x import utils",
                "train_eval/utils.DatasetConfig.task_feature_lengths = None",
            ],
            "needs a length for each feature",
        ),
        (
            ["models.DecoderOnlyModel.feature_converter_cls = @seqio.EncDecFeatureConverter"],
            "DecoderFeatureConverter does",
        ),
        (["network.TransformerConfig.num_encoder_layers = 2"], "num_encoder_layers"),
        (["models.DecoderOnlyModel.input_vocabulary = None"], "input_vocabulary"),
    ],
)
def test_what_a_decoder_only_model_cannot_do_is_refused(bindings, why, tmp_path):
    with pytest.raises(UserError, match=re.escape(why)):
        decoder_only_config(tmp_path, *bindings)
