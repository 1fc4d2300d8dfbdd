"""A report's figures in the forms in which results are shared.

Below a folder that can be uploaded as it is:

    data/<suite>/<developer>/<model>/<id>.json    Every Eval Ever, schema 0.3.0
    .eval_results/<suite>.yaml                    the Hub's results of a model repository
    model_card.md                                 a section for a model card

Sources: github.com/evaleval/every_eval_ever, eval.schema.json of every-eval-ever 0.3.0, and
huggingface.co/docs/hub/eval-results.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import re
import uuid
from collections.abc import Iterator
from pathlib import Path, PurePath
from typing import Any

import yaml

from t0repro.errors import UserError
from t0repro.reports.page_markdown import escape, markdown_table
from t0repro.reports.published import family_of
from t0repro.reports.report import Report
from t0repro.reports.results import DatasetResult, GroupResult, PromptResult
from t0repro.reports.statistics import Interval
from t0repro.storage import write_atomically
from t0repro.tasks.catalog import CatalogEntry, catalog
from t0repro.words import counted

EVERY_EVAL_EVER = "0.3.0"
SUITE = "t0_rank_classification"
_NAME = re.compile(r"[\w.-]*\w")  # of a repository's owner, and of a model
_SPLITS = {"validation": "val"}  # Every Eval Ever's names, where they are not ours
_URL = "https://github.com/bigscience-workshop/t-zero"


def share_report(report: Report, model: str, out: str | os.PathLike[str]) -> list[Path]:
    """Writes a report's figures for Every Eval Ever, the Hub and a model card.

    Args:
      report: With ranked datasets.
      model: The evaluated model's repository, OWNER/NAME.
      out: The folder; files that it has from the same scores are replaced.

    Returns:
      The paths of the files.

    Raises:
      UserError: If the model is not OWNER/NAME, or the report has no ranked datasets.
    """
    parts = model.split("/")
    if len(parts) != 2 or not all(map(_NAME.fullmatch, parts)):
        raise UserError(
            f"{model!r} is not OWNER/NAME.",
            where="--model",
            fix="Name the model's repository: bigscience/T0_3B.",
        )
    if not report.datasets:
        raise UserError(
            "The report has no ranked datasets to share.",
            where=report.provenance.eval_dir,
            fix="Name the report of a rank evaluation.",
        )
    # The same scores of the same model keep their name, so sharing them twice replaces the file.
    facts = f"{model} {report.provenance.step} {report.provenance.scores_sha256}"
    name = uuid.UUID(hashlib.sha256(facts.encode()).hexdigest()[:32], version=4)
    log = json.dumps(every_eval_ever(report, model), indent=2, ensure_ascii=False)
    files = {
        f"data/{SUITE}/{model}/{name}.json": f"{log}\n",
        f".eval_results/{SUITE}.yaml": yaml.safe_dump(hub_results(report), sort_keys=False),
        "model_card.md": model_card(report, model),
    }
    for path, text in files.items():
        write_atomically(Path(out) / path, text)
    return [Path(out) / path for path in files]


def every_eval_ever(report: Report, model: str) -> dict[str, Any]:
    """The report as an evaluation log of Every Eval Ever; accuracies are in percent."""
    facts = report.provenance
    created = datetime.datetime.fromisoformat(facts.created)
    developer, name = model.split("/")
    origin = {
        "checkpoint": facts.checkpoint,
        "checkpoint_sha256": facts.checkpoint_hash,
        "step": str(facts.step),
        "scores_sha256": facts.scores_sha256,
        "templates_sha256": facts.templates_hash,
        "device": facts.device,
        "git_commit": facts.git_commit,
    }
    return {
        "schema_version": EVERY_EVAL_EVER,
        "evaluation_id": f"{SUITE}/{model}/{created.timestamp():.0f}",
        "evaluation_timestamp": facts.created,
        "retrieved_timestamp": f"{created.timestamp():.0f}",
        "source_metadata": {
            "source_name": report.title,
            "source_type": "evaluation_run",
            "source_organization_name": "t0repro",
            "evaluator_relationship": "third_party",
        },
        "eval_library": {
            "name": "t0repro",
            "version": facts.versions.get("t0repro", "unknown"),
            "additional_details": {key: value for key, value in origin.items() if value},
        },
        "model_info": {
            "name": name,
            "id": model,
            "developer": developer,
            "inference_engine": {"name": "jax", "version": facts.versions.get("jax", "unknown")},
            "additional_details": {
                "deployment_type": "self_deployed",
                "model_availability": "open_weights",
            },
        },
        "evaluation_results": list(_results(report)),
    }


def _results(report: Report) -> Iterator[dict[str, Any]]:
    """The mean and median over each dataset's prompts, each prompt, and each group's mean."""
    for group in report.groups:
        source = {"dataset_name": group.title, "source_type": "url", "url": [_URL]}
        yield _result(
            report, group.group, "mean", source, group.mean, group.interval, group,
            f"The mean over {group.datasets} datasets of each one's mean over prompts.",
        )  # fmt: skip
    for dataset in report.datasets:
        source, over = _source(report, dataset), f"over {counted(len(dataset.prompts), 'prompt')}"
        mean, median = dataset.accuracy.mean, dataset.accuracy.median
        yield _result(
            report, dataset.dataset, "mean", source, mean, dataset.mean_interval, dataset,
            f"The mean {over}.",
        )  # fmt: skip
        yield _result(
            report, dataset.dataset, "median", source, median, dataset.median_interval, None,
            f"The median {over}.",
        )  # fmt: skip
        for prompt in dataset.prompts:
            yield _result(
                report, dataset.dataset, prompt.template_name, source, prompt.accuracy,
                prompt.interval, prompt, f"The prompt {prompt.template_name!r}.",
            )  # fmt: skip


def _result(
    report: Report,
    dataset: str,
    figure: str,
    source: dict[str, Any],
    score: float,
    interval: Interval,
    result: GroupResult | DatasetResult | PromptResult | None,
    description: str,
) -> dict[str, Any]:
    """One figure; `result` has its standard error, chance and examples, where there are any."""
    uncertainty: dict[str, Any] = {
        "confidence_interval": {
            "lower": interval.low,
            "upper": interval.high,
            "confidence_level": report.bootstrap.confidence,
            "method": "Gaffke's",
        },
        "num_bootstrap_samples": report.bootstrap.replicates,
    }
    details = {}
    if result is not None:
        uncertainty["standard_error"] = {"value": result.standard_error, "method": "analytic"}
        details = {"chance": f"{result.chance:.2f}", "majority_class": f"{result.majority:.2f}"}
    if not isinstance(result, GroupResult | None):
        uncertainty["num_samples"] = result.examples
    return {
        "evaluation_result_id": f"{dataset}/{figure}",
        "evaluation_name": f"{dataset} ({figure})",
        "source_data": source,
        "metric_config": {
            "evaluation_description": f"{description} The predicted answer choice is the one with"
            " the highest log-likelihood, summed over its tokens, EOS included.",
            "metric_id": "accuracy",
            "metric_name": "Accuracy",
            "metric_kind": "accuracy",
            "metric_unit": "percent",
            "lower_is_better": False,
            "score_type": "continuous",
            "min_score": 0,
            "max_score": 100,
        },
        "score_details": {"score": score, "details": details, "uncertainty": uncertainty},
    }


def _source(report: Report, dataset: DatasetResult) -> dict[str, Any]:
    """Where a dataset's rows are from, as Every Eval Ever describes it."""
    entry, split = _entry(dataset.dataset), _split(report)
    if entry is None or entry.hub is None:
        return {"dataset_name": dataset.dataset, "source_type": "other"}
    details = {"configuration": entry.hub.configuration, "split": split}
    if revision := _revision(report, entry):
        details["revision"] = revision
    return {
        "dataset_name": dataset.dataset,
        "source_type": "hf_dataset",
        "hf_repo": entry.hub.repository,
        "hf_split": _SPLITS.get(split, split),
        "samples_number": dataset.examples,
        "additional_details": details,
    }


def hub_results(report: Report) -> list[dict[str, Any]]:
    """The report as the Hub's .eval_results; datasets that the Hub does not have are left out."""
    results = []
    for dataset in report.datasets:
        entry = _entry(dataset.dataset)
        if entry is None or entry.hub is None:
            continue
        on_hub = {"id": entry.hub.repository, "task_id": dataset.dataset.replace("/", "_")}
        if revision := _revision(report, entry):
            on_hub["revision"] = revision
        interval = dataset.mean_interval
        results.append(
            {
                "dataset": on_hub,
                "value": round(dataset.accuracy.mean, 2),
                "date": report.provenance.created,
                "notes": f"T0's rank classification: accuracy in percent, mean over"
                f" {counted(len(dataset.prompts), 'prompt')}, {report.bootstrap.percent} interval"
                f" {interval.low:.2f}-{interval.high:.2f}, split {_split(report)}",
            }
        )
    return results


def model_card(report: Report, model: str) -> str:
    """A section of a model card, as Markdown: each dataset's figures, and how to check them."""
    published = {
        (figure.dataset, figure.model): f"{figure.value:.1f}"
        for figure in report.published
        if figure.statistic == "mean"
    }
    models = list(dict.fromkeys(name for _, name in published))
    header = ("Dataset", "prompts", "mean", "interval", "median", "chance", *models)
    rows = [
        (
            dataset.dataset,
            str(len(dataset.prompts)),
            f"{dataset.accuracy.mean:.1f}",
            f"{dataset.mean_interval.low:.1f}-{dataset.mean_interval.high:.1f}",
            f"{dataset.accuracy.median:.1f}",
            f"{dataset.chance:.1f}",
            *(published.get((family_of(dataset.dataset), name), "") for name in models),
        )
        for dataset in report.datasets
    ]
    facts = report.provenance
    lines = [
        f"## {escape(report.title)}",
        escape(
            f"Rank classification accuracy of {model}, in percent, over each dataset's prompts,"
            f" with {report.bootstrap.percent} intervals; split {_split(report)}."
        ),
        markdown_table(header, rows),
    ]
    if models:
        sources = dict.fromkeys(figure.source for figure in report.published)
        lines.append(escape(f"Published figures (means over prompts): {'; '.join(sources)}."))
    lines.append(
        f"Computed by t0repro, step {facts.step}, SHA-256 of the scores"
        f" {facts.scores_sha256 or 'unknown'}; `t0repro report verify` computes a sample again."
    )
    return "\n\n".join(lines) + "\n"


def _split(report: Report) -> str:
    """The evaluated split: results are in a folder named for it."""
    return PurePath(report.provenance.eval_dir).name.removesuffix("_eval")


def _entry(dataset: str) -> CatalogEntry | None:
    """What is known about a dataset of T0; ANLI's rounds are one."""
    name, _, subset = family_of(dataset).partition("/")
    return catalog().get((name, subset or None))


def _revision(report: Report, entry: CatalogEntry) -> str | None:
    """The commit of the hub that the rows were read at, if they were."""
    found = re.search(r"\bcommit ([0-9a-f]{40})\b", report.provenance.data.get(entry.label, ""))
    return found[1] if found else None
