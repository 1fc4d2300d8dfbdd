"""Batches made without SeqIO from rows and from shards: SeqIO's own, order included."""

import contextlib
import itertools

import numpy as np
import pytest
import seqio
from seqio import dataset_providers

from t0repro import compat
from t0repro.config.data import EvalDataConfig, SeqioDataConfig
from t0repro.data import batches, cached, described_batches
from t0repro.data.cached import CachedBatches
from t0repro.data.described_batches import RenderedBatches
from t0repro.data.train_data import EvalBatches, SeqioTrainBatches
from t0repro.errors import UserError
from t0repro.progress import heard_by
from t0repro.tasks.registration import add_prompted_task
from t0repro.tasks.registry import DescribedTask, task_descriptions
from t0repro.tasks.user_files import DATA_VARIABLE

from ..helpers import tiny_models as tiny
from ..tasks.prompt_caches import make
from .test_cached import assert_equal

pytestmark = pytest.mark.mtf

RANKED = "demo_synthetic_ag_news_classify_score_eval"
EVALUATED = "demo_synthetic_glue_mrpc_want_to_know_score_eval"
# The last gives an example for each answer choice.
RATES = {
    "demo_synthetic_ag_news_which_section": 1.0,
    "demo_synthetic_glue_mrpc_paraphrase": 3.0,
    RANKED: 0.5,
}
# Shorter than the longest examples, so that some are cut.
LENGTHS = {"inputs": 60, "targets": 6}
MIXTURE, SEED = "made_by_numpy", 11


@pytest.fixture(scope="module", autouse=True)
def mixture():
    import t0repro.tasks.demo  # noqa: F401 (registers the tasks)

    seqio.MixtureRegistry.add(MIXTURE, list(RATES.items()))
    yield
    seqio.MixtureRegistry.remove(MIXTURE)


def data(name=MIXTURE, **changes) -> SeqioDataConfig:
    values = {"sequence_length": LENGTHS, "split": "train", "batch_size": 12, "shuffle": True,
              "seed": SEED, "pack": True}  # fmt: skip
    return SeqioDataConfig(name, **{**values, **changes})


def seqios(config: SeqioDataConfig, count: int) -> list[dict[str, np.ndarray]]:
    source = SeqioTrainBatches(config, save_dataset=False)
    with heard_by([].append):
        return list(itertools.islice(source.open(0, None), count))


def rendered_batches(config: SeqioDataConfig, rates=None) -> RenderedBatches:
    rates = rates or (RATES if config.mixture_or_task_name == MIXTURE else None)
    return RenderedBatches(
        rates or {config.mixture_or_task_name: 1.0},
        config.sequence_length,
        config.batch_size,
        split=config.split,
        pack=config.pack,
        shuffle=config.shuffle,
        seed=config.seed,
        num_shards=config.num_shards,
    )


def first(source, count: int, saved=None) -> list[dict[str, np.ndarray]]:
    return list(itertools.islice(source.open(0, saved), count))


@pytest.mark.parametrize(
    ("pack", "shuffle", "num_shards"), [(True, True, 3), (False, True, 1), (True, False, 1)]
)
def test_batches_of_rows_are_seqios(pack, shuffle, num_shards):
    config = data(pack=pack, shuffle=shuffle, num_shards=num_shards)
    # Several epochs of the smallest task, which has 64 rows or more.
    assert_equal(first(rendered_batches(config), 60), seqios(config, 60))


def test_a_task_too_large_for_memory_is_rendered_alike_in_each_epoch(monkeypatch):
    config = data(pack=False)
    held = first(rendered_batches(config), 150)
    monkeypatch.setattr(described_batches, "KEPT_IN_MEMORY", 0)
    monkeypatch.setattr(dataset_providers, "_MAX_EXAMPLES_TO_MEM_CACHE", 0)
    assert_equal(first(rendered_batches(config), 150), held)
    assert_equal(seqios(config, 150), held)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cache")
    make(folder, *RATES, min_shards=4)
    return folder


@pytest.mark.parametrize(
    ("shuffle", "held", "num_shards"),
    # In two shards files are divided, in five examples.
    [(True, 10_000, 2), (True, 0, 2), (False, 10_000, 2), (True, 10_000, 5)],
)
def test_shards_of_caches_are_seqios(cache, monkeypatch, num_shards, shuffle, held):
    monkeypatch.setattr(dataset_providers, "_MAX_EXAMPLES_TO_MEM_CACHE", held)
    monkeypatch.setattr(cached, "KEPT_IN_MEMORY", held)
    for name in RATES:
        monkeypatch.setattr(seqio.TaskRegistry.get(name), "_cache_dir", str(cache / name))
    config = data(shuffle=shuffle, num_shards=num_shards, batch_size=10, use_cached=True)
    folders = {str(cache / name): rate for name, rate in RATES.items()}
    ours = CachedBatches(folders, LENGTHS, 10, shuffle=shuffle, seed=SEED, num_shards=num_shards)
    assert_equal(first(ours, 60), seqios(config, 60))


@contextlib.contextmanager
def only_described(*modules):
    """The tasks as if SeqIO had not been given them."""
    with pytest.MonkeyPatch.context() as patched:
        for module in modules:
            for name, found in (
                ("is_described", lambda name: True),
                ("find_tasks", lambda name: [DescribedTask(task_descriptions()[name])]),
            ):
                patched.setattr(module, name, found, raising=False)
        yield


@pytest.mark.parametrize("pack", [True, False])
def test_the_batches_of_an_evaluation_of_the_loss_are_seqios(pack):
    config = data(shuffle=False, pack=pack)
    theirs = list(EvalBatches(config, 8))
    assert_equal(list(rendered_batches(config).first(8)), theirs)


@pytest.mark.parametrize("pack", [True, False])
@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("limit", [None, 7])
def test_rows_of_an_evaluation_are_mesh_tensorflows(pack, shuffle, limit):
    lengths = {**LENGTHS, "targets": 1}  # EOS takes the place of the only token
    config = EvalDataConfig(EVALUATED, "validation", False, pack, limit, shuffle, SEED)
    with only_described(batches):
        ((name, ours),) = described_batches.make_mesh_rows(config, lengths)
        ours = list(map(batches._take_row, ours))
    (theirs,) = batches._mesh_eval_datasets(config, lengths)
    assert name == EVALUATED and any(row["targets"][-1] for row in ours)
    assert_equal(ours, list(batches._to_numpy(theirs.dataset_fn())))


def test_training_rows_for_a_perplexity_are_mesh_tensorflows():
    values = {"shuffle": True, "seed": SEED, "pack": True, "use_cached": False}
    run = tiny.eval_run(
        tiny.run_config("unused", 1),
        eval_data=tiny.train_data(RANKED, **values),
        sequence_length=LENGTHS,
    )
    compat.install()
    from t5.models import mesh_transformer

    theirs = mesh_transformer.mesh_train_dataset_fn(RANKED, LENGTHS, **values)
    with only_described(batches):
        ours = list(itertools.islice(batches._train_rows(run), 50))
    assert_equal(ours, list(theirs.take(50).as_numpy_iterator()))


def test_a_resumed_run_goes_on_with_the_same_batches(tmp_path):
    config = data(seed=None, num_shards=3)
    source = rendered_batches(config)
    read = source.open(0, None)
    list(itertools.islice(read, 9))
    source.save(tmp_path)
    expected = list(itertools.islice(read, 20))
    assert_equal(first(rendered_batches(config), 20, tmp_path), expected)


def test_a_broken_row_is_told_before_the_first_step(tmp_path, monkeypatch):
    folder = tmp_path / "imdb" / "default"
    folder.mkdir(parents=True)
    rows = ['{"text": "good", "label": 1}'] * 2000 + ['{"text": "no label"}']
    (folder / "train.jsonl").write_text("\n".join(rows))
    monkeypatch.setenv(DATA_VARIABLE, str(tmp_path))
    name = add_prompted_task("imdb", None, "Movie Expressed Sentiment", ["train"], name="broken")
    with pytest.raises(UserError, match=r"train\.jsonl, line 2001"):
        next(rendered_batches(data(name.name, pack=False)).open(0, None))


def test_a_shard_whose_rows_all_give_no_example_ends_the_data(monkeypatch):
    source = rendered_batches(data(RANKED, num_shards=2))
    read = RenderedBatches._read

    def of_one_shard(self, task, shard):
        return read(self, task, shard) if shard == 0 else iter(())

    monkeypatch.setattr(RenderedBatches, "_read", of_one_shard)
    with pytest.raises(UserError, match="Shard 1 of 2 of the training data has no more examples"):
        next(source.open(0, None))
