#!/usr/bin/env bash
# Trains with the T0 README's t5_mesh_transformer command, on either stack; by default the embedded demo.
#
#   bash scripts/train.sh --backend=jax
#   bash scripts/train.sh --backend=mtf --gin_param="run.train_steps = 100"
#
# Arguments are passed on last, so that they override the settings below. Variables:
#   MODEL_DIR, CACHE_DIR   where the run goes; where scripts/cache.sh put the tasks
#   MODULE, MIXTURE_NAME   what registers the tasks (a,b); which of them to train on
#   MODEL_GIN              the model: a file of gin/ or of t5's, or a checkpoint's operative_config.gin
#   INIT_CHECKPOINT        a checkpoint to start from, if model_dir has none: with --backend=jax of any format,
#                          else .../model.ckpt-<step>
#   TRAIN_STEPS            the global step to train to
#   TOKENS_PER_BATCH, INPUTS_LENGTH, TARGETS_LENGTH
#
# The defaults are small. T0 used t5.1.1.lm100k.xxl, 1,112,200 steps (from 1,100,000), 1,048,576 tokens per batch,
# lengths 1024 and 256, and a TPU v3-512.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
export PATH="$root/.venv/bin:$PATH"
if [[ " $* " == *" --help "* ]]; then
  sed -n '/^#!/d; s/^# \{0,1\}//p; /^set /q' "${BASH_SOURCE[0]}"
  exec t5_mesh_transformer --help
fi
if ! command -v t5_mesh_transformer >/dev/null; then
  echo "train: t5_mesh_transformer is not installed: bash $root/scripts/setup.sh" >&2
  exit 2
fi

MODEL_DIR=${MODEL_DIR:-runs/demo/model}
CACHE_DIR=${CACHE_DIR:-runs/demo/cache}
MODULE=${MODULE:-t0repro.tasks.demo}
if [[ -z ${MIXTURE_NAME:-} ]]; then
  echo "train: MIXTURE_NAME is not set: training on the demo's, demo_train" >&2
fi
MIXTURE_NAME=${MIXTURE_NAME:-demo_train}
if [[ -z ${TRAIN_STEPS:-} && "$*" != *train_steps* ]]; then
  echo "train: TRAIN_STEPS is not set: training to step 1,500" >&2
fi
MODEL_GIN=${MODEL_GIN:-demo/t5.1.1.demo.gin}
initial=()
if [[ -n ${INIT_CHECKPOINT:-} ]]; then
  initial=(--gin_param="utils.run.init_checkpoint = '$INIT_CHECKPOINT'")
fi
skip=()
# What a cache was made with: its other tasks are trained on, with their rates.
if [[ -f $CACHE_DIR/skipped.json ]]; then
  skip=(--skip_missing)
fi

# use_custom_ops = False: the compiled packing op is not part of the Mesh TensorFlow package.
# mesh_shape = []: one device. On a TPU, T0 gives --tpu, model_parallelism and tpu_topology instead.
exec t5_mesh_transformer \
  --model_dir="$MODEL_DIR" \
  --additional_task_cache_dirs="$CACHE_DIR" \
  --module_import="$MODULE" ${skip[@]+"${skip[@]}"} \
  --gin_file="dataset.gin" \
  --gin_param="MIXTURE_NAME = '$MIXTURE_NAME'" \
  --gin_file="$MODEL_GIN" \
  ${initial[@]+"${initial[@]}"} \
  --gin_param="run.train_steps = ${TRAIN_STEPS:-1500}" \
  --gin_file="learning_rate_schedules/constant_0_001.gin" \
  --gin_param="run.batch_size = ('tokens_per_batch', ${TOKENS_PER_BATCH:-4096})" \
  --gin_param="run.sequence_length = {'inputs': ${INPUTS_LENGTH:-128}, 'targets': ${TARGETS_LENGTH:-32}}" \
  --gin_param="mesh_train_dataset_fn.use_cached = True" \
  --gin_param="pack_dataset.use_custom_ops = False" \
  --gin_param="serialize_num_microbatches.tokens_per_microbatch_per_replica = 2048" \
  --gin_param="utils.run.mesh_shape = []" \
  "$@"
