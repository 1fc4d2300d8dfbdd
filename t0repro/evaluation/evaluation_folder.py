"""An evaluation's results folder: which tasks are finished, and whose results it holds.

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
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from t0repro.config.model import DType
from t0repro.converters.finding import checkpoint_at, list_checkpoints
from t0repro.errors import UserError
from t0repro.evaluation import records
from t0repro.evaluation.code_version import generation_digest, rendering_digest, scoring_digest
from t0repro.evaluation.opened import Checkpoint
from t0repro.evaluation.task_output import TaskResult
from t0repro.storage import write_atomically
from t0repro.words import remove_passwords


@dataclasses.dataclass(frozen=True)
class EvaluationSettings:
    """What to evaluate and how.

    Attributes:
      split: the split of every task.
      limit: maximum number of inputs sampled from a task's split; None takes all.
      lengths: maximum tokens per feature; T0's are 1,024 and 256. Decoded outputs may be as long
        as targets.
      activation: dtype of the activations.
      tokens_per_batch: see engine.Engine.
      use_cached: read tasks from SeqIO's cache.
      calibrated: also score every choice given a content-free input.
      modes: some of selection.MODES: "rank" ranks answer choices, "generate" decodes.
      skip_missing: leave out tasks whose rows are not on this machine.
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
    skip_missing: bool = False


# The keys of a claim that say what is evaluated; the others are settings.
_OF_THE_CHECKPOINT = frozenset({"path", "step", "digest", "model"})


class EvaluationFolder:
    """The results of one checkpoint under one set of settings.

    Args:
      path: the `<split>_eval` folder.
      checkpoint: the checkpoint that is evaluated.
      settings: the settings of the evaluation.
      generated: names of the tasks to decode; the others are ranked.
      command: part of the key, because commands choose examples differently: under a limit,
        score_eval takes the first ones and rank_eval samples.
    """

    def __init__(
        self,
        path: Path,
        checkpoint: Checkpoint,
        settings: EvaluationSettings,
        generated: Collection[str] = (),
        command: str = "rank_eval",
    ):
        self.path, self._checkpoint, self._command = path, checkpoint, command
        self._settings, self._generated = settings, frozenset(generated)

    def key(self, name: str) -> dict[str, Any]:
        """Everything that determines a task's results, as JSON values."""
        from t0repro.evaluation.reading import data_origin, vocabulary_digest
        from t0repro.tasks.registry import prompted_tasks

        settings, prompt = self._settings, prompted_tasks().get(name)
        generates = name in self._generated
        # Decoding and scoring run different modules; a change of one keeps the other's results
        # valid.
        code = generation_digest() if generates else scoring_digest()
        return {
            "command": self._command,
            "checkpoint": self._checkpoint.digest,
            "model": self._checkpoint.computation(),
            "step": self._checkpoint.step,
            "code": code,
            "rendering": rendering_digest(),
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
        from t0repro.evaluation.reading import find_dropped_rows

        examples = details.get("available") or result.statistics["inputs"]
        record = {
            "key": self.key(result.task),
            "mode": "generate" if result.task in self._generated else "rank",
            "metrics": result.metrics,
            "files": result.files,
            # Examples are numbered without these, so the same row may have two numbers.
            "dropped_rows": find_dropped_rows(result.task, self._settings.split, examples),
            **result.statistics,
            **details,
        }
        records.write_record(self.path, record)


def journal_folder(out: Path, checkpoint: Checkpoint) -> Path:
    """The folder of the scores' journal, named by what determines them besides a pair's tokens."""
    activation, model = checkpoint.model.dtypes.activation, json.dumps(checkpoint.computation())
    text = f"{checkpoint.digest} {model} {activation} {scoring_digest()}"
    return out / "scores" / hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def claim_step(
    out: Path,
    checkpoint: Checkpoint,
    mixture: str,
    settings: EvaluationSettings,
    *,
    add_step: bool = False,
    force: bool = False,
) -> None:
    """Claims a step's results in a folder for this evaluation.

    Args:
      out: the results folder.
      checkpoint: the checkpoint to evaluate.
      mixture: the mixture to evaluate.
      settings: the settings of the evaluation.
      add_step: whether the folder may hold the same evaluation of other steps.
      force: whether to remove another evaluation's results.

    Raises:
      UserError: if the folder holds another evaluation, which would be overwritten; it names what
        differs.
    """
    claim = {
        "step": checkpoint.step,
        "path": remove_passwords(checkpoint.path),
        "digest": checkpoint.digest,
        "model": checkpoint.computation(),
        **_decisive(mixture, settings),
    }
    if _finds_results_to_remove(out, claim, add_step, force):
        _remove_results(out)
    write_atomically(records.claim_path(out, checkpoint.step), json.dumps(claim))


def check_settings(
    out: Path,
    mixture: str,
    settings: EvaluationSettings,
    *,
    add_step: bool = False,
    force: bool = False,
) -> None:
    """The part of `claim_step`'s check that needs no checkpoint, for a dry run: removes nothing."""
    _finds_results_to_remove(out, _decisive(mixture, settings), add_step, force)


def _decisive(mixture: str, settings: EvaluationSettings) -> dict[str, Any]:
    """What makes two evaluations of one checkpoint different, in JSON's types."""
    decisive = {"mixture": mixture, **dataclasses.asdict(settings)}
    # The first changes no score, and the second adds rows that came since.
    del decisive["tokens_per_batch"], decisive["skip_missing"]
    # Not asdict's copy, which keeps the type of the mapping.
    return json.loads(json.dumps({**decisive, "lengths": dict(settings.lengths)}))


def _finds_results_to_remove(
    out: Path, claim: Mapping[str, Any], add_step: bool, force: bool
) -> bool:
    """Whether a folder has another evaluation's results, which are refused unless `force`."""
    claims = [recorded for path in _claims(out) if (recorded := _read_claim(path)) is not None]
    # Settings may change until a task is finished, which loses nothing: scores stay in the journal.
    # The checkpoint may not, since whoever claimed the folder for it will continue.
    finished = any(out.glob(f"*_eval/{records.RESULTS}/*.json"))
    compared = (
        claim if finished else {name: claim[name] for name in _OF_THE_CHECKPOINT & claim.keys()}
    )
    differences = next(
        filter(None, (_differences(each, compared, add_step) for each in claims)), []
    )
    if not claims and (list_checkpoints(out) or checkpoint_at(str(out))):
        raise UserError(
            "This folder holds checkpoints.",
            where=str(out),
            fix=f"Choose another --out, such as {out / 'rank_eval'}.",
        )
    if not claims and (unclaimed := _find_unclaimed(out)):
        differences = [f"it does not say what its {unclaimed} is of"]
    if differences and not force:
        # Of another run, a step beside these would show as one of its own.
        paths = (str(each.get("path")).rstrip("/") for each in (*claims, claim))
        runs = {re.sub(r"/(checkpoint_|model[.]ckpt-)\d+$", "", path) for path in paths}
        differ = any(_differences(each, compared, True) for each in claims)
        only_step = bool(claims) and len(runs) == 1 and not differ
        raise UserError(
            f"This folder holds another evaluation: {'; '.join(differences)}.",
            where=str(out),
            fix="Choose another --out; --force removes what is there"
            + (", --add_step keeps the other steps." if only_step else "."),
        )
    return bool(differences)


def _claims(out: Path) -> list[Path]:
    return sorted((out / "scores").glob("step_*.json"))


def _read_claim(path: Path) -> dict[str, Any] | None:
    """A claim; None if it is damaged."""
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def _differences(other: Mapping[str, Any], claim: Mapping[str, Any], add_step: bool) -> list[str]:
    """In words, what differs between another claim and this one, which may name no checkpoint."""
    if not claim.keys() <= other.keys():
        return ["it was written by another version of t0repro"]
    differences = []
    if "step" in claim and claim["step"] != other["step"]:
        # Another step has another checkpoint, so these are not compared.
        if not add_step:
            before, now = (f"step {each['step']} ({each['path']})" for each in (other, claim))
            differences.append(f"{before}, not {now}")
    elif "digest" in claim and claim["digest"] != other["digest"]:
        differences.append(
            f"results of another checkpoint of step {other['step']}, {other['path']} (parameters"
            f" {other['digest']}), not {claim['path']} ({claim['digest']})"
        )
    elif "model" in claim and claim["model"] != other["model"]:
        before, now = other["model"], claim["model"]
        name = next(name for name in sorted(now | before) if before.get(name) != now.get(name))
        differences.append(
            f"the same parameters in another model, whose {name} was {before.get(name)!r}, and the"
            f" files of {claim['path']} say {now.get(name)!r}"
        )
    return differences + [
        f"{name} {_format_value(other[name])}, not {_format_value(claim[name])}"
        for name in sorted(claim.keys() - _OF_THE_CHECKPOINT)
        if other[name] != claim[name]
    ]


def _format_value(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return "none" if value is None else str(value)


def _find_unclaimed(out: Path) -> str | None:
    """The name of another program's evaluation in the folder, if there is one."""
    files = (*out.glob("*_eval*/*_targets"), *out.glob("report.*"))
    return next((str(path.relative_to(out).parts[0]) for path in sorted(files)), None)


def _remove_results(out: Path) -> None:
    """Removes the tasks that rank-eval finished in a folder, their records first, and the claims.

    The journal of scores stays: its entries are found by what they were computed with.
    """
    for path in out.glob(f"*_eval/{records.RESULTS}/*.json"):
        record = records.read_with_checksum(path)
        path.unlink()
        for name in record["files"] if record else ():
            if Path(name).name == name:
                (path.parents[1] / name).unlink(missing_ok=True)
    for path in _claims(out):
        path.unlink()
