"""T5X's run mode eval."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path

from t0repro.config.run import EvalRun
from t0repro.converters.model_files import check_configured
from t0repro.converters.tensors import CheckpointRef
from t0repro.data.vocabulary_checks import check_own_tokenizer
from t0repro.evaluation.evaluator import FOLDER, open_evaluator
from t0repro.evaluation.records import read_with_checksum, write_with_checksum
from t0repro.evaluation.result_lines import print_results
from t0repro.progress import say
from t0repro.runs.preflight import check_inference
from t0repro.runs.restored_checkpoints import (
    POLL_SECONDS,
    choose_checkpoints,
    identity,
    make_generating_model,
    open_restored,
    own_path,
    wait_for_checkpoints,
)

RECORD = "evaluated.json"


Metrics = dict[str, dict[str, float]]


def evaluate_checkpoints(
    plan: EvalRun,
    *,
    watch: bool = False,
    until: int | None = None,
    seconds: float = POLL_SECONDS,
    describe: Callable[[], None] = lambda: None,
) -> dict[int, Metrics]:
    """Evaluates each chosen checkpoint that this folder's record lacks.

    Args:
      plan: The evaluation.
      watch: Whether to keep evaluating as new checkpoints appear.
      until: Watching ends after a checkpoint of this step or a later one; None never ends.
      seconds: Between polls for new checkpoints.
      describe: Writes config.gin and model-info.txt, once data and checkpoints are found.

    Returns:
      Step -> task -> metrics, of the checkpoints evaluated by this call.

    Raises:
      UserError: If there is no checkpoint, one does not fit the model, the task's vocabulary is
        not the model's, or nothing has a metric.
    """
    check_inference(plan, starts=True)
    folder, record = Path(plan.output_dir), EvaluatedCheckpoints(plan)
    evaluator, results = None, {}
    refs = _checkpoints(plan, watch, until, seconds)
    describe()
    for ref in refs:
        # Taken first: a checkpoint that is replaced while being read is evaluated again next time.
        its_identity = identity(ref)
        if record.has(ref, its_identity):
            say(f"{ref.path}: evaluated before; remove {record.path} to evaluate it again")
            continue
        if evaluator is None:  # reads all examples, which a finished evaluation need not do
            evaluator = open_evaluator(plan.data, plan.evaluator, folder, plan.decoding)
        checkpoint = open_restored(plan, ref)
        model = make_generating_model(plan, checkpoint.model)
        metrics = evaluator.evaluate(model, checkpoint.params, checkpoint.step)
        # Recorded last: an evaluation interrupted before its results are written is repeated.
        record.add(ref, its_identity)
        results[checkpoint.step] = metrics
        print_results(metrics, checkpoint.step, folder)
        if any(logger.name != "py" for logger in plan.evaluator.loggers):
            say(f"wrote {folder / FOLDER}")
    return results


def _checkpoints(
    plan: EvalRun, watch: bool, until: int | None, seconds: float
) -> Iterator[CheckpointRef]:
    if not watch:
        refs = choose_checkpoints(plan.restore)
        for ref in refs:  # before the run writes a config.gin, which may replace their own
            check_configured(ref, plan.model)
            check_own_tokenizer(ref, plan.input_vocabulary, plan.output_vocabulary)
        return iter(refs)
    return wait_for_checkpoints(plan.restore, until, seconds)


class EvaluatedCheckpoints:
    """The evaluations done into a folder, kept in its inference_eval/evaluated.json.

    A checkpoint counts as evaluated only with the same model, examples and decoding.
    """

    def __init__(self, plan: EvalRun):
        # A training run's folder has an evaluated.json of its own.
        self.path = Path(plan.output_dir) / FOLDER / RECORD
        # Earlier versions wrote it into the folder itself; the next evaluation moves it.
        self._earlier = Path(plan.output_dir) / RECORD
        settings = {**plan.decisive(), "evaluator": dataclasses.asdict(plan.evaluator)}
        # Sort keys, so that equal settings give equal texts.
        self._settings = json.dumps(settings, sort_keys=True)

    def has(self, ref: CheckpointRef, its_identity: str | None) -> bool:
        """Whether a checkpoint has been evaluated with these settings; reports a replaced one.

        A checkpoint that is gone, or that has no identity in the record, is matched by its path.
        """
        done, path = self._read().get(self._settings, {}), own_path(ref)
        if path not in done:
            return False
        if its_identity is None or done[path] in (its_identity, None):
            return True
        say(f"note: {ref.path} has changed since it was evaluated; evaluated again")
        return False

    def add(self, ref: CheckpointRef, its_identity: str | None) -> None:
        """Records a checkpoint as evaluated."""
        done = self._read()
        done.setdefault(self._settings, {})[own_path(ref)] = its_identity
        rows = [
            {"settings": json.loads(key), "checkpoints": [*known], "identities": known}
            for key, known in done.items()
        ]
        write_with_checksum(self.path, {"evaluated": rows})
        if read_with_checksum(self._earlier) is not None:
            self._earlier.unlink()

    def _read(self) -> dict[str, dict[str, str | None]]:
        """Settings -> path -> identity, None in a record of a version that knew paths alone."""
        # Treat a damaged record as missing: its checkpoints are evaluated again.
        record = read_with_checksum(self.path) or read_with_checksum(self._earlier)
        rows = (record or {"evaluated": []})["evaluated"]
        return {
            json.dumps(row["settings"], sort_keys=True): {
                path: row.get("identities", {}).get(path) for path in row["checkpoints"]
            }
            for row in rows
        }
