#!/usr/bin/env bash
# The two examples of docs/auxiliary_jobs.md on real data. While a training run continues, jobs evaluate each of
# its checkpoints on two mixtures. Jobs of a second run fine-tune each of its checkpoints in a separate folder.
#
#   T0REPRO_DATA_DIR=DIR T0REPRO_VOCAB=FILE bash scripts/auxiliary_jobs.sh
#
# Writes into runs/topics and runs/news in the current folder. A second start continues where the first stopped.
# Further arguments go to both training runs, such as --gin.TRAIN_STEPS=200.
set -euo pipefail
if [[ " $* " == *" --help "* ]]; then
  sed -n '/^#!/d; s/^# \{0,1\}//p; /^set /q' "${BASH_SOURCE[0]}"
  exit
fi
: "${T0REPRO_DATA_DIR:?the folder of datasets, <dataset>/<subset>/<split>.jsonl}"
: "${T0REPRO_VOCAB:?a copy of the T5 sentencepiece.model}"
files=t5x/examples/t5/t5_1_1/examples/topics

declare -a EVALUATE=(
--gin.MODEL_DIR="'runs/topics'"
--final_auxiliary_job_steps=0
--replace_gin_file=True
--auxiliary_job_mixtures=questions_eval_score_eval,news_eval_score_eval
--auxiliary_job_gin_file="${files}_eval.gin"
--auxiliary_job_build_target_path=//t5x:eval
--gin_file="${files}_train.gin"
--poll_seconds=2
)
started=$SECONDS
t0repro train "${EVALUATE[@]}" "$@"
t0repro aux status runs/topics
echo "continuous evaluation: $((SECONDS - started)) s"

declare -a FINETUNE=(
--final_auxiliary_job_steps=60
--replace_gin_file=True
--auxiliary_job_mixtures=questions_train
--auxiliary_job_gin_file="${files}_finetune.gin"
--auxiliary_job_build_target_path=train
--gin_file="${files}_train.gin"
--gin.MODEL_DIR="'runs/news'"
--gin.MIXTURE_OR_TASK_NAME="'news_train'"
--gin.TRAIN_STEPS=200
--poll_seconds=2
)
started=$SECONDS
t0repro train "${FINETUNE[@]}" "$@"
t0repro aux status runs/news
echo "continuous fine-tuning: $((SECONDS - started)) s"
