"""Writes the demo's rows: .venv/bin/python scripts/demo/generate.py [folder].

Every sentence is composed from the phrases in words.py with a fixed seed, so that the files can be
reproduced byte for byte. The rows are deliberately easy: their words reveal most of the answer, so
a model of a few million parameters learns the tasks within minutes on two cores.
"""

from __future__ import annotations

import json
import random
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import words

from t0repro.storage import write_atomically
from t0repro.tasks.catalog import SYNTHETIC
from t0repro.tasks.demo.datasets import FOLDER

SEED = 20211015
TRAIN_ROWS = 640
VALIDATION_ROWS = 64

Row = dict[str, Any]


def capitalize(sentence: str) -> str:
    """The sentence with a capital letter in front, the rest as it is."""
    return sentence[0].upper() + sentence[1:]


def with_articles(sentence: str) -> str:
    """The sentence with `an` for `a` in front of a vowel."""
    return re.sub(r"\b([Aa]) (?=[aeiou])", r"\1n ", sentence)


def news(draw: random.Random, index: int) -> Row:
    """A headline and a report, in the schema of ag_news: text, label of four topics."""
    # Labels take turns, so that all are equally frequent.
    label = index % 4
    topic = words.NEWS[label]
    who = draw.choice(topic["who"]).format(place=draw.choice(words.PLACES))
    does, adds = draw.choice(topic["does"]), draw.sample(topic["adds"], 2)
    text = f"{who} to {does} on {draw.choice(words.DAYS)}. {adds[0]}"
    if draw.random() < 0.5:
        text += f" {adds[1]}"
    return {"text": text, "label": label}


def short_review(draw: random.Random, index: int) -> Row:
    """One sentence about a film, in the schema and the small letters of rotten_tomatoes."""
    label = index % 2
    first, second, third = draw.sample(words.JUDGMENTS[label], 3)
    film, subject = draw.choice(words.FILMS), draw.choice(words.SUBJECTS)
    aspect, verdict = draw.choice(words.ASPECTS), draw.choice(words.VERDICTS[label])
    text = draw.choice(
        (
            f"a {first} and {second} {film} about {subject} ; {verdict} .",
            f"this {film} about {subject} is {first} , {second} and {third} .",
            f"the {aspect} is {first} , and {verdict} .",
            f"{verdict} : a {first} {film} with a {second} {aspect} .",
            f"what could have been any {film} about {subject} turns out {first} and {second} .",
        )
    )
    return {"text": with_articles(text), "label": label}


def long_review(draw: random.Random, index: int) -> Row:
    """A viewer's account in whole sentences, in the schema of imdb."""
    label = index % 2
    first, second, third = draw.sample(words.JUDGMENTS[label], 3)
    aspect, other = draw.sample(words.ASPECTS, 2)
    verdict = capitalize(draw.choice(words.VERDICTS[label]))
    text = (
        f"I saw this {draw.choice(words.FILMS)} about {draw.choice(words.SUBJECTS)} with"
        f" {draw.choice(words.COMPANIONS)} {draw.choice(words.OCCASIONS)}."
        f" The {aspect} was {first} and the {other} {second}."
        f" {verdict}. All in all a {third} film."
    )
    return {"text": with_articles(text), "label": label}


def sentence_pair(draw: random.Random, index: int) -> Row:
    """Two sentences that are or are not paraphrases, in the schema of glue/mrpc."""
    label = index % 2
    actor, other_actor = draw.choice(words.ACTORS)
    act, past, other_past, thing, other_thing = draw.choice(words.ACTS)
    day = draw.choice(words.DAYS)
    first = draw.choice((f"{actor} {past} {thing} on {day}", f"on {day} {actor} {past} {thing}"))
    if label:
        named = draw.choice((other_thing, thing))
        who = draw.choice((other_actor, actor))
        second = draw.choice(
            (f"{who} {other_past} {named} on {day}", f"on {day} {who} {other_past} {named}")
        )
    else:
        refusal = draw.choice(words.REFUSALS)
        second = refusal.format(actor=other_actor, act=act, thing=thing) + f" on {day}"
    return {
        "sentence1": capitalize(first) + ".",
        "sentence2": capitalize(second) + ".",
        "label": label,
        "idx": index,
    }


def question(draw: random.Random, index: int) -> Row:
    """A question with four options, in the schema of openbookqa/main."""
    # The first kind gives the question and its answer, each of the others a wrong option.
    kind, *others = draw.sample(words.KINDS, 4)
    options = [draw.choice(members) for _, members in others]
    answer = index % 4
    options.insert(answer, draw.choice(kind[1]))
    return {
        "id": f"demo-{index}",
        "question_stem": draw.choice(kind[0]),
        "choices": {"text": options, "label": ["A", "B", "C", "D"]},
        "answerKey": "ABCD"[answer],
    }


def distinct(make: Callable[[random.Random, int], Row], draw: random.Random) -> Iterator[Row]:
    """Yields rows without end, no two with the same text; the label of row i follows from i."""
    seen: set[str] = set()
    index = 0
    while True:
        row = make(draw, index)
        text = json.dumps({key: row[key] for key in row if key not in ("id", "idx")})
        # Numbers and ids are left out: they would make every row distinct.
        if text not in seen:
            seen.add(text)
            index += 1
            yield row


# What makes each dataset's rows, and rows of each split, by the dataset that the rows are modeled
# on. imdb is held out of training.
DATASETS = (
    ("ag_news/default", news, {"train": TRAIN_ROWS, "validation": VALIDATION_ROWS}),
    ("rotten_tomatoes/default", short_review, {"train": TRAIN_ROWS, "validation": VALIDATION_ROWS}),
    ("glue/mrpc", sentence_pair, {"train": TRAIN_ROWS, "validation": VALIDATION_ROWS}),
    ("openbookqa/main", question, {"train": TRAIN_ROWS, "validation": VALIDATION_ROWS}),
    ("imdb/default", long_review, {"validation": VALIDATION_ROWS}),
)


def generate(folder: Path) -> None:
    """Writes every split of every dataset below the folder, `synthetic_<dataset>/<subset>/`."""
    for name, make, splits in DATASETS:
        # Seeded by the name, so that a dataset's rows do not depend on the others.
        rows = distinct(make, random.Random(f"{SEED}/{name}"))
        for split, count in splits.items():
            lines = [json.dumps(next(rows)) + "\n" for _ in range(count)]
            write_atomically(folder / (SYNTHETIC + name) / f"{split}.jsonl", "".join(lines))


if __name__ == "__main__":
    generate(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
