#!/usr/bin/env bash
# All checks before a release except the tests: version, changelog, citation, contents of the source distribution
# and the wheel, licenses of all dependencies, a bill of materials.
#   EXTRAS=release bash scripts/setup.sh     # the tools, once
#   bash scripts/dev/release_check.sh            # writes both packages and sbom.json to dist/
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
export PATH="$PWD/.venv/bin:$PATH"

fail() { echo "release_check: $1" >&2; exit 1; }

for tool in pyproject-build twine cyclonedx-py; do
  command -v "$tool" >/dev/null || fail "$tool is not installed: EXTRAS=release bash scripts/setup.sh"
done
[[ -z "$(git status --porcelain)" ]] || fail "there are changes that are not committed"

echo "== version"
version=$(python -P setup.py --version 2>/dev/null)
[[ "$(python -P -c 'import t0repro; print(t0repro.__version__)')" == "$version" ]] ||
  fail "setup.py says $version and t0repro/__init__.py something else"
grep -qE "^## \[${version//./\\.}\] - [0-9]{4}-[0-9]{2}-[0-9]{2}$" CHANGELOG.md || fail "CHANGELOG.md has no entry for $version"
grep -q "^version: $version$" CITATION.cff || fail "CITATION.cff has another version than $version"

tree=$(mktemp -d)
trap 'rm -rf "$tree"' EXIT

echo "== citation"
# In a separate environment, because it needs an older jsonschema than the bill of materials.
python -m venv "$tree/.cff"
"$tree/.cff/bin/python" -m pip install --quiet --disable-pip-version-check cffconvert
"$tree/.cff/bin/cffconvert" --validate -i CITATION.cff
rm -rf "$tree/.cff"

echo "== source distribution and wheel"
# From committed files only, so that the packages contain nothing else from the checkout.
git archive HEAD | tar -x -C "$tree"
rm -rf dist
pyproject-build --outdir dist "$tree"
twine check --strict dist/*
python -P -m pytest -q tests/test_wheel.py -m "not slow"

echo "== licenses"
python -P scripts/dev/licenses.py | diff docs/evidence/licenses.md - >/dev/null ||
  fail "docs/evidence/licenses.md is not what scripts/dev/licenses.py prints: write it again"
if grep "not stated" docs/evidence/licenses.md; then fail "these state no license: see to them"; fi

echo "== bill of materials"
cat requirements/{core,reference}.lock >"$tree/locked.txt"
cyclonedx-py requirements "$tree/locked.txt" --output-format JSON --output-file dist/sbom.json
python -P - <<'PY'
import json
import re

with open("dist/sbom.json", encoding="utf-8") as file:
    parts = {part["name"].lower() for part in json.load(file)["components"]}
locked = set()
for tier in ("core", "reference"):
    with open(f"requirements/{tier}.lock", encoding="utf-8") as file:
        locked |= {name.lower() for name in re.findall(r"^([\w.-]+)==", file.read(), re.M)}
assert locked <= parts, sorted(locked - parts)
print(f"{len(parts)} components")
PY
echo "release_check: $version can be released"
