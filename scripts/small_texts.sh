#!/usr/bin/env bash
# Does the recipe learn? Runs T0's recipe from T5X's gin files, on real data and at a size for two CPU cores. For
# each of three seeds, it pretrains a small T5 1.1 by span corruption, adapts it to language modeling and
# fine-tunes it on prompts of four datasets. It then evaluates every checkpoint of the fine-tuning by rank
# classification on held-out prompts and datasets. docs/evidence/learning.md has the results.
#
#   T0REPRO_DATA_DIR=DIR bash scripts/small_texts.sh
#
# Writes everything into runs/small_texts in the current folder, including a vocabulary trained on the texts. An
# interrupted run continues where it stopped. SEEDS (default "1 2 3") lists the runs. Further arguments go to all
# training runs. The last command prints and draws the results. It fails unless accuracy on held-out prompts is
# clearly above both chance and the most frequent answer.
set -euo pipefail
if [[ " $* " == *" --help "* ]]; then
  sed -n '/^#!/d; s/^# \{0,1\}//p; /^set /q' "${BASH_SOURCE[0]}"
  exit
fi
here=$(cd "$(dirname "$0")" && pwd)
: "${T0REPRO_DATA_DIR:?the folder of datasets, <dataset>/<subset>/<split>.jsonl}"
files=t5x/examples/t5/t5_1_1/examples/small_texts
out=runs/small_texts

mkdir -p "$out"
export T0REPRO_VOCAB=$PWD/$out/vocabulary.model
[[ -e $T0REPRO_VOCAB ]] || python -P "$here/small_vocabulary.py" "$T0REPRO_VOCAB"

# train <stage> <folder> <flag>...
train() {
  t0repro train --gin_file "${files}_$1.gin" --gin.MODEL_DIR="'$2'" "${@:3}"
}

for seed in ${SEEDS:-1 2 3}; do
  run=$out/seed_$seed
  flags=(--gin.RANDOM_SEED="$seed" "$@")
  train pretrain "$run/pretrained" "${flags[@]}"
  train adapt "$run/adapted" --gin.INITIAL_CHECKPOINT_PATH="'$run/pretrained'" "${flags[@]}"
  train finetune "$run/finetuned" --gin.INITIAL_CHECKPOINT_PATH="'$run/adapted'" "${flags[@]}"
  t0repro eval --gin_file "${files}_eval.gin" --gin.CHECKPOINT_PATH="'$run/finetuned'" \
    --gin.EVAL_OUTPUT_DIR="'$run/eval'"
done

python -P "$here/bench/small_texts.py" "$out" "$out/curves.png"
