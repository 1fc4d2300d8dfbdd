"""Prompted SeqIO tasks: promptsource 0.1.0's templates over rows on disk, as T0 registered them.

Importing one of the modules below registers its tasks; nothing is read and no socket is opened.

  demo: generated data, its own vocabulary, mixtures `demo_train` and `demo_eval_score_eval`.
  small: the same job on real rows, mixtures `small_train` and `small_eval_score_eval`.
  local: every task of T0's table whose dataset lies under T0REPRO_DATA_DIR, by T0's names.
"""

from t0repro.tasks.registry import PromptedTask, prompted_tasks

__all__ = ["PromptedTask", "prompted_tasks"]
