"""The embedded demo: 14 training tasks, 9 evaluation tasks, 0.4 MB of generated rows.

Mixtures `demo_train` (ag_news, rotten_tomatoes, glue/mrpc, openbookqa) and `demo_eval_score_eval`
(held-out prompts of these, and imdb, of which nothing is trained on). Inputs fit 128 tokens of the
demo's vocabulary, targets 32. Use it as any module of tasks:

    seqio_cache_tasks --module_import=t0repro.tasks.demo ...
"""

from __future__ import annotations

from t0repro.tasks.demo.datasets import DEMO, FOLDER, VOCABULARY
from t0repro.tasks.jobs import register_job
from t0repro.tasks.vocabulary import VocabularyFile

register_job("demo", DEMO, root=FOLDER, vocabulary=VocabularyFile(str(VOCABULARY)))
