"""Registered tasks: T0's features, metrics and postprocessing, and the twin to be ranked."""

import itertools
import math
import subprocess
import sys

import numpy as np
import pytest
import seqio
import tensorflow as tf
from t5.data import glue_utils
from t5.evaluation import metrics

from t0repro.errors import UserError
from t0repro.tasks import prompted_tasks, vocabulary
from t0repro.tasks.checking import Verdict, check_tasks
from t0repro.tasks.demo.datasets import VOCABULARY
from t0repro.tasks.listing import list_tasks
from t0repro.tasks.metrics import postprocess
from t0repro.tasks.modules import load_tasks
from t0repro.tasks.prompt_cache.seqio_plan import choose_tasks
from t0repro.tasks.registration import add_mixture, add_prompted_task
from t0repro.tasks.registry import find_tasks, prompted_mixtures, tasks_of_mixture
from t0repro.tasks.seqio_tasks import task_metrics
from t0repro.tasks.source import PromptedRows, Split
from t0repro.tasks.templates import load_template
from t0repro.tasks.vocabulary import VocabularyFile
from tests.tasks.vocabularies import write_vocabulary

SPLITS = ("train", "validation")


@pytest.fixture
def add(rows_root, monkeypatch):
    """Registers tasks over the three rows for the time of a test, in registries that are empty."""
    for registry in (seqio.TaskRegistry, seqio.MixtureRegistry):
        monkeypatch.setattr(registry, "_REGISTRY", {})
    monkeypatch.setattr("t0repro.tasks.registry._tasks", {})
    monkeypatch.setattr("t0repro.tasks.registry._mixtures", {})
    vocabulary = VocabularyFile(str(VOCABULARY))

    def add_task(template="GPT-3 style", splits=SPLITS, **options):
        options = {"root": rows_root, "vocabulary": vocabulary, **options}
        return add_prompted_task("super_glue", "rte", template, splits, **options)

    return add_task


def examples(name, split="train"):
    dataset = seqio.TaskRegistry.get(name).get_dataset(None, split, shuffle=False)
    return list(dataset.as_numpy_iterator())


def test_a_task_has_t0s_name_features_and_splits(add):
    add()
    task = seqio.TaskRegistry.get("super_glue_rte_GPT_3_style")
    inputs, targets = task.output_features["inputs"], task.output_features["targets"]
    assert (inputs.add_eos, targets.add_eos) == (False, True)
    assert inputs.dtype == targets.dtype == tf.int32
    assert tuple(task.splits) == SPLITS and task.supports_caching and not task.requires_caching
    assert task.num_input_examples("train") == 3


def test_inputs_end_without_eos_and_targets_with_one(add):
    example = examples(add().name)[0]
    assert example["inputs"][-1] != 1 and list(example["targets"]).count(1) == 1
    assert example["targets"][-1] == 1
    assert example["inputs_pretokenized"] == (
        b"It rained all day.\nQuestion: The street is wet. True or False?"
    )
    assert example["targets_pretokenized"] == b"True"


def test_the_twin_has_one_example_per_choice(add):
    twin = examples(add().name + "_score_eval")
    assert [example["idx"].tolist() for example in twin] == [
        [row, choice] for row in range(3) for choice in range(2)
    ]
    assert [example["targets_pretokenized"] for example in twin] == [b"True", b"False"] * 3
    # The last row's label is hidden: none of its choices is the right one.
    expected = [True, False, False, True, False, False]
    assert [bool(example["is_correct"]) for example in twin] == expected
    assert {example["weight"] for example in twin} == {np.float32(1.0)}


def test_the_twin_is_ranked_by_t5s_metric_with_the_number_of_classes(add):
    add()
    (metric,) = seqio.TaskRegistry.get("super_glue_rte_GPT_3_style_score_eval").metric_fns
    assert metric.func is metrics.rank_classification and metric.keywords == {"num_classes": 2}


def test_the_registry_of_prompts_has_the_task_and_its_twin(add):
    task = add()
    assert prompted_tasks() == {task.name: task, f"{task.name}_score_eval": task.twin()}
    assert (task.dataset, task.subset, task.template_name) == ("super_glue", "rte", "GPT-3 style")
    assert task.fixed_choices == ("True", "False") and task.original_task
    assert task.metrics == ("Accuracy",) and "{{premise}}" in task.prompt
    assert task.twin().score_eval and not task.score_eval


def test_a_template_without_choices_has_no_twin(rows_root, add):
    task = add_prompted_task("glue", "mrpc", "generate_sentence", ["train"], root=rows_root)
    assert not task.has_answer_choices
    assert "glue_mrpc_generate_sentence_score_eval" not in seqio.TaskRegistry.names()


def test_registering_twice_does_nothing_and_another_source_is_refused(add, tmp_path):
    assert add() == add()
    with pytest.raises(UserError, match="with other data is registered already"):
        add(splits={"train": Split("train", max_rows=2)})
    with pytest.raises(UserError, match="with other data is registered already"):
        add(root=tmp_path)


def test_of_the_same_task_with_more_and_with_fewer_splits_the_one_with_more_stays(add):
    names = [
        add(splits=("train",)).name,
        add().name + "_score_eval",
        add(splits=("validation",)).name,
    ]
    assert names[0] == names[2]
    for name in names:
        assert set(seqio.TaskRegistry.get(name).splits) == {"train", "validation"}


def test_fixed_choices_are_postprocessed_to_their_class():
    assert postprocess(" True\n", label_classes=("True", "False")) == 0
    assert postprocess("neither", label_classes=("True", "False")) == -1
    assert postprocess(" a free answer ") == "a free answer"


def test_glue_and_super_glue_take_t5s_metrics_and_others_the_templates():
    def of(dataset, subset, name):
        return task_metrics(dataset, subset, load_template(dataset, subset, name))

    assert of("glue", "mrpc", "replace") == glue_utils.get_glue_metric("mrpc")
    assert of("super_glue", "cb", "can we infer") == glue_utils.get_super_glue_metric("cb")
    assert of("super_glue", "wsc.fixed", "p is/are r") == [metrics.accuracy]
    assert of("super_glue", "multirc", "is… a correct answer?") == [metrics.accuracy]
    assert of("cos_e", "v1.11", "rationale") == [metrics.bleu, metrics.rouge]


def test_a_missing_file_and_a_broken_line_reach_the_reader_of_a_task(add, rows_root):
    add(splits=("train", "test"))
    task = seqio.TaskRegistry.get("super_glue_rte_GPT_3_style")
    with pytest.raises(UserError, match=r"test\.jsonl"):
        task.get_dataset(None, "test", shuffle=False)
    path = rows_root / "super_glue" / "rte" / "train.jsonl"
    path.write_text(path.read_text() + "{broken\n")
    with pytest.raises(UserError, match="line 4"):
        task.get_dataset(None, "train", shuffle=False)


def test_a_missing_vocabulary_reaches_the_reader_of_a_task(add, tmp_path):
    add(vocabulary=VocabularyFile(str(tmp_path / "absent.model")))
    with pytest.raises(UserError, match=r"vocabulary is missing(.|\n)*absent\.model"):
        examples("super_glue_rte_GPT_3_style")


def test_a_row_without_a_column_is_named_by_file_and_line(tmp_path):
    folder = tmp_path / "cos_e" / "v1.11"
    folder.mkdir(parents=True)
    row = '{"question": "Which?", "choices": ["a", "b"], "answer": "c"}\n'
    (folder / "train.jsonl").write_text(row)
    template = load_template("cos_e", "v1.11", "question_option_description_id")
    splits = {"train": Split("train")}
    source = PromptedRows("t", "cos_e", "v1.11", template, splits, tmp_path)
    with pytest.raises(UserError, match=r"abstractive_explanation(.|\n)*train\.jsonl, line 1"):
        list(source.examples("train"))


def test_a_limited_split_counts_and_yields_so_many_rows(add):
    task = add(splits={"validation": Split("validation", max_rows=2)})
    source = seqio.TaskRegistry.get(task.name).source
    assert source.num_input_examples("validation") == len(examples(task.name, "validation")) == 2


@pytest.mark.parametrize(
    ("rates", "message"),
    [
        ((0.0, 0.0), "No task of mixture 'rates_bad' has a rate above 0"),
        ((-1.0, 1.0), r"The rate of .* in mixture 'rates_bad' is -1.0"),
        ((math.nan, 1.0), "is nan"),
        ((1.0, math.inf), "is inf"),
    ],
)
def test_rates_that_would_give_no_examples_are_refused(rates, message):
    tasks = ("demo_synthetic_glue_mrpc_replace", "demo_synthetic_glue_mrpc_paraphrase")
    with pytest.raises(UserError, match=message):
        add_mixture("rates_bad", dict(zip(tasks, rates, strict=True)))
    assert "rates_bad" not in prompted_mixtures()


def test_a_task_of_rate_zero_is_in_the_mixture_and_never_sampled():
    import t0repro.tasks.demo  # noqa: F401 - registers

    add_mixture(
        "rates_some",
        {"demo_synthetic_glue_mrpc_replace": 0, "demo_synthetic_ag_news_classify": 1},
    )
    mixture = seqio.get_mixture_or_task("rates_some")
    lengths = {"inputs": 128, "targets": 32}
    both = mixture.get_dataset(lengths, split="train", shuffle=False, num_epochs=1)
    alone = seqio.get_mixture_or_task("demo_synthetic_ag_news_classify").get_dataset(
        lengths, split="train", shuffle=False, num_epochs=1
    )
    assert len(mixture.tasks) == 2
    for one, other in itertools.zip_longest(
        both.as_numpy_iterator(), alone.as_numpy_iterator(), fillvalue={}
    ):
        assert one["inputs"].tolist() == other["inputs"].tolist()


def test_folders_of_caches_stay_known_once_seqio_is_imported(tmp_path):
    program = f"""
import sys
from t0repro.tasks.registry import add_cache_dirs, cache_dirs
add_cache_dirs([{str(tmp_path)!r}])
assert "seqio" not in sys.modules
from t0repro import compat
compat.install()
import seqio
seqio.add_global_cache_dirs(["/another"])
print(cache_dirs())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == str(["/another", str(tmp_path)]), done.stderr[-2000:]


@pytest.mark.parametrize("made_by", ["t0repro", "SeqIO"])
def test_a_mixture_of_tasks_with_different_vocabularies_is_refused(
    add, tmp_path, monkeypatch, made_by
):
    own = str(write_vocabulary(tmp_path / "own.model", pieces=2_000))
    monkeypatch.setenv("T0REPRO_VOCAB", own)
    names = [add("GPT-3 style").name, add("MNLI crowdsource", vocabulary=None).name]
    with pytest.raises(UserError, match="different vocabularies of inputs") as error:
        if made_by == "t0repro":
            add_mixture("mixed", dict.fromkeys(names, 1.0))
        else:
            seqio.MixtureRegistry.add("mixed", [(name, 1.0) for name in names])
            with pytest.raises(UserError, match="different vocabularies"):
                choose_tasks(["mixed"], [])
            tasks_of_mixture("mixed")
    for part in (*names, own, str(VOCABULARY), f"T0REPRO_VOCAB={VOCABULARY}"):
        assert part in str(error.value)
    assert made_by == "SeqIO" or "mixed" not in seqio.MixtureRegistry.names()


def test_a_mixture_of_tasks_with_copies_of_one_vocabulary_is_made(add, tmp_path, monkeypatch):
    """Its files may hold the sentinels or not: SeqIO takes them for equal too."""
    held = str(write_vocabulary(tmp_path / "held.model", inside=100))
    monkeypatch.setenv("T0REPRO_VOCAB", held)
    names = [add("GPT-3 style").name, add("MNLI crowdsource", vocabulary=None).name]
    add_mixture("copies", dict.fromkeys(names, 1.0))
    mixed = seqio.MixtureRegistry.get("copies")
    dataset = mixed.get_dataset({"inputs": 64, "targets": 8}, "train", shuffle=False)
    assert next(iter(dataset.as_numpy_iterator()))["targets"].size
    assert len(find_tasks("copies")) == 2


def test_a_mixture_of_t5s_vocabulary_and_a_smaller_one_is_refused_without_a_network(
    add, monkeypatch
):
    monkeypatch.delenv("T0REPRO_VOCAB", raising=False)
    monkeypatch.setattr(vocabulary, "_fetch", lambda address: pytest.fail(f"asked for {address}"))
    names = [add("GPT-3 style").name, add("MNLI crowdsource", vocabulary=None).name]
    with pytest.raises(UserError, match="different vocabularies"):
        add_mixture("mixed", dict.fromkeys(names, 1.0))


def test_a_mixture_is_made_while_a_vocabulary_is_missing(add, tmp_path):
    names = [
        add(template, vocabulary=VocabularyFile(str(tmp_path / template))).name
        for template in ("GPT-3 style", "MNLI crowdsource")
    ]
    add_mixture("unread", dict.fromkeys(names, 1.0))
    assert list(prompted_mixtures()["unread"].tasks) == names


def test_what_add_mixture_cannot_mix_is_refused_by_name(add):
    """Before SeqIO has it: SeqIO ends with its own errors, some once a run reads examples."""
    name = add().name
    feature = seqio.Feature(seqio.SentencePieceVocabulary(str(VOCABULARY), 100))
    source = seqio.FunctionDataSource(lambda split, shuffle_files, seed=None: None, ["train"])
    features = dict.fromkeys(("inputs", "targets"), feature)
    seqio.TaskRegistry.add("seqios", source, preprocessors=[], output_features=features)
    add_mixture("one", {name: 1.0})
    for tasks, rate, message in (
        ({"absent": 1.0}, None, "There is no task or mixture 'absent'"),
        ([name], None, "no rate for mixture 'bad': the default is not a function"),
        ([name], 1.0, "no rate for mixture 'bad': the default is not a function"),
        ([name, "seqios"], lambda rows: 1.0, "no rate for seqios in mixture 'bad'"),
        ([name, "one"], lambda rows: 1.0, "no rate for one in mixture 'bad'"),
    ):
        with pytest.raises(UserError, match=message):
            add_mixture("bad", tasks, rate)
    for tasks in ({name: 2.0}, {name: 1.0, "seqios": 1.0}):
        with pytest.raises(UserError, match="There is a mixture 'one' of other tasks or rates"):
            add_mixture("one", tasks)
    add_mixture("one", {name: 1.0})
    add_mixture("nested", {"one": 1.0, "seqios": 3.0})
    assert {task.task: task.rate for task in list_tasks("nested")} == {name: 1}
    assert set(seqio.MixtureRegistry.names()) == {"one", "nested"}


def test_rates_that_seqio_cannot_mix_are_refused_where_the_mixture_is_named(add):
    name = add().name
    seqio.MixtureRegistry.add("inner", [(name, 1.0)])
    seqio.MixtureRegistry.add("outer", [("inner", lambda task: 1.0)])
    seqio.MixtureRegistry.add("negative", [(name, -1.0)])
    seqio.MixtureRegistry.add("of_negative", [("negative", 1.0)])
    for mixture, message in (
        ("outer", "rate of mixture 'inner' in mixture 'outer' is a function"),
        ("of_negative", "in mixture 'negative' is -1.0"),
    ):
        with pytest.raises(UserError, match=message):
            tasks_of_mixture(mixture)


def test_a_task_again_with_another_vocabulary_and_one_of_tokens_are_refused(add, tmp_path):
    add()
    with pytest.raises(UserError, match=r"with another vocabulary \(.*\) is registered already"):
        add(vocabulary=VocabularyFile(str(write_vocabulary(tmp_path / "own.model", pieces=2_000))))
    with pytest.raises(UserError, match="cannot have a PassThroughVocabulary"):
        add("MNLI crowdsource", vocabulary=seqio.PassThroughVocabulary(8))


def test_the_check_of_tasks_opens_their_vocabularies(add, tmp_path):
    """A run would refuse these ids; bytes have no file, and their tokens are counted too."""
    path = str(write_vocabulary(tmp_path / "default_ids.model", unk=0, bos=1, eos=2))
    name, of_bytes = add(vocabulary=VocabularyFile(path)).name, "of_bytes"
    add("MNLI crowdsource", vocabulary=VocabularyFile("bytes"), name=of_bytes)
    broken, counted = check_tasks([name, of_bytes], lambda count: None)
    assert broken.verdict is Verdict.BROKEN and "padding's id, 0" in broken.reason
    assert counted.verdict is Verdict.OK and counted.cut == {"inputs": 0, "targets": 0}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("seqio.MixtureRegistry.add('bad', [])", "ValueError: Mixture, bad, does not contain any"),
        ("x = ", "SyntaxError: "),
        ("import a_missing_package", "ModuleNotFoundError: No module named 'a_missing_package'"),
    ],
)
def test_a_module_that_raises_when_it_is_imported_is_named_with_its_line(
    tmp_path, monkeypatch, line, said
):
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / f"raises_{said.partition(':')[0].lower()}.py"
    file.write_text(f"import seqio\n{line}\n")
    with pytest.raises(UserError, match=f"'{file.stem}' cannot be imported: {said}") as error:
        load_tasks([file.stem], into_seqio=False)
    assert f"{file}:2" == error.value.where


def test_a_mistake_in_a_call_of_a_users_module_has_the_calls_line(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / "calls_wrongly.py"
    file.write_text(
        "from t0repro.tasks.registration import add_mixture\n\nadd_mixture('m', {'nothing': 1})\n"
    )
    with pytest.raises(UserError, match="There is no task or mixture 'nothing'") as error:
        load_tasks([file.stem], into_seqio=False)
    assert error.value.where == f"{file}:3"
