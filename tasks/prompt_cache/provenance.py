"""What a cached task was made from: written next to it, and checked before the cache is used.

SeqIO finds shards by a pattern, so it silently reads a cache with a missing or empty shard, or with
tokens of another vocabulary. It does not read the file written here, in which
nothing depends on when or where the cache was made, so it is reproducible byte for byte.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import t0repro
from t0repro.compat import installed_version
from t0repro.errors import UserError
from t0repro.progress import say
from t0repro.storage import is_streamed
from t0repro.tasks.prompt_cache.folders import MARKER, PROVENANCE, shard_names
from t0repro.tasks.prompt_cache.records import count_records, features, is_damaged_at, read_records
from t0repro.tasks.registry import task_descriptions
from t0repro.tasks.task import TaskDescription
from t0repro.tasks.vocabulary import model_of
from t0repro.words import some

if TYPE_CHECKING:
    import seqio

    from t0repro.tasks.prompt_cache.prompts import CachedTask, Prompt


_PACKAGES = ("promptsource", "jinja2", "sentencepiece", "seqio", "t5")


_TRUNCATION = (
    "each variable that the template prints is cut to 2,048 characters by Jinja's truncate, at a"
    " word's end and with '...'; tokens are not cut here but to the sequence lengths of a run"
)


def _versions() -> dict[str, str]:
    """Versions of the packages that decide what an example is, of those that are installed."""
    found = {name: installed_version(name) for name in _PACKAGES}
    return {name: version for name, version in found.items() if version is not None}


def describe(
    prompt: Prompt, task: CachedTask, seed: int, splits: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """The contents of a task's provenance file.

    Args:
      prompt: The task's prompt.
      task: The task.
      seed: Seed for the template's random choices and the order of the examples.
      splits: Split -> origin of its rows and counts of rows, examples and dropped rows.
    """
    template = prompt.template
    return {
        "task": task.name,
        "dataset": prompt.dataset,
        "subset": prompt.subset,
        "template": {"name": template.name, "id": template.id, "sha256": template.digest()},
        "score_eval": task.score_eval,
        "vocabulary": {"sha256": prompt.vocabulary, "eos": dict(prompt.eos)},
        "seed": seed,
        "truncation": _TRUNCATION,
        "versions": {"t0repro": t0repro.__version__, **_versions()},
        "splits": dict(splits),
    }


P3_SOURCE = "p3_source.json"
"""The file that `tasks fetch-p3` writes beside the files that it fetched."""


SAMPLES = 3
"""Number of examples whose tokens are compared with their text, in a cache without provenance."""


def check_caches(tasks: Sequence[seqio.Task], split: str) -> None:
    """Checks the cached split of each task, before anything reads it.

    Args:
      tasks: The tasks of a run; those that are not cached, or cached in a bucket, are skipped.
      split: The split to be read.

    Raises:
      UserError: If a cache is incomplete, or was made with another vocabulary or template.
    """
    changed, unknown = [], []
    for task in tasks:
        if not task.cache_dir or "://" in task.cache_dir or split not in task.splits:
            continue
        folder = Path(task.cache_dir)
        found = damage(folder, split)
        if found:
            raise UserError(
                f"The cache of task {task.name}, split {split!r}, is incomplete: {found}.",
                where=str(folder),
                fix="Remove this folder and cache the task again.",
            )
        provenance = _json(folder / PROVENANCE)
        if provenance is None:
            _check_samples(task, folder, split)
            unknown.append(task.name)
            continue
        _check_made_of(task, provenance, folder)
        description = task_descriptions().get(task.name)
        if description and rows_changed(description, split, provenance["splits"].get(split, {})):
            changed.append(task.name)
    if changed:
        say(
            f"warning: the rows of split {split!r} have changed since {some(changed, 3)} was"
            " cached; the cache is read as it is. Cache to another folder to have the new rows."
        )
    if unknown:
        say(
            "note: SeqIO's caches do not say their vocabulary: the tokens of up to"
            f" {SAMPLES} examples of {some(unknown, 3)} were compared with their text, and agree"
        )


def damage(folder: Path, split: str) -> str | None:
    """Describes the damage in a cached split, or None if it is complete.

    Caches from `t0repro cache` and `tasks fetch-p3` record the bytes and records of each shard. In
    a cache that SeqIO made, records are counted and compared with its statistics, except in a
    bucket.
    """
    if not (folder / MARKER).is_file():
        return f"there is no {MARKER}"
    info, stats = _json(folder / f"info.{split}.json"), folder / f"stats.{split}.json"
    if not isinstance(info, dict) or not isinstance(info.get("num_shards"), int):
        return f"info.{split}.json is missing or damaged"
    features = info.get("features")
    if not isinstance(features, dict) or not all(
        isinstance(each, dict)
        and isinstance(each.get("dtype"), str)
        and isinstance(each.get("shape"), list)
        for each in features.values()
    ):
        return f"info.{split}.json does not say of which types and shapes its features are"
    statistics = _json(stats) if stats.is_file() else {}
    if not isinstance(statistics, dict):
        return f"{stats.name} is damaged"
    examples = statistics.get("examples")
    if not isinstance(examples, int | float | None):
        return f"{stats.name} is damaged"
    names = shard_names(split, info["num_shards"])
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        return f"{len(missing)} of {len(names)} shards are missing, {missing[0]} first"
    try:
        declared = _read_declared(folder, split)
        if not declared and any(is_streamed(folder / name) for name in names):
            return None  # counting records would fetch them
        records = 0
        for name in names:
            count = _records(folder / name, declared.get(name))
            if isinstance(count, str):
                return count
            records += count
    except (KeyError, TypeError, AttributeError, ValueError):
        return f"{PROVENANCE} is damaged"
    if examples is not None and examples != records:
        return f"its shards hold {records:,} examples and its statistics count {examples:,}"
    return None


def explain_damaged_record(message: str) -> UserError:
    """The error for TensorFlow's "corrupted record at 2299", with the name of the file.

    TensorFlow checks each record but does not name the file, so this searches the caches of all
    registered tasks for a damaged record at that byte.
    """
    import seqio

    byte = re.search(r"record at (\d+)", message)
    place = int(byte[1]) if byte else 0
    tasks = (seqio.TaskRegistry.get(name) for name in seqio.TaskRegistry.names())
    folders = {task.cache_dir for task in tasks if task.cache_dir and "://" not in task.cache_dir}
    shards = (path for folder in sorted(folders) for path in Path(folder).glob("*.tfrecord-*"))
    found = next((path for path in shards if is_damaged_at(path, place)), None)
    return UserError(
        "A record of a TFRecord file has another checksum than when it was written.",
        where=f"{found or 'a file of examples'}, byte {place}",
        fix="Remove the task's folder and cache it again; copy any other file again.",
    )


def _read_declared(folder: Path, split: str) -> Mapping[str, Mapping[str, int]]:
    """Shard -> its records and bytes, if the cache records them; empty for caches of SeqIO."""
    if (folder / PROVENANCE).is_file():
        return json.loads((folder / PROVENANCE).read_text())["splits"][split].get("files", {})
    if (folder / P3_SOURCE).is_file():
        source = json.loads((folder / P3_SOURCE).read_text())
        return {
            name: {"records": count, "bytes": source["files"][name]["bytes"]}
            for name, count in source["records"].items()
        }
    return {}


def _records(path: Path, declared: Mapping[str, int] | None) -> int | str:
    """A shard's number of records, as declared or else counted; if it is damaged, what is wrong."""
    if declared is not None:
        size = path.stat().st_size
        if size != declared["bytes"]:
            return f"{path.name} has {size:,} of {declared['bytes']:,} bytes"
        return declared["records"]
    try:
        return count_records(path)
    except UserError as error:
        return f"{error.what.rstrip('.')} ({error.where})"


def rows_changed(description: TaskDescription, split: str, made: Mapping[str, Any]) -> bool:
    """Whether the rows on this machine differ from those that a split was cached from.

    Args:
      description: The task.
      split: The task's split.
      made: The provenance file's entry for the split.

    Returns:
      False also if the rows are missing or the cache does not record their checksum.
    """
    then = made.get("origin", {})
    if "sha256" not in then or split not in description.rows.available_splits():
        return False
    reader = description.rows.reader(split)
    # The size reveals most changes without reading the file.
    if getattr(reader, "size", then["bytes"]) != then["bytes"]:
        return True
    return reader.origin().get("sha256") != then["sha256"]


def _check_made_of(task: seqio.Task, provenance: Mapping[str, Any], folder: Path) -> None:
    """Raises UserError if a cache was made with another vocabulary or template."""
    # A prompted task has one vocabulary.
    model = model_of(task.output_features["targets"].vocabulary)
    differing = []
    if model is not None and model_digest(model) != provenance["vocabulary"]["sha256"]:
        differing.append("vocabulary")
    description = task_descriptions().get(task.name)
    if description is not None and template_digest(description) != provenance["template"]["sha256"]:
        differing.append("template")
    if differing:
        raise UserError(
            f"Task {task.name} was cached with another {' and '.join(differing)}.",
            where=str(folder / PROVENANCE),
            fix="Give the vocabulary that it was cached with (T0REPRO_VOCAB), or cache the task"
            " again, to another folder.",
        )


def template_digest(description: TaskDescription) -> str:
    """SHA-256 of the Jinja of prompt and answer choices, as in provenance files."""
    from t0repro.tasks.prompt_cache.prompts import PlainTemplate

    template = description.rows.template
    return PlainTemplate(template.name, "", template.jinja, template.answer_choices).digest()


def _check_samples(task: seqio.Task, folder: Path, split: str) -> None:
    """Detokenizes a few examples and compares them with the text cached beside the tokens."""
    shards = map(read_records, sorted(folder.glob(f"{split}.tfrecord-*")))
    for record in itertools.islice(itertools.chain.from_iterable(shards), SAMPLES):
        found = features(record)
        for name, feature in task.output_features.items():
            # A task may have one vocabulary for its inputs and another for its targets.
            vocabulary = feature.vocabulary
            tokens, texts = found.get(name, []), found.get(f"{name}_pretokenized")
            # The vocabulary cannot decode tokens out of range.
            wrong = [token for token in tokens if not 0 <= token < vocabulary.vocab_size]
            text = texts[0].decode("utf-8", "replace") if texts else None
            if wrong or (text is not None and not _agree(vocabulary, tokens, text)):
                raise UserError(
                    f"Task {task.name} was cached with another vocabulary: the tokens of an example"
                    f" spell {vocabulary.decode(tokens)[:80]!r}, and its text is"
                    f" {(text or '')[:80]!r}.",
                    where=str(folder),
                    fix="Give the vocabulary that it was cached with (T0REPRO_VOCAB), or cache the"
                    " task again.",
                )


def _agree(vocabulary: Any, tokens: Sequence[int], text: str) -> bool:
    """Whether tokens spell a text, or its beginning, as far as the vocabulary can."""

    # Spaces are compared loosely: decoding does not restore them exactly.
    def spell(numbers: Sequence[int]) -> str:
        return " ".join(vocabulary.decode([n for n in numbers if n != vocabulary.eos_id]).split())

    # Compare a prefix: the tokens may have been truncated.
    return spell(vocabulary.encode(text)).startswith(spell(tokens))


@functools.lru_cache(maxsize=4)
# A digest of a megabyte, asked for once per task.
def model_digest(model: bytes) -> str:
    """SHA-256 of a vocabulary's serialized model, as in provenance files."""
    return hashlib.sha256(model).hexdigest()


def _json(path: Path) -> Any:
    """The file's content; None if there is no such file, or it is not JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
