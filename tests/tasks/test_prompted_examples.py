"""Examples read without SeqIO's pipeline equal those of t5's evaluation, which goes through it."""

import numpy as np
import pytest
import seqio

from t0repro.errors import UserError
from t0repro.tasks.prompted_examples import prompted_examples
from t0repro.tasks.registry import task_descriptions

from .real_tasks import ROWS, register

SHORT = {"inputs": 48, "targets": 5}  # most inputs and many targets are cut
LONG = {"inputs": 1024, "targets": 256}


@pytest.fixture(scope="module")
def names(shared_data, shared_vocab):
    """Tasks and twins over 16 datasets."""
    tasks = register("direct_", shared_data, shared_vocab)
    twins = [f"{name}_score_eval" for name in tasks]
    return tasks + [name for name in twins if name in seqio.TaskRegistry.names()]


@pytest.fixture(scope="module", autouse=True)
def demo():
    """The demo's tasks."""
    import t0repro.tasks.demo  # noqa: F401 - registers


def by_t5(name, lengths):
    from t0repro import compat

    compat.install()
    from t5.models import mesh_transformer

    (dataset,) = mesh_transformer.mesh_eval_dataset_fn(name, lengths, "validation")
    return list(dataset.dataset_fn().as_numpy_iterator())


def comparable(example, lengths=None):
    """Feature -> (type, values); padded to lengths where these are given."""
    if lengths is not None:
        padded = {k: np.pad(example[k], (0, lengths[k] - len(example[k]))) for k in lengths}
        example = {**example, **padded}
    arrays = {name: np.asarray(value) for name, value in example.items()}
    kind = {
        name: "S" if array.dtype.kind in "SO" else array.dtype for name, array in arrays.items()
    }
    return {name: (str(kind[name]), array.tolist()) for name, array in arrays.items()}


def check_equal(name, lengths):
    ours = list(prompted_examples(task_descriptions()[name], "validation", lengths))
    theirs = by_t5(name, lengths)
    assert len(ours) == len(theirs), name
    for one, other in zip(ours, theirs, strict=True):
        assert comparable(one, lengths) == comparable(other), name
    return ours


def test_every_feature_of_every_example_is_t5s_over_16_datasets(names):
    compared = cut = 0
    for number, name in enumerate(names):
        lengths = SHORT if number % 2 else LONG
        examples = check_equal(name, lengths)
        compared += len(examples)
        cut += sum(len(each["inputs"]) == lengths["inputs"] for each in examples)
    assert (
        compared > 16 * ROWS and cut > 100 and any(name.endswith("_score_eval") for name in names)
    )


@pytest.mark.parametrize("lengths", [SHORT, LONG])
@pytest.mark.parametrize("suffix", ["", "_score_eval"])
def test_examples_of_the_demo_are_t5s(suffix, lengths):
    check_equal(f"demo_synthetic_openbookqa_main_pick_answer_with_options{suffix}", lengths)


def test_only_the_chosen_rows_come_with_all_of_their_choices_and_their_numbers():
    task = task_descriptions()["demo_synthetic_openbookqa_main_pick_answer_with_options_score_eval"]
    whole = prompted_examples(task, "validation", LONG)
    wanted = [comparable(each) for each in whole if each["idx"][0] in (1, 4)]
    some = prompted_examples(
        task, "validation", LONG, lambda rows: (row for row in rows if row[0] in (1, 4))
    )
    assert [comparable(each) for each in some] == wanted and len(wanted) == 8


def test_missing_rows_are_named(tmp_path):
    from t0repro.tasks.registration import add_prompted_task

    add_prompted_task("super_glue", "rte", "GPT-3 style", ["train"], root=tmp_path, name="no_rows")
    with pytest.raises(UserError, match="missing"):
        list(prompted_examples(task_descriptions()["no_rows"], "train", LONG))
