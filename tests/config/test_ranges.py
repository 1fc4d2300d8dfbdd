"""Ranges of numbers: each stated beside its field, each refused with the place that bound it."""

import dataclasses
import typing

import pytest

from t0repro.config import checkpoints, data, decoding, model, optimizer, run
from t0repro.config.run import TrainRun
from t0repro.config.settings import Range, check_settings, range_of
from t0repro.errors import UserError

from .t5x_trainings import config as t5x_config
from .test_mtf_gin import load

CONFIGS = [
    kind
    for module in (checkpoints, data, decoding, model, optimizer, run)
    for kind in vars(module).values()
    if isinstance(kind, type)
    and dataclasses.is_dataclass(kind)
    and kind.__module__ == module.__name__
]


def is_numeric(hint) -> bool:
    parts = typing.get_args(hint)
    if hint in (int, float):
        return True
    return typing.get_origin(hint) is not typing.Literal and any(map(is_numeric, parts))


@pytest.mark.parametrize("kind", CONFIGS, ids=lambda kind: kind.__name__)
def test_every_number_of_a_run_has_a_range(kind):
    hints = typing.get_type_hints(kind)
    without = [
        field.name
        for field in dataclasses.fields(kind)
        if is_numeric(hints[field.name]) and range_of(kind, field.name) is None
    ]
    assert without == []


@pytest.mark.mtf
@pytest.mark.parametrize(
    ("param", "words"),
    [
        ("run.sequence_length = 0", "at least 1"),
        ("run.sequence_length = {'inputs': 64, 'targets': -1}", "sequence_length['targets'] is -1"),
        ("run.sequence_length = 'long'", "sequence_length is 'long'"),
        ("run.batch_size = 0", "batch_size is 0"),
        ("run.batch_size = 8.5", "batch_size is 8.5"),
        ("run.batch_size = ('tokens_per_batch', 0)", "tokens_per_batch"),
        ("run.batch_size = ('tokens_per_batch', 100)", "whole number of sequences of 64"),
        ("run.batch_size = ('tokens_per_bach', 512)", "tokens_per_batch"),
        ("run.train_steps = -1", "train_steps is -1"),
        ("run.train_steps = 'many'", "train_steps is 'many'"),
        ("run.save_checkpoints_steps = 0", "save_checkpoints_steps is 0"),
        ("run.keep_checkpoint_max = -1", "whole number, at least 1, or 0, or None"),
        ("run.eval_checkpoint_step = -2", "eval_checkpoint_step is -2"),
        # Not the steps 1, 0 and 0.
        ("run.eval_checkpoint_step = '100'", "at least 0, or -1, or 'all'"),
        ("run.eval_checkpoint_step = 'latest'", "eval_checkpoint_step is 'latest'"),
        ("run.perplexity_eval_steps = 0", "perplexity_eval_steps is 0"),
        ("d_model = 0", "d_model is 0"),
        ("d_model = 12.5", "d_model is 12.5"),
        ("d_ff = -4", "d_ff is -4"),
        ("num_layers = 0", "is 0"),
        ("dropout_rate = 1.5", "dropout_rate is 1.5"),
        ("dropout_rate = 1.0", "below 1"),
        ("decoder/Unitransformer.label_smoothing = 2.0", "label_smoothing is 2.0"),
        ("Unitransformer.z_loss = -1.0", "z_loss is -1.0"),
        ("Unitransformer.loss_denominator = 0.0", "loss_denominator is 0.0"),
        ("AdafactorOptimizer.beta1 = 1.0", "beta1 is 1.0"),
        ("AdafactorOptimizer.clipping_threshold = 0.0", "clipping_threshold is 0.0"),
        ("constant_learning_rate.learning_rate = -0.001", "learning_rate is -0.001"),
        ("constant_learning_rate.learning_rate = 1e999", "learning_rate is inf"),
        ("mesh_train_dataset_fn.seed = -1", "seed is -1"),
        ("Bitransformer.decode.beam_size = 0", "beam_size is 0"),
        ("Bitransformer.decode.temperature = -1.0", "temperature is -1.0"),
        # A list or a mapping is not a number, and a number no text.
        # Too wide for JAX's counts, or for any.
        ("run.train_steps = 1000000000000000000000000", "at most 2147483647"),
        ("run.train_steps = 3000000000", "at most 2147483647"),
        ("run.train_steps = 1e999", "train_steps is inf"),
        ("run.batch_size = 10000000000", "at most 2147483647"),
        ("run.batch_size = ('tokens_per_batch', 1e999)", "is inf"),
        ("run.sequence_length = {'inputs': 10000000000, 'targets': 8}", "at most 2147483647"),
        ("mesh_train_dataset_fn.seed = 1000000000000000000000", "at most 9223372036854775807"),
        ("run.keep_checkpoint_max = 1000000000000000000000", "at most 9223372036854775807"),
        ("run.save_checkpoints_steps = [5]", "save_checkpoints_steps is [5]"),
        ("run.train_steps = (3,)", "train_steps is (3,)"),
        ("AdafactorOptimizer.beta1 = [0.9]", "beta1 is [0.9]; it must be a number"),
        ("AdafactorOptimizer.clipping_threshold = {'a': 1.0}", "clipping_threshold is {'a': 1.0}"),
        ("run.init_checkpoint = 5", "init_checkpoint is 5; it must be a text"),
        ("run.eval_dir_suffix = [1]", "eval_dir_suffix is [1]"),
        ("constant_learning_rate.learning_rate = [0.1]", "learning_rate is [0.1]"),
        ("run.sequence_length = {'input': 32, 'targets': 8}", "'inputs'"),
        ("run.sequence_length = {'inputs': [32], 'targets': 8}", "sequence_length['inputs'] is"),
        ("run.sequence_length = True", "sequence_length is True"),
        ("run.batch_size = True", "batch_size is True"),
        ("get_variable_dtype.master_dtype = 'flaot32'", "TensorFlow has no such type"),
        ("run.learning_rate_schedule = -0.1", "is -0.1"),
        ("run.total_run_steps = -5", "total_run_steps is -5"),
        ("run.mode = 'nonsense'", "mode is 'nonsense'; it must be 'train' or 'eval'"),
    ],
)
def test_a_number_out_of_range_is_refused_with_the_place_that_bound_it(param, words):
    with pytest.raises(UserError) as error:
        load(param)
    assert words in f"{error.value}"
    assert error.value.where and param in error.value.where
    assert error.value.fix


@pytest.mark.mtf
def test_a_number_out_of_range_in_a_file_is_refused_by_its_line(tmp_path):
    file = tmp_path / "mine.gin"
    file.write_text("include 'demo/t5.1.1.demo.gin'\n\ndropout_rate = 1.5\n")
    with pytest.raises(UserError) as error:
        load(files=("dataset.gin", str(file)))
    assert f"{file}:3" in str(error.value.where)


@pytest.mark.mtf
@pytest.mark.parametrize(
    "param",
    [
        "run.keep_checkpoint_max = None",
        "run.keep_checkpoint_max = 0",
        "run.eval_checkpoint_step = 'all'",
        "run.eval_checkpoint_step = [1, 2]",
        "AdafactorOptimizer.clipping_threshold = None",
        "constant_learning_rate.learning_rate = 0",
        "mesh_train_dataset_fn.seed = None",
    ],
)
def test_what_has_a_meaning_of_its_own_passes(param):
    assert isinstance(load(param), TrainRun)


def test_whole_numbers_and_truth_values_are_told_apart():
    @dataclasses.dataclass
    class Sizes:
        count: typing.Annotated[int, Range(at_least=0)]
        share: typing.Annotated[float | None, Range(at_least=0, at_most=1)] = None

    check_settings(Sizes(0), {})
    check_settings(Sizes(3, 1), {})
    for wrong in (Sizes(True), Sizes(1.0), Sizes("1"), Sizes(1, float("nan")), Sizes(1, [0.5, 2])):  # type: ignore
        with pytest.raises(UserError):
            check_settings(wrong, {})


def test_a_range_says_its_bounds_in_words():
    assert str(Range(at_least=0, below=1)) == "at least 0 and below 1"
    assert str(Range(at_least=1, also=(-1,))) == "at least 1, or -1"
    assert str(Range()) == "finite"


@pytest.mark.parametrize(
    ("binding", "words"),
    [
        ("TRAIN_STEPS = 1000000000000000000000000", "at most 2147483647"),
        ("BATCH_SIZE = 10000000000", "at most 2147483647"),
        ("train.random_seed = 1000000000000000000000", "at most 9223372036854775807"),
        ("BATCH_SIZE = 1e999", "batch_size is inf"),
        ("Z_LOSS = 1e999", "z_loss is inf"),
    ],
)
def test_a_number_too_wide_for_a_run_of_t5x_is_refused_with_the_place_that_bound_it(binding, words):
    with pytest.raises(UserError) as error:
        t5x_config(binding)
    assert words in str(error.value) and binding in str(error.value.where)
