"""A value of any kind for any argument is read, or refused with the file and line that bound it."""

import dataclasses
import functools
import random
import re

import pytest

import gin
from t0repro.config.t5x import gin_files
from t0repro.config.t5x.arguments import parameters_of
from t0repro.config.t5x.run import read_run
from t0repro.errors import UserError

from ..t5x_trainings import FINETUNE, MODEL, REQUIRED

VALUES = (
    "None", "True", "'False'", "'text'", "3", "-1", "0", "1.5", "[]", "['a']", "[3]", "{}",
    "{'a': 1}", "(1, 2)", "@utils.CheckpointConfig()", "@optimizers.chain",
)  # fmt: skip
RUN = {
    "train": (FINETUNE, ("INITIAL_CHECKPOINT_PATH = 'a'", *REQUIRED)),
    "eval": ("", ("CHECKPOINT_PATH = 'a'", "EVAL_OUTPUT_DIR = 'b'", *REQUIRED[:3])),
    "infer": ("", ("CHECKPOINT_PATH = 'a'", "INFER_OUTPUT_DIR = 'b'", *REQUIRED[:3])),
    "precompile": ("", ("MODEL_DIR = 'a'", *REQUIRED[:3])),
}
# Arguments of any type that docs/t5x.md lists as having no effect, and those of an optimizer or a
# decoding function in a mode that does not use it.
NO_EFFECT = "learning_rate|logical_factor_rules|rules|summarize_config_fn|summary_writer"
UNUSED = {
    "eval": r"adafactor\..*|.*optimizer_def",
    "infer": r"adafactor\..*|.*optimizer_def",
    "precompile": r".*decode_fn|utils\.create_learning.*",
    "train": "none",
}
# None and an empty list leave T5X's default.
UNSET = ("None", "[]", "{}")


def inputs(mode, *bindings):
    run_file, required = RUN[mode]
    files = (MODEL, run_file or f"t5x/configs/runs/{mode}.gin")
    imports = ("from t5x import utils", "from t5x import optimizers")
    return gin_files.T5xInputs(mode, files, (*required, *imports, *bindings))


@functools.cache
def arguments(mode):
    return [item.name for item in gin_files.parse(inputs(mode)).values]


def cases(count, seed):
    """A sample of (run mode, argument, value), as many of each mode."""
    chosen = random.Random(seed)
    for mode in RUN:
        every = [(mode, name, value) for name in arguments(mode) for value in VALUES]
        yield from chosen.sample(every, count)


def check(mode, name, value):
    """Reads a run with one binding; returns whether it was refused.

    Raises:
      AssertionError: if a value is accepted that is not of the declared type, or is refused without
        naming the binding's place.
    """
    binding = f"{name} = {value}"
    try:
        read_run(gin_files.parse(inputs(mode, binding)))
    except UserError as error:
        assert binding in (error.where or ""), (binding, error.what, error.where)
        assert error.what and error.fix and len(str(error)) < 3000
        return True
    finally:
        gin.clear_config()
    of, _, argument = name.rpartition("/")[2].rpartition(".")
    if value in UNSET or re.fullmatch(NO_EFFECT, argument) or re.fullmatch(UNUSED[mode], name):
        return False
    given = 3 if value.startswith("@") else eval(value)
    # `train_script.train` is the function `train` of the script.
    known = of if parameters_of(of) else of.partition(".")[2]
    assert parameters_of(known)[argument].accepts(given, None), binding
    return False


def test_150_wrong_values_are_refused_with_their_place_or_of_the_declared_type():
    refused = [check(*case) for case in cases(38, seed=0)]
    assert len(refused) == 152 and sum(refused) > 100


@pytest.mark.slow
def test_600_more_wrong_values_are_refused_with_their_place_or_of_the_declared_type():
    refused = [check(*case) for case in cases(150, seed=1)]
    assert len(refused) == 600 and sum(refused) > 400


@pytest.mark.parametrize(
    "mode, binding, complaint",
    [
        ("train", "train.checkpoint_cfg = None", "must be CheckpointConfig"),
        ("train", "train.train_dataset_cfg = None", "needs examples"),
        ("precompile", "precompile.train_dataset_cfg = None", "needs examples"),
        ("train", "seqio.Evaluator.logger_cls = None", "must be a list"),
        ("train", "utils.SaveCheckpointConfig.checkpoint_steps = -1", "must be a list"),
        ("train", "train/utils.DatasetConfig.task_feature_lengths = 3", "must be a mapping"),
        ("train", "utils.SaveCheckpointConfig.keep_period = -1", "^utils.Save.*keep_period is -1"),
        ("train", "utils.SaveCheckpointConfig.period = -1", "at least 1, or 0, or None"),
        ("eval", "models.EncoderDecoderModel.input_vocabulary = 0", "must be a vocabulary"),
        (
            "eval",
            "models.EncoderDecoderModel.default_decoder_params = {'alpha': -1}",
            "decoding.alpha is -1",
        ),
        ("infer", "network.T5Config.emb_dim = 0", "network.T5Config.emb_dim is 0"),
        ("train", "utils.CheckpointConfig.save = @utils.CheckpointConfig()", "refers to itself"),
    ],
)
def test_what_ended_in_an_exception_or_without_a_place_names_both(mode, binding, complaint):
    with pytest.raises(UserError, match=complaint) as caught:
        read_run(gin_files.parse(inputs(mode, binding)))
    assert binding in caught.value.where


def test_an_empty_list_in_place_of_a_function_leaves_t5xs_default():
    bound = read_run(gin_files.parse(inputs("infer", "infer_script.infer.write_fn = []")))
    assert bound == read_run(gin_files.parse(inputs("infer")))


OWN = """\
from __gin__ import dynamic_registration
import colorsys
import fractions

CLASS = @fractions.Fraction
OBJECT = @fractions.Fraction()
FUNCTION = @colorsys.rgb_to_hsv
"""


@pytest.mark.parametrize(
    "argument, wanted",
    [
        ("train.trainer_cls", "your own subclass of t0repro.training.trainer.BaseTrainer"),
        ("train.model", "your own subclass of t0repro.training.models.EncoderDecoderModel"),
        ("train.partitioner", "your own subclass of t0repro.training.partitioner.Partitioner"),
        ("train.checkpoint_cfg", "Bind CheckpointConfig"),
        ("utils.SaveCheckpointConfig.checkpointer_cls", "Remove the binding"),
        ("models.EncoderDecoderModel.decode_fn", "Bind @decoding.beam_search"),
    ],
)
def test_any_class_object_or_function_of_the_users_is_refused_with_what_is_supported(
    argument, wanted, tmp_path
):
    (tmp_path / "own.gin").write_text(OWN)
    for value in ("%CLASS", "%OBJECT", "%FUNCTION"):
        binding = f"{argument} = {value}"
        run = inputs("train", binding)
        own = dataclasses.replace(run, gin_files=(*run.gin_files, str(tmp_path / "own.gin")))
        with pytest.raises(UserError) as caught:
            read_run(gin_files.parse(own))
        assert binding in caught.value.where and "own.gin:" in caught.value.where
        assert wanted in caught.value.fix
