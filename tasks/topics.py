"""Topics of questions and of news: mixture `topics_train`, and two for ranking.

`questions_score_eval` (trec) and `news_score_eval` (ag_news) rank the answers of two prompts each
that are not trained on, on evenly spaced rows. Rows come from T0REPRO_DATA_DIR; neither set has a
validation split, so rows of their test splits are evaluated.
"""

from t0repro.tasks.jobs import PromptedDataset, evaluation_rate, register_job
from t0repro.tasks.registration import add_mixture
from t0repro.tasks.source import Split
from t0repro.tasks.task import SCORE_EVAL_SUFFIX
from t0repro.tasks.templates import task_name

ROWS = 150
"""Rows of each set that are ranked, so that an evaluation takes seconds on a CPU."""

TREC = PromptedDataset(
    "trec",
    None,
    train=("pick_the_best_descriptor", "trec1", "what_category_best_describe"),
    evaluate=("trec2", "which_category_best_describes"),
    validation=Split("test", ROWS),
)
NEWS = PromptedDataset(
    "ag_news",
    None,
    train=("classify", "classify_with_choices", "recommend", "which_section_choices"),
    evaluate=("classify_question_first", "which_section"),
    validation=Split("test", ROWS),
)

register_job("topics", (TREC, NEWS))
for mixture, entry in (("questions", TREC), ("news", NEWS)):
    names = [task_name(entry.dataset, entry.subset, template) for template in entry.evaluate]
    tasks = [f"topics_{name}{SCORE_EVAL_SUFFIX}" for name in names]
    add_mixture(f"{mixture}{SCORE_EVAL_SUFFIX}", tasks, evaluation_rate)
