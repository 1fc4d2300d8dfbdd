"""Trains a SentencePiece vocabulary, in T5's form, on the pretraining texts of small_texts.sh.

    T0REPRO_DATA_DIR=DIR .venv/bin/python -P scripts/small_vocabulary.py vocabulary.model

4,000 pieces, without T5's sentinels: the tasks add those. With T5's own 32,000, nearly all
parameters of so small a model would be embeddings.
"""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import sentencepiece

from t0repro.storage import write_atomically
from t0repro.tasks.examples.small_texts import FIELDS, TRAIN
from t0repro.tasks.user_files import find_data_file

PIECES = 4000


def main() -> None:
    """Trains the vocabulary and writes it to the path given on the command line."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(dict.fromkeys(texts())),  # ropes repeats its texts
        model_writer=model,
        vocab_size=PIECES,
        max_sentence_length=100_000,  # bytes; the trainer ignores longer texts
        num_threads=1,  # fixes the order of float sums, so that the vocabulary is reproducible
        # The ids of T5's special pieces; it has no BOS.
        pad_id=0,
        eos_id=1,
        unk_id=2,
        bos_id=-1,
        minloglevel=1,
    )
    write_atomically(Path(sys.argv[1]), model.getvalue())


def texts() -> Iterator[str]:
    """The texts of all rows."""
    for name in TRAIN:
        for line in find_data_file(f"{name}.jsonl").open(encoding="utf-8"):
            row = json.loads(line)
            yield next(row[field] for field in FIELDS if field in row)


if __name__ == "__main__":
    main()
