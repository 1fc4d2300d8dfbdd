"""An evaluation's results folder: finished tasks, the code that made them, and new records."""

from __future__ import annotations

import ast
import dataclasses
import functools
import hashlib
import importlib.util
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from t0repro.compat import installed_version
from t0repro.config.run_config import DType
from t0repro.errors import UserError
from t0repro.evaluation import outputs
from t0repro.evaluation.opened import Checkpoint
from t0repro.evaluation.task_output import TaskResult
from t0repro.files import write_atomically
from t0repro.words import without_passwords

_ROOT = "t0repro"

# A pair's score: from tokens to log-likelihood, and how the journal stores it.
_SCORING = (
    "t0repro.evaluation.engine",
    "t0repro.evaluation.pairs",
)
# A decoded text: from tokens to text.
_GENERATION = ("t0repro.evaluation.generation",)
# An example: from rows to tokens. All of t0repro.tasks is included, because only the command's run
# shows which module registers a task.
_RENDERING = ("t0repro.evaluation.reading",)

# Packages whose versions decide what the modules compute.
_COMPUTING_PACKAGES = ("jax", "jaxlib", "flax", "numpy")
_RENDERING_PACKAGES = ("promptsource", "jinja2", "seqio", "t5", "sentencepiece")

ReadSource = Callable[[str], str | None]


@functools.cache
def scoring_digest() -> str:
    """Digest, 16 hex digits, of the code of the model and the scoring engine."""
    return code_digest(_SCORING, _COMPUTING_PACKAGES)


@functools.cache
def generation_digest() -> str:
    """Digest, 16 hex digits, of the code of the model and of decoding."""
    return code_digest(_GENERATION, _COMPUTING_PACKAGES)


@functools.cache
def rendering_digest() -> str:
    """Digest, 16 hex digits, of the code that turns rows into examples."""
    spec = importlib.util.find_spec("t0repro.tasks")
    assert spec is not None and spec.origin is not None
    tasks = Path(spec.origin).parent
    modules = [path.relative_to(tasks).with_suffix("") for path in tasks.rglob("*.py")]
    names = [".".join(("t0repro.tasks", *module.parts)) for module in modules]
    return code_digest([*_RENDERING, *names], _RENDERING_PACKAGES)


def code_digest(
    modules: Iterable[str], packages: Iterable[str], read: ReadSource | None = None
) -> str:
    """Digest, 16 hex digits, of modules, all their imports from t0repro, and package versions.

    Args:
      modules: full names of modules of t0repro.
      packages: distribution names; a missing one has the version "none".
      read: returns a module's source by its full name, or None if there is no such module;
        defaults to reading the installed source.
    """
    digest = hashlib.blake2b(digest_size=8)
    for name, source in sorted(imported_modules(modules, read or read_source).items()):
        digest.update(f"{name} {hashlib.blake2b(source.encode()).hexdigest()}\n".encode())
    for name in packages:
        digest.update(f"{name} {installed_version(name) or 'none'}\n".encode())
    return digest.hexdigest()


def imported_modules(modules: Iterable[str], read: ReadSource) -> dict[str, str]:
    """Full name -> source, for the modules and every module of t0repro that they import."""
    found: dict[str, str] = {}
    waiting = list(modules)
    while waiting:
        name = waiting.pop()
        source = None if name in found else read(name)
        if source is not None:
            found[name] = source
            waiting += _imports(source)
            # Importing a module also runs its package's __init__.
            waiting += [name.rpartition(".")[0]] if name != _ROOT else []
    return found


def _imports(source: str) -> Iterator[str]:
    """Yields names that a source imports from t0repro: modules, and names defined in modules."""
    for node in _executed(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            # `from package import module` and `from module import name` look alike.
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        else:
            continue
        yield from (name for name in names if name.split(".")[0] == _ROOT)


def _executed(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes except those under `if TYPE_CHECKING`."""
    for node in ast.iter_child_nodes(tree):
        if not (isinstance(node, ast.If) and _named(node.test) == "TYPE_CHECKING"):
            yield node
            yield from _executed(node)


def _named(node: ast.expr) -> str | None:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", None)


@functools.cache
def read_source(name: str) -> str | None:
    """Source of an installed module, without importing it; None if there is no such module."""
    parts = name.split(".")
    # Locate the folder by the first two parts: t0repro.tasks may lie outside t0repro's own.
    spec = importlib.util.find_spec(".".join(parts[:2]))
    if spec is None or spec.origin is None:
        return None
    if not spec.submodule_search_locations:
        return Path(spec.origin).read_text(encoding="utf-8") if len(parts) == 2 else None
    place = Path(spec.origin).parent.joinpath(*parts[2:])
    for path in (place / "__init__.py", place.with_suffix(".py")):
        if path.is_file():
            return path.read_text(encoding="utf-8")
    return None


# ---- The results folder of an evaluation: which tasks are finished, and records of new ones ------

# <out>/<split>_eval/          the tasks' files (see task_output), provenance.json,
#                              operative_config.gin
# <out>/<split>_eval/results/  a record of each finished task
# <out>/scores/<key>/          the journal of scored pairs
# <out>/scores/step_<n>.json   which checkpoint the results of step n belong to


@dataclasses.dataclass(frozen=True)
class EvaluationSettings:
    """What to evaluate and how.

    Attributes:
      split: the split of every task.
      limit: maximum number of inputs sampled from a task's split; None takes all.
      lengths: maximum tokens per feature; T0's are 1,024 and 256. Decoded outputs may be as long
        as targets.
      activation: dtype of the activations.
      tokens_per_batch: see grouping.make_batching; defaults to a size for the device.
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
        from t0repro.tasks.task import prompted_tasks

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
            "prompt": outputs.digest_of_texts([prompt.prompt if prompt else ""]),
            "vocabulary": vocabulary_digest(name),
            "data": data_origin(name, settings.split, settings.use_cached),
            "split": settings.split,
            "limit": settings.limit,
            "lengths": dict(settings.lengths),
            "calibrated": settings.calibrated and not generates,
        }

    def finished(self, names: Sequence[str]) -> tuple[str, ...]:
        """The tasks whose record has the current key and whose files are intact."""
        found = outputs.read_records(self.path, self._checkpoint.step)
        return tuple(
            name
            for name in names
            if outputs.is_finished(self.path, self.key(name), found.get(name))
        )

    def record(self, result: TaskResult, details: Mapping[str, Any]) -> None:
        """Writes a task's record, which marks it as finished."""
        from t0repro.evaluation.reading import dropped_rows

        examples = details.get("available") or result.statistics["inputs"]
        record = {
            "key": self.key(result.task),
            "mode": "generate" if result.task in self._generated else "rank",
            "metrics": result.metrics,
            "files": result.files,
            # Examples are numbered without these, so the same row may have two numbers.
            "dropped_rows": dropped_rows(result.task, self._settings.split, examples),
            **result.statistics,
            **details,
        }
        outputs.write_record(self.path, record)


def scores_key(checkpoint: Checkpoint) -> str:
    """Hash of what determines a pair's score besides its tokens; names the journal's folder."""
    activation, model = checkpoint.model.dtypes.activation, json.dumps(checkpoint.computation())
    text = f"{checkpoint.digest} {model} {activation} {scoring_digest()}"
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


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
        "path": without_passwords(checkpoint.path),
        "digest": checkpoint.digest,
        "model": checkpoint.computation(),
        **_decisive(mixture, settings),
    }
    _check_claims(out, claim, add_step, force)
    write_atomically(out / "scores" / f"step_{checkpoint.step}.json", json.dumps(claim))


def check_settings(
    out: Path,
    mixture: str,
    settings: EvaluationSettings,
    *,
    add_step: bool = False,
    force: bool = False,
) -> None:
    """The part of `claim_step`'s check that needs no checkpoint, for a dry run."""
    _check_claims(out, _decisive(mixture, settings), add_step, force)


def _decisive(mixture: str, settings: EvaluationSettings) -> dict[str, Any]:
    """What makes two evaluations of one checkpoint different, in JSON's types."""
    found = {"mixture": mixture, **dataclasses.asdict(settings)}
    # The first changes scores by rounding alone, and the second adds rows that came since.
    del found["tokens_per_batch"], found["at_hand"]
    # Not asdict's copy, which keeps the type of the mapping.
    return json.loads(json.dumps({**found, "lengths": dict(settings.lengths)}))


def _check_claims(out: Path, claim: Mapping[str, Any], add_step: bool, force: bool) -> None:
    """Refuses a folder with another evaluation's results, or removes these if `force`."""
    claims = [read for path in _claims(out) if (read := _read_claim(path)) is not None]
    found = [(other, _differences(other, claim, add_step)) for other in claims]
    differences = next((each for _, each in found if each), [])
    if not claims and (there := _unclaimed(out)):
        differences = [f"it does not say what its {there} is of"]
    # Nothing is lost where no task has been finished.
    if not differences or (claims and not any(out.glob(f"*_eval/{outputs.RESULTS}/*.json"))):
        return
    if not force:
        raise UserError(
            f"This folder holds another evaluation: {'; '.join(differences)}.",
            where=str(out),
            fix="Choose another --out; --force removes what is there"
            + (", --add_step keeps the other steps." if "step" in claim else "."),
        )
    _remove_results(out)


def _claims(out: Path) -> list[Path]:
    return sorted((out / "scores").glob("step_*.json"))


def _read_claim(path: Path) -> dict[str, Any] | None:
    """A claim with its step; None if it is damaged."""
    try:
        claim = json.loads(path.read_text(encoding="utf-8"))
        # Earlier versions recorded the step in the file's name alone.
        return {"step": int(path.stem.removeprefix("step_")), **claim}
    except (OSError, ValueError, TypeError):
        return None


def _differences(other: Mapping[str, Any], claim: Mapping[str, Any], add_step: bool) -> list[str]:
    """In words, what differs between another claim and this one; earlier versions recorded less."""
    step, path = other["step"], claim.get("path")
    found = []
    if claim.get("step", step) != step:
        # Another step has another checkpoint, so these are not compared.
        found += [] if add_step else [f"step {step}, not {claim['step']}"]
    elif other.get("digest") != claim.get("digest", other.get("digest")):
        found.append(
            f"results of another checkpoint of step {step}, {other.get('path')} (parameters"
            f" {other.get('digest')}), not {path} ({claim['digest']})"
        )
    else:
        model = claim.get("model", {})
        theirs = other.get("model", model)
        changed = [name for name in model if theirs.get(name) != model[name]]
        found += [
            f"the same parameters in another model, whose {name} was {theirs.get(name)!r}, and the"
            f" files of {path} say {model[name]!r}"
            for name in changed[:1]
        ]
    settings = sorted(claim.keys() & other.keys() - {"path", "step", "digest", "model"})
    return found + [
        f"{name} {_shown(other[name])}, not {_shown(claim[name])}"
        for name in settings
        if other[name] != claim[name]
    ]


def _shown(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _unclaimed(out: Path) -> str | None:
    """The name of another program's evaluation in the folder, if there is one."""
    files = (*out.glob("*_eval*/*_targets"), *out.glob("report.json"))
    return next((str(path.relative_to(out).parts[0]) for path in sorted(files)), None)


def _remove_results(out: Path) -> None:
    """Removes the tasks that rank-eval finished in a folder, their records first, and the claims.

    The journal of scores stays: its entries are found by what they were computed with.
    """
    for path in out.glob(f"*_eval/{outputs.RESULTS}/*.json"):
        record = outputs.read_with_checksum(path)
        path.unlink()
        for name in record["files"] if record else ():
            if Path(name).name == name:
                (path.parents[1] / name).unlink(missing_ok=True)
    for path in _claims(out):
        path.unlink()
