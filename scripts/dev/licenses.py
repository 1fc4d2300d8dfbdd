"""Prints docs/evidence/licenses.md: every package of requirements/ with its version and license.

    .venv/bin/python -P scripts/dev/licenses.py > docs/evidence/licenses.md

Licenses are those that the installed packages state about themselves; nothing is looked up.
"""

import importlib.metadata
import re
from pathlib import Path

LOCKS = Path(__file__).resolve().parents[2] / "requirements"
TIERS = ("core", "reference", "tests")
HEAD = """# Licenses

t0repro is under the Apache License 2.0. These are the packages that the locks in `requirements/`
name, with the licenses that their own metadata state; `scripts/dev/licenses.py` prints the page.
*Not installed* marks packages that only another operating system or Python version needs.

| package | version | tier | license |
|---|---|---|---|"""

# Licenses of packages whose metadata lack them, with the source.
ELSEWHERE = {
    "namex": "Apache-2.0 (its LICENSE file)",
    "sentencepiece": "Apache-2.0 (its repository)",
}


def license(metadata) -> str:
    """A package's license: the expression, else its classifiers, else the text's first line."""
    if expression := metadata.get("License-Expression"):
        return expression
    classifiers = [each for each in metadata.get_all("Classifier") or () if "License ::" in each]
    named = sorted({each.rpartition(" :: ")[2] for each in classifiers} - {"OSI Approved"})
    if named:
        return ", ".join(named)
    # Some put the complete text there; its first line names the license.
    text = (metadata.get("License") or "").strip()
    return text.splitlines()[0].strip() if text else ELSEWHERE.get(metadata["Name"], "not stated")


def stated_by(name: str, version: str) -> str:
    """The license of a package, if it is installed at this version."""
    try:
        found = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
    return license(found.metadata) if found.version == version else "not installed"


def main() -> None:
    print(HEAD)
    listed = set()
    for tier in TIERS:
        lock = (LOCKS / f"{tier}.lock").read_text()
        for name, version in re.findall(r"^([\w.-]+)==([^\s;]+)", lock, re.M):
            # What one tier needs on some systems only, a later one may need on all.
            if (name, version) in listed:
                continue
            listed.add((name, version))
            print(f"| {name} | {version} | {tier} | {stated_by(name, version).replace('|', ',')} |")


if __name__ == "__main__":
    main()
