"""What a small model can learn: mixtures `learning_train` and `learning_eval_score_eval`.

scripts/small_texts.sh trains on prompts of four datasets. It evaluates other prompts of these, a
held-out dataset of a task type that it trains on (imdb: film reviews, like rotten_tomatoes), and
datasets of T0's held-out task types. Rows come from T0REPRO_DATA_DIR. Larger sets are evaluated on
evenly spaced rows, so that many checkpoints can be evaluated.
"""

from t0repro.tasks.source import Split
from t0repro.tasks.t0_mixtures import PromptedDataset, register_train_and_eval

TRAINED = (
    PromptedDataset(
        "rotten_tomatoes",
        None,
        train=(
            "Movie Expressed Sentiment 2",
            "Reviewer Enjoyment Yes No",
            "Reviewer Expressed Sentiment",
            "Reviewer Opinion bad good choices",
            "Sentiment with choices ",
            "Text Expressed Sentiment",
            "Writer Expressed Sentiment",
        ),
        # No training prompt contains the last one's answers.
        evaluate=("Movie Expressed Sentiment", "Reviewer Sentiment Feeling", "Reviewer Enjoyment"),
        validation=Split("validation", 400),
    ),
    PromptedDataset(
        "ag_news",
        None,
        train=(
            "classify",
            "classify_with_choices",
            "classify_with_choices_question_first",
            "recommend",
            "which_section_choices",
        ),
        evaluate=("classify_question_first", "which_section"),
        # ag_news and trec have no validation split.
        validation=Split("test", 250),
    ),
    PromptedDataset(
        "trec",
        None,
        train=("pick_the_best_descriptor", "trec1", "what_category_best_describe"),
        evaluate=("trec2", "which_category_best_describes"),
        validation=Split("test", 250),
    ),
    PromptedDataset(
        "glue",
        "mrpc",
        train=("equivalent", "paraphrase", "replace"),
        evaluate=("same thing", "want to know"),
        validation=Split("validation", 200),
    ),
)
HELD_OUT_DATASETS = (
    PromptedDataset(
        "imdb",
        None,
        # Its question comes first, so truncating a long review keeps it.
        evaluate=("Movie Expressed Sentiment 2",),
        # The larger of imdb's splits; nothing trains on it.
        validation=Split("train", 400),
    ),
)
HELD_OUT_KINDS = (
    PromptedDataset(
        "super_glue", "rte", evaluate=("does this imply",), validation=Split("validation", 150)
    ),
    PromptedDataset("super_glue", "cb", evaluate=("can we infer",)),
    PromptedDataset(
        "anli",
        None,
        evaluate=("guaranteed true",),
        validation=Split("dev_r1", 150),
        suffix="_r1",
    ),
    PromptedDataset("super_glue", "copa", evaluate=("more likely",)),
    PromptedDataset(
        "super_glue", "wic", evaluate=("same_sense",), validation=Split("validation", 150)
    ),
    PromptedDataset(
        "winogrande",
        "winogrande_xl",
        evaluate=("underscore refer to",),
        validation=Split("validation", 150),
    ),
)

register_train_and_eval("learning", (*TRAINED, *HELD_OUT_DATASETS, *HELD_OUT_KINDS))
