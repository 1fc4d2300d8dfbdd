"""T5X's run mode infer: predictions or scores of examples, as JSON lines in T5X's form.

In the output folder, for each task and shard:

    <task>-<mode>.jsonl-00000-of-00001             a line per example, in the examples' order
    <task>-<mode>.jsonl-00000-of-00001.COMPLETED   its digest (in T5X empty), a digest of the
                                                   checkpoint's path and the settings, and the
                                                   checkpoint's identity; written last
    tmp-<task>-00000-of-00001/                     chunks; an interrupted run continues after them

A file or chunk that does not match its digest counts as missing.

Source: t5x.infer.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from t0repro.config.run import InferRun
from t0repro.converters.model_files import check_configured
from t0repro.converters.tensors import CheckpointRef
from t0repro.data.checks import tasks_with_split
from t0repro.data.eval_examples import eval_examples
from t0repro.data.train_data import make_seqio_converter
from t0repro.data.vocabulary_checks import check_own_tokenizer
from t0repro.errors import UserError
from t0repro.evaluation.evaluator import model_features
from t0repro.evaluation.model_functions import make_functions
from t0repro.evaluation.opened import Checkpoint
from t0repro.evaluation.records import file_digest
from t0repro.runs.preflight import check_inference
from t0repro.runs.restored_checkpoints import (
    choose_checkpoints,
    identity,
    is_there,
    make_generating_model,
    open_restored,
    own_path,
)
from t0repro.storage import make_folder, write_atomically
from t0repro.storage.disk import name_in_errors, sync
from t0repro.tasks.registry import DescribedTask, find_tasks
from t0repro.tasks.vocabulary import VocabularyFile
from t0repro.words import counted

COMPLETED = ".COMPLETED"
_SETTINGS = "settings.json"


def infer(plan: InferRun, describe: Callable[[], None] = lambda: None) -> list[Path]:
    """Predicts or scores the examples of each task that has the split and is not completed yet.

    Args:
      plan: The inference.
      describe: Writes config.gin and model-info.txt, once every check has passed.

    Returns:
      The paths of the results.

    Raises:
      UserError: If there is no checkpoint, it does not fit the model, the task's vocabulary is
        not the model's, no task has the split, a task's split has no example, or the folder has
        complete outputs of another checkpoint.
    """
    check_inference(plan, starts=True)
    name = plan.data.mixture_or_task_name
    checkpoint: Checkpoint | None = None
    # A complete output stays complete when its checkpoint is gone, removed by a run's retention
    # say.
    ref = _choose_checkpoint(plan) if is_there(plan.restore) else None
    tasks = tasks_with_split(name, plan.data.split)
    for task in tasks:
        # Tasks that give the model's features need not have it.
        if plan.mode != "score" and "targets" not in task.output_features:
            raise UserError(
                f"The task {task.name} has no feature targets, whose vocabulary decodes outputs.",
                where="its output_features",
                fix="Declare seqio.Feature(..., required=False) under this name.",
            )
    others = len(find_tasks(name)) - len(tasks)
    if others:
        left_out = counted(others, "task")
        print(f"left out: {left_out} without a split {plan.data.split!r}", file=sys.stderr)
    jobs = _jobs(plan, tasks, ref)
    # Evaluate this once: it computes the digests of complete files.
    unfinished = [job for job in jobs if not job.is_completed()]
    if unfinished and ref is None:
        ref = _choose_checkpoint(plan)  # raises
    if plan.shard_id == 0:  # the shards share a folder
        describe()
    for job in jobs:
        if job not in unfinished:
            print(f"{job.output}: already complete", file=sys.stderr)
            continue
        # Load it only now: a run with nothing left to do loads no checkpoint.
        if checkpoint is None:
            assert ref is not None
            checkpoint = open_restored(plan, ref)
        job.run(checkpoint)
    return [job.output for job in jobs]


def check_outputs(plan: InferRun) -> None:
    """Raises UserError for complete outputs of another checkpoint."""
    ref = _choose_checkpoint(plan) if is_there(plan.restore) else None
    tasks = tasks_with_split(plan.data.mixture_or_task_name, plan.data.split)
    for job in _jobs(plan, tasks, ref):
        job.is_completed()


def _jobs(plan: InferRun, tasks: Sequence[Any], ref: CheckpointRef | None) -> list[_TaskJob]:
    # Read these first: if the checkpoint is replaced meanwhile, its outputs are rebuilt next time.
    known = (own_path(ref), identity(ref)) if ref else (None, None)
    return [_TaskJob(plan, task, *known) for task in tasks]


def _choose_checkpoint(plan: InferRun) -> CheckpointRef:
    """The checkpoint: an inference takes exactly one, unlike an evaluation."""
    (ref,) = choose_checkpoints(plan.restore)
    # Before the run writes a config.gin, which may replace the checkpoint's own.
    check_configured(ref, plan.model)
    check_own_tokenizer(ref, plan.input_vocabulary, plan.output_vocabulary)
    return ref


class _TaskJob:
    """The inference of one task's shard."""

    def __init__(self, plan: InferRun, task: Any, path: str | None, its_identity: str | None):
        """Takes the checkpoint's own path and its identity; None if it is gone."""
        self._plan, self._task = plan, task
        self._checkpoint, self._identity = path, its_identity
        shard = f"{plan.shard_id:05}-of-{plan.num_shards:05}"
        folder = Path(plan.output_dir)
        self.output = folder / f"{task.name}-{plan.mode}.jsonl-{shard}"
        self._chunks = folder / f"tmp-{task.name}-{shard}"

    def is_completed(self) -> bool:
        """Whether an earlier run completed the output, as one file or as unmerged chunks.

        Raises:
          UserError: If it is another checkpoint's.
        """
        if self._plan.merge:
            complete = _is_complete(self.output)
        else:
            count = self._complete_chunks()
            complete = _lines_of(self.output)[:1] == [_chunks_in_words(count)]
        if not complete or self._identity is None:
            return complete
        recorded, now = _lines_of(self.output)[1:], self._describe_identity()
        # Earlier versions did not write the path.
        if recorded in (now, now[:2]):
            return True
        is_of_it = recorded[2:3] == now[2:]
        if len(recorded) > 1 and recorded[0] != now[0] and not is_of_it:
            raise UserError(
                "This output is complete, and was made from another checkpoint.",
                where=str(self.output),
                fix="Bind another INFER_OUTPUT_DIR, or remove what is there.",
            )
        what = "made with other settings" if is_of_it else f"{self._checkpoint} has changed since"
        if recorded[:1] == now[:1]:
            what = f"{self._checkpoint} has changed since"
        print(f"note: {self.output}: {what}; done again", file=sys.stderr)
        return False

    def _describe_identity(self) -> list[str]:
        """A digest of checkpoint and settings; the checkpoint's identity; and its path."""
        # Not the parameters' digest: a run with nothing left to do should not have to read them.
        settings = {"checkpoint": self._checkpoint, **self._settings()}
        digest = hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:16]
        return [digest, self._identity or "", self._checkpoint or ""]

    def _settings(self) -> dict[str, Any]:
        plan = self._plan
        written = [plan.all_inputs, plan.input_fields, plan.output_ids]
        return {**plan.decisive(), "mode": plan.mode, "written": written}

    def run(self, checkpoint: Checkpoint) -> None:
        """Continues after the last complete chunk, and merges the chunks at the end."""
        first = self._prepare(checkpoint)
        # The period counts batches.
        size = self._plan.checkpoint_period * self._plan.data.batch_size
        examples = self._examples(skip=first * size)
        number = first
        for number in itertools.count(first):
            chunk = list(itertools.islice(examples, size))
            if not chunk:
                break
            self._write_chunk(number, chunk, checkpoint)
            done = counted(number * size + len(chunk), "example")
            print(f"{self._task.name}: {done} so far", file=sys.stderr)
        if number == 0:
            self._check_has_examples()
            # There are more shards than examples; T5X raises an error here.
            shard = f"shard {self._plan.shard_id} of {self._plan.num_shards}"
            print(f"{self._task.name} has no example in {shard}", file=sys.stderr)
        if self._plan.merge:
            self._merge(number)
        else:
            _mark(self.output, _chunks_in_words(number), *self._describe_identity())
        print(f"wrote {self.output}", file=sys.stderr)

    def _prepare(self, checkpoint: Checkpoint) -> int:
        """Number of chunks done; removes chunks made from another checkpoint or other settings."""
        # Identify the checkpoint by its contents: its path may hold another one by now.
        settings = {
            "checkpoint": checkpoint.digest,
            # With another period, a chunk's number would stand for other examples.
            "checkpoint_period": self._plan.checkpoint_period,
            **self._settings(),
        }
        text = json.dumps(settings, indent=1) + "\n"
        record = self._chunks / _SETTINGS
        if self._chunks.is_dir() and (not record.is_file() or record.read_text() != text):
            what = "made from another checkpoint or with other settings"
            print(f"note: {self._chunks}: {what}; started over", file=sys.stderr)
            shutil.rmtree(self._chunks)
        make_folder(self._chunks)
        write_atomically(record, text)
        done = self._complete_chunks()
        if done:
            print(f"{self._task.name}: continues after {counted(done, 'chunk')}", file=sys.stderr)
        return done

    def _complete_chunks(self) -> int:
        """Number of chunks before the first one that is missing or altered."""
        return next(n for n in itertools.count() if not _is_complete(self._chunk(n)))

    def _chunk(self, number: int) -> Path:
        return self._chunks / f"{self.output.name}-chunk{number:05}"

    def _examples(self, skip: int) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any]]]:
        """Each example as a pair: the task's features, and the model's."""
        if isinstance(self._task, DescribedTask):
            own = self._list_examples(self._plan.shard_id, self._plan.num_shards)
            examples = itertools.islice(own, skip, None)
            lengths, converter = self._lengths(), self._plan.data.converter
            return ((each, model_features(each, lengths, converter)) for each in examples)
        import seqio
        import tensorflow as tf

        shard = seqio.ShardInfo(self._plan.shard_id, self._plan.num_shards)
        dataset, lengths = self._dataset(shard), self._lengths()
        # Not packed, because each example gets a line of its own.
        converted = make_seqio_converter(self._plan.data.converter)(dataset, lengths)
        # The seed makes every pass and every process see the same examples, so skipping is exact.
        pairs: Any = tf.data.Dataset.zip((dataset, converted)).skip(skip).as_numpy_iterator()
        return pairs

    def _list_examples(self, shard: int = 0, num_shards: int = 1) -> Iterator[Mapping[str, Any]]:
        data = self._plan.data
        return eval_examples(
            self._task,
            data.split,
            self._lengths(),
            use_cached=data.use_cached,
            shard=shard,
            num_shards=num_shards,
        )

    def _check_has_examples(self) -> None:
        """Raises UserError if none of the shards has an example."""
        described = isinstance(self._task, DescribedTask)
        if not any(True for _ in (self._list_examples() if described else self._dataset().take(1))):
            raise UserError(
                f"{self._task.name!r} has no example to infer from.",
                where=f"split {self._plan.data.split!r}",
                fix="Check the split, and whether the task filters its examples out.",
            )

    def _dataset(self, shard: Any = None) -> Any:
        """The task's examples in order: all shards', or one shard's as SeqIO divides them."""
        data = self._plan.data
        return self._task.get_dataset(
            sequence_length=self._lengths(),
            split=data.split,
            shuffle=False,
            num_epochs=1,
            shard_info=shard,
            use_cached=data.use_cached,
            seed=data.seed,
        )

    def _lengths(self) -> dict[str, int]:
        assert self._plan.data.sequence_length is not None
        return dict(self._plan.data.sequence_length)

    def _write_chunk(self, number: int, chunk: Sequence[Any], checkpoint: Checkpoint) -> None:
        plan = self._plan
        # A seed per chunk: it samples the same whether or not the run was interrupted before.
        model = make_generating_model(plan, checkpoint.model)
        functions = make_functions(model, checkpoint.params, plan.decoding, plan.data, seed=number)
        converted = list(enumerate(example for _, example in chunk))
        aux: Mapping[str, Sequence[Any]] = {}
        if plan.mode == "score":
            outputs = functions.score(converted)
        elif plan.mode == "predict":
            outputs = functions.predict(converted)
        else:
            outputs, aux = functions.predict_with_aux(converted)
        vocabulary = plan.mode != "score" and self._task.output_features["targets"].vocabulary
        lines = []
        for (index, output), (example, _) in zip(outputs, chunk, strict=True):
            values = {name: column[index] for name, column in aux.items()}
            lines.append(json.dumps(_line(plan, example, output, values, vocabulary)) + "\n")
        path = self._chunk(number)
        write_atomically(path, "".join(lines))
        # Marked last: a chunk without its marker counts as missing, and is written again.
        _mark(path, file_digest(path) or "")

    def _merge(self, count: int) -> None:
        """Concatenates the chunks and removes them."""
        # Written apart and renamed, so that a partial file is never mistaken for the result.
        whole = self.output.with_name(f".{self.output.name}.tmp")
        with name_in_errors(self.output), open(whole, "wb") as merged:
            for number in range(count):
                with open(self._chunk(number), "rb") as chunk:
                    shutil.copyfileobj(chunk, merged)
            merged.flush()
            os.fsync(merged.fileno())
        os.replace(whole, self.output)
        sync(self.output.parent)
        # Mark the output before removing chunks: an interruption leaves at least one of the two.
        _mark(self.output, file_digest(self.output) or "", *self._describe_identity())
        shutil.rmtree(self._chunks)


def _mark(path: Path, *lines: str) -> None:
    """Writes the marker beside `path`: the file is complete, and these lines say of what."""
    write_atomically(f"{path}{COMPLETED}", "\n".join(lines))


def _lines_of(path: Path) -> list[str]:
    """The lines of the marker beside `path`; [] if there is none."""
    marker = Path(f"{path}{COMPLETED}")
    if not marker.is_file():
        return []
    # A damaged marker must not raise: its lines match no digest, and the work is done again.
    return marker.read_text(encoding="utf-8", errors="replace").splitlines()


def _is_complete(path: Path) -> bool:
    """Whether a file exists and is unchanged since it was marked."""
    return path.is_file() and _lines_of(path)[:1] == [file_digest(path)]


def _chunks_in_words(count: int) -> str:
    """The marker's text for an output that is left in chunks."""
    return counted(count, "chunk")


def _line(
    plan: InferRun,
    example: Mapping[str, Any],
    output: Any,
    aux: Mapping[str, Any],
    vocabulary: Any,
) -> dict[str, Any]:
    """The fields that T5X writes for an example; the vocabulary decodes outputs."""
    line: dict[str, Any] = {
        "inputs": {
            name: _plain(value) for name, value in example.items() if _is_written(name, plan)
        }
    }
    if plan.mode == "score":
        return line | {"score": output}
    line["prediction"] = _decode_tokens(output, vocabulary)
    if plan.output_ids:
        line["prediction_tokens"] = _cut_at_padding(output)
    if plan.mode == "predict_with_aux":
        line["aux"] = dict(aux)
    return line


def _decode_tokens(output: list[Any], vocabulary: Any) -> Any:
    """The text of an output's tokens; with several decodes, those of each."""
    if isinstance(vocabulary, VocabularyFile):
        if output and isinstance(output[0], list):
            return [vocabulary.decode(tokens) for tokens in output]
        return vocabulary.decode(output)
    import tensorflow as tf

    return _plain(vocabulary.decode_tf(tf.constant(output)).numpy())


def _is_written(feature: str, plan: InferRun) -> bool:
    if plan.all_inputs:
        return True
    # Without options, T5X writes the text from which the tokens were made.
    text = feature.removesuffix("_pretokenized")
    if plan.input_fields is not None:
        return feature in plan.input_fields or (text != feature and text in plan.input_fields)
    return text != feature


def _cut_at_padding(output: list[Any]) -> list[Any]:
    """Token ids before the first 0; with several decodes, those of each."""
    if output and isinstance(output[0], list):
        return [_cut_at_padding(tokens) for tokens in output]
    return output[: output.index(0)] if 0 in output else output


def _plain(value: Any) -> Any:
    """A feature in JSON's types: texts and numbers, in lists."""
    if isinstance(value, bytes):
        return value.decode("utf-8")
    if isinstance(value, np.ndarray | np.generic):
        return _plain(value.tolist())
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value
