#!/usr/bin/env bash
# The main job from prompts to report, on the embedded demo: cache, train on JAX, go on training on both
# stacks, evaluate on both, convert there and back, report. Under 4 minutes on two idle cores. The demo's
# rows are generated: its scores show that everything works, and say nothing about real data.
#
#   bash scripts/quickstart.sh                                      # the embedded demo
#   T0REPRO_DATA_DIR=DIR T0REPRO_VOCAB=FILE bash scripts/quickstart.sh   # the same on real datasets
#
# RUN_DIR (default runs/quickstart) receives everything. What is there already is not done again, so an
# interrupted run goes on where it stopped; remove the folder for a fresh one. Further arguments go to
# both training commands, e.g. --gin_param="run.batch_size = 16".
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/setup.sh
export PATH="$PWD/.venv/bin:$PATH"

# ---- What is trained and evaluated --------------------------------------------------------------------
if [[ -n ${T0REPRO_DATA_DIR:-} ]]; then
  : "${T0REPRO_VOCAB:?set T0REPRO_VOCAB to a copy of the T5 sentencepiece.model as well}"
  name=small
  # Longer texts, and a vocabulary of 32,128 whose softmax takes most of the time.
  export INPUTS_LENGTH=${INPUTS_LENGTH:-256} TRAIN_STEPS=${TRAIN_STEPS:-500}
else
  name=demo
  export TRAIN_STEPS=${TRAIN_STEPS:-400}
fi
run=${RUN_DIR:-runs/quickstart_$name}
mkdir -p "$run"
export MODULE=t0repro.tasks.$name MIXTURE_NAME=${name}_train EVAL_MIXTURE_NAME=${name}_eval_score_eval
export CACHE_DIR=$run/cache
more_steps=$((TRAIN_STEPS + 20))
model=$run/model
started=$SECONDS

say() { printf '\n== %s  [%d:%02d]\n' "$1" $(((SECONDS - started) / 60)) $(((SECONDS - started) % 60)); }

# float32 masters, which T0's TPU runs hold in bfloat16: what one stack saves, the other reads bit for bit.
exact=(--gin_param="utils.get_variable_dtype.master_dtype = 'float32'")

# ---- 1 and 2: prompted tasks, cached ------------------------------------------------------------------
say "1/6  caching the tasks of $MIXTURE_NAME and $EVAL_MIXTURE_NAME with seqio_cache_tasks"
MIXTURE=$MIXTURE_NAME,$EVAL_MIXTURE_NAME bash scripts/cache.sh

# ---- 3: training on JAX ---------------------------------------------------------------------------------
say "2/6  training a small T5 1.1 on JAX for $TRAIN_STEPS steps"
MODEL_DIR=$model bash scripts/train.sh --backend=jax "${exact[@]}" "$@"

# ---- 4: the same checkpoint, trained on by both stacks with the same gin parameters --------------------
say "3/6  20 more steps on both stacks from the same checkpoint"
[[ -d $run/model_mtf ]] || t0repro convert "$model" "$run/model_mtf" --to mtf
cp "$model/operative_config.gin" "$run/model_mtf/"
for stack in mtf jax; do
  INIT_CHECKPOINT=$run/model_mtf/model.ckpt-$TRAIN_STEPS MODEL_DIR=$run/continued_$stack \
    TRAIN_STEPS=$more_steps bash scripts/train.sh --backend=$stack "${exact[@]}" "$@" \
    --gin_param="mesh_train_dataset_fn.seed = 17"
done
t0repro compare mtf="$run/continued_mtf/metrics.jsonl" jax="$run/continued_jax/metrics.jsonl"

# ---- 5: rank classification on both stacks ---------------------------------------------------------------
say "4/6  rank classification on both stacks"
MODEL_DIR=$model bash scripts/rank_eval.sh --backend=jax
MODEL_DIR=$run/model_mtf bash scripts/rank_eval.sh --backend=mtf
t0repro compare mtf="$run/model_mtf/validation_eval" jax="$model/validation_eval"

# ---- 6: conversion and report ------------------------------------------------------------------------------
say "5/6  converting the checkpoint to Mesh TensorFlow and back"
[[ -d $run/model_back ]] || t0repro convert "$run/model_mtf" "$run/model_back" --to jax
t0repro checkpoint diff "$model" "$run/model_back" | tee "$run/conversion.txt"

say "6/6  the report"
t0repro report make "$model/validation_eval" --out "$run/report" --checkpoint "$model" \
  --module-import "$MODULE" --train-mixture "$MIXTURE_NAME" --metrics "$model/metrics.jsonl" \
  --label jax --other "mtf=$run/model_mtf/validation_eval" \
  --losses "mtf=$run/continued_mtf/metrics.jsonl" "jax=$run/continued_jax/metrics.jsonl" \
  --conversion "$run/conversion.txt"
say "done: open $run/report/report.html"
if [[ $name == demo ]]; then
  echo "The demo's rows are synthetic: these scores say nothing about imdb, ag_news and the other datasets"
  echo "whose form they have. For real rows, set T0REPRO_DATA_DIR and T0REPRO_VOCAB."
fi
