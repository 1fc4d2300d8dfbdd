#!/usr/bin/env bash
# Everything that must hold before a change goes in: lint, format, types, tests. Arguments go to pytest.
#   bash scripts/test.sh                   # all but the slow
#   bash scripts/test.sh tests/mesh -x     # these tests, after lint and types
#   bash scripts/test.sh -m slow           # the ones of more than a minute, which are left out otherwise
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh
export PATH="$PWD/.venv/bin:$PATH"

echo "== ruff"
ruff check
ruff format --check
echo "== basedpyright"
# On the package as it is installed: in the checkout, tasks/, converters/ and gin/ are not yet below
# t0repro, and gin/ would be taken for gin-config.
typed=build/typed
rm -rf "$typed"
python -P setup.py --quiet build_py --build-lib "$typed"
cp pyproject.toml "$typed"
ln -s ../../.venv "$typed/.venv"
(cd "$typed" && basedpyright --level error t0repro)
echo "== pytest"
# loadfile: the tests of a file share their fixtures, so that one training run serves them all.
pytest -n "${TEST_WORKERS:-2}" --dist loadfile -m "not slow" "$@"
