"""Trains the demo's vocabulary: .venv/bin/python scripts/demo/train_vocabulary.py [model].

A unigram SentencePiece model with T5's special pieces (pad 0, EOS 1, unknown 2) and normalization,
trained on the demo's training rows as every template of the demo renders them.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from pathlib import Path

import sentencepiece

from t0repro.storage import write_atomically
from t0repro.tasks.demo.datasets import DEMO, FOLDER, VOCABULARY
from t0repro.tasks.rendering import render
from t0repro.tasks.rows import dataset_folder, read_rows, splits_on_disk
from t0repro.tasks.templates import load_template

PIECES = 2_000


def sentences() -> Iterator[str]:
    """All texts of the demo: prompts, targets and answer choices of every split's rows."""
    for entry in DEMO:
        folder = dataset_folder(FOLDER, entry.dataset, entry.subset)
        # Evaluation prompts too: the vocabulary must cover their words, which no model trains on.
        for name in (*entry.train, *entry.evaluate):
            template = load_template(entry.dataset, entry.subset, name)
            for split in splits_on_disk(folder):
                for row in read_rows(folder / f"{split}.jsonl"):
                    rendering = render(template, row)
                    if rendering is not None:
                        # The trainer treats each line as a sentence.
                        yield rendering.inputs.replace("\n", " ")
                        yield from rendering.answer_choices or [rendering.targets]


def train() -> bytes:
    """The serialized model, the same on every machine: one thread trains it without sampling."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=sentences(),
        model_writer=model,
        model_type="unigram",
        vocab_size=PIECES,
        hard_vocab_limit=False,
        character_coverage=1.0,
        pad_id=0,
        eos_id=1,
        unk_id=2,
        bos_id=-1,
        num_threads=1,
        minloglevel=2,
    )
    return model.getvalue()


if __name__ == "__main__":
    write_atomically(Path(sys.argv[1]) if len(sys.argv) > 1 else VOCABULARY, train())
