"""Pretraining on real texts: `small_texts_span_corruption` and `small_texts_prefix_lm`.

The texts are training rows of datasets under T0REPRO_DATA_DIR, without their labels; those of the
validation split are test rows of a dataset that the job `small` neither trains on nor evaluates.
"""

from t0repro.tasks.rows import data_folder
from t0repro.tasks.texts import add_text_task

TRAIN = ("ag_news/default", "imdb/default", "rotten_tomatoes/default", "ropes/default")
VALIDATION = ("imdb/default",)
FIELDS = ("text", "background")

_root = data_folder()
_files = {
    "train": [f"{_root}/{dataset}/train.jsonl" for dataset in TRAIN],
    "validation": [f"{_root}/{dataset}/test.jsonl" for dataset in VALIDATION],
}
add_text_task("small_texts_span_corruption", _files, field=FIELDS)
add_text_task("small_texts_prefix_lm", _files, field=FIELDS, objective="prefix_lm")
