"""Prints docs/licences.md: every package of requirements.lock with its version and licence.

    .venv/bin/python -P scripts/licences.py > docs/licences.md

Licences are those that the installed packages state about themselves; nothing is looked up.
"""

import importlib.metadata
import re
from pathlib import Path

LOCK = Path(__file__).resolve().parents[1] / "requirements.lock"
HEAD = """# Licences

t0repro is under the Apache License 2.0. These are the packages of `requirements.lock`, with what
their own metadata say; `scripts/licences.py` prints the page. A package that only another system or
Python needs is not installed where the page was made.

| package | version | licence |
|---|---|---|"""

# Licences of packages whose metadata lack them, with the source.
ELSEWHERE = {
    "namex": "Apache-2.0 (its LICENSE file)",
    "sentencepiece": "Apache-2.0 (its repository)",
}


def licence(metadata) -> str:
    """A package's licence: the expression, else its classifiers, else the text's first line."""
    if expression := metadata.get("License-Expression"):
        return expression
    classifiers = [each for each in metadata.get_all("Classifier") or () if "License ::" in each]
    named = sorted({each.rpartition(" :: ")[2] for each in classifiers} - {"OSI Approved"})
    if named:
        return ", ".join(named)
    # Some put the complete text there; its first line names the licence.
    text = (metadata.get("License") or "").strip()
    return text.splitlines()[0].strip() if text else ELSEWHERE.get(metadata["Name"], "not stated")


def main() -> None:
    print(HEAD)
    for name, version in re.findall(r"^([\w.-]+)==([^\s;]+)", LOCK.read_text(), re.M):
        try:
            found = importlib.metadata.distribution(name)
            stated = licence(found.metadata) if found.version == version else "not installed"
        except importlib.metadata.PackageNotFoundError:
            stated = "not installed"
        print(f"| {name} | {version} | {stated.replace('|', ',')} |")


if __name__ == "__main__":
    main()
