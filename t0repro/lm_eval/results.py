"""Reads lm-evaluation-harness's results as an evaluation of ours, which reports can show.

`lm_eval run --log_samples --output_path DIR` leaves, for each start,

    DIR/<model>/results_<date>.json          settings, and the number of examples of each task
    DIR/<model>/samples_<task>_<date>.jsonl  each example with its choices' log-likelihoods

and `import_results` writes the files of evaluation.outputs from them. A harness task that
lm_eval.export wrote gets the name of its `_score_eval` twin, so that the result can be compared
with rank-eval's. The harness does not count tokens: lengths are 0, and ranking by length refused.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from t0repro.errors import UserError
from t0repro.evaluation.evaluation_facts import EVALUATION_FACTS
from t0repro.evaluation.task_output import LineFile
from t0repro.files import make_folder, write_atomically
from t0repro.tasks.task import SCORE_EVAL_SUFFIX

STEP = 0
"""The step of an imported evaluation: the harness does not know a model's."""
_RUN_AGAIN = "Run lm_eval again with --log_samples and --output_path."
_OURS = {"example", "inputs", "choices", "label"}


def import_results(results: str | os.PathLike[str], folder: Path) -> tuple[Path, dict[str, str]]:
    """Writes the latest results below a folder as a `<split>_eval` folder.

    Args:
      results: The folder that `--output_path` named, or one inside it.
      folder: Where to write the `<split>_eval` folder; files of the same tasks are replaced.

    Returns:
      The written folder, and harness task -> why it was left out, for tasks that do not rank
      choices.

    Raises:
      UserError: If there are no results, samples are missing or fewer than were evaluated, a file
        is damaged, or no task ranks choices.
    """
    path = _latest(Path(results))
    found = _json(path.read_text(encoding="utf-8"), str(path))
    date = path.stem.removeprefix("results_")
    configs = found.get("configs", {})
    ranked = {
        task: config
        for task, config in configs.items()
        if config.get("output_type") == "multiple_choice"
    }
    if not ranked:
        raise UserError("No task in these results ranks choices.", where=str(path), fix=_RUN_AGAIN)
    splits = {each.get("test_split") or each.get("validation_split") for each in ranked.values()}
    eval_dir = folder / f"{splits.pop() if len(splits) == 1 else 'all'}_eval"
    make_folder(eval_dir)
    for task in ranked:
        samples = path.with_name(f"samples_{task}_{date}.jsonl")
        expected = found.get("n-samples", {}).get(task, {}).get("effective")
        _import_task(task, samples, expected, eval_dir)
    # Last: with it the folder says whose scores these are.
    facts = json.dumps(_facts(found, path), indent=1)
    write_atomically(eval_dir / EVALUATION_FACTS, facts)
    left_out = {
        task: f"its output_type is {config.get('output_type')}"
        for task, config in configs.items()
        if task not in ranked
    }
    return eval_dir, left_out


def _latest(folder: Path) -> Path:
    found = sorted(folder.rglob("results_*.json"), key=lambda path: path.name)
    if not found:
        raise UserError(
            "There are no results of lm-evaluation-harness here (results_<date>.json).",
            where=str(folder),
            fix=_RUN_AGAIN,
        )
    models = sorted({str(path.parent) for path in found})
    if len(models) > 1:
        raise UserError(
            f"There are results of {len(models)} models here.",
            where=str(folder),
            fix=f"Name the folder of one: {', '.join(models)}.",
        )
    return found[-1]


def _import_task(task: str, samples: Path, expected: int | None, eval_dir: Path) -> None:
    if not samples.is_file():
        raise UserError(f"The samples of {task!r} are missing.", where=str(samples), fix=_RUN_AGAIN)
    pairs, examples, ours = [], set(), True
    for sample, where in _lines(samples):
        try:
            pairs += list(_pairs(sample))
            ours = ours and sample["doc"].keys() >= _OURS
            examples.add(sample["doc_id"])
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise UserError(
                f"This is not a sample of a multiple-choice task: {error!r}.",
                where=where,
                fix=_RUN_AGAIN,
            ) from error
    if not pairs or (expected is not None and len(examples) != expected):
        raise UserError(
            f"Task {task!r} has samples of {len(examples)} examples; {expected} were evaluated.",
            where=str(samples),
            fix="Copy the file again, or run lm_eval again.",
        )
    name = task + SCORE_EVAL_SUFFIX if ours else task
    columns = zip(*pairs, strict=True)
    endings = ("inputs", "targets", f"{STEP}_predictions")
    for ending, values in zip(endings, columns, strict=True):
        file = LineFile(eval_dir / f"{name}_{ending}")
        try:
            file.write(values)
        except BaseException:
            file.discard()
            raise
        file.commit()


def _pairs(sample: Mapping[str, Any]) -> Iterator[tuple[str, Any, float]]:
    """(input, target, log-likelihood) of each choice, as score_eval writes them."""
    doc, arguments = sample["doc"], sample["arguments"]
    scores = [float(score[0]) for score in sample["filtered_resps"]]
    if not scores:
        raise ValueError("it has no scores")
    texts = [arguments[f"gen_args_{number}"] for number in range(len(scores))]
    choices = [str(text["arg_1"]).strip() for text in texts]
    example, answer = int(doc.get("example", sample["doc_id"])), int(sample["target"])
    for number, score in enumerate(scores):
        # Equal choices are equally right, as in T0's tasks.
        correct = 0 <= answer < len(choices) and choices[number] == choices[answer]
        yield texts[number]["arg_0"], ((example, number), correct, 1.0, 0), score


def _lines(path: Path) -> Iterator[tuple[dict[str, Any], str]]:
    with open(path, encoding="utf-8", newline="\n") as file:
        for number, line in enumerate(file, start=1):
            where = f"{path}:{number}"
            yield _json(line, where), where


def _json(text: str, where: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise UserError(f"This is not JSON: {error}", where=where, fix=_RUN_AGAIN) from error
    if not isinstance(found, dict):
        raise UserError("This is not a JSON object.", where=where, fix=_RUN_AGAIN)
    return found


def _facts(found: Mapping[str, Any], path: Path) -> dict[str, Any]:
    config = found.get("config", {})
    arguments, digest = config.get("model_args"), config.get("model_sha")
    named = arguments if isinstance(arguments, Mapping) else {}
    versions = {
        "lm-eval": found.get("lm_eval_version"),
        "transformers": found.get("transformers_version"),
    }
    return {
        "step": STEP,
        "checkpoint": str(named.get("checkpoint") or named.get("pretrained") or arguments),
        "checkpoint_hash": digest if isinstance(digest, str) and digest else None,
        "duration_seconds": float(found.get("total_evaluation_time_seconds") or 0) or None,
        "versions": {name: str(version) for name, version in versions.items() if version},
        "data": {"results": str(path)},
    }
