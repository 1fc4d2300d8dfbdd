"""Evaluations of the small model on the demo's tasks."""

import json
import warnings

from t0repro.evaluation.evaluation_folder import EvaluationSettings
from t0repro.evaluation.opened import open_checkpoint
from t0repro.progress import heard_by
from t0repro.reports.statistics import Bootstrap
from t0repro.runs import rank_eval

MIXTURE = "demo_eval_score_eval"
SETTINGS = EvaluationSettings(lengths={"inputs": 128, "targets": 32}, limit=3)
QUICK = Bootstrap(replicates=100)


def evaluate(model_dir, out, settings=SETTINGS, mixture=MIXTURE, said=None, **options):
    checkpoint = open_checkpoint(str(model_dir), None, settings.activation)
    with heard_by((lambda text: None) if said is None else said.append), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # t5's metrics, of few examples
        return rank_eval.rank_eval(checkpoint, mixture, out, settings, **options)


def facts_of(outcome):
    return json.loads((outcome.folder / "provenance.json").read_text())
