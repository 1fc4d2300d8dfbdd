"""Story Cloze, whose authors send CSV files to applicants who fill in a form.

The files are read unchanged, and their columns get the names that `datasets` gave them.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from t0repro.errors import UserError
from t0repro.tasks import rows

STORY_CLOZE_FORM = "https://cs.rochester.edu/nlp/rocstories/"


# Names of the files as they are sent, by split, and of their columns. Source of both: the loading
# script story_cloze of `datasets` 2.4.0.
STORY_CLOZE_FILES: Mapping[str, str] = {
    "validation": "cloze_test_val__spring2016 - cloze_test_ALL_val.csv",
    "test": "cloze_test_test__spring2016 - cloze_test_ALL_test.csv",
}


STORY_CLOZE_COLUMNS: Mapping[str, str] = {
    "InputStoryid": "story_id",
    "InputSentence1": "input_sentence_1",
    "InputSentence2": "input_sentence_2",
    "InputSentence3": "input_sentence_3",
    "InputSentence4": "input_sentence_4",
    "RandomFifthSentenceQuiz1": "sentence_quiz1",
    "RandomFifthSentenceQuiz2": "sentence_quiz2",
    "AnswerRightEnding": "answer_right_ending",
}


def manual_file(root: Path, dataset: str, subset: str | None, split: str) -> Path | None:
    """A split's file under the name that its authors gave it, or None if it is not there."""
    if dataset != "story_cloze" or subset != "2016" or split not in STORY_CLOZE_FILES:
        return None
    path = rows.dataset_folder(root, dataset, subset) / STORY_CLOZE_FILES[split]
    return path if path.is_file() else None


def how_to_ask(dataset: str, subset: str | None, split: str, folder: Path) -> str:
    """How to get a dataset that may not be redistributed, and where to put it."""
    if dataset == "story_cloze":
        name = STORY_CLOZE_FILES.get(split, f"{split}.jsonl")
        return (
            f"Ask its authors by the form at {STORY_CLOZE_FORM} and put the file that they send,"
            f" under its own name, here: {folder / name}"
        )
    return (
        f"Ask its authors, and put the rows, one JSON object per line, into {folder}/{split}.jsonl"
    )


def read_story_cloze(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the rows of one of the CSV files, with the columns that they have in `datasets`.

    Raises:
      UserError: If a column is missing, a line is truncated or the text is not UTF-8.
    """
    # utf-8-sig drops the byte-order mark that spreadsheets write.
    with open(path, newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file)
        try:
            missing = set(STORY_CLOZE_COLUMNS) - set(reader.fieldnames or ())
            if missing:
                raise _broken_row_error(path, 1, f"the columns {sorted(missing)} are missing")
            for row in reader:
                brought = {new: row[old] for old, new in STORY_CLOZE_COLUMNS.items()}
                answer = brought["answer_right_ending"]
                # DictReader completes a short line with None.
                if None in brought.values() or answer not in ("1", "2"):
                    raise _broken_row_error(
                        path, reader.line_num, "it is cut, or its answer is not 1 or 2"
                    )
                yield {**brought, "answer_right_ending": int(answer)}
        except (UnicodeDecodeError, csv.Error) as error:
            raise _broken_row_error(path, reader.line_num + 1, str(error)) from error


def _broken_row_error(path: Path, line: int, reason: str) -> UserError:
    return UserError(
        f"A line is not a row of Story Cloze: {reason}.",
        where=f"{path}, line {line}",
        fix="Save the file again as it was sent, as CSV with its first line, in UTF-8.",
    )
