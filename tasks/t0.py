"""Registers T0's tasks and its eight mixtures, with the names and rates that T0 gave them.

    seqio_cache_tasks --module_import=t0repro.tasks.t0 --tasks='super_glue_cb_.*' ...
    t5_mesh_transformer --module_import=t0repro.tasks.t0 --gin_param="MIXTURE_NAME = 't0_train'" ...

  t0_train, t0+_train, t0++_train: the training mixtures of the three models.
  t0_eval_score_eval: the held-out evaluation; t0_train_score_eval: evaluation of checkpoints.
  t0_train_one_og_prompt, t0_train_all_og_prompts: training on one or all original-task prompts.
  bias_fairness_eval_score_eval: CrowS-Pairs and WinoGender.

Splits and sizes come from the catalog, so registering tasks needs no data; rows are located when
a split is read (t0repro.tasks.readers). The rules are those of bigscience-workshop/t-zero,
t0/seqio_tasks/tasks.py.
"""

from __future__ import annotations

from t0repro.tasks.registration import add_mixture
from t0repro.tasks.t0_mixtures import evaluation_rate, register_t0_tasks, t0_mixtures


def register_t0() -> None:
    """Registers every task in T0's table and the mixtures; calling it again has no effect."""
    tasks = register_t0_tasks()
    for mixture in t0_mixtures(tasks):
        if mixture.rates is not None:
            add_mixture(mixture.name, mixture.rates)
        else:
            add_mixture(mixture.name, mixture.tasks, default_rate=evaluation_rate)


register_t0()
