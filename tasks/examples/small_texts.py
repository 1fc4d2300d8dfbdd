"""Pretraining on real texts: `small_texts_span_corruption` and `small_texts_prefix_lm`.

The texts are rows of datasets under T0REPRO_DATA_DIR, without questions or labels; those of the
validation split are imdb's test rows. None of the texts is in the evaluation of the job `learning`.
"""

from t0repro.tasks.texts import add_text_task
from t0repro.tasks.user_files import find_data_file

TRAIN = (
    "ag_news/default/train",
    "rotten_tomatoes/default/train",
    "ropes/default/train",
    "super_glue/boolq/train",
    "hellaswag/default/validation",
)
VALIDATION = ("imdb/default/test",)
FIELDS = ("text", "background", "passage", "ctx")

_files = {
    split: [str(find_data_file(f"{name}.jsonl")) for name in names]
    for split, names in (("train", TRAIN), ("validation", VALIDATION))
}
add_text_task("small_texts_span_corruption", _files, field=FIELDS)
add_text_task("small_texts_prefix_lm", _files, field=FIELDS, objective="prefix_lm")
