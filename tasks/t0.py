"""T0's tasks and its eight mixtures, by their names and with their rates, as T0 registered them.

    seqio_cache_tasks --module_import=t0repro.tasks.t0 --tasks='super_glue_cb_.*' ...
    t5_mesh_transformer --module_import=t0repro.tasks.t0 --gin_param="MIXTURE_NAME = 't0_train'" ...

  t0_train, t0+_train, t0++_train: the training mixtures of the three models.
  t0_eval_score_eval: the held-out evaluation; t0_train_score_eval: that of the checkpoints.
  t0_train_one_og_prompt, t0_train_all_og_prompts: training with one or with all original prompts.
  bias_fairness_eval_score_eval: CrowS-Pairs and WinoGender.

Splits and sizes are the catalogue's, so that no data needs to be at hand; a split's rows are looked
for when they are read (t0repro.tasks.readers). The rules are those of bigscience-workshop/t-zero,
t0/seqio_tasks/tasks.py.
"""

from __future__ import annotations

from t0repro.tasks.registration import add_mixture
from t0repro.tasks.t0_mixtures import evaluation_rate, register_t0_tasks, t0_mixtures


def register_t0() -> None:
    """Registers every task of T0's table and the mixtures; once more does nothing."""
    tasks = register_t0_tasks()
    for mixture in t0_mixtures(tasks):
        if mixture.rates is not None:
            add_mixture(mixture.name, mixture.rates)
        else:
            add_mixture(mixture.name, mixture.tasks, default_rate=evaluation_rate)


register_t0()
