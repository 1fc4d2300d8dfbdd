#!/usr/bin/env bash
# Evaluates by rank classification with the T0 README's score_eval command, on either stack.
#
#   bash scripts/rank_eval.sh --backend=jax
#   bash scripts/rank_eval.sh --backend=mtf --gin_param="eval_checkpoint_step = 'all'"
#
# Arguments are passed on last, so that they override the settings below. Variables:
#   MODEL_DIR, CACHE_DIR        the trained run; where scripts/cache.sh put the tasks
#   MODULE, EVAL_MIXTURE_NAME   what registers the tasks (a,b); which of them to evaluate
#   EVAL_STEP                   a step, 'all' (quoted for gin), or -1 for the latest (the default)
#   NUM_EVAL_EXAMPLES           (input, choice) pairs per task; -1 takes all (the default)
#   EVAL_TOKENS_PER_BATCH
#
# Writes $MODEL_DIR/validation_eval/ (inputs, targets and scores of each task) and metrics.jsonl beside it.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
export PATH="$root/.venv/bin:$PATH"
if [[ " $* " == *" --help "* ]]; then
  sed -n '/^#!/d; s/^# \{0,1\}//p; /^set /q' "${BASH_SOURCE[0]}"
  exec t5_mesh_transformer --help
fi
if ! command -v t5_mesh_transformer >/dev/null; then
  echo "rank_eval: t5_mesh_transformer is not installed: bash $root/scripts/setup.sh" >&2
  exit 2
fi

MODEL_DIR=${MODEL_DIR:-runs/demo/model}
CACHE_DIR=${CACHE_DIR:-runs/demo/cache}
MODULE=${MODULE:-t0repro.tasks.demo}
if [[ -z ${EVAL_MIXTURE_NAME:-} ]]; then
  echo "rank_eval: EVAL_MIXTURE_NAME is not set: evaluating the demo's, demo_eval_score_eval" >&2
fi
EVAL_MIXTURE_NAME=${EVAL_MIXTURE_NAME:-demo_eval_score_eval}
if [[ $MODEL_DIR != *://* && ! -f $MODEL_DIR/operative_config.gin ]]; then
  echo "rank_eval: $MODEL_DIR/operative_config.gin is missing: train first (scripts/train.sh), or set MODEL_DIR" >&2
  exit 2
fi
skip=()
# What a cache was made with: its other tasks are evaluated.
if [[ -f $CACHE_DIR/skipped.json ]]; then
  skip=(--skip_missing)
fi

exec t5_mesh_transformer \
  --model_dir="$MODEL_DIR" \
  --additional_task_cache_dirs="$CACHE_DIR" \
  --module_import="$MODULE" ${skip[@]+"${skip[@]}"} \
  --gin_file="$MODEL_DIR/operative_config.gin" \
  --gin_file="score_eval.gin" \
  --gin_param="MIXTURE_NAME = '$EVAL_MIXTURE_NAME'" \
  --gin_param="run.dataset_split = 'validation'" \
  --gin_param="run.batch_size = ('tokens_per_batch', ${EVAL_TOKENS_PER_BATCH:-8192})" \
  --gin_param="mesh_eval_dataset_fn.use_cached = True" \
  --gin_param="mesh_eval_dataset_fn.num_eval_examples = ${NUM_EVAL_EXAMPLES:--1}" \
  --gin_param="eval_checkpoint_step = ${EVAL_STEP:--1}" \
  "$@"
