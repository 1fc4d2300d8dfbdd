"""The datasets and prompts of the embedded demo; importing this registers nothing."""

from __future__ import annotations

from pathlib import Path

from t0repro.tasks.t0_mixtures import PromptedDataset

FOLDER = Path(__file__).parent / "rows"
VOCABULARY = Path(__file__).parent / "sentencepiece.model"

DEMO = (
    PromptedDataset(
        "synthetic_ag_news",
        None,
        train=("classify", "classify_question_first", "classify_with_choices", "which_section"),
        evaluate=("classify_with_choices_question_first", "which_section_choices"),
    ),
    PromptedDataset(
        "synthetic_rotten_tomatoes",
        None,
        train=(
            "Movie Expressed Sentiment",
            "Reviewer Expressed Sentiment",
            "Text Expressed Sentiment",
            "Reviewer Enjoyment Yes No",
        ),
        evaluate=("Writer Expressed Sentiment", "Sentiment with choices "),
    ),
    PromptedDataset(
        "synthetic_glue",
        "mrpc",
        train=("same thing", "paraphrase", "replace"),
        evaluate=("want to know",),
    ),
    PromptedDataset(
        "synthetic_openbookqa",
        "main",
        train=("choices", "only_options", "which_correct"),
        evaluate=("pick_answer_with_options",),
    ),
    # Entirely held out: no row or prompt of it is trained on.
    PromptedDataset(
        "synthetic_imdb",
        None,
        evaluate=(
            "Movie Expressed Sentiment 2",
            "Reviewer Sentiment Feeling",
            "Reviewer Enjoyment Yes No",
        ),
    ),
)
