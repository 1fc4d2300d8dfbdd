"""The demo's job on real rows: mixtures `small_train` and `small_eval_score_eval`.

Rows come from T0REPRO_DATA_DIR, and the vocabulary is T5's. No evaluation prompt is trained on;
RTE, CB, COPA and ANLI's first round are held-out datasets. Evaluations use evenly spaced rows of
the larger sets, so that Mesh TensorFlow scores them all in minutes on a CPU.
"""

from t0repro.tasks.source import Split
from t0repro.tasks.t0_mixtures import PromptedDataset, register_train_and_eval

ROWS = 100
"""Rows of a larger evaluation set that are scored."""

DATASETS = (
    PromptedDataset(
        "rotten_tomatoes",
        None,
        train=(
            "Movie Expressed Sentiment 2",
            "Reviewer Enjoyment Yes No",
            "Reviewer Expressed Sentiment",
            "Reviewer Opinion bad good choices",
            "Sentiment with choices ",
        ),
        evaluate=("Movie Expressed Sentiment", "Reviewer Enjoyment"),
        validation=Split("validation", ROWS),
    ),
    PromptedDataset(
        "ag_news",
        None,
        train=("classify", "classify_with_choices", "recommend", "which_section_choices"),
        evaluate=("classify_question_first", "which_section"),
        # ag_news and trec have no validation split.
        validation=Split("test", ROWS),
    ),
    PromptedDataset(
        "trec",
        None,
        train=("pick_the_best_descriptor", "trec1", "what_category_best_describe"),
        evaluate=("trec2",),
        validation=Split("test", ROWS),
    ),
    PromptedDataset(
        "glue",
        "mrpc",
        train=("equivalent", "paraphrase", "replace"),
        evaluate=("same thing",),
        validation=Split("validation", ROWS),
    ),
    PromptedDataset(
        "super_glue",
        "rte",
        evaluate=("does this imply",),
        validation=Split("validation", ROWS),
    ),
    PromptedDataset("super_glue", "cb", evaluate=("can we infer",)),
    PromptedDataset("super_glue", "copa", evaluate=("more likely",)),
    PromptedDataset(
        "anli",
        None,
        evaluate=("guaranteed true",),
        validation=Split("dev_r1", ROWS),
        suffix="_r1",
    ),
)

register_train_and_eval("small", DATASETS)
