"""One task's outputs, from any command: its files, its metrics and the details of its record.

For each task and checkpoint step, the evaluation's folder gets one line per example:

    <task>_inputs               the rendered input, newlines replaced by spaces
    <task>_targets              the postprocessed target; for rank classification
                                ((input, choice), is_correct, weight, target length)
    <task>_<step>_predictions   when scoring, the score: natural log, summed over target tokens, EOS
                                included; when generating, the generated text, postprocessed

Source: mesh_tensorflow.transformer.utils, eval_model and save_scores.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from t0repro.errors import UserError
from t0repro.evaluation.judge import Example, Judge
from t0repro.evaluation.task_scores import ScoredPairs
from t0repro.storage import make_folder
from t0repro.storage.disk import name_in_errors


class TruncationCounter:
    """Counts the truncated texts of one task.

    Args:
      features: the task's features by name, `inputs` and `targets`.
      lengths: maximum tokens per feature; None if nothing is cut.
    """

    def __init__(self, features: Mapping[str, Any], lengths: Mapping[str, int] | None):
        self._features, self._lengths = features, lengths
        self._cut: dict[str, int | None] = {"inputs": 0, "targets": 0}
        self._inputs = 0
        self._seen: set[int] = set()

    def add(self, examples: Sequence[Mapping[str, Any]]) -> None:
        """Counts the target of each example, and an input once for all of its choices."""
        for example in examples:
            number = int(example["idx"][0]) if "idx" in example else None
            # Choices of other inputs may come in between, as SeqIO reads a cache of several files.
            if number is None or number not in self._seen:
                self._inputs += 1
                self._count(example, "inputs")
            if number is not None:
                self._seen.add(number)
            self._count(example, "targets")

    def as_record(self) -> dict[str, Any]:
        """Counts of inputs, truncated inputs and truncated targets; None if examples lack text."""
        return {
            "inputs": self._inputs,
            "cut_inputs": self._cut["inputs"],
            "cut_targets": self._cut["targets"],
        }

    def _count(self, example: Mapping[str, Any], name: str) -> None:
        count = self._cut[name]
        if self._lengths is None or count is None:
            return
        # Shorter than the limit: nothing was truncated, so skip tokenizing.
        if np.count_nonzero(example[name]) < self._lengths[name]:
            return
        text = example.get(f"{name}_pretokenized")
        # One unknown text makes the total unknown.
        self._cut[name] = None if text is None else count + self._is_cut(name, text)

    def _is_cut(self, name: str, text: bytes | str) -> bool:
        assert self._lengths is not None
        feature = self._features[name]
        text = text.decode("utf-8") if isinstance(text, bytes) else text
        tokens = len(feature.vocabulary.encode(text)) + bool(feature.add_eos)
        return tokens > self._lengths[name]


def numbers(items: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, float]]:
    """The (name, value) pairs whose value converts to a float; others are left out."""
    for name, value in items:
        try:
            yield name, float(value)
        except (TypeError, ValueError):
            continue


@dataclasses.dataclass(frozen=True)
class TaskResult:
    """One task evaluated at one step.

    Attributes:
      task: the SeqIO task's name.
      step: the checkpoint's step.
      metrics: the task's metrics by name.
      statistics: sizes of the data, for the task's record.
      files: digest of each written file, by name; empty if none was written.
    """

    task: str
    step: int
    metrics: Mapping[str, float]
    statistics: Mapping[str, Any]
    files: Mapping[str, str]


class TaskOutput:
    """Collects a task's examples and their outputs part by part.

    Lines are written to disk at once, so that memory never holds the texts of a whole task; the
    files get their names only when the task is finished.

    Args:
      judge: the task's judge.
      step: the checkpoint's step.
      folder: the folder of the files; None writes none.
      truncation: counts the texts truncated to the lengths.

    Attributes:
      examples: number of examples added so far.
    """

    def __init__(self, judge: Judge, step: int, folder: Path | None, truncation: TruncationCounter):
        self.judge, self.step, self.examples = judge, step, 0
        self._statistics = Statistics(truncation)
        self._pairs = ScoredPairs() if judge.ranks else None
        self._targets: list[Any] = []
        self._predictions: list[Any] = []
        # `zip` in `add` relies on this order.
        names = (f"{judge.task}_targets", f"{judge.task}_inputs", self.predictions_file)
        self._files = [LineFile(folder / name) for name in names] if folder else []

    @property
    def predictions_file(self) -> str:
        """Name of the file of scores or decoded texts."""
        return f"{self.judge.task}_{self.step}_predictions"

    def add(self, examples: Sequence[Example], outputs: Iterable[Any]) -> None:
        """Adds examples with one score or decoded text for each."""
        self.examples += len(examples)
        targets = [self.judge.target(example) for example in examples]
        predictions = [
            self.judge.postprocess(output, example=example)
            for output, example in zip(outputs, examples, strict=True)
        ]
        inputs = map(_input_text, examples)
        for file, lines in zip(self._files, (targets, inputs, predictions), strict=False):
            file.write(lines)
        self._statistics.add(examples)
        if self._pairs is not None:
            self._pairs.add(targets, predictions)
        else:
            self._targets += targets
            self._predictions += predictions

    def finish(self) -> TaskResult:
        """Computes the metrics and renames the files into place."""
        compared = (self._targets, self._predictions)
        if self._pairs is not None:
            compared = self._pairs.as_metric_arguments()
        metrics = self.judge.metrics(*compared)
        files = {file.path.name: file.commit() for file in self._files}
        return TaskResult(self.judge.task, self.step, metrics, self._statistics.as_record(), files)

    def discard(self) -> None:
        """Removes the unfinished files of a task that will not be finished."""
        for file in self._files:
            file.discard()


class Statistics:
    """Sizes of a task's data, and a digest of its tokens."""

    def __init__(self, truncation: TruncationCounter):
        self._truncation = truncation
        self._rows = hashlib.blake2b(digest_size=8)
        self._counts = {"input_tokens": 0, "target_tokens": 0, "longest_input": 0}

    def add(self, examples: Sequence[Example]) -> None:
        """Counts examples; zeros at the end of their tokens are padding."""
        # Depending on the reader, examples may be padded; digest only their tokens.
        for example in examples:
            source, target = (
                np.trim_zeros(np.asarray(example[name], np.int32), "b")
                for name in ("inputs", "targets")
            )
            # The separator keeps apart rows whose concatenated tokens are equal.
            self._rows.update(source.tobytes() + b"|" + target.tobytes())
            self._counts["input_tokens"] += len(source)
            self._counts["target_tokens"] += len(target)
            self._counts["longest_input"] = max(self._counts["longest_input"], len(source))
        self._truncation.add(examples)

    def as_record(self) -> dict[str, Any]:
        """The counts by name."""
        return {**self._counts, "rows": self._rows.hexdigest(), **self._truncation.as_record()}


class LineFile:
    """A text file with one line per value that appears under its name only when complete."""

    def __init__(self, path: Path):
        self.path = path
        # Hidden, so that a reader that lists the folder does not take it for a task's file.
        self._temporary = path.with_name(f".{path.name}.tmp")
        make_folder(path.parent)
        self._file = open(self._temporary, "wb")  # noqa: SIM115 (closed by commit or discard)
        self._digest = hashlib.blake2b(digest_size=8)

    def write(self, values: Iterable[Any]) -> None:
        """Appends lines; a newline within a value becomes a space."""
        with name_in_errors(self.path):
            for value in values:
                line = (str(value).replace("\n", " ") + "\n").encode()
                self._digest.update(line)
                self._file.write(line)

    def commit(self) -> str:
        """Syncs the file and renames it into place; returns its digest, 16 hex digits."""
        with name_in_errors(self.path):
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
        # Rename after the sync: the name never refers to a file that is only partly on disk.
        os.replace(self._temporary, self.path)
        return self._digest.hexdigest()

    def discard(self) -> None:
        """Removes what was written."""
        # On a full disk, closing fails again because it cannot write the buffer.
        with contextlib.suppress(OSError):
            self._file.close()
        with contextlib.suppress(FileNotFoundError):
            self._temporary.unlink()


def _input_text(example: Example) -> str:
    text = example.get("inputs_pretokenized", b"")
    return text.decode("utf-8") if isinstance(text, bytes) else str(text)


@contextlib.contextmanager
def explain_incomplete_inputs(limit: int | None) -> Iterator[None]:
    """Names the binding to change if an input lacks some of its choices, and cannot be ranked.

    Args:
      limit: mesh_eval_dataset_fn.num_eval_examples; None if all examples are evaluated.

    Raises:
      UserError: in place of the errors of t5's rank_classification and of `rank_metrics`.
    """
    try:
        yield
    except (AssertionError, UserError) as error:
        # t5's message is "5 % 2 != 0": pairs, choices of an input.
        choices = re.search(r"^\d+ % (\d+) != 0$|has \d+ choices?, not (\d+)", str(error), re.M)
        if limit is None or choices is None:
            raise
        each = choices[1] or choices[2]
        raise UserError(
            f"{limit} pairs cannot be ranked: each input has {each} choices.",
            where=f"mesh_eval_dataset_fn.num_eval_examples = {limit}",
            fix=f"It counts pairs: bind it to a multiple of {each}, or to -1 for all.",
        ) from error


def check_finite(scores: np.ndarray, task: str, step: int) -> None:
    """Refuses scores that cannot be ranked.

    Raises:
      UserError: naming task, example and step.
    """
    broken = np.flatnonzero(~np.isfinite(scores))
    if broken.size:
        raise UserError(
            f"{task}: the score of example {broken[0]} at step {step} is {scores[broken[0]]}"
            f" ({broken.size} of {scores.size} are NaN or Inf).",
            fix="Check the checkpoint with `t0repro checkpoint inspect`, or compute in float32.",
        )
