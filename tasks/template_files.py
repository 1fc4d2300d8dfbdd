r"""Reads users' own prompts from files in promptsource's YAML format.

    dataset: my_reviews
    subset: null
    templates:
      1f0c...:
        !Template
        name: was it good
        jinja: "{{text}}\nWas it good? ||| {{answer_choices[label]}}"
        answer_choices: no ||| yes
        metadata: !TemplateMetadata {original_task: true, metrics: [Accuracy]}

A file may also define its own mixtures, of its tasks and other registered ones, with rates:

    mixtures:
      my_train: {my_reviews_was_it_good: 4000, super_glue_rte_GPT_3_style: 2490}

The keys that earlier versions and forks of promptsource wrote are read as those read them; see
`_choices` and `_metadata`. The loader only creates text, numbers, lists and mappings, so a file
cannot name a Python object.
"""

from __future__ import annotations

import dataclasses
import math
import os
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import yaml

from t0repro import yaml_files
from t0repro.errors import UserError, nearest_names
from t0repro.tasks.prompt_environment import TemplateFailure
from t0repro.tasks.sandbox import check_jinja
from t0repro.tasks.templates import make_template, task_name, truncate_variables

SEPARATOR = "|||"
LONGEST_NAME = 200
"""Bytes of a task's name: file systems allow 255, of which suffixes take some."""
FILE_KEYS = ("dataset", "subset", "templates", "mixtures")
TEMPLATE_KEYS = ("name", "jinja", "answer_choices", "id", "metadata", "reference")
METADATA_KEYS = ("original_task", "choices_in_prompt", "metrics", "languages")
OLD_FILE_KEYS = ("config",)
OLD_TEMPLATE_KEYS = ("answer_choices_key", "task_template")
OLD_METADATA_KEYS = ("task_template", "task_format", "metric")
ANNOTATIONS = (
    *("_do_train", "_do_eval", "answer_span_indices", "counting", "long_distance"),
    *("negated_answers", "no_sep_2_sentences", "non_natural_language"),
    *("nontrivial_choices_given", "nontrivial_choices_hidden"),
    *("trivial_choices_given", "trivial_choices_hidden"),
)
"""Truth values of promptsource's first months, which nothing in it ever read."""
FORMAT = "The format is promptsource's: keys dataset, subset (if any) and templates."


@dataclasses.dataclass(frozen=True)
class TemplateFile:
    """The contents of a template file.

    Attributes:
      path: The file.
      dataset: The dataset's name, which is also its folder under T0REPRO_DATA_DIR; "" for a file
        of mixtures alone.
      subset: The configuration, or None.
      templates: promptsource `Template`s in the file's order.
      mixtures: Name -> task -> rate.
    """

    path: Path
    dataset: str
    subset: str | None
    templates: tuple[Any, ...]
    mixtures: Mapping[str, Mapping[str, float]]


def read_template_file(path: str | Path) -> TemplateFile:
    """Reads and checks a file of templates, without registering anything.

    Raises:
      UserError: If the file has any mistake; names the file and, where known, line and template.
    """
    path = Path(path)
    content = _load(path)
    if set(content) == {"mixtures"}:
        return TemplateFile(path, "", None, (), _mixtures(path, content))
    known = (*FILE_KEYS, *OLD_FILE_KEYS)
    _check_keys(content, known, ("dataset", "templates"), str(path), FORMAT)
    dataset = _folder_name(content, "dataset", path)
    key = "subset" if "subset" in content else "config"
    subset = None if content.get(key) is None else _folder_name(content, key, path)
    entries = content["templates"]
    if not isinstance(entries, _Mapping) or not entries:
        raise UserError(
            "The file has no templates.",
            where=f"{path}, line {content.line_of('templates')}",
            fix="Below templates:, write one entry for each, `<id>: !Template` and its keys.",
        )
    templates = [_template(path, key, entry, entries) for key, entry in entries.items()]
    _check_names(path, dataset, subset, templates, entries)
    return TemplateFile(path, dataset, subset, tuple(templates), _mixtures(path, content))


def _folder_name(content: _Mapping, key: str, path: Path) -> str:
    """A dataset or subset, which is also a path: refused if it leaves T0REPRO_DATA_DIR."""
    value = _text(content, key, str(path))
    # Python refuses a path with a NUL by a ValueError, wherever it is first used.
    if value.startswith("/") or ".." in value.split("/") or "\0" in value:
        raise UserError(
            f"{key} is {value!r}, which leads out of the folder of datasets.",
            where=f"{path}, line {content.line_of(key)}",
            fix="Name a folder below T0REPRO_DATA_DIR.",
        )
    return value


def _mixtures(path: Path, content: _Mapping) -> dict[str, dict[str, float]]:
    """The file's mixtures, checked except for whether their tasks exist."""
    entries = content.get("mixtures")
    if entries is None:
        return {}
    where = f"{path}, line {content.line_of('mixtures')}"
    fix = "Write, below mixtures:, a name and below it a line `<task>: <rate>` for each task."
    if not isinstance(entries, _Mapping) or not entries:
        raise UserError("mixtures is not a table of names and tasks.", where=where, fix=fix)
    for name, tasks in entries.items():
        where = f"{path}, line {entries.line_of(name)}"
        if not isinstance(tasks, _Mapping) or not tasks:
            raise UserError(f"Mixture {name!r} has no tasks with rates.", where=where, fix=fix)
        for task, rate in tasks.items():
            # Compare exact types: Python treats True as an int, but it is not a rate.
            if type(rate) not in (int, float) or not 0 < rate < math.inf:
                raise UserError(
                    f"The rate of {task} in mixture {name!r} is {reprlib.repr(rate)}.",
                    where=f"{path}, line {tasks.line_of(task)}",
                    fix="Write a number above 0; T0's rates are numbers of examples.",
                )
    return {
        name: {task: float(rate) for task, rate in tasks.items()} for name, tasks in entries.items()
    }


class _Mapping(dict[str, Any]):
    """A mapping in the file that remembers its line, its keys' lines and its tag."""

    tag: str = ""
    line: int = 0
    lines: Mapping[str, int] = {}

    def line_of(self, key: str) -> int:
        return self.lines.get(key, self.line)


class _Loader(yaml_files.Bounded, yaml.SafeLoader):
    """Loads text, numbers, lists and mappings, which may be tagged as promptsource's classes."""

    def _mapping(self, node: yaml.Node) -> Iterator[_Mapping]:
        if not isinstance(node, yaml.MappingNode):
            raise yaml.constructor.ConstructorError(
                None, None, f"{node.tag} must be keys and values", node.start_mark
            )
        content = _Mapping()
        # YAML's merge keys (<<) and anchors still work.
        yield content  # before it is filled, since an anchor inside may refer to it
        self.flatten_mapping(node)
        lines: dict[str, int] = {}
        for key_node, value_node in node.value:
            # YAML reads keys such as 1 or yes as a number or a bool.
            key = str(self.construct_object(key_node, deep=True))
            # YAML counts lines from 0.
            lines[key] = key_node.start_mark.line + 1
            content[key] = self.construct_object(value_node, deep=True)
        content.tag, content.line, content.lines = node.tag, node.start_mark.line + 1, lines


for _tag in ("!Template", "!TemplateMetadata", yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG):
    _Loader.add_constructor(_tag, _Loader._mapping)
# promptsource's first templates of WMT have names that are tuples of one text.
_Loader.add_constructor("tag:yaml.org,2002:python/tuple", yaml.SafeLoader.construct_yaml_seq)


def _load(path: Path) -> _Mapping:
    if path.suffix == ".py":
        raise UserError(
            "This is a Python module, not a file of templates.",
            where=str(path),
            fix="Name it with --module_import if it registers tasks. Write prompts, such as FLAN's"
            " patterns, in promptsource's YAML format: {{premise}} for {premise}, then ||| and the"
            " target.",
        )
    if not path.exists():
        raise UserError(
            "There is no such file of templates.",
            where=str(path),
            fix="The path, of --templates or T0REPRO_TEMPLATES, counts from the working folder,"
            f" {os.getcwd()}.",
        )
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else f"not UTF-8: {error.reason}"
        raise UserError(
            f"The template file cannot be read: {why}.",
            where=str(path),
            fix="Name a file in promptsource's YAML format, in UTF-8.",
        ) from error
    try:
        content = yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f", line {mark.line + 1}" if mark else ""
        reason = ": ".join(part for part in (error.context, error.problem) if part)
        raise UserError(
            f"The template file is not valid: {reason}.",
            where=f"{path}{line}",
            fix="Rename one of the two; each template has an id of its own."
            if error.problem == "is there twice"
            else "Fix that line: a text with a colon, braces or % at its beginning needs quotes."
            " The tags that a file may have are !Template and !TemplateMetadata.",
        ) from error
    except (yaml.YAMLError, ValueError) as error:  # an invalid character or date
        raise UserError(
            f"The template file is not YAML: {' '.join(str(error).split())}.",
            where=str(path),
            fix="Correct that line.",
        ) from error
    if not isinstance(content, _Mapping):
        raise UserError("The template file has no keys.", where=str(path), fix=FORMAT)
    return content


def _template(path: Path, key: str, entry: Any, entries: _Mapping) -> Any:
    """The promptsource `Template` of one entry, checked."""
    where = f"{path}, line {entries.line_of(key)}"
    # Require the tag: an entry without it may belong to another kind of file.
    if not isinstance(entry, _Mapping) or entry.tag != "!Template":
        raise UserError(
            f"Entry {key!r} of templates is not a template.", where=where, fix="Tag it !Template."
        )
    wanted = "Each template has name and jinja, and may have answer_choices, id, metadata"
    known = (*TEMPLATE_KEYS, *OLD_TEMPLATE_KEYS)
    _check_keys(entry, known, ("name", "jinja"), where, f"{wanted} and reference.")
    if isinstance(entry["name"], list) and len(entry["name"]) == 1:
        (entry["name"],) = entry["name"]
    name = _text(entry, "name", where)
    field, choices = _choices(entry, where)
    jinja = _text(entry, "jinja", where)
    _check_body(jinja, f"{path}, line {entry.line_of('jinja')}, template {name!r}")
    _check_jinja(choices or "", field, f"{path}, line {entry.line_of(field)}, template {name!r}")
    if SEPARATOR not in jinja:
        raise UserError(
            f"Template {name!r} has no target: its jinja has no {SEPARATOR}.",
            where=f"{path}, line {entry.line_of('jinja')}",
            fix=f"Write the input, {SEPARATOR} and the target.",
        )
    return make_template(
        name,
        jinja,
        choices,
        _metadata(entry, where),
        # promptsource identifies templates by UUID; use the key if the file gives none.
        identifier=str(entry.get("id") or key),
        reference=str(entry.get("reference") or ""),
    )


def _choices(entry: _Mapping, where: str) -> tuple[str, str | None]:
    """The key that has a template's answer choices, and their Jinja.

    Until promptsource's commit c8bacdeb, the Jinja was `answer_choices_key`. `answer_choices` was a
    list of texts, used where there was no such key.
    """
    choices = entry.get("answer_choices")
    if entry.get("answer_choices_key") is not None:
        jinja = _text(entry, "answer_choices_key", where)
        if isinstance(choices, str) and choices not in ("", jinja):
            raise UserError(
                "answer_choices and answer_choices_key have different values.",
                where=f"{where.partition(', line')[0]}, line {entry.line_of('answer_choices')}",
                fix="Remove one; answer_choices_key is its old name.",
            )
        return "answer_choices_key", jinja
    # xP3 has "" for none.
    if choices in (None, "", []):
        return "answer_choices", None
    if not isinstance(choices, list):
        return "answer_choices", _text(entry, "answer_choices", where)
    for choice in choices:
        literal = isinstance(choice, str) and choice.strip()
        if not literal or any(mark in choice for mark in (SEPARATOR, "{{", "{%", "{#")):
            raise UserError(
                f"answer_choices has the item {reprlib.repr(choice)}, which is not plain text.",
                where=f"{where.partition(', line')[0]}, line {entry.line_of('answer_choices')}",
                fix="Put a number or a bare word in quotes; write Jinja as one text, no ||| yes.",
            )
    return "answer_choices", f" {SEPARATOR} ".join(choices)


def _metadata(template: _Mapping, where: str) -> dict[str, Any]:
    """The metadata that promptsource 0.1.0 has, checked like those that only others have."""
    entry = template.get("metadata")
    fix = f"Keys of metadata: {', '.join(METADATA_KEYS)}."
    if entry is None:
        entry = _Mapping()
    if not isinstance(entry, _Mapping):
        raise UserError("The metadata is not a table of keys and values.", where=where, fix=fix)
    _check_keys(entry, (*METADATA_KEYS, *OLD_METADATA_KEYS, *ANNOTATIONS), (), where, fix)
    kinds = {
        "metrics": (_is_texts, "a list of names: [Accuracy]"),
        "languages": (_is_texts, "a list of codes in quotes: ['en']"),
        "task_format": (lambda value: isinstance(value, str), "a word: Classification"),
        "metric": (lambda value: False, "metrics: and a list"),
    }
    truth = (lambda value: value in (True, False), "true, false or null")
    for holder, key in [*((entry, key) for key in entry), (template, "task_template")]:
        accepts, wanted = kinds.get(key, truth)
        if holder.get(key) is not None and not accepts(holder[key]):
            raise UserError(
                f"{key} is {reprlib.repr(holder[key])}.", where=where, fix=f"Write {wanted}."
            )
    # original_task was called task_template, first as a key of the template.
    tasks = [entry.get("original_task"), entry.get("task_template"), template.get("task_template")]
    return {
        "original_task": next((task for task in tasks if task is not None), None),
        "choices_in_prompt": entry.get("choices_in_prompt"),
        "metrics": entry.get("metrics"),
    }


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _check_body(jinja: str, where: str) -> None:
    try:
        check_jinja(truncate_variables(jinja))
    except (jinja2.TemplateError, TemplateFailure):
        _check_jinja(jinja, "jinja", where)
        raise UserError(
            "promptsource puts a filter before every }} of the jinja, which is not valid then.",
            where=where,
            fix="Write }} rather than -}}, and {%- or {{- where the next one begins.",
        ) from None


def _check_jinja(text: str, field: str, where: str) -> None:
    try:
        check_jinja(text)
    except jinja2.TemplateError as error:
        line = getattr(error, "lineno", None)
        of_line = f", its line {line}" if line and "\n" in text else ""
        raise UserError(
            f"The {field} is not a Jinja template{of_line}: {error.message}.",
            where=where,
            fix="Correct it; a column whose name has blanks needs another in the rows. The filters"
            " are Jinja's, and promptsource's choice and most_frequent.",
        ) from error
    except TemplateFailure as error:
        raise UserError(
            f"The {field} cannot be compiled: {error}.",
            where=where,
            fix="Write a prompt; what it reads comes from a row.",
        ) from error


def _check_names(
    path: Path, dataset: str, subset: str | None, templates: Sequence[Any], entries: _Mapping
) -> None:
    lines = [entries.line_of(key) for key in entries]
    seen: dict[str, tuple[str, int]] = {}
    for template, line in zip(templates, lines, strict=True):
        # Two names that differ only in punctuation would give one task.
        name = task_name(dataset, subset, template.name)
        if len(name.encode()) > LONGEST_NAME:
            raise UserError(
                f"Template {template.name[:60]!r}... would be a task whose name has"
                f" {len(name.encode())} bytes; a cached task is a folder, whose name has"
                f" {LONGEST_NAME} at most.",
                where=f"{path}, line {line}",
                fix="Give the template a shorter name.",
            )
        if name in seen:
            first, first_line = seen[name]
            raise UserError(
                f"Templates {first!r} (line {first_line}) and {template.name!r} would both be the"
                f" task {name!r}.",
                where=f"{path}, line {line}",
                fix="Give one another name; all but letters, digits, '.' and '_' counts as '_'.",
            )
        seen[name] = (template.name, line)


def _check_keys(
    content: _Mapping, known: Sequence[str], required: Sequence[str], where: str, fix: str
) -> None:
    for key in content:
        if key not in known:
            raise UserError(
                f"There is no key {key!r}; nearest: {nearest_names(key, known)}.",
                where=f"{where.partition(', line')[0]}, line {content.line_of(key)}",
                fix=fix,
            )
    for key in required:
        if content.get(key) is None:
            raise UserError(f"The key {key!r} is missing.", where=where, fix=fix)


def _text(content: _Mapping, key: str, where: str) -> str:
    value = content[key]
    if not isinstance(value, str) or not value.strip():
        raise UserError(
            f"{key} is {reprlib.repr(value)}, not text.",
            where=f"{where.partition(', line')[0]}, line {content.line_of(key)}",
            # Anything else that is not text is a number, a date or the like, as YAML reads bare
            # words.
            fix="Put it in quotes." if value not in (None, "") else "Write it.",
        )
    try:
        # YAML keeps the two halves of a character apart, "\\uD83D\\uDE00"; one alone is no text.
        return value.encode("utf-16", "surrogatepass").decode("utf-16")
    except UnicodeDecodeError:
        raise UserError(
            f"{key} has half of a character, an escape from \\uD800 to \\uDFFF.",
            where=f"{where.partition(', line')[0]}, line {content.line_of(key)}",
            fix="Write the character itself, or both halves of it.",
        ) from None
