"""A report's figures as Every Eval Ever, the Hub and a model card take them."""

import dataclasses
import json
import subprocess
import sys

import pytest
import yaml

from t0repro.errors import UserError
from t0repro.reports.sharing import SUITE, share_report

from .suites import Evaluation, report_of

MODEL = "bigscience/T0_3B"
COMMIT = "c0ffee" * 6 + "c0de"


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    evaluation = Evaluation(tmp_path_factory.mktemp("run") / "validation_eval")
    evaluation.add("super_glue", "rte", "GPT-3 style", 40, 2, 1.0)
    evaluation.add("super_glue", "rte", "can we infer", 40, 2, 0.0)
    evaluation.add("my_reviews", None, "was it good", 20, 2, 1.0)
    report = report_of(evaluation)
    data = {"super_glue/rte": f"source hub, repository aps/super_glue, commit {COMMIT}, rows 277"}
    facts = dataclasses.replace(report.provenance, data=data, scores_sha256="ab" * 32)
    return dataclasses.replace(report, provenance=facts)


def required(content, *keys):
    """An object's values by key, all of which it must have."""
    assert content.keys() >= {*keys}, content
    return [content[key] for key in keys]


def test_every_eval_ever_has_what_its_schema_requires(report, tmp_path):
    """The keys that schema 0.3.0 requires, in case its package is not installed."""
    first, *_ = share_report(report, MODEL, tmp_path)
    assert first.relative_to(tmp_path).parts[:-1] == ("data", SUITE, "bigscience", "T0_3B")
    log = json.loads(first.read_text())
    version, _, stamp, source, model, library, results = required(
        log, "schema_version", "evaluation_id", "retrieved_timestamp", "source_metadata",
        "model_info", "eval_library", "evaluation_results",
    )  # fmt: skip
    assert version == "0.3.0" and stamp.isdecimal()
    required(source, "source_type", "source_organization_name", "evaluator_relationship")
    required(library, "name", "version")
    _, identity, details = required(model, "name", "id", "additional_details")
    assert identity == MODEL
    assert required(details, "deployment_type", "model_availability")[0] == "self_deployed"
    for result in results:
        _, rows, metric, score = required(
            result, "evaluation_name", "source_data", "metric_config", "score_details"
        )
        required(rows, "dataset_name", "source_type")
        assert required(metric, "lower_is_better", "min_score", "max_score") == [False, 0, 100]
        (value,), interval = required(score, "score"), score["uncertainty"]["confidence_interval"]
        assert interval["lower"] <= value <= interval["upper"]
        assert all(isinstance(detail, str) for detail in score["details"].values())
    by_id = {result["evaluation_result_id"]: result for result in results}
    rte = by_id["super_glue/rte/mean"]
    (dataset,) = (each for each in report.datasets if each.dataset == "super_glue/rte")
    assert rte["score_details"]["score"] == dataset.accuracy.mean
    assert rte["source_data"]["hf_repo"] == "aps/super_glue"
    assert rte["source_data"]["additional_details"]["revision"] == COMMIT
    assert by_id["my_reviews/mean"]["source_data"]["source_type"] == "other"
    assert len(by_id) == len(results) == 2 * 2 + 3 + len(report.groups)


def test_every_eval_evers_own_validator_finds_no_fault(report, tmp_path):
    pytest.importorskip("every_eval_ever", reason="needs every-eval-ever, on Python 3.12")
    first, *_ = share_report(report, MODEL, tmp_path)
    command = [sys.executable, "-m", "every_eval_ever", "validate", first.relative_to(tmp_path)]
    checked = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_the_hubs_results_name_repository_task_commit_and_value(report, tmp_path):
    _, results, _ = share_report(report, MODEL, tmp_path)
    assert results == tmp_path / ".eval_results" / f"{SUITE}.yaml"
    (rte,) = yaml.safe_load(results.read_text())
    assert rte["dataset"] == {
        "id": "aps/super_glue",
        "task_id": "super_glue_rte",
        "revision": COMMIT,
    }
    assert rte["value"] == round(report.datasets[-1].accuracy.mean, 2)
    assert rte["date"] == report.provenance.created and "2 prompts" in rte["notes"]


def test_the_model_card_shows_each_dataset_beside_the_published_figures(report, tmp_path):
    *_, card = share_report(report, MODEL, tmp_path)
    text = card.read_text()
    header = next(line for line in text.splitlines() if line.startswith("| Dataset"))
    assert "T0 3B" in header and "T0 11B" in header
    rte = next(line for line in text.splitlines() if line.startswith("| super_glue/rte"))
    assert f"{report.datasets[-1].accuracy.mean:.1f}" in rte and "64.6" in rte and "81.0" in rte
    assert "arXiv 2212.10315" in text and "ab" * 32 in text


def test_sharing_again_replaces_the_files(report, tmp_path):
    first = share_report(report, MODEL, tmp_path)
    assert share_report(report, MODEL, tmp_path) == first
    assert len(list((tmp_path / "data").rglob("*.json"))) == 1


@pytest.mark.parametrize("model", ["T0_3B", "a/b/c", "../T0", "big science/T0", "a/.."])
def test_a_model_that_is_no_repository_is_refused(report, model, tmp_path):
    with pytest.raises(UserError, match="is not OWNER/NAME"):
        share_report(report, model, tmp_path)
    assert not list(tmp_path.iterdir())
