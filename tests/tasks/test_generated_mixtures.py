"""Mixtures of tasks with random vocabularies and features: one verdict by all commands, SeqIO's."""

import random
from types import SimpleNamespace

import pytest
import seqio
import tensorflow as tf

from t0repro.config import data as records
from t0repro.config.data import SeqioDataConfig
from t0repro.data.checks import check_data
from t0repro.errors import UserError
from t0repro.evaluation.evaluation_folder import EvaluationSettings
from t0repro.evaluation.selection import MODES, select_tasks
from t0repro.runs import preflight
from t0repro.tasks import checking
from t0repro.tasks.demo.datasets import VOCABULARY
from t0repro.tasks.listing import list_tasks
from t0repro.tasks.prompt_cache.plan import Request, make_plan
from t0repro.tasks.prompt_cache.seqio_plan import choose_tasks
from t0repro.tasks.registration import add_mixture, add_prompted_task
from t0repro.tasks.registry import find_tasks
from t0repro.tasks.seqio_tasks import seqio_vocabulary
from t0repro.tasks.vocabulary import VocabularyFile
from tests.tasks.vocabularies import write_vocabulary

TEMPLATES = ("GPT-3 style", "MNLI crowdsource", "guaranteed true", "does it follow that")
LENGTHS = {"inputs": 16, "targets": 4, "more": 4}


@pytest.fixture
def vocabularies(tmp_path):
    """T5's forms in small: equal ones at several places, another size, other ids, bytes."""
    return [
        VocabularyFile(str(VOCABULARY), 100),
        VocabularyFile(str(write_vocabulary(tmp_path / "copy.model"))),
        VocabularyFile(str(write_vocabulary(tmp_path / "100extra.model", inside=100)), 0),
        VocabularyFile(str(write_vocabulary(tmp_path / "larger.model", pieces=2_000))),
        VocabularyFile(str(write_vocabulary(tmp_path / "madlads.model", unk=1, bos=-1, eos=2))),
        VocabularyFile("bytes"),
        VocabularyFile("bytes", 7),
    ]


def add_to_seqio(name, chosen, drawn):
    """A task of SeqIO's own: inputs and targets, one of them, another, or int64."""
    one, other = (seqio_vocabulary(next(chosen)) for _ in range(2))
    features = drawn.choice(
        [{"inputs": seqio.Feature(one), "targets": seqio.Feature(one)}] * 4
        + [
            {"inputs": seqio.Feature(one), "targets": seqio.Feature(other)},
            {"targets": seqio.Feature(one)},
            {"question": seqio.Feature(one), "answer": seqio.Feature(one)},
            {each: seqio.Feature(one) for each in ("inputs", "targets", "more")},
            {each: seqio.Feature(one, dtype=tf.int64) for each in ("inputs", "targets")},
        ]
    )

    def read(split, shuffle_files, seed=None):
        rows = {each: tf.ones([3, 2], feature.dtype) for each, feature in features.items()}
        return tf.data.Dataset.from_tensor_slices(rows)

    source = seqio.FunctionDataSource(read, splits=["train"])
    seqio.TaskRegistry.add(name, source, preprocessors=[], output_features=features)
    return name


def refused(check, *arguments, **named):
    """What is said against the mixture; None if it is taken, or refused for another reason."""
    try:
        check(*arguments, **named)
    except UserError as error:
        return error.what if error.what.startswith("The tasks of mixture ") else None
    return None


def verdicts(mixture, folder):
    """Command -> what it says against a mixture."""
    record = records.SentencePieceVocabulary(
        sentencepiece_model_file=str(VOCABULARY), extra_ids=100
    )
    data = SeqioDataConfig(mixture, LENGTHS, "train", 1, False, 1)
    inputs = SimpleNamespace(
        mixture_or_task_name=mixture, split="train", use_cached=False, mode="train",
        sequence_length=LENGTHS,
    )  # fmt: skip
    model = SimpleNamespace(decoder_only=False, vocab_size=1408)

    def t5x(mode):
        list(preflight._data(data, model, (record, record), mode))

    def show():
        checking.check_tasks(checking.tasks_without_prompts(mixture), lambda count: None)

    return {
        "tasks ls": refused(list_tasks, mixture),
        "tasks check": refused(show),
        "cache": refused(make_plan, Request((), (), (mixture,), str(folder))),
        "scripts/cache.sh": refused(choose_tasks, [mixture], []),
        "t5_mesh_transformer": refused(check_data, inputs),
        "rank-eval": refused(select_tasks, mixture, EvaluationSettings("train", modes=MODES)),
        **{mode: refused(t5x, mode) for mode in ("train", "eval", "infer")},
    }


def seqio_takes(tasks):
    """Whether SeqIO mixes the tasks, which it decides when a run reads its first examples."""
    try:
        seqio.Mixture("peer", [(task, 1.0) for task in tasks])._check_compatible_features()
    except ValueError:
        return False
    return True


def test_every_command_takes_the_mixtures_that_seqio_reads_and_no_other(
    vocabularies, rows_root, tmp_path, monkeypatch
):
    said = []
    for seed in range(40):
        for registry in (seqio.TaskRegistry, seqio.MixtureRegistry):
            monkeypatch.setattr(registry, "_REGISTRY", {})
        for records_of in ("_tasks", "_mixtures"):
            monkeypatch.setattr(f"t0repro.tasks.registry.{records_of}", {})
        drawn = random.Random(seed)
        pool = vocabularies[:3] if seed % 2 else drawn.sample(vocabularies, 2)
        chosen = iter(lambda pool=pool, drawn=drawn: drawn.choice(pool), None)
        names = []
        for number, template in enumerate(TEMPLATES):
            if drawn.random() < 0.5:
                names.append(add_to_seqio(f"seqios_{number}", chosen, drawn))
            else:
                task = add_prompted_task(
                    "super_glue", "rte", template, ("train",), root=rows_root,
                    vocabulary=next(chosen), name=f"own_{number}",
                )  # fmt: skip
                names.append(task.name)
        for mixture in ("first", "second"):
            parts = drawn.sample(names, drawn.choice([1, 2, 2, 3]))
            if "first" in seqio.MixtureRegistry.names() and drawn.random() < 0.7:
                parts.append("first")
            said.append(verdict_on(mixture, parts, drawn, tmp_path / "cache"))
    for kind in ("types", "features", "vocabularies"):
        assert sum(f"different {kind}" in (what or "") for what in said) > 2
    assert said.count(None) > 20


def verdict_on(mixture, parts, drawn, folder):
    """What is said against a mixture of these tasks and mixtures, when it is made or named."""
    tasks = {task.name: task for part in parts for task in find_tasks(part)}
    taken = seqio_takes(tasks.values())
    rates = {part: drawn.choice([0.5, 1.0, 3]) for part in parts}
    ours = refused(add_mixture, mixture, rates)
    assert (ours is None) == taken, (ours, parts)
    if ours is not None:
        assert mixture not in seqio.MixtureRegistry.names()
        if "features:" in ours:
            return ours  # SeqIO refuses to make it
        seqio.MixtureRegistry.add(mixture, list(rates.items()))
    for command, what in verdicts(mixture, folder).items():
        assert what is None if taken else what is not None, (command, what, parts)
        assert taken or any(name in what for name in tasks), what
    if not taken:
        seqio.MixtureRegistry.remove(mixture)
    return ours
