#!/usr/bin/env bash
# From prompts to a report on the embedded demo: cache, train on JAX, continue training on both stacks, evaluate
# on both, convert there and back, report. Under 2 minutes on two idle cores.
#
#   bash scripts/quickstart.sh                                      # the embedded demo
#   T0REPRO_DATA_DIR=DIR T0REPRO_VOCAB=FILE bash scripts/quickstart.sh   # the same on real datasets
#
# The demo's rows are generated from word lists in the form of real datasets. Its accuracies show that the
# pipeline works; they say nothing about the real datasets.
#
# In the core tier (docs/tiers.md) JAX does all of it, and what compares with the other stack is left out:
#   TIER=core bash scripts/quickstart.sh
#
# Writes everything into RUN_DIR (default runs/quickstart_demo). An interrupted run continues where it stopped;
# remove the folder to start over. Further arguments go to both training commands, such as
# --gin_param="run.batch_size = 16".
set -euo pipefail
if [[ " $* " == *" --help "* ]]; then
  sed -n '/^#!/d; s/^# \{0,1\}//p; /^set /q' "${BASH_SOURCE[0]}"
  exit
fi
# Paths are relative to the folder from which the script is called.
for path in T0REPRO_DATA_DIR T0REPRO_VOCAB RUN_DIR; do
  if [[ -n ${!path:-} ]]; then export "$path=$(realpath -m -- "${!path}")"; fi
done
cd "$(dirname "$0")/.."
bash scripts/setup.sh
export PATH="$PWD/.venv/bin:$PATH"
both=true stacks="both stacks"
if [[ $(<.venv/.t0repro-tier) == core ]]; then both=false stacks="JAX"; fi

# ---- What is trained and evaluated --------------------------------------------------------------------
if [[ -n ${T0REPRO_DATA_DIR:-} ]]; then
  : "${T0REPRO_VOCAB:?set T0REPRO_VOCAB to a copy of the T5 sentencepiece.model as well}"
  name=small module=examples.small
  rows="real rows"
  seqio_task=super_glue_copa_more_likely_score_eval
  # Real texts are longer, and the softmax over T5's vocabulary of 32,128 takes most of the time.
  export INPUTS_LENGTH=${INPUTS_LENGTH:-256} TRAIN_STEPS=${TRAIN_STEPS:-500}
else
  name=demo module=demo
  rows="SYNTHETIC rows: these figures say nothing about the real datasets"
  seqio_task=demo_synthetic_glue_mrpc_want_to_know_score_eval
  # Short, because targets have at most 7 tokens. Half of scripts/train.sh's batch is enough for the demo.
  export TARGETS_LENGTH=${TARGETS_LENGTH:-16} TOKENS_PER_BATCH=${TOKENS_PER_BATCH:-2048}
  export TRAIN_STEPS=${TRAIN_STEPS:-350}
fi
run=${RUN_DIR:-runs/quickstart_$name}
mkdir -p "$run/logs"
export MODULE=t0repro.tasks.$module MIXTURE_NAME=${name}_train EVAL_MIXTURE_NAME=${name}_eval_score_eval
export CACHE_DIR=$run/cache
model=$run/model
# Commands share their compiled programs through this cache.
export JAX_COMPILATION_CACHE_DIR=$run/programs

started=$SECONDS
say() { printf '\n== %s  [%d:%02d]\n' "$1" $(((SECONDS - started) / 60)) $(((SECONDS - started) % 60)); }

# `beside NAME COMMAND` starts a command in the background, so that each of two commands has a core.
# `joined NAME` waits for it and prints its output.
declare -A others=()
beside() {
  set -m # in a process group of its own, which can be ended as a whole
  "${@:2}" >"$run/logs/$1.log" 2>&1 </dev/null &
  set +m
  others[$1]=$!
}
joined() {
  local status=0
  printf '\n-- beside it, %s:\n' "$1"
  wait "${others[$1]}" || status=$?
  cat "$run/logs/$1.log"
  return "$status"
}
trap 'for group in "${others[@]}"; do kill -- "-$group" 2>/dev/null || true; done' EXIT

# float32 masters, so that each stack reads the other's checkpoints bit for bit. T0's TPU runs have bfloat16.
train() { bash scripts/train.sh --gin_param="utils.get_variable_dtype.master_dtype = 'float32'" "$@"; }

# ---- 1: prompted tasks, cached --------------------------------------------------------------------------
say "1/6  caching the tasks of $MIXTURE_NAME and $EVAL_MIXTURE_NAME"
t0repro cache --module_import "$MODULE" --mixture "$MIXTURE_NAME,$EVAL_MIXTURE_NAME" \
  --output_cache_dir "$CACHE_DIR" --min_shards 4
# SeqIO's own command caches one of the tasks too, to check that all fields of all examples are equal.
cache_by_seqio() {
  MIXTURE='' TASKS=$seqio_task CACHE_DIR=$run/seqio_cache bash scripts/cache.sh
  TF_CPP_MIN_LOG_LEVEL=2 CUDA_VISIBLE_DEVICES='' python -P -W ignore scripts/same_examples.py \
    "$CACHE_DIR/$seqio_task" "$run/seqio_cache/$seqio_task"
}
if $both; then beside seqio_cache_tasks cache_by_seqio; fi

# ---- 2: training on JAX ---------------------------------------------------------------------------------
say "2/6  training a small T5 1.1 on JAX for $TRAIN_STEPS steps ($rows)"
MODEL_DIR=$model train --backend=jax "$@"
if $both; then joined seqio_cache_tasks; fi

# ---- 3: the same checkpoint, trained on by both stacks with the same gin parameters --------------------
say "3/6  20 more steps on $stacks from the same checkpoint ($rows)"
[[ -d $run/model_mtf ]] || t0repro convert "$model" "$run/model_mtf" --to mtf
cp "$model/operative_config.gin" "$run/model_mtf/"
continue_on() {
  INIT_CHECKPOINT=$run/model_mtf/model.ckpt-$TRAIN_STEPS MODEL_DIR=$run/continued_$1 \
    TRAIN_STEPS=$((TRAIN_STEPS + 20)) train --backend="$1" "${@:2}" \
    --gin_param="mesh_train_dataset_fn.seed = 17"
}
if $both; then
  beside continued_on_mtf continue_on mtf "$@"
  # Mesh TensorFlow's evaluation, of step 4, starts now: both stacks then end at about the same time.
  MODEL_DIR=$run/model_mtf beside evaluated_on_mtf bash scripts/rank_eval.sh --backend=mtf
fi
continue_on jax "$@"
if $both; then
  joined continued_on_mtf
  t0repro compare mtf="$run/continued_mtf/metrics.jsonl" jax="$run/continued_jax/metrics.jsonl"
fi

# ---- 4: rank classification on both stacks ---------------------------------------------------------------
say "4/6  rank classification on $stacks ($rows)"
MODEL_DIR=$model bash scripts/rank_eval.sh --backend=jax
if $both; then
  joined evaluated_on_mtf
  t0repro compare mtf="$run/model_mtf/validation_eval" jax="$model/validation_eval"
fi

# ---- 5: conversion ---------------------------------------------------------------------------------------
say "5/6  converting the checkpoint to Mesh TensorFlow and back"
[[ -d $run/model_back ]] || t0repro convert "$run/model_mtf" "$run/model_back" --to jax
t0repro checkpoint diff "$model" "$run/model_back" | tee "$run/conversion.txt"

# ---- 6: the report ---------------------------------------------------------------------------------------
say "6/6  the report ($rows)"
beside_it=()
if $both; then
  beside_it=(--other "mtf=$run/model_mtf/validation_eval"
    --losses "mtf=$run/continued_mtf/metrics.jsonl" "jax=$run/continued_jax/metrics.jsonl")
fi
t0repro report make "$model/validation_eval" --out "$run/report" --checkpoint "$model" \
  --module_import "$MODULE" --train_mixture "$MIXTURE_NAME" --metrics "$model/metrics.jsonl" \
  --label jax ${beside_it[@]+"${beside_it[@]}"} --conversion "$run/conversion.txt"
say "done: open $run/report/report.html ($rows)"
