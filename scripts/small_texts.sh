#!/usr/bin/env bash
# Does the recipe learn? T0's recipe in T5X's gin files, on real data and at a size for two CPU cores: a
# small T5 1.1 is pretrained by span corruption and adapted to language modelling, once; from there it is
# tuned on prompts of four datasets by each of three seeds, and every checkpoint of the tunings ranks the
# answers of prompts and datasets that it was not trained on. docs/learning.md has what came of it.
#
#   T0REPRO_DATA_DIR=DIR bash scripts/small_texts.sh
#
# Everything goes to runs/small_texts in the current folder, a vocabulary made of the texts included. An
# interrupted run continues where it stopped. SEEDS (default "1 2 3") are those of the tunings. Further
# arguments go to all trainings. The last command prints and draws what has been learned, and fails unless
# accuracy on held-out prompts is clearly above chance and above the most frequent answer.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
: "${T0REPRO_DATA_DIR:?the folder of datasets, <dataset>/<subset>/<split>.jsonl}"
files=t5x/examples/t5/t5_1_1/examples/small_texts
out=runs/small_texts # as in the gin files

mkdir -p "$out"
export T0REPRO_VOCAB=$PWD/$out/vocabulary.model
[[ -e $T0REPRO_VOCAB ]] || python -P "$here/small_vocabulary.py" "$T0REPRO_VOCAB"

for stage in pretrain adapt; do
  t0repro train --gin_file "${files}_$stage.gin" "$@"
done
for seed in ${SEEDS:-1 2 3}; do
  run=$out/seed_$seed
  t0repro train --gin_file "${files}_finetune.gin" --gin.RANDOM_SEED="$seed" --gin.MODEL_DIR="'$run/finetuned'" "$@"
  t0repro eval --gin_file "${files}_eval.gin" --gin.CHECKPOINT_PATH="'$run/finetuned'" \
    --gin.EVAL_OUTPUT_DIR="'$run/eval'"
done

python -P "$here/bench/small_texts.py" "$out" "$out/curves.png"
