#!/usr/bin/env bash
# Trains a small T5 1.1 for 1,000 steps on both stacks, on real data, from the same random parameters. Each stack
# then evaluates its own model by rank classification. On two shared cores, Mesh TensorFlow took 22 minutes and
# the rest 9.
#
#   T0REPRO_DATA_DIR=DIR T0REPRO_VOCAB=FILE bash scripts/bench/long_run.sh
#
# Writes everything into RUN_DIR (default runs/long_run). scripts/bench/long_run.py computes the figures of
# docs/parity.md from it. d_model 64 with T5's vocabulary: 4.3 M parameters.
set -euo pipefail
cd "$(dirname "$0")/../.."
: "${T0REPRO_DATA_DIR:?set T0REPRO_DATA_DIR to a folder of datasets}"
: "${T0REPRO_VOCAB:?set T0REPRO_VOCAB to a copy of the T5 sentencepiece.model}"
run=${RUN_DIR:-runs/long_run}
export MODULE=t0repro.tasks.examples.small MIXTURE_NAME=small_train EVAL_MIXTURE_NAME=small_eval_score_eval
export TRAIN_STEPS=${TRAIN_STEPS:-1000} TOKENS_PER_BATCH=1024 INPUTS_LENGTH=128 TARGETS_LENGTH=16
export CACHE_DIR=$run/cache
settings=(
  --gin_param="d_model = 64" --gin_param="d_kv = 16" --gin_param="d_ff = 128"
  --gin_param="learning_rate_schedules.constant_learning_rate.learning_rate = 0.01"
  --gin_param="mesh_train_dataset_fn.use_cached = False" --gin_param="mesh_train_dataset_fn.seed = 17"
  --gin_param="serialize_num_microbatches.tokens_per_microbatch_per_replica = None"
  --gin_param="utils.get_variable_dtype.master_dtype = 'float32'" --gin_param="dropout_rate = 0.0"
)
started=$SECONDS
say() { printf '== %s  [%d:%02d]\n' "$1" $(((SECONDS - started) / 60)) $(((SECONDS - started) % 60)); }

# JAX starts from Mesh TensorFlow's own step-0 checkpoint.
say "$TRAIN_STEPS steps on Mesh TensorFlow"
MODEL_DIR=$run/mtf bash scripts/train.sh --backend=mtf "${settings[@]}" \
  --gin_param="run.save_checkpoints_steps = $TRAIN_STEPS"
say "$TRAIN_STEPS steps on JAX"
MODEL_DIR=$run/jax INIT_CHECKPOINT=$run/mtf/model.ckpt-0 bash scripts/train.sh --backend=jax \
  "${settings[@]}" --gin_param="run.save_checkpoints_steps = $TRAIN_STEPS"
for stack in mtf jax; do
  say "rank classification on $stack"
  MODEL_DIR=$run/$stack bash scripts/rank_eval.sh --backend=$stack \
    --gin_param="mesh_eval_dataset_fn.use_cached = False"
done
say "done: .venv/bin/python -P scripts/bench/long_run.py $run"
