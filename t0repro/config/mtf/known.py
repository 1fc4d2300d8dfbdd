"""The bindings that a run on the JAX stack reads; any other may only bind a default.

Most are the arguments that the run's settings name in their annotations (t0repro.config.settings).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import EllipsisType

from t0repro.config.gin import door
from t0repro.config.mtf.arguments import Arguments
from t0repro.config.mtf.optimizer import OPTIMIZERS, SCHEDULES
from t0repro.config.mtf.stand_ins import full_name, signature_of
from t0repro.config.run import MeshEvalRun, TextRun, TrainRun
from t0repro.config.settings import arguments_of, list_parts

# Configurables all of whose arguments rules read, or of which nothing depends on one.
_ANY_ARGUMENT = (
    "utils.serialize_num_microbatches", "utils.auto_train_steps", "utils.tpu_mesh_shape",
    "utils.get_variable_dtype", "mesh_transformer.get_vocabulary", "ops.rewrite_stack_variables",
    "optimize.adafactor_decay_rate_pow",
)  # fmt: skip
# Configurables of Mesh TensorFlow's whose every argument must have its default.
_DEFAULTS_ALONE = (
    "utils.score_with_estimator", "utils.init_checkpoint_variable_mapping",
    "utils.should_load_variable", "utils.decode", "utils.clean_decodes", "dataset.pack_dataset",
    "layers.unit_scaling_convention", "layers.VarianceScalingInitializer",
    "transformer.Bitransformer", "transformer.VocabEmbedding",
    "transformer.get_vocab_embedding_cls", "transformer.shift_targets",
    "transformer.sublayer_residual", "transformer.sublayer_call_layer",
    "transformer.sublayer_mask_padding", "transformer_layers.enc_dec_attention",
    "transformer_layers.enc_dec_attention_bias",
)  # fmt: skip
# Arguments that set no field: rules read them, Mesh TensorFlow passes others itself, or nothing
# that the JAX stack computes depends on them.
_OTHERS: Mapping[str, set[str]] = {
    "utils.run": {
        # Read by rules.
        "vocabulary", "layout_rules", "total_run_steps",
        # Without an effect here.
        "autostack", "export_checkpoint_step", "export_path", "iterations_per_loop", "mesh_devices",
        "tpu_job_name", "tpu", "gcp_project", "tpu_zone", "model_dir",
    },
    "utils.tpu_estimator_model_fn": {
        "model_info_file", "tpu_summaries", "hierarchical_tiling_spec", "init_checkpoint",
    },
    "utils.infer_model": {"decode_fn"},
    "utils.score_from_strings": {"score_postprocess_fn"},
    "utils.score_from_dataset": {"score_dataset_fn", "score_postprocess_fn"},
    "Bitransformer.decode": {"variable_dtype"},
    "Unitransformer.sample_autoregressive": {
        "temperature", "sampling_keep_top_k", "variable_dtype", "has_partial_sequences",
        "encoder_output", "encoder_sequence_id", "encoder_inputs", "shared_params",
        "encoder_layer_outputs",
    },
    "beam_search.beam_search": {
        "alpha", "decode_length", "use_tpu", "dtype", "layout", "mesh_shape", "states",
    },
    "transformer.Unitransformer": {"max_length", "positional_embedding"},
    "transformer.LayerStack": {
        "sublayers_initial", "sublayers_per_layer", "sublayers_final", "dropout_rate",
    },
    "transformer.make_layer_stack": {"layers"},
    "transformer.make_bitransformer": {"decoder_name"},
    "transformer_layers.DenseReluDense": {"dropout_rate"},
    "transformer_layers.SelfAttention": {"dropout_rate"},
    "transformer_layers.EncDecAttention": {"num_heads", "key_value_size", "dropout_rate"},
    **{kind.gin_configurables["mtf"]: {"learning_rate"} for kind in OPTIMIZERS.values()},
    "optimize.AdafactorOptimizer": {"stacked_dim_names", "learning_rate"},
}  # fmt: skip


@functools.cache
def known_bindings() -> Mapping[str, set[str] | EllipsisType]:
    """Configurable -> its arguments that are read; `...` for all of them."""
    known: dict[str, set[str]] = {}
    for kind in list_parts(TrainRun, MeshEvalRun, TextRun):
        for each in arguments_of(kind, "mtf").values():
            configurable = each.configurable.rpartition("/")[2]
            # The JAX stack's own settings are all read.
            if not configurable.startswith("t0repro."):
                known.setdefault(full_name(configurable), set()).add(each.argument)
    for name, arguments in {**dict.fromkeys(_DEFAULTS_ALONE, ()), **_OTHERS}.items():
        known.setdefault(full_name(name), set()).update(arguments)
    every = dict.fromkeys(map(full_name, _ANY_ARGUMENT), ...)
    schedules = {
        name: {*signature_of(name).parameters} - {"step", "total_train_steps"} for name in SCHEDULES
    }
    return {**known, **schedules, **every}


def refuse_unknown_bindings(arguments: Arguments) -> None:
    """Refuses a supported configurable's argument that is neither read nor at its default.

    Raises:
      NotOnJax: Naming the binding and its place.
    """
    for (scope, selector), bound in door.bound().items():
        known = known_bindings().get(selector)
        if known is None or known is ...:
            continue
        defaults = arguments.defaults(selector)
        # Compare with the signature's defaults: binding a default changes nothing.
        for argument in (each for each in bound if each not in known):
            value = arguments.read(selector, scope)[argument]
            if argument not in defaults or value != defaults[argument]:
                shown = door.format_value(bound[argument])
                arguments.refuse(f"{argument} = {shown}", argument, selector, scope)
