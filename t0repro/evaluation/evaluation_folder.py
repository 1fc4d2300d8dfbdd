"""The results folder of an evaluation: which tasks are finished, and records of new ones.

<out>/<split>_eval/          the tasks' files (see task_output), provenance.json,
                             operative_config.gin
<out>/<split>_eval/results/  a record of each finished task
<out>/scores/<key>/          the journal of scored pairs
<out>/scores/step_<n>.json   which checkpoint the results of step n belong to
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from t0repro.config.run_config import DType
from t0repro.errors import UserError
from t0repro.evaluation import code_version, records
from t0repro.evaluation.opened import Checkpoint
from t0repro.evaluation.task_output import TaskResult
from t0repro.files import write_atomically
from t0repro.redaction import without_passwords


@dataclasses.dataclass(frozen=True)
class Settings:
    """What to evaluate and how.

    Attributes:
      split: the split of every task.
      limit: maximum number of inputs sampled from a task's split; None takes all.
      lengths: maximum tokens per feature; T0's are 1,024 and 256. Decoded outputs may be as long
        as targets.
      activation: dtype of the activations.
      tokens_per_batch: see grouping.make_plan; defaults to a size for the device.
      use_cached: read tasks from SeqIO's cache.
      calibrated: also score every choice given a content-free input.
      modes: some of selection.MODES: "rank" ranks answer choices, "generate" decodes.
      at_hand: leave out tasks whose rows are not on this machine.
    """

    split: str = "validation"
    limit: int | None = None
    lengths: Mapping[str, int] = dataclasses.field(
        default_factory=lambda: {"inputs": 1024, "targets": 256}
    )
    activation: DType = "float32"
    tokens_per_batch: int | None = None
    use_cached: bool = False
    calibrated: bool = False
    modes: tuple[str, ...] = ("rank",)
    at_hand: bool = False


class EvaluationFolder:
    """The results of one checkpoint under one set of settings.

    Args:
      path: the `<split>_eval` folder.
      checkpoint: the checkpoint that is evaluated.
      settings: the settings of the evaluation.
      generated: names of the tasks that are decoded; the others are ranked.
      command: part of the key, because commands choose examples differently: under a limit,
        score_eval takes the first ones and rank_eval samples.
    """

    def __init__(
        self,
        path: Path,
        checkpoint: Checkpoint,
        settings: Settings,
        generated: Collection[str] = (),
        command: str = "rank_eval",
    ):
        self.path, self._checkpoint, self._command = path, checkpoint, command
        self._settings, self._generated = settings, frozenset(generated)

    def key(self, name: str) -> dict[str, Any]:
        """Everything that a task's results depend on, as JSON values."""
        from t0repro.evaluation.reading import data_origin, vocabulary_digest
        from t0repro.tasks.task import prompted_tasks

        settings, prompt = self._settings, prompted_tasks().get(name)
        generates = name in self._generated
        # Decoding and scoring depend on different modules; a change of one leaves the
        # other's results.
        code = code_version.generation_digest() if generates else code_version.scoring_digest()
        return {
            "command": self._command,
            "checkpoint": self._checkpoint.digest,
            "step": self._checkpoint.step,
            "code": code,
            "rendering": code_version.rendering_digest(),
            "activation": settings.activation,
            "task": name,
            "prompt": records.digest_of_texts([prompt.prompt if prompt else ""]),
            "vocabulary": vocabulary_digest(name),
            "data": data_origin(name, settings.split, settings.use_cached),
            "split": settings.split,
            "limit": settings.limit,
            "lengths": dict(settings.lengths),
            "calibrated": settings.calibrated and not generates,
        }

    def finished(self, names: Sequence[str]) -> tuple[str, ...]:
        """The tasks whose record has the current key and whose files are intact."""
        found = records.read_records(self.path, self._checkpoint.step)
        return tuple(
            name
            for name in names
            if records.is_finished(self.path, self.key(name), found.get(name))
        )

    def record(self, result: TaskResult, details: Mapping[str, Any]) -> None:
        """Writes a task's record, which marks it as finished."""
        record = {
            "key": self.key(result.task),
            "mode": "generate" if result.task in self._generated else "rank",
            "metrics": result.metrics,
            "files": result.files,
            **result.statistics,
            **details,
        }
        records.write_record(self.path, record)


def scores_key(checkpoint: Checkpoint) -> str:
    """Hash of what a pair's score depends on besides its tokens; the journal's folder name."""
    activation = checkpoint.model.dtypes.activation
    text = f"{checkpoint.digest} {activation} {code_version.scoring_digest()}"
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def claim_step(out: Path, checkpoint: Checkpoint) -> None:
    """Claims a step's results in a folder for this checkpoint.

    Raises:
      UserError: if they belong to another checkpoint, whose results would be mixed with this one's.
    """
    path = out / "scores" / f"step_{checkpoint.step}.json"
    try:
        holder = json.loads(path.read_text(encoding="utf-8"))
        other = (holder["path"], holder["digest"])
    except (OSError, ValueError, KeyError, TypeError):  # none yet, or damaged
        claim = {"path": without_passwords(checkpoint.path), "digest": checkpoint.digest}
        write_atomically(path, json.dumps(claim))
        return
    if other[1] != checkpoint.digest:
        raise UserError(
            f"This folder holds results of another checkpoint of step {checkpoint.step}:"
            f" {other[0]} (parameters {other[1]}); {checkpoint.path} has {checkpoint.digest}.",
            where=str(out),
            fix="Choose another --out, or remove the folder to evaluate again from scratch.",
        )
