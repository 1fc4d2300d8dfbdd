"""How command lines are spelled: with dashes or underscores, in T5X's and in absl's forms."""

from __future__ import annotations

import re
from collections.abc import Iterable

from t0repro.errors import UserError

T5X_NAMES = {
    "another --model_dir": "another MODEL_DIR",
    "--gin_location_prefix": "--gin_search_paths",
    "--t5_tfds_data_dir": "--tfds_data_dir",
    "--additional_task_cache_dirs": "--cache_dir",
    "mesh_train_dataset_fn.use_cached = False, in an evaluation mesh_eval_dataset_fn's": (
        "USE_CACHED_TASKS = False"
    ),
    "bind use_cached = True": "bind USE_CACHED_TASKS = True",
    "run.sequence_length": "utils.DatasetConfig.task_feature_lengths",
    "mesh_train_dataset_fn.seed": "train/utils.DatasetConfig.seed",
    "utils.run.init_checkpoint": "utils.RestoreCheckpointConfig.path",
    ", or continue with --backend=mtf": "",
}
"""What T5X's commands say for flags, macros and bindings of t5_mesh_transformer."""

# absl takes one dash or two, and a value for a flag that is on or off.
_SHORT_VERBOSITY = re.compile(r"-v=(.*)")
_SWITCH = re.compile(r"--(replace_gin_file|alsologtostderr|logtostderr|sync)=(?i:(true|false))")


def translate_for_click(argument: str) -> str | None:
    """An argument in absl's spelling as Click parses it; None if it has no effect."""
    if short := _SHORT_VERBOSITY.fullmatch(argument):
        return f"--verbosity={short[1]}"
    if switch := _SWITCH.fullmatch(argument):
        return f"--{switch[1]}" if switch[2].lower() == "true" else None
    return None if argument == "--nosync" else argument


def canonical(name: str) -> str:
    """An option's name as --help shows it: with underscores, like t5's own flags."""
    return name.replace("-", "_")


def canonical_arguments(arguments: Iterable[str]) -> list[str]:
    """The command line with canonical option names; values are unchanged.

    Raises:
      UserError: If a path begins with a `~` that the shell left as it was.
    """
    spelled = []
    for argument in arguments:
        _check_home(argument)
        # Only words that look like options; "--" alone ends the options.
        if argument.startswith("--") and argument != "--":
            name, equals, value = argument[2:].partition("=")
            argument = f"--{canonical(name)}{equals}{value}"
        spelled.append(argument)
    return spelled


def translate_t5x_overrides(arguments: Iterable[str]) -> list[str]:
    """The command line with T5X's spellings replaced by this program's.

    `--gin.NAME=VALUE` becomes `--gin_bindings=NAME=VALUE`. `--replace_gin_file=True`, as T5X's
    page on auxiliary jobs writes it, becomes the flag alone, and `-v=1` becomes `--verbosity=1`.
    What follows `--` is another command's, and stays as it is.

    Raises:
      UserError: If one has no "=", or a path begins with a `~` that the shell left as it was.
    """
    spelled, remaining = [], iter(arguments)
    for argument in remaining:
        if argument == "--":
            return [*spelled, argument, *remaining]
        _check_home(argument)
        if argument.startswith("--gin."):
            if "=" not in argument:
                raise UserError(
                    f"{argument} has no value.", fix=f"Write it as {argument}=VALUE, in one word."
                )
            argument = f"--gin_bindings={argument.removeprefix('--gin.')}"
        if (spelling := translate_for_click(argument)) is not None:
            spelled.append(spelling)
    return spelled


def _check_home(argument: str) -> None:
    """Refuses `--out=~/runs`: shells leave that `~` alone, and it would become a folder's name."""
    option, equals, value = argument.partition("=")
    if not (equals and option.startswith("--")):
        option, value = "", argument
    if value == "~" or value.startswith("~/"):
        raise UserError(
            f"The shell did not expand the ~ of {value!r}, which would be a folder of that name.",
            where=option or None,
            fix=f"Write {f'{option} {value}' if option else value}, without = and quotes, or $HOME"
            " in place of ~.",
        )
