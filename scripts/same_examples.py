"""Checks that two caches of a task have the same examples in each split, in any order.

    .venv/bin/python -P scripts/same_examples.py CACHE_A/TASK CACHE_B/TASK

Prints the number of examples; exits with 1, naming the split, if the two differ.
"""

from __future__ import annotations

import collections
import re
import sys
from pathlib import Path

from t0repro import compat

compat.install()  # TensorFlow imports without its start-up lines
import tensorflow as tf  # noqa: E402


def examples_by_split(folder: Path) -> dict[str, collections.Counter[str]]:
    """How often each example occurs in each split of a cached task."""
    found: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for path in sorted(folder.glob("*.tfrecord-*")):
        split = re.split(r"\.tfrecord-", path.name)[0]
        for record in tf.data.TFRecordDataset(str(path)).as_numpy_iterator():
            features = tf.train.Example.FromString(record).features.feature
            found[split][str(sorted((name, str(value)) for name, value in features.items()))] += 1
    return dict(found)


def main() -> None:
    """Compares the two folders of the command line."""
    ours, theirs = (examples_by_split(Path(folder)) for folder in sys.argv[1:3])
    if not ours or ours.keys() != theirs.keys():
        sys.exit(f"different splits: {sorted(ours)} and {sorted(theirs)}")
    for split, examples in ours.items():
        if examples != theirs[split]:
            sys.exit(f"split {split}: {(examples - theirs[split]).total()} examples differ")
    count = sum(examples.total() for examples in ours.values())
    name = Path(sys.argv[1]).name
    print(f"t0repro cache and seqio_cache_tasks wrote the same {count:,} examples of {name}")


if __name__ == "__main__":
    main()
