"""Writes the golden files of tests/parity/goldens with the real Mesh TensorFlow; about a minute.

.venv/bin/python -P scripts/dev/make_goldens.py [CASE ...]
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from t0repro.storage import write_atomically

TESTS = Path(__file__).resolve().parents[2] / "tests" / "parity"
sys.path.append(str(TESTS))
import golden  # noqa: E402 - the cases, which are beside their test

GOLDENS = TESTS / "goldens"


def main() -> None:
    """Makes the named cases' files, or all of them."""
    wanted = sys.argv[1:]
    cases = [case for case in golden.CASES if not wanted or case.name in wanted]
    with tempfile.TemporaryDirectory() as folder:
        for case, found in zip(cases, golden.run_on_mesh(cases, folder), strict=True):
            path = GOLDENS / f"{case.name}.json"
            write_atomically(path, golden.to_text(found))
            print(path)


if __name__ == "__main__":
    main()
