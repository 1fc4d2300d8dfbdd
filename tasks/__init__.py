"""Prompted SeqIO tasks: promptsource 0.1.0's templates over rows on disk, as T0 registered them.

Importing one of the modules below registers its tasks; nothing is read and no socket is opened.

  t0: T0's tasks and its eight mixtures, `t0_train`, `t0_eval_score_eval` and the others.
  demo: generated data with its own vocabulary; mixtures `demo_train` and `demo_eval_score_eval`.
  examples: recipes on real rows, such as examples.small, which is the demo's job.
  local: those of T0's tasks whose dataset is under T0REPRO_DATA_DIR, with the splits found there.
"""

from t0repro.tasks.registry import prompted_tasks
from t0repro.tasks.task import PromptedTask

__all__ = ["PromptedTask", "prompted_tasks"]
