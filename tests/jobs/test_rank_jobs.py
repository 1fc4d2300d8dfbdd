"""Rank evaluation as an auxiliary job: its results of all steps make a history."""

import pytest

from t0repro.config.t5x.run import read_eval_run
from t0repro.jobs.journal import read_status
from t0repro.reports.history import read_history

from ..runs.tiny_gin import parsed, save_checkpoint
from .trainings import curve, work_once

TASK = "demo_synthetic_glue_mrpc_want_to_know_score_eval"
RANK_EVAL = "rank-eval --module_import t0repro.tasks.demo --inputs_length 64 --targets_length 16"


@pytest.mark.slow
def test_rank_evaluations_feed_the_history_and_the_trainings_tensorboard(tmp_path):
    model_dir = tmp_path / "model"
    bindings = ("MIXTURE_OR_TASK_NAME = 'a'", "CHECKPOINT_PATH = 'b'", "EVAL_OUTPUT_DIR = 'c'")
    for step in (3, 5):
        save_checkpoint(
            model_dir, read_eval_run(parsed("eval", "eval", *bindings)), step, seed=step
        )
    assert work_once(model_dir, f"{RANK_EVAL} --limit 12 --resamples 100", TASK)
    history = read_history(model_dir / "auxiliary" / TASK / "results" / "validation_eval", {})
    assert history.steps == (3, 5)
    (accuracies,) = history.curves.values()
    (tag,) = {progress.metric[0] for progress in read_status(model_dir).values()}
    assert tag.startswith("eval/") and tag.endswith("/accuracy")
    logged = curve(model_dir / "inference_eval" / TASK, tag)
    assert logged == [
        (3, pytest.approx(accuracies[0], abs=1e-3)),
        (5, pytest.approx(accuracies[1], abs=1e-3)),
    ]
