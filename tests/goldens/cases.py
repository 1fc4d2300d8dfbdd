"""What `scripts/dev/make_reference_goldens.py` records of the reference stack, and from what.

Neither TensorFlow nor SeqIO nor t5 is imported here: the core's tests read the cases, too.

    reference.json   rates of mixtures, renderings of templates, metrics of texts; the versions of
                     what computed them, with a digest of each package's Python files
    reference.npz    packed batches; the parameters of a small model (rounded to float16), its
                     log-likelihoods of answer choices, and what it generates
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from t0repro.config.decoding import DecodingConfig

JSON, ARRAYS = (Path(__file__).parent / f"reference.{kind}" for kind in ("json", "npz"))
MIXTURE, EVALUATED = "demo_train", "demo_eval_score_eval"

# ---- Batches of the demo's training mixture ------------------------------------------------------

MIN_SHARDS, ROWS, BATCHES, SEED = 2, 8, 3, 17
LENGTHS = {"inputs": 64, "targets": 4}  # so short that some targets are cut


@dataclasses.dataclass(frozen=True)
class BatchCase:
    """Batches of one library: SeqIO's for T5X, or Mesh TensorFlow's."""

    mesh: bool
    pack: bool
    shuffle: bool


BATCH_CASES = {
    "seqio packed": BatchCase(mesh=False, pack=True, shuffle=True),
    "seqio unpacked, in order": BatchCase(mesh=False, pack=False, shuffle=False),
    "mesh packed": BatchCase(mesh=True, pack=True, shuffle=True),
    "mesh unpacked": BatchCase(mesh=True, pack=False, shuffle=True),
}

# ---- A model that scores answer choices and generates --------------------------------------------

SIZES = {"num_layers": 1, "num_heads": 4, "d_kv": 8, "d_model": 32, "d_ff": 48}
BINDINGS = (
    *(f"utils.get_variable_dtype.{kind}_dtype = 'float32'" for kind in ("activation", "master")),
    *(f"{name} = {value}" for name, value in SIZES.items()),
)
MODEL_GIN = "models/t5.1.1.small.gin"
PAIRS = 12  # of each task
SCORE_LENGTHS = {"inputs": 128, "targets": 16}
INPUTS, DECODED_TOGETHER = 40, 20
GREEDY = DecodingConfig(max_length=16, prefilter=2)
DECODINGS = {
    "greedy": GREEDY,
    "4 beams": dataclasses.replace(GREEDY, beam_size=4),
    "2 beams without length penalty": dataclasses.replace(GREEDY, beam_size=2, alpha=0.0),
}


def parameters(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The model's parameters among the recorded arrays, float32, by their paths in T5X."""
    from t0repro.parameters import naming

    return {
        naming.mtf_to_path(name.removeprefix("variables/")): values.astype(np.float32)
        for name, values in arrays.items()
        if name.startswith("variables/")
    }


# ---- Renderings of T0's templates ----------------------------------------------------------------

_RANDOM = re.compile(r"\|\s*(choice|random)\b")


def made_up_row(features: Mapping[str, Any]) -> dict[str, Any]:
    """A row of a dataset whose values say of which column they are."""
    # promptsource renames hyphens.
    return {name.replace("-", "_"): _value(feature, name) for name, feature in features.items()}


def _value(feature: Any, name: str) -> Any:
    if isinstance(feature, list):
        return [_value(feature[0], f"{name} {number}") for number in range(2)]
    kind = feature.get("_type")
    if kind == "Sequence":
        inner = feature["feature"]
        if isinstance(inner, dict) and "_type" not in inner:  # a record of lists
            return {key: _value([each], f"{name} {key}") for key, each in inner.items()}
        return _value([inner], name)
    if kind == "ClassLabel":
        return len(feature["names"]) - 1
    if kind == "Value":
        values = {"string": f"The {name}, in words.", "bool": True}
        return values.get(feature["dtype"], 1)
    return {key: _value(each, f"{name} {key}") for key, each in feature.items()}


def templates() -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Yields name, promptsource's template and a row of each of T0's templates.

    Those that draw at random are left out, because promptsource seeds nothing.
    """
    from t0repro.tasks.catalog import features_of, t0_datasets
    from t0repro.tasks.templates import load_template, template_datasets, template_names

    prompted = set(template_datasets())
    for dataset, subset in dict.fromkeys((each.dataset, each.subset) for each in t0_datasets()):
        features = features_of(dataset, subset)
        if (dataset, subset) not in prompted or features is None:
            continue
        row = made_up_row(features)
        for name in template_names(dataset, subset):
            template = load_template(dataset, subset, name)
            if not _RANDOM.search(template.jinja):
                yield f"{dataset}/{subset}/{name}", template, row


def digest(rendered: Any) -> str:
    """A digest of a rendering: its texts and answer choices."""
    return hashlib.sha256(json.dumps(rendered).encode()).hexdigest()[:12]


# ---- Metrics of texts ----------------------------------------------------------------------------

CLASSES = ([0, 1, 1, 0, 2, 1, 0, 0], [0, 1, 0, -1, 2, 2, 0, 1])
BINARY = ([0, 1, 1, 0, 0, 1, 0, 0], [0, 1, 0, -1, 0, 1, 0, 1])
TEXTS = (
    ["The cat, a dog", "Paris", "7 o'clock", "`it`", "no"],
    ["cat dog", "paris!", "at 7 o'clock", "it", ""],
)
NUMBERS = ([0.5, 1.0, 2.5, 4.0], [0.4, 1.5, 2.0, 4.5])
METRICS = {
    "accuracy": CLASSES,
    "f1_score_with_invalid": BINARY,
    "matthews_corrcoef": CLASSES,
    "mean_3class_f1": CLASSES,
    "pearson_corrcoef": NUMBERS,
    "sequence_accuracy": TEXTS,
    "spearman_corrcoef": NUMBERS,
    "squad": TEXTS,
    "trivia_qa": TEXTS,
}
"""Metric -> targets and predictions."""
