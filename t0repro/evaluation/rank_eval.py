"""Rank evaluation of one checkpoint on a whole mixture: what `t0repro rank-eval` does.

    <out>/<split>_eval/          Mesh TensorFlow's files (see score_eval), provenance.json
    <out>/<split>_eval/results/  a record of each finished task: its key, metrics, tokens, seconds
    <out>/scores/<key>/          the journal of scored pairs
    <out>/metrics.jsonl, events  the metrics, under T5's names `eval/<task>/accuracy`

A finished task whose key (checkpoint, task, prompt text, split, limit, lengths, activations, code)
is that of its record is not read again; a pair that the journal has is not scored again.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from t0repro.config.run_config import DType, DTypePolicy, ModelConfig
from t0repro.data.batches import EvalTask
from t0repro.errors import UserError
from t0repro.evaluation import score_eval
from t0repro.evaluation.grouping import Plan, make_plan
from t0repro.evaluation.journal import Journal
from t0repro.evaluation.pair_progress import pair_progress
from t0repro.evaluation.pairs import Pairs, distinct_pairs
from t0repro.evaluation.records import RESULTS, read_records
from t0repro.evaluation.summary import PromptInfo
from t0repro.files import write_atomically

CONTENT_FREE = "N/A"
"""The input of contextual calibration (Zhao et al. 2021, arXiv 2102.09690)."""
_SECONDS_BETWEEN_RECORDS = 2.0

# What a score depends on beside the checkpoint and the rendered text.
_CODE = ("model/layers.py", "model/t5.py", "evaluation/engine.py", "evaluation/pairs.py")


@dataclasses.dataclass(frozen=True)
class Settings:
    """What is evaluated.

    Attributes:
      split: of every task.
      limit: the most inputs of a task; None takes all.
      lengths: tokens per feature; T0's are 1,024 and 256.
      activation: type of the activations.
      tokens_per_batch: see grouping.make_plan; None is what suits the device.
      use_cached: read cached tasks.
      calibrated: also score every choice after a content-free input.
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


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A checkpoint in memory.

    Attributes:
      digest: of all parameters' names, shapes and values.
      params: on the device.
      model: a t0repro.model.t5.T5.
    """

    path: str
    step: int
    digest: str
    params: dict
    model: Any


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What an evaluation did.

    Attributes:
      folder: the `<split>_eval` folder.
      tasks: all of them; finished those that an earlier run had finished.
      empty: tasks whose split has no example.
      pairs: (input, choice) pairs of the tasks that were read.
      distinct: distinct ones among them; scored those that the journal did not have.
      padding: share of padding in what was scored; shapes compiled.
      seconds: of scoring.
    """

    folder: Path
    tasks: tuple[str, ...]
    finished: tuple[str, ...]
    empty: tuple[str, ...]
    pairs: int
    distinct: int
    scored: int
    padding: float
    shapes: int
    seconds: float


def open_checkpoint(path: str, step: int | None, activation: DType) -> Checkpoint:
    """Reads a checkpoint of any format and tells the model from its parameters.

    Raises:
      UserError: as converters.sources.load_any does.
    """
    from t0repro.converters import sources
    from t0repro.converters.family import recognise
    from t0repro.model.t5 import T5
    from t0repro.training.train_state import parameters_from_flat_tree

    tree = sources.load_any(path, step, slots=False)
    family = recognise({name: value.shape for name, value in tree.items()})
    config = ModelConfig(
        num_encoder_layers=family.num_encoder_layers,
        num_decoder_layers=family.num_decoder_layers,
        d_model=family.d_model,
        d_ff=family.d_ff,
        num_heads=family.num_heads,
        d_kv=family.d_kv,
        vocab_size=family.vocab_size,
        activations=("gelu", "linear") if family.gated else ("relu",),
        logits_from_embedding=family.tied,
        relative_attention_num_buckets=family.relative_attention_num_buckets,
        dropout_rate=0.0,
        label_smoothing=0.0,
        z_loss=0.0,
        loss_denominator=None,
    )
    return Checkpoint(
        path=path,
        step=int(tree.get("state/step", 0)),
        digest=_digest_of(tree),
        params=parameters_from_flat_tree(tree, where=path),
        model=T5(config, DTypePolicy("float32", "float32", activation)),
    )


def _digest_of(tree: Mapping[str, np.ndarray]) -> str:
    """32 hexadecimal digits that stand for the parameters."""
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(tree):
        if name.startswith("target/"):
            digest.update(f"{name} {tree[name].dtype} {tree[name].shape}".encode())
            digest.update(np.ascontiguousarray(tree[name]).view(np.uint8).data)
    return digest.hexdigest()


def code_digest() -> str:
    """16 hexadecimal digits that stand for the code that a score depends on."""
    package = Path(__file__).parent.parent
    digest = hashlib.blake2b(digest_size=8)
    for name in _CODE:
        digest.update((package / name).read_bytes())
    return digest.hexdigest()


def rank_eval(
    checkpoint: Checkpoint,
    mixture: str,
    out: str | os.PathLike[str],
    prompts: Mapping[str, PromptInfo],
    settings: Settings,
    say: Callable[[str], None] = lambda text: print(text, file=sys.stderr, flush=True),
) -> Outcome:
    """Scores what is not scored yet and writes every task's files.

    Args:
      checkpoint: of `open_checkpoint`.
      mixture: a registered mixture or task.
      out: the folder of the results.
      prompts: task name -> its prompt.
      settings: what to evaluate.
      say: is told what a person should know while it runs.

    Raises:
      UserError: for a task without answer choices, an empty split, a checkpoint of another
        vocabulary, or a NaN score (naming task, example and step).
    """
    from t0repro.evaluation.rank_tasks import check_vocabulary, ranked_tasks, read_task
    from t0repro.training.metrics import MetricsManager, event_writer

    names = tuple(ranked_tasks(mixture, settings.split))
    rows = checkpoint.model.config.vocab_size
    vocabulary = check_vocabulary(names, rows, checkpoint.path)
    folder = Path(out) / f"{settings.split}_eval"
    keys = {name: _task_key(name, checkpoint, prompts.get(name), settings) for name in names}
    finished = tuple(name for name in names if _is_finished(folder, name, checkpoint, keys[name]))
    if finished:
        say(f"{len(finished)} of {len(names)} tasks are finished already.")
    todo = [name for name in names if name not in finished]
    tasks = []
    for count, name in enumerate(todo, 1):
        tasks.append(
            read_task(name, settings.split, settings.lengths, settings.limit, settings.use_cached)
        )
        if count % 10 == 0 or count == len(todo):
            say(f"read {count} of {len(todo)} tasks")
    empty = tuple(task.name for task in tasks if not task.examples)
    tasks = [task for task in tasks if task.examples]
    if not tasks and not finished:
        raise UserError(
            f"The split {settings.split!r} of {mixture!r} has no examples.",
            fix="See whether the data is there, and whether the templates drop every row.",
        )
    journal = Journal(Path(out) / "scores" / _scores_key(checkpoint) / "pairs.bin")
    run = _Run(checkpoint, tasks, settings, vocabulary, journal)
    metrics = MetricsManager(out, writers=[event_writer(out)])
    try:
        seconds = run.score(
            say, lambda task, result: _record(folder, keys, run, metrics, task, result)
        )
    finally:
        journal.close()
        metrics.close()
    _write_facts(folder, names, checkpoint)
    return Outcome(
        folder=folder,
        tasks=names,
        finished=finished,
        empty=empty,
        pairs=len(run.pairs.index),
        distinct=len(run.pairs),
        scored=run.scored,
        padding=run.plan.padding,
        shapes=len(run.plan.shapes),
        seconds=seconds,
    )


class _Run:
    """Scores the pairs of tasks and hands out each task as soon as all of its pairs are known."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        tasks: Sequence[EvalTask],
        settings: Settings,
        vocabulary: Any,
        journal: Journal,
    ):
        self.checkpoint, self.tasks, self.settings = checkpoint, tasks, settings
        self.journal = journal
        content_free = np.array(vocabulary.encode(CONTENT_FREE), np.int32)
        examples = [example for task in tasks for example in task.examples]
        if settings.calibrated:
            examples += [{**example, "inputs": content_free} for example in examples]
        self.pairs: Pairs = distinct_pairs(examples, settings.lengths)
        self.digests = [self.pairs.digest(pair) for pair in range(len(self.pairs))]
        self.scores = np.array([journal.scores.get(d, np.nan) for d in self.digests])
        # Known scores are finite: a NaN stops the run before it is written
        unknown = np.flatnonzero(np.isnan(self.scores))
        self.plan: Plan = make_plan(self.pairs, _tokens(settings), unknown)
        without = [pair for pair in unknown if not len(self.pairs.targets[pair])]
        self.scores[np.array(without, np.int64)] = 0.0
        self.scored = 0
        self.seconds = np.zeros(len(self.pairs))

    def score(
        self, say: Callable[[str], None], done: Callable[[EvalTask, score_eval.TaskResult], None]
    ) -> float:
        """Scores everything; `done` writes a task. Returns the seconds that it took."""
        from t0repro.evaluation.engine import Engine

        total = sum(len(batch.pairs) for batch in self.plan.batches)
        say(
            f"{len(self.pairs.index)} pairs, {len(self.pairs)} distinct, {total} to score;"
            f" {len(self.plan.batches)} batches of {len(self.plan.shapes)} shapes,"
            f" {100 * self.plan.padding:.1f}% padding"
        )
        engine = Engine(self.checkpoint.params, self.checkpoint.model, say)
        started = last = handed_out = time.monotonic()
        waiting = list(self._examples())
        waiting = self._hand_out(waiting, done)
        with pair_progress(total) as advance:
            for found in engine.run(self.pairs, self.plan):
                self._check(found.pairs, found.scores)
                self.journal.add([self.digests[pair] for pair in found.pairs], found.scores)
                self.scores[found.pairs] = found.scores
                self.scored += len(found.pairs)
                now = time.monotonic()
                self.seconds[found.pairs] = (now - last) / len(found.pairs)
                last = now
                advance(len(found.pairs))
                if now - handed_out >= _SECONDS_BETWEEN_RECORDS:
                    waiting, handed_out = self._hand_out(waiting, done), now
        self._hand_out(waiting, done)
        return time.monotonic() - started

    def _examples(self) -> Iterator[tuple[EvalTask, np.ndarray, np.ndarray]]:
        """Each task with its examples' pairs, and those after the content-free input."""
        start, half = 0, len(self.pairs.index) // 2
        for task in self.tasks:
            place = slice(start, start := start + len(task.examples))
            free = np.zeros(0, np.int64)
            if self.settings.calibrated:
                free = self.pairs.index[place.start + half : place.stop + half]
            yield task, self.pairs.index[place], free

    def _hand_out(self, waiting: list, done: Callable) -> list:
        """Writes the tasks whose pairs are all known; returns the others."""
        left = []
        for task, index, free in waiting:
            if np.isnan(self.scores[index]).any() or np.isnan(self.scores[free]).any():
                left.append((task, index, free))
                continue
            scores = self.scores[index].astype(np.float32)
            done(task, score_eval.TaskResult(task.name, self.checkpoint.step, scores, {}))
        return left

    def content_free(self, name: str) -> np.ndarray | None:
        """Scores of a task's choices after the content-free input; None if not asked for."""
        if not self.settings.calibrated:
            return None
        return next(self.scores[free] for task, _, free in self._examples() if task.name == name)

    def seconds_of(self, name: str) -> float:
        """Seconds that a task's pairs took; a pair of several tasks counts for each."""
        index = next(index for task, index, _ in self._examples() if task.name == name)
        return float(self.seconds[np.unique(index)].sum())

    def _check(self, pairs: np.ndarray, scores: np.ndarray) -> None:
        """Stops at a score that is not finite, naming a task and an example that has it."""
        broken = pairs[~np.isfinite(scores)]
        if not broken.size:
            return
        for task, index, free in self._examples():
            for found in (index, free):
                at = np.flatnonzero(np.isin(found, broken))
                if at.size:
                    values = dict(zip(pairs.tolist(), scores.tolist(), strict=True))
                    row = np.zeros(len(task.examples))
                    row[at] = [values[int(pair)] for pair in found[at]]
                    score_eval.check_finite(row, task.name, self.checkpoint.step)


def _tokens(settings: Settings) -> int:
    import jax

    from t0repro.evaluation.engine import TOKENS_PER_BATCH

    return settings.tokens_per_batch or TOKENS_PER_BATCH.get(jax.default_backend(), 4096)


# Records ------------------------------------------------------------------------------------------


def _scores_key(checkpoint: Checkpoint) -> str:
    """What a pair's score depends on beside its tokens, as a folder's name."""
    activation = checkpoint.model.dtypes.activation
    text = f"{checkpoint.digest} {activation} {code_digest()}"
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _task_key(
    name: str, checkpoint: Checkpoint, prompt: PromptInfo | None, settings: Settings
) -> dict[str, Any]:
    return {
        "checkpoint": checkpoint.digest,
        "step": checkpoint.step,
        "code": code_digest(),
        "activation": settings.activation,
        "task": name,
        "prompt": hashlib.blake2b(
            (prompt.prompt if prompt else "").encode(), digest_size=8
        ).hexdigest(),
        "split": settings.split,
        "limit": settings.limit,
        "lengths": dict(settings.lengths),
        "calibrated": settings.calibrated,
    }


def _is_finished(folder: Path, name: str, checkpoint: Checkpoint, key: Mapping[str, Any]) -> bool:
    record = read_records(folder, checkpoint.step).get(name)
    files = (f"{name}_targets", f"{name}_{checkpoint.step}_predictions")
    return (
        record is not None
        and record["key"] == key
        and all((folder / file).is_file() for file in files)
    )


def _record(
    folder: Path,
    keys: Mapping[str, Mapping[str, Any]],
    run: _Run,
    metrics: Any,
    task: EvalTask,
    scored: score_eval.TaskResult,
) -> None:
    """Writes a finished task's files, its metrics and, last, its record."""
    result = score_eval.task_result(task, scored.step, scored.scores, folder)
    values = {f"{task.name}/{name}": value for name, value in result.metrics.items()}
    metrics.write("eval", result.step, values)
    rows = hashlib.blake2b(digest_size=8)
    for example in task.examples:
        rows.update(example["inputs"].tobytes() + b"|" + example["targets"].tobytes())
    idx = np.array([example["idx"] for example in task.examples])
    free = run.content_free(task.name)
    if free is not None:  # in the order of outputs.TaskScores
        free = free[np.lexsort((idx[:, 1], idx[:, 0]))]
    record = {
        "key": keys[task.name],
        "metrics": result.metrics,
        "pairs": len(task.examples),
        "input_tokens": int(sum(len(example["inputs"]) for example in task.examples)),
        "target_tokens": int(sum(len(example["targets"]) for example in task.examples)),
        "longest_input": max(len(example["inputs"]) for example in task.examples),
        "rows": rows.hexdigest(),
        "seconds": run.seconds_of(task.name),
        "content_free": None if free is None else free.tolist(),
    }
    write_atomically(folder / RESULTS / f"{task.name}_{result.step}.json", json.dumps(record))


def _write_facts(folder: Path, names: Sequence[str], checkpoint: Checkpoint) -> None:
    """provenance.json: what only the evaluation knows, for the report."""
    import jax

    from t0repro.evaluation.provenance import EVALUATION_FACTS, package_versions

    records = read_records(folder, checkpoint.step)
    used = [records[name] for name in names if name in records]
    device = jax.devices()[0]
    facts = {
        "checkpoint": checkpoint.path,
        "checkpoint_hash": checkpoint.digest,
        "device": f"{jax.device_count()} x {device.device_kind}, {os.cpu_count()} CPU cores",
        "duration_seconds": sum(record["seconds"] for record in used),
        "versions": package_versions(),
        "templates_hash": _digest_of_texts([record["key"]["prompt"] for record in used]),
        "data_revision": _digest_of_texts([record["rows"] for record in used]),
    }
    write_atomically(folder / EVALUATION_FACTS, json.dumps(facts, indent=1))


def _digest_of_texts(texts: Sequence[str]) -> str:
    return hashlib.blake2b("\n".join(texts).encode(), digest_size=8).hexdigest()
