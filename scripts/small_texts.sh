#!/usr/bin/env bash
# From real texts to rank classification in T5X's gin files: a small T5 1.1 is pretrained by span
# corruption, adapted to language modelling, fine-tuned on prompts, and evaluated on held-out ones.
#
#   T0REPRO_DATA_DIR=DIR T0REPRO_VOCAB=FILE bash scripts/small_texts.sh
#
# Everything goes to runs/small_texts in the current folder. An interrupted run continues where it stopped.
# SCRATCH=1 also fine-tunes from random parameters; scripts/bench/small_texts.py then shows what the
# pretraining brings (docs/benchmarks.md has what was seen).
# Further arguments go to all trainings.
set -euo pipefail
: "${T0REPRO_DATA_DIR:?the folder of datasets, <dataset>/<subset>/<split>.jsonl}"
: "${T0REPRO_VOCAB:?a copy of the T5 sentencepiece.model}"
files=t5x/examples/t5/t5_1_1/examples/small_texts

for stage in pretrain adapt finetune; do
  t0repro train --gin_file "${files}_$stage.gin" "$@"
done
t0repro eval --gin_file "${files}_eval.gin"

if [[ -n ${SCRATCH:-} ]]; then
  scratch=runs/small_texts/scratch
  t0repro train --gin_file "${files}_finetune.gin" --gin.MODEL_DIR="'$scratch'" \
    --gin_bindings="utils.CheckpointConfig.restore = None" --gin.TRAIN_STEPS=400 "$@"
  t0repro eval --gin_file "${files}_eval.gin" --gin.CHECKPOINT_PATH="'$scratch'" \
    --gin.EVAL_OUTPUT_DIR="'runs/small_texts/eval_scratch'"
fi
