"""FLAN 2022's mixture over your own prompted tasks: its names, rates and caps.

    flan2022_submix                         40% flan2021, 32% t0, 20% niv2, 5% cot, 3% dialog
      flan2021_submix                       its four settings, as much of each
        flan_zsopt                          zero-shot, answer options in the prompt
          palmflan_flan_zs_opt              tasks, each by its number of examples, up to 30,000
        flan_fsopt, flan_zsnoopt, ...       fs: few-shot; noopt: without answer options
      cot_submix
        cot_zsopt                           cot and, 0.3 times as much, cot-ii (inputs inverted)
          palmflan_cot_zs_opt, palmflan_cot-ii_zs_opt

FLAN counts the examples that are short enough for its sequence lengths; here each task counts the
rows of its train split.

Sources: google-research/FLAN at e9e4ec6e, flan/v2/mixtures.py, mixtures_utils.py and
run_example.py; Longpre et al. 2023, arXiv 2301.13688.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

from t0repro.errors import UserError, nearest_names
from t0repro.tasks.registration import add_mixture
from t0repro.tasks.source import PromptedRows

FLAN_2022 = "flan2022_submix"
_PREFIX = "palmflan_"
_INVERTED = 0.3
"""Rate of a source's tasks with inputs and targets inverted, next to 1 for the others."""

CAPS: Mapping[str, int] = {
    "flan": 30_000,
    "t0": 20_000,
    "niv2": 5_000,
    "cot": 100_000,
    "cot-ii": 100_000,
    "dialog": 200_000,
    "dialog-ii": 200_000,
}
"""Source -> the most examples that one of its tasks counts for."""

# Submixture -> its share, its source and the source's settings.
_SUBMIXTURES: Mapping[str, tuple[float, str, Sequence[str]]] = {
    "flan2021_submix": (0.4, "flan", ("zs_opt", "fs_opt", "zs_noopt", "fs_noopt")),
    "t0_submix": (0.32, "t0", ("zs_opt", "fs_opt", "zs_noopt", "fs_noopt")),
    "niv2_submix": (0.2, "niv2", ("zs_opt", "fs_opt")),
    "cot_submix": (0.05, "cot", ("zs_opt", "fs_opt")),
    "dialog_submix": (0.03, "dialog", ("zs_opt", "fs_opt")),
}


def add_flan_2022(tasks: Mapping[str, Sequence[str]]) -> None:
    """Registers FLAN 2022's mixture, and those in it, over tasks that are registered already.

    Args:
      tasks: Source and setting, such as `flan_zs_opt`, `t0_fs_noopt` or `cot-ii_zs_opt` -> names of
        your tasks of that kind. Where there are none, the mixture is left out, and those beside it
        keep their rates.

    Raises:
      UserError: If FLAN has no such source and setting, there are no tasks at all, or a task is not
        registered.
    """
    known = {
        f"{each}_{setting}": each
        for _, source, settings in _SUBMIXTURES.values()
        for each in (source, f"{source}-ii")
        if each in CAPS
        for setting in settings
    }
    for kind in tasks:
        if kind not in known:
            raise UserError(
                f"FLAN 2022 has no source and setting {kind!r}.",
                fix=f"Nearest: {nearest_names(kind, known)}.",
            )
    given = {kind: names for kind, names in tasks.items() if names}
    if not given:
        raise UserError(
            "There are no tasks for FLAN 2022's mixture.",
            fix="Name some: add_flan_2022({'flan_zs_opt': ['my_task']}).",
        )
    for kind, names in given.items():
        rate = functools.partial(_cap_examples, cap=CAPS[known[kind]])
        add_mixture(f"{_PREFIX}{kind}", list(names), rate)
    shares = {}
    for submixture, (share, source, settings) in _SUBMIXTURES.items():
        parts = []
        for setting in settings:
            kinds = {f"{source}_{setting}": 1.0, f"{source}-ii_{setting}": _INVERTED}
            rates = {f"{_PREFIX}{kind}": rate for kind, rate in kinds.items() if kind in given}
            if rates:
                parts.append(f"{source}_{setting.replace('_', '')}")
                add_mixture(parts[-1], rates)
        if parts:
            shares[submixture] = share
            add_mixture(submixture, dict.fromkeys(parts, 1.0))
    add_mixture(FLAN_2022, shares)


def _cap_examples(rows: PromptedRows, cap: int) -> int:
    return min(rows.num_input_examples("train"), cap)
