#!/usr/bin/env bash
# Does the stack learn? A small T5 1.1 (9 M parameters, T5's vocabulary), trained from random parameters on
# three prompts of one real set (trec, 5,452 questions of six kinds), ranks the answers of two prompts that
# it has not seen, on the 500 questions of the set's held-out split. Fails unless the 95% interval of the
# mean over the two prompts begins above chance (16.7%). Under 8 minutes on two idle cores.
#
#   T0REPRO_DATA_DIR=DIR T0REPRO_VOCAB=FILE bash scripts/learning_check.sh
#
# RUN_DIR (default runs/learning_check) receives the model and the report. Run again, it continues where it
# stopped. TRAIN_STEPS is 400 unless set.
set -euo pipefail
cd "$(dirname "$0")/.."
: "${T0REPRO_DATA_DIR:?set T0REPRO_DATA_DIR to the folder of datasets}"
: "${T0REPRO_VOCAB:?set T0REPRO_VOCAB to a copy of the T5 sentencepiece.model}"
export PATH="$PWD/.venv/bin:$PATH"
run=${RUN_DIR:-runs/learning_check}
started=$SECONDS

MODULE=t0repro.tasks.learning_check MIXTURE_NAME=learning_train MODEL_DIR=$run/model \
  INPUTS_LENGTH=256 TRAIN_STEPS=${TRAIN_STEPS:-400} bash scripts/train.sh --backend=jax \
  --gin_param="mesh_train_dataset_fn.use_cached = False" --gin_param="mesh_train_dataset_fn.seed = 1"

t0repro rank-eval --checkpoint "$run/model" --mixture learning_eval_score_eval \
  --module_import t0repro.tasks.learning_check --train_mixture learning_train \
  --inputs-length 256 --targets-length 32 --out "$run/rank_eval" --title "Learning check"

python -P - "$run/rank_eval" $((SECONDS - started)) <<'PYTHON'
import sys

from t0repro.reports import load_report

(group,) = load_report(sys.argv[1]).groups
low, high = group.interval.low, group.interval.high
print(
    f"{group.title}: {group.mean:.1f}% ({low:.1f} to {high:.1f}), chance {group.chance:.1f}%, majority"
    f" class {group.majority:.1f}%; {sys.argv[2]} s"
)
sys.exit(0 if group.above_chance else "learning check: not clearly above chance")
PYTHON
