"""Classifying trec's questions: mixtures `learning_train` and `learning_eval_score_eval`.

scripts/learning_check.sh trains a small T5 on the first from scratch, and evaluates it with two
prompts that it has never seen. Rows come from T0REPRO_DATA_DIR; trec has no validation split, so
all 500 rows of its test split are evaluated.
"""

from t0repro.tasks.jobs import PromptedDataset, register_job
from t0repro.tasks.source import Split

DATASETS = (
    PromptedDataset(
        "trec",
        None,
        train=("pick_the_best_descriptor", "trec1", "what_category_best_describe"),
        evaluate=("trec2", "which_category_best_describes"),
        validation=Split("test"),
    ),
)

register_job("learning", DATASETS)
