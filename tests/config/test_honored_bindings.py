"""Every argument that the JAX stack takes from Mesh TensorFlow's gin changes the run that it names.

A table binds each argument and says which fields of the run change, and to what. Whatever
else a run may bind either changes nothing on purpose, and is listed, or is refused.
"""

import contextlib
import inspect
import io
import json
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from t0repro.config.mtf import dialect, jax_settings, stand_ins
from t0repro.config.mtf.parser import MeshInputs
from t0repro.config.mtf.refusals import known_bindings
from t0repro.errors import UserError

from .test_mtf_gin import FILES, PARAMS
from .test_mutated_bindings import INERT

pytestmark = pytest.mark.mtf

RATES = "learning_rate_schedules"
DATA = "t5.models.mesh_transformer.mesh_eval_dataset_fn"
WRITTEN = ("score_postprocess_fn = @save_scores", "save_scores.scores_filename = 'x'")


def schedule(name: str, *more: str) -> tuple[str, ...]:
    return (f"run.learning_rate_schedule = @{name}", *more)


# Name -> what a run binds beforehand, so that it reads the arguments of its table.
RUNS: Mapping[str, tuple[str, ...]] = {
    "train": (),
    "lm": ("run.model_type = 'lm'",),
    "start": ("run.init_checkpoint = 'a'",),
    "tokens": ("run.train_steps = @auto_train_steps",),
    "adam": ("run.optimizer = @optimize.AdamWeightDecayOptimizer",),
    "momentum": (
        *("run.optimizer = @optimize.MomentumOptimizer", "MomentumOptimizer.momentum = 0.9"),
    ),
    "constant": schedule(f"{RATES}.constant"),
    "noam": schedule(f"{RATES}.learning_rate_schedule_noam"),
    "linear_decay": schedule(f"{RATES}.linear_decay"),
    "linear_decay_learning_rate": schedule(f"{RATES}.linear_decay_learning_rate"),
    "linear_warmup": schedule(f"{RATES}.linear_warmup"),
    "slanted_triangular": schedule(f"{RATES}.slanted_triangular"),
    "truncated_rsqrt": schedule(f"{RATES}.truncated_rsqrt"),
    "product": schedule(
        f"{RATES}.product_learning_rate", f"{RATES}.product_learning_rate.factors = [0.5]"
    ),
    "optimize.product": schedule(
        "optimize.product_learning_rate", "optimize.product_learning_rate.factors = [0.5]"
    ),
    "eval": (
        *("run.mode = 'score_eval'", f"run.eval_dataset_fn = @{DATA}"),
        "mesh_eval_dataset_fn.mixture_or_task_name = %MIXTURE_NAME",
    ),
    "infer": (
        *("run.mode = 'infer'", "infer_model.decode_fn = @decode_from_file"),
        *("decode_from_file.input_filename = 'a'", "decode_from_file.output_filename = 'b'"),
    ),
    "strings": (
        *("run.mode = 'score_from_strings'", "score_from_strings.inputs = ['a']"),
        *("score_from_strings.targets = ['b']", *(f"score_from_strings.{WRITTEN[0]}", WRITTEN[1])),
    ),
    "tpu": (
        "utils.run.mesh_shape = @utils.tpu_mesh_shape()",
        "utils.run.layout_rules = 'batch:batch,d_ff:model,heads:model,vocab:model'",
        *("tpu_mesh_shape.tpu_topology = 'v3-8'", "tpu_mesh_shape.model_parallelism = 1"),
    ),
}
ARGUMENTS = "schedule.arguments."
# Run -> binding -> the fields that change, and their new values; None for what is gone.
CHANGES: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "train": {
        "run.save_checkpoints_steps = 3": {"plan.save.period": 3},
        "run.keep_checkpoint_max = 3": {"plan.save.keep": 3},
        "run.batch_size = 3": {"batch_size": 3},
        "run.train_steps = 3": {"train_steps": 3, "schedule.total_train_steps": 3},
        "run.total_run_steps = 3": {"schedule.total_train_steps": 3},
        "run.sequence_length = {'inputs': 32, 'targets': 16}": {
            "sequence_length.inputs": 32, "batch_size": 16,
        },
        "run.learning_rate_schedule = 0.5": {
            "schedule.name": "constant", f"{ARGUMENTS}value": 0.5,
            f"{ARGUMENTS}learning_rate": None,
        },
        "run.skip_seen_data = True": {"plan.train_data.skip_seen_data": True},
        "run.seen_data_init_step = 3": {"plan.train_data.seen_data_init_step": 3},
        "run.checkpoint_input_pipeline = True": {"plan.train_data.checkpoint_input_pipeline": True},
        "get_variable_dtype.master_dtype = 'float32'": {"dtypes.master": "float32"},
        "serialize_num_microbatches.tokens_per_microbatch_per_replica = 256": {
            "num_microbatches": 2,
        },
        "Unitransformer.d_model = 16": {"model.d_model": 16},
        "Unitransformer.shared_embedding_and_softmax_weights = True": {
            "model.logits_from_embedding": True,
        },
        "decoder/Unitransformer.label_smoothing = 0.5": {"model.label_smoothing": 0.5},
        "Unitransformer.z_loss = 0.5": {"model.z_loss": 0.5},
        "Unitransformer.vocab_divisor = 3": {"model.vocab_size": 1410},
        "Unitransformer.loss_denominator = 3": {"model.loss_denominator": 3},
        "LayerStack.recompute_grads = True": {"model.recompute": "full"},
        "make_layer_stack.num_layers = 3": {
            "model.num_encoder_layers": 3, "model.num_decoder_layers": 3,
        },
        "decoder/make_layer_stack.num_layers = 3": {"model.num_decoder_layers": 3},
        "dropout_rate = 0.5": {"model.dropout_rate": 0.5},  # a macro of all dropouts
        "sublayer_rms_norm.epsilon = 0.5": {"model.rms_norm_epsilon": 0.5},
        "DenseReluDense.hidden_size = 3": {"model.d_ff": 3},
        "DenseReluDense.activation = 'relu'": {"model.activations": ["relu"]},
        "SelfAttention.num_heads = 3": {"model.num_heads": 3},
        "SelfAttention.key_value_size = 3": {"model.d_kv": 3},
        "SelfAttention.relative_attention_type = 'bias'": {"model.position_bias_per_layer": True},
        "SelfAttention.relative_attention_num_buckets = 64": {
            "model.relative_attention_num_buckets": 64,
        },
        "AdafactorOptimizer.multiply_by_parameter_scale = False": {
            "optimizer.multiply_by_parameter_scale": False,
        },
        "AdafactorOptimizer.decay_rate = 0.5": {"optimizer.decay_rate": 0.5},
        "AdafactorOptimizer.beta1 = 0.5": {"optimizer.beta1": 0.5},
        "AdafactorOptimizer.clipping_threshold = 0.5": {"optimizer.clipping_threshold": 0.5},
        "AdafactorOptimizer.factored = False": {"optimizer.factored": False},
        "AdafactorOptimizer.epsilon1 = 0.5": {"optimizer.epsilon1": 0.5},
        "AdafactorOptimizer.epsilon2 = 0.5": {"optimizer.epsilon2": 0.5},
        "AdafactorOptimizer.min_dim_size_to_factor = 3": {"optimizer.min_dim_size_to_factor": 3},
        "AdafactorOptimizer.exclude_from_parameter_scale = ['embedding']": {
            "optimizer.exclude_from_parameter_scale": ["token_embedder/embedding"],
        },
        "adafactor_decay_rate_pow.exponent = 0.5": {"optimizer.decay_exponent": 0.5},
        "adafactor_decay_rate_pow.offset = 3": {"optimizer.decay_offset": 3},
        "constant_learning_rate.learning_rate = 0.5": {f"{ARGUMENTS}learning_rate": 0.5},
        "mesh_train_dataset_fn.mixture_or_task_name = 'a'": {
            "plan.train_data.mixture_or_task_name": "a",
        },
        "mesh_train_dataset_fn.shuffle = False": {"plan.train_data.shuffle": False},
        "mesh_train_dataset_fn.seed = 3": {"plan.train_data.seed": 3},
        "mesh_train_dataset_fn.use_cached = True": {"plan.train_data.use_cached": True},
        "mesh_train_dataset_fn.pack = False": {"plan.train_data.pack": False},
        "t0repro.jax_model.relative_attention_max_distance = 64": {
            "model.relative_attention_max_distance": 64,
        },
        "t0repro.jax_model.exact_gelu = True": {"model.activations": ["gelu_exact", "linear"]},
        "t0repro.jax_model.scale_tied_logits = False": {"model.scale_tied_logits": False},
        "t0repro.jax_model.recompute = 'minimal'": {"model.recompute": "minimal"},
        "t0repro.jax_training.weight_metrics_every = 3": {"weight_metrics_every": 3},
        "t0repro.jax_training.data_shards = 2": {"plan.train_data.num_shards": 2},
    },
    "lm": {
        "Unitransformer.input_full_attention = True": {"model.input_full_attention": True},
        "Unitransformer.loss_on_targets_only = True": {"model.loss_on_targets_only": True},
    },
    "start": {
        "tpu_estimator_model_fn.init_variable_filter = 'encoder'": {
            "plan.restore.variable_filter": "encoder",
        },
        "run.init_checkpoint = 'b'": {"plan.restore.path": "b"},
    },
    "tokens": {
        "auto_train_steps.train_tokens = 65536": {
            "train_steps": 128, "schedule.total_train_steps": 128,
        },
    },
    "adam": {
        "AdamWeightDecayOptimizer.weight_decay_rate = 0.5": {"optimizer.weight_decay_rate": 0.5},
        "AdamWeightDecayOptimizer.beta_1 = 0.5": {"optimizer.beta_1": 0.5},
        "AdamWeightDecayOptimizer.beta_2 = 0.5": {"optimizer.beta_2": 0.5},
        "AdamWeightDecayOptimizer.epsilon = 0.5": {"optimizer.epsilon": 0.5},
        "AdamWeightDecayOptimizer.exclude_from_weight_decay = ['embedding']": {
            "optimizer.exclude_from_weight_decay": ["token_embedder/embedding"],
        },
    },
    "momentum": {"MomentumOptimizer.momentum = 0.5": {"optimizer.momentum": 0.5}},
    "constant": {f"{RATES}.constant.value = 0.5": {f"{ARGUMENTS}value": 0.5}},
    "noam": {
        f"learning_rate_schedule_noam.{name} = {value}": {f"{ARGUMENTS}{name}": value}
        for name, value in (
            ("warmup_steps", 3), ("linear_decay_fraction", 0.5), ("multiplier", 0.5), ("offset", 3),
        )
    },
    "linear_decay": {
        f"{RATES}.linear_decay.steps_or_fraction = 3": {f"{ARGUMENTS}steps_or_fraction": 3},
    },
    "linear_decay_learning_rate": {
        "linear_decay_learning_rate.initial_lr = 0.5": {f"{ARGUMENTS}initial_lr": 0.5},
        "linear_decay_learning_rate.offset = 3": {f"{ARGUMENTS}offset": 3},
    },
    "linear_warmup": {
        f"{RATES}.linear_warmup.steps_or_fraction = 3": {f"{ARGUMENTS}steps_or_fraction": 3},
    },
    "slanted_triangular": {
        f"slanted_triangular.{name} = {value}": {f"{ARGUMENTS}{name}": value}
        for name, value in (
            ("cut_fraction", 0.5), ("ratio", 3), ("max_learning_rate", 0.5), ("start_step", 3),
        )
    },
    "truncated_rsqrt": {
        f"{RATES}.truncated_rsqrt.warmup_steps = 3": {f"{ARGUMENTS}warmup_steps": 3},
    },
    "product": {
        f"{RATES}.product_learning_rate.factors = [0.25]": {f"{ARGUMENTS}factors": [0.25]},
        f"{RATES}.product_learning_rate.offset = 3": {f"{ARGUMENTS}offset": 3},
    },
    "optimize.product": {
        "optimize.product_learning_rate.factors = [0.25]": {f"{ARGUMENTS}factors": [0.25]},
        "optimize.product_learning_rate.offset = 3": {f"{ARGUMENTS}offset": 3},
    },
    "eval": {
        "run.dataset_split = 'validation'": {
            "eval_data.split": "validation",
        },
        "run.mode = 'perplexity_eval'": {"mode": "perplexity_eval"},
        "run.eval_checkpoint_step = 3": {"eval_checkpoint_step": 3},
        "run.eval_summary_dir = 'a'": {"eval_summary_dir": "a"},
        "run.eval_dir_suffix = 'a'": {"eval_dir_suffix": "a"},
        "run.output_eval_examples = False": {"output_eval_examples": False},
        "run.perplexity_eval_steps = 3": {"perplexity_eval_steps": 3},
        "Bitransformer.decode.beam_size = 3": {"decoding.beam_size": 3},
        "Bitransformer.decode.alpha = 0.5": {"decoding.alpha": 0.5},
        "Bitransformer.decode.temperature = 0.5": {"decoding.temperature": 0.5},
        "Bitransformer.decode.sampling_keep_top_k = 3": {"decoding.keep_top_k": 3},
        "Bitransformer.decode.decode_length_multiplier = 0.5": {
            "decoding.length_multiplier": 0.5,
        },
        "Bitransformer.decode.decode_length_constant = 3": {"decoding.length_constant": 3},
        "Bitransformer.decode.max_decode_length = 3": {"decoding.max_length": 3},
        "beam_search.num_prefilter = 3": {"decoding.prefilter": 3},
        "get_checkpoint_iterator.skip_until = 3": {"checkpoint_choice.skip_until": 3},
        "get_checkpoint_iterator.stop_after = 3": {"checkpoint_choice.stop_after": 3},
        "get_checkpoint_iterator.find_closest = False": {"checkpoint_choice.find_closest": False},
        "mesh_eval_dataset_fn.mixture_or_task_name = 'a'": {"eval_data.mixture_or_task_name": "a"},
        "mesh_eval_dataset_fn.num_eval_examples = 3": {"eval_data.num_eval_examples": 3},
        "mesh_eval_dataset_fn.use_cached = True": {"eval_data.use_cached": True},
        "mesh_eval_dataset_fn.pack = True": {"eval_data.pack": True},
        "mesh_eval_dataset_fn.shuffle_eval_examples = True": {
            "eval_data.shuffle_eval_examples": True,
        },
        "mesh_eval_dataset_fn.seed = 3": {"eval_data.seed": 3},
    },
    "infer": {
        "decode_from_file.input_filename = 'c'": {"text.input_filename": "c"},
        "decode_from_file.output_filename = 'c'": {"text.output_filename": "c"},
        "decode_from_file.eos_id = 3": {"text.eos_id": 3},
        "decode_from_file.repeats = 3": {"text.repeats": 3},
    },
    "strings": {
        "score_from_strings.inputs = ['c']": {"text.inputs": ["c"]},
        "score_from_strings.targets = 'c'": {"text.targets": "c"},
        "score_from_strings.eos_id = 3": {"text.eos_id": 3},
        "score_from_strings.score_eos = False": {"text.score_eos": False},
        "save_scores.scores_filename = 'y'": {"scores_filename": "y"},
        "save_scores.save_example_text = False": {"save_example_text": False},
    },
    "tpu": {
        "tpu_mesh_shape.tpu_topology = 'v3-32'": {
            "layout.topology": "v3-32", "layout.data": 32,
        },
        "tpu_mesh_shape.model_parallelism = 2": {
            "layout.model": 2, "layout.data": 4,
        },
        "tpu_mesh_shape.ensemble_parallelism = 2": {"layout.data": 4},
    },
}  # fmt: skip
# Chosen above by the runs themselves.
CHOSEN = (
    "run.model_type", "run.optimizer", "run.train_dataset_fn", "run.eval_dataset_fn",
    "run.variable_filter",
    "infer_model.decode_fn", "score_from_strings.score_postprocess_fn",
    "score_from_dataset.score_dataset_fn", "score_from_dataset.score_postprocess_fn",
)  # fmt: skip
# What the caller passes, or what the model files bind already.
PASSED = (
    "auto_train_steps.batch_size", "auto_train_steps.sequence_length", "Optimizer.learning_rate",
    "Unitransformer.positional_embedding",
)  # fmt: skip
# All dropouts have one rate and both attentions one size: a binding of one alone is refused.
TOGETHER = ("dropout_rate", "EncDecAttention.")


def fields(values: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted name, value) of every field but the provenance."""
    if not isinstance(values, dict):
        yield name, values
        return
    for key, value in values.items():
        if key != "provenance":
            yield from fields(value, f"{name}.{key}" if name else key)


def load(*lines: str) -> dict[str, Any]:
    inputs = MeshInputs(
        "a_model_dir", FILES, (*PARAMS, *lines), module_imports=("t0repro.tasks.demo",)
    )
    with contextlib.redirect_stderr(io.StringIO()):
        return dict(fields(json.loads(dialect.load(inputs).run.to_json())))


def difference(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    names = {name for name in {*before, *after} if before.get(name) != after.get(name)}
    return {name: after.get(name) for name in names}


@pytest.mark.parametrize("run", RUNS)
def test_each_binding_changes_the_fields_that_it_is_for_and_no_others(run):
    plain, wrong = load(*RUNS[run]), {}
    for line, expected in CHANGES[run].items():
        found = difference(plain, load(*RUNS[run], line))
        if found != expected:
            wrong[line] = found
    assert not wrong


def test_another_optimizer_takes_the_place_of_adafactor():
    found = load("run.optimizer = @optimize.SgdOptimizer")
    assert [name for name in found if name.startswith("optimizer.")] == ["optimizer.frozen"]


def test_a_filter_of_variables_freezes_the_others():
    (frozen,) = difference(load(), load("run.variable_filter = 'encoder'")).values()
    assert len(frozen) > 9 and not any("encoder/" in path for path in frozen)


def known_arguments() -> dict[str, Any]:
    """Every argument that a run may bind, by its full name, with its default."""
    signatures = {selector: stand_ins.signature_of(selector) for selector in known_bindings()}
    signatures |= {
        "t0repro.jax_model": inspect.signature(jax_settings.jax_model),
        "t0repro.jax_training": inspect.signature(jax_settings.jax_training),
    }
    return {
        f"{selector}.{name}": parameter.default
        for selector, signature in signatures.items()
        for name, parameter in signature.parameters.items()
        if name != "self" and parameter.kind is not parameter.VAR_KEYWORD
    }


def other_than(default: Any) -> str:
    if isinstance(default, bool):
        return str(not default)
    return "3" if isinstance(default, int) else "0.37" if isinstance(default, float) else "'other'"


@pytest.mark.always
def test_every_other_argument_is_inert_on_purpose_or_refused():
    load()  # registers what is bound below
    bound = {
        line.partition(" = ")[0].rpartition("/")[2] for lines in CHANGES.values() for line in lines
    }
    passed = (*INERT, *CHOSEN, *PASSED, *TOGETHER)
    rest = {
        name: default
        for name, default in known_arguments().items()
        if not any(name.endswith(f".{each}") or name == each for each in bound)
        and not any(part in name for part in passed)
    }
    plain, silent = load(), []
    for name, default in rest.items():
        with contextlib.suppress(UserError):
            line = f"{name} = {other_than(default)}"
            if not difference(plain, load(line)):
                silent.append(line)
    assert not silent


@pytest.mark.parametrize("value", ["True", "1", "3", "0.5", "['float32']"])
@pytest.mark.parametrize("kind", ["master", "slice", "activation"])
def test_a_number_is_no_type(kind, value):
    """TensorFlow takes some for types: 1 is float32."""
    with pytest.raises(UserError, match="no such type") as caught:
        load(f"get_variable_dtype.{kind}_dtype = {value}")
    assert f"{kind}_dtype = {value}" in str(caught.value.where)
