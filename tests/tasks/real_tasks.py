"""Tasks on a few real rows of many datasets, a template of each kind that a dataset has."""

from pathlib import Path

import seqio

from t0repro.tasks.readers import local_reader
from t0repro.tasks.registration import add_prompted_task
from t0repro.tasks.source import Split
from t0repro.tasks.templates import load_template, template_names

ROWS = 24
DATASETS = {  # -> a split held, for fixed choices, choices of each row, and none
    ("super_glue", "cb"): "validation",
    ("super_glue", "copa"): "validation",
    ("super_glue", "wsc.fixed"): "validation",
    ("winogrande", "winogrande_xl"): "validation",
    ("hellaswag", None): "validation",
    ("ag_news", None): "test",
    ("trec", None): "test",
    ("dream", None): "validation",
    ("ropes", None): "validation",
    ("quail", None): "validation",
    ("common_gen", None): "validation",
    ("glue", "mrpc"): "validation",
    ("social_i_qa", None): "validation",
    ("sciq", None): "validation",
    ("xsum", None): "validation",
    ("trivia_qa", "unfiltered"): "validation",
}


def kinds(dataset: str, subset: str | None) -> list[str]:
    """A template of each kind that the dataset has: no choices, fixed ones, each row's own."""
    found: dict[object, str] = {}
    for name in template_names(dataset, subset):
        template = load_template(dataset, subset, name)
        fixed = template.get_fixed_answer_choices_list()
        found.setdefault("own" if template.answer_choices and not fixed else bool(fixed), name)
    return list(found.values())


def register(prefix: str, data: Path, vocabulary: Path) -> list[str]:
    """Registers the tasks, each with a split `validation` of a few rows; names, without twins."""
    seqios = seqio.SentencePieceVocabulary(str(vocabulary), 100)
    names = []
    for (dataset, subset), split in DATASETS.items():
        assert local_reader(data, dataset, subset, split) is not None
        for index, template in enumerate(kinds(dataset, subset)):
            splits = {"validation": Split(split, max_rows=ROWS)}
            task = add_prompted_task(
                dataset, subset, template, splits,
                root=data, vocabulary=seqios, name=f"{prefix}{dataset}_{subset}_{index}",
            )  # fmt: skip
            names.append(task.name)
    return names
