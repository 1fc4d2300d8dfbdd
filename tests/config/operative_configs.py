"""Gin files in the manner of the operative configs that T5's and T0's checkpoints come with.

Written for these tests: what such a file holds (modules that have moved, references that are gone,
every argument spelled out by scope, parameters that later versions added left out), not its text.
"""

TOWER = """
{tower}/make_layer_stack.block_scope = True
{tower}/make_layer_stack.layer_stack_cls = @mesh_tensorflow.transformer.transformer.LayerStack
{tower}/make_layer_stack.layers = [
{layers}]
{tower}/make_layer_stack.num_layers = %num_layers
{tower}/Unitransformer.d_model = %d_model
{tower}/Unitransformer.ensemble = None
{tower}/Unitransformer.label_smoothing = 0.0
{tower}/Unitransformer.loss_denominator = None
{tower}/Unitransformer.loss_fn = None
{tower}/Unitransformer.loss_on_targets_only = False
{tower}/Unitransformer.max_length = 512
{tower}/Unitransformer.positional_embedding = False
{tower}/Unitransformer.shared_embedding_and_softmax_weights = {tied}
{tower}/Unitransformer.vocab_divisor = 128
{tower}/Unitransformer.z_loss = 0.0001
{tower}/DenseReluDense.activation = {activation}
{tower}/DenseReluDense.dropout_rate = %dropout_rate
{tower}/DenseReluDense.hidden_size = %d_ff
{tower}/DenseReluDense.use_bias = False
{tower}/SelfAttention.attention_func = None
{tower}/SelfAttention.attention_kwargs = None
{tower}/SelfAttention.combine_dims = True
{tower}/SelfAttention.dropout_rate = %dropout_rate
{tower}/SelfAttention.fold_scaling_into_initializer = True
{tower}/SelfAttention.keep_query_heads_dims = False
{tower}/SelfAttention.key_value_size = %d_kv
{tower}/SelfAttention.num_heads = %num_heads
{tower}/SelfAttention.num_memory_heads = 0
{tower}/SelfAttention.relative_attention_num_buckets = 32
{tower}/SelfAttention.relative_attention_type = 'bias_shared'
{tower}/SelfAttention.shared_kv = False
"""
HEAD = """
import mesh_tensorflow.optimize
import mesh_tensorflow.transformer.dataset
import mesh_tensorflow.transformer.learning_rate_schedules
import mesh_tensorflow.transformer.t2t_vocabulary
import mesh_tensorflow.transformer.transformer_layers
import mesh_tensorflow.transformer.utils
import t5.data.sentencepiece_vocabulary
import t5.models.mesh_transformer

d_ff = 96
d_kv = 16
d_model = 64
dropout_rate = {dropout}
num_heads = 4
num_layers = 2

AdafactorOptimizer.beta1 = 0.0
AdafactorOptimizer.clipping_threshold = 1.0
AdafactorOptimizer.decay_rate = None
AdafactorOptimizer.epsilon1 = 1e-30
AdafactorOptimizer.epsilon2 = 0.001
AdafactorOptimizer.factored = True
AdafactorOptimizer.min_dim_size_to_factor = 128
AdafactorOptimizer.multiply_by_parameter_scale = True
Bitransformer.shared_embedding = True
make_bitransformer.decoder_name = 'decoder'
make_bitransformer.encoder_name = 'encoder'
get_sentencepiece_model_path.mixture_or_task_name = %MIXTURE_NAME
get_variable_dtype.activation_dtype = 'bfloat16'
get_variable_dtype.master_dtype = 'bfloat16'
get_variable_dtype.slice_dtype = 'float32'
maybe_print_dataset.should_print = False
mesh_train_dataset_fn.mixture_or_task_name = %MIXTURE_NAME
mesh_train_dataset_fn.use_cached = False
num_parallel_calls.deterministic = False
SentencePieceVocabulary.extra_ids = 100
SentencePieceVocabulary.sentencepiece_model_file = \
    @t5.models.mesh_transformer.get_sentencepiece_model_path()
run.autostack = True
run.batch_size = ('tokens_per_batch', 256)
run.dataset_split = 'train'
run.ensemble_inputs = None
run.eval_checkpoint_step = None
run.eval_dataset_fn = None
run.eval_summary_dir = None
run.export_path = ''
run.iterations_per_loop = 100
run.keep_checkpoint_max = None
run.layout_rules = 'ensemble:ensemble,batch:batch,d_ff:model,heads:model,vocab:model,experts:batch'
run.learning_rate_schedule = @learning_rate_schedules.{schedule}
run.mesh_shape = @mesh_tensorflow.transformer.utils.tpu_mesh_shape()
run.mode = 'train'
run.model_type = 'bitransformer'
run.optimizer = @optimize.AdafactorOptimizer
run.perplexity_eval_steps = 10
run.predict_fn = None
run.save_checkpoints_steps = 2400
run.sequence_length = {{'inputs': 32, 'targets': 16}}
run.train_dataset_fn = @t5.models.mesh_transformer.mesh_train_dataset_fn
run.train_steps = 1000000000
run.variable_filter = None
run.vocabulary = @seqio.sentencepiece_vocabulary.SentencePieceVocabulary()
serialize_num_microbatches.tokens_per_microbatch_per_replica = 128
shift_targets.bos_id = 0
shift_targets.eos_id = 1
tpu_estimator_model_fn.init_checkpoint = None
tpu_estimator_model_fn.outer_batch_size = 1
tpu_estimator_model_fn.tpu_summaries = False
tpu_mesh_shape.ensemble_parallelism = None
tpu_mesh_shape.model_parallelism = 1
tpu_mesh_shape.tpu_topology = 'v3-8'
"""
_LAYER = "    @mesh_tensorflow.transformer.transformer_layers.{},\n"
_ENCODER = _LAYER.format("SelfAttention") + _LAYER.format("DenseReluDense")
_DECODER = (
    _LAYER.format("SelfAttention")
    + _LAYER.format("EncDecAttention")
    + _LAYER.format("DenseReluDense")
)


def _towers(tied: bool, activation: str) -> str:
    return "".join(
        TOWER.format(tower=tower, layers=layers, tied=tied, activation=activation)
        for tower, layers in (("encoder", _ENCODER), ("decoder", _DECODER))
    )


# T5 1.0: sublayers by their legacy switches, rsqrt schedule, the objective that it was trained on.
T5_1_0 = (
    HEAD.format(dropout=0.1, schedule="learning_rate_schedule_noam")
    + _towers(True, "'relu'")
    + """
learning_rate_schedule_noam.linear_decay_fraction = 0.0
learning_rate_schedule_noam.multiplier = 1.0
learning_rate_schedule_noam.offset = 0
learning_rate_schedule_noam.warmup_steps = 10000
encoder/LayerStack.dropout_rate = 0.1
encoder/LayerStack.norm_epsilon = 1e-06
decoder/LayerStack.dropout_rate = 0.1
decoder/LayerStack.norm_epsilon = 1e-06
run.vocabulary = @t5.data.sentencepiece_vocabulary.SentencePieceVocabulary()
t5.data.sentencepiece_vocabulary.SentencePieceVocabulary.extra_ids = 100
split_tokens.max_tokens_per_segment = @preprocessors.random_spans_tokens_length()
random_spans_helper.inputs_length = 32
targets_length/random_spans_helper.inputs_length = 32
unsupervised.preprocessors = [@preprocessors.split_tokens, @preprocessors.denoise]
"""
)
# What the list of deprecated references of t5 0.9.4's own command lacks of it.
T5_1_0_DEPRECATED = ("t5.data.sentencepiece_vocabulary.SentencePieceVocabulary",)
# T5 1.1 as T0 continued it: sublayers spelled out, constant rate.
T5_1_1 = (
    HEAD.format(dropout=0.0, schedule="constant_learning_rate")
    + _towers(False, "['gelu', 'linear']")
    + "\nconstant_learning_rate.learning_rate = 0.001\n"
    + "".join(
        f"""
{tower}/LayerStack.dropout_rate = None
{tower}/LayerStack.norm_epsilon = None
{tower}/LayerStack.recompute_grads = False
{tower}/LayerStack.sublayers_initial = [@transformer.sublayer_dropout]
{tower}/LayerStack.sublayers_per_layer = [
    @transformer.sublayer_rms_norm, @transformer.sublayer_call_layer,
    @transformer.sublayer_dropout, @transformer.sublayer_residual]
{tower}/LayerStack.sublayers_final = [
    @transformer.sublayer_rms_norm, @transformer.sublayer_dropout]
"""
        for tower in ("encoder", "decoder")
    )
    + """
sublayer_dropout.dropout_rate = %dropout_rate
sublayer_rms_norm.epsilon = 1e-06
sublayer_rms_norm.name = 'rms_norm'
"""
)
# What a fork adds that nobody else has.
FORK = """
our_own_loss.margin = 0.5
run.our_own_summary_steps = 10
"""
