"""Topics of questions (trec) and of news (ag_news), for examples that train beside evaluations.

Mixtures: `questions_train`, `news_train`, and both together as `topics_train`; for ranking,
`questions_eval_score_eval` and `news_eval_score_eval`, two prompts each, none of them trained on.
Rows come from T0REPRO_DATA_DIR; evenly spaced rows of the test splits are ranked.
"""

from t0repro.tasks.registration import add_mixture
from t0repro.tasks.source import Split
from t0repro.tasks.t0_mixtures import PromptedDataset, register_train_and_eval
from t0repro.tasks.templates import task_name

ROWS = 150
"""Rows of each set that are ranked, so that an evaluation takes seconds on a CPU."""

QUESTIONS = PromptedDataset(
    "trec",
    None,
    train=("pick_the_best_descriptor", "trec1", "what_category_best_describe"),
    evaluate=("trec2", "which_category_best_describes"),
    # Neither set has a validation split.
    validation=Split("test", ROWS),
)
NEWS = PromptedDataset(
    "ag_news",
    None,
    train=("classify", "classify_with_choices", "recommend", "which_section_choices"),
    evaluate=("classify_question_first", "which_section"),
    validation=Split("test", ROWS),
)

register_train_and_eval("questions", (QUESTIONS,))
register_train_and_eval("news", (NEWS,))
add_mixture(
    "topics_train",
    {
        f"{job}_{task_name(entry.dataset, entry.subset, template)}": 1.0
        for job, entry in (("questions", QUESTIONS), ("news", NEWS))
        for template in entry.train
    },
)
