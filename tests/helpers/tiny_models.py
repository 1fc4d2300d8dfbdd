"""Small models, options, batches and runs that tests share; a test changes what it is about."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from t0repro.config.checkpoints import CheckpointChoice, SaveConfig
from t0repro.config.data import SeqioDataConfig, TrainDataConfig
from t0repro.config.decoding import DecodingConfig
from t0repro.config.model import DTypePolicy, ModelConfig
from t0repro.config.optimizer import AdafactorConfig, ScheduleConfig
from t0repro.config.run import MeshEvalRun, Run, TrainingPlan, TrainRun, mesh_transformer_plan
from t0repro.model.t5 import T5, initial_parameters
from t0repro.training.optimizers import make_optimizer
from t0repro.training.schedules import make_schedule
from t0repro.training.train_state import new_train_state

FLOAT32 = DTypePolicy("float32", "float32", "float32")
BFLOAT16 = DTypePolicy("float32", "float32", "bfloat16")

T5_1_1 = ModelConfig(
    num_encoder_layers=1,
    num_decoder_layers=1,
    d_model=16,
    d_ff=24,
    num_heads=2,
    d_kv=4,
    vocab_size=128,
    activations=("gelu", "linear"),
    logits_from_embedding=False,
    relative_attention_num_buckets=8,
    dropout_rate=0.0,
    label_smoothing=0.0,
    z_loss=0.0,
    loss_denominator=None,
)
T5_1_0 = dataclasses.replace(T5_1_1, activations=("relu",), logits_from_embedding=True)
# Every field that sets transformers' umT5 and its relatives apart from T5 1.1, at once.
UMT5 = dataclasses.replace(
    T5_1_1,
    activations=("silu", "linear"),
    logits_from_embedding=True,
    scale_tied_logits=False,
    position_bias_per_layer=True,
    relative_attention_max_distance=20,
    rms_norm_epsilon=1e-3,
)

PLAN = TrainingPlan(
    train_data=SeqioDataConfig("a_task", {"inputs": 6, "targets": 5}, "train", 4, False, 1),
    train_eval_data=None,
    infer_eval_data=None,
    evaluator=None,
    random_seed=3,
    relative_steps=None,
    eval_steps=2,
    eval_period=3,
    stats_period=1,
    run_eval_before_training=False,
    save=SaveConfig(3, (), None, "float32", True, None, None),
    restore=None,
    actions={},
    gc_period=0,
)


def model_config(**changes: Any) -> ModelConfig:
    """T5_1_1 with other values in some fields."""
    return dataclasses.replace(T5_1_1, **changes)


# ---- Training ------------------------------------------------------------------------------------

MODEL = model_config(d_model=8, d_ff=12, z_loss=1e-4)
ADAFACTOR = AdafactorConfig(min_dim_size_to_factor=8)
OPTIMIZER = make_optimizer(ADAFACTOR)
SCHEDULE = ScheduleConfig("constant_learning_rate", {"learning_rate": 0.01}, 100)


def model(**changes) -> T5:
    return T5(dataclasses.replace(MODEL, **changes), FLOAT32)


def new_state(seed: int = 0, optimizer: AdafactorConfig = ADAFACTOR, **changes):
    return new_train_state(
        initial_parameters(model(**changes), jax.random.key(seed)), make_optimizer(optimizer)
    )


def neighbors(params):
    """Each parameter's next float32 up or down, at random: what rounding may do to it."""
    random = np.random.default_rng(0)

    def moved(leaf):
        toward = np.where(random.random(leaf.shape) < 0.5, -np.inf, np.inf)
        return jnp.asarray(np.nextafter(np.asarray(leaf), toward.astype(np.float32)))

    return jax.tree.map(moved, params)


def schedule():
    return make_schedule(SCHEDULE)


def batches(count: int, rows: int = 4, seed: int = 0) -> list[dict[str, np.ndarray]]:
    """Unpacked batches [rows, 6] and [rows, 5] with some padding."""
    generator = np.random.default_rng(seed)

    def tokens(length):
        x = generator.integers(2, 128, (rows, length)).astype(np.int32)
        x[np.arange(length) >= generator.integers(1, length + 1, (rows, 1))] = 0
        return x

    return [{"inputs": tokens(6), "targets": tokens(5)} for _ in range(count)]


def train_data(task: str, **changes) -> TrainDataConfig:
    """A task's examples from its cache, packed and shuffled; a test changes what it is about."""
    config = TrainDataConfig(
        mixture_or_task_name=task,
        split="train",
        use_cached=True,
        pack=True,
        shuffle=True,
        seed=5,
        skip_seen_data=None,
        seen_data_init_step=0,
        checkpoint_input_pipeline=False,
    )
    return dataclasses.replace(config, **changes)


def mesh_plan(train_data: TrainDataConfig | None = None, **changes) -> TrainingPlan:
    """The rhythm of mesh_transformer_main, with a checkpoint every three steps."""
    return mesh_transformer_plan(train_data, **{"save_checkpoints_steps": 3, **changes})


def run_config(model_dir, train_steps: int, **changes) -> TrainRun:
    config = TrainRun(
        mode="train",
        model_dir=str(model_dir),
        model=MODEL,
        dtypes=FLOAT32,
        optimizer=ADAFACTOR,
        schedule=SCHEDULE,
        sequence_length={"inputs": 6, "targets": 5},
        batch_size=4,
        num_microbatches=2,
        train_steps=train_steps,
        plan=mesh_plan(),
    )
    return dataclasses.replace(config, **changes)


def eval_run(run: TrainRun, **changes) -> MeshEvalRun:
    """A score_eval of a training run's model, with Mesh TensorFlow's defaults."""
    shared = {field.name: getattr(run, field.name) for field in dataclasses.fields(Run)}
    values = {
        "mode": "score_eval",
        "eval_data": None,
        "eval_checkpoint_step": None,
        "eval_summary_dir": None,
        "eval_dir_suffix": None,
        "output_eval_examples": False,
        "checkpoint_choice": CheckpointChoice(0, None, True),
        "perplexity_eval_steps": 100,
        "decoding": DecodingConfig(prefilter=2),
        "scores_filename": None,
        "save_example_text": True,
    }
    return MeshEvalRun(**{**shared, **values, **changes})
