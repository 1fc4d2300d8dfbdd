"""The embedded demo: 14 training tasks, 9 evaluation tasks, 0.4 MB of generated rows.

Prompts are T0's. scripts/demo/generate.py made the rows, in the form of real datasets, hence names
such as `synthetic_imdb`. Scores on them show that the machinery works, but nothing about language.

Mixtures: `demo_train` (synthetic_ag_news, synthetic_rotten_tomatoes, synthetic_glue/mrpc and
  synthetic_openbookqa) and `demo_eval_score_eval` (held-out prompts of these, and the held-out
  dataset synthetic_imdb). Inputs fit 128 tokens of the demo's vocabulary, targets 32. Import it
  like any module of tasks:

    seqio_cache_tasks --module_import=t0repro.tasks.demo ...
"""

from __future__ import annotations

from t0repro.tasks.demo.datasets import DEMO, FOLDER, VOCABULARY
from t0repro.tasks.t0_mixtures import register_train_and_eval
from t0repro.tasks.vocabulary import EXTRA_IDS, VocabularyFile

register_train_and_eval(
    "demo", DEMO, root=FOLDER, vocabulary=VocabularyFile(str(VOCABULARY), EXTRA_IDS)
)
