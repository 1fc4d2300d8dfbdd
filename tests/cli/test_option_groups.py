"""Options that several commands share are one definition, wherever they appear."""

import dataclasses
import subprocess
import sys

import pytest

from t0repro.cli.app import command
from t0repro.cli.t5x_options import T5xOptions
from t0repro.cloud.auxiliary_options import AuxiliaryOptions


def options_of(*path):
    """Name -> (help, default) of a command's options."""
    parser = command()
    for name in path:
        parser = parser.commands[name]
    return {each.name: (each.help, each.default) for each in parser.params}


@pytest.mark.parametrize(
    ("group", "commands"),
    [(AuxiliaryOptions, ["aux", "train"]), (T5xOptions, ["train", "eval", "infer"])],
)
def test_commands_that_share_a_group_have_all_of_its_options_alike(group, commands):
    names = {field.name for field in dataclasses.fields(group)}
    first, *others = (options_of(command) for command in commands)
    assert names <= first.keys()
    for other in others:
        assert {name: other[name] for name in names} == {name: first[name] for name in names}


def test_t0s_command_has_the_options_of_auxiliary_jobs_with_the_same_defaults_and_hands_them_on():
    code = """
import dataclasses
from absl import flags
from t0repro.cli import t5_mesh_transformer
from t0repro.cloud.auxiliary_options import AuxiliaryOptions
from t0repro.errors import UserError
t5_mesh_transformer.define_flags()
flags.FLAGS(["t5", "--max_failures=2", "--time_limit=1.5", "--main_metric=accuracy"])
for field in dataclasses.fields(AuxiliaryOptions):
    if getattr(flags.FLAGS, field.name) != field.default:
        print(field.name, getattr(flags.FLAGS, field.name))
try:
    flags.FLAGS(["t5", "--max_parallel=0"])
except flags.IllegalFlagValueError:
    print("refused")
target = "--auxiliary_job_build_target_path=eval '"
flags.FLAGS(["t5", "--model_dir=d", "--skip_missing", "--auxiliary_job_mixtures=m", target])
try:
    with t5_mesh_transformer.jobs_during_training(flags.FLAGS):
        pass
except UserError as error:
    print(error.where)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        "replace_gin_file True", "max_failures 2", "time_limit 1.5", "main_metric accuracy",
        "refused", "--auxiliary_job_build_target_path=eval ' --skip_missing",
    ]  # fmt: skip
