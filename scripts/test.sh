#!/usr/bin/env bash
# All checks before a change is merged: lint, format, imports, types, tests. Arguments go to pytest.
#   bash scripts/test.sh                   # all tests except slow ones and fault injection
#   bash scripts/test.sh --fast            # under 3 minutes on two idle cores: tests/fast_tier.txt
#   bash scripts/test.sh tests/mtf -x     # these tests, after lint and types
#   bash scripts/test.sh --coverage        # which lines and branches the tests run; slower by a third
#   bash scripts/test.sh -m slow           # those that take more than a minute each
#   bash scripts/test.sh -m hardlife       # kills, full disks, power loss, remote stores: nightly
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
TIER=tests bash scripts/setup.sh
export PATH="$PWD/.venv/bin:$PATH"

tests=()
run=(pytest)
case ${1:-} in
  --fast)
    shift
    mapfile -t tests < <(grep -v '^#' tests/fast_tier.txt)
    ;;
  --coverage)
    shift
    run=(coverage run -m pytest)
    mkdir -p build/coverage
    coverage erase
    # Reported after failures too.
    trap 'coverage combine --quiet && coverage report' EXIT
    ;;
esac

echo "== ruff"
ruff check
ruff format --check
# Imports and types are checked on the built package: in the checkout, tasks/, converters/ and gin/ are not below
# t0repro, and gin/ would be mistaken for gin-config.
built=build/typed
rm -rf "$built"
python -P setup.py --quiet build_py --build-lib "$built"
cp pyproject.toml "$built"
ln -s ../../.venv "$built/.venv"
echo "== import contracts"
(cd "$built" && PYTHONPATH=. lint-imports --no-logo)
echo "== basedpyright"
(cd "$built" && basedpyright --level error t0repro)
echo "== pytest"
# loadfile, because the tests of a file share fixtures, such as one training run. tests/conftest.py sets the order
# of files. Three workers on two cores, because tests often wait for processes that they started.
"${run[@]}" -n "${TEST_WORKERS:-3}" --dist loadfile --no-loadscope-reorder \
  -m "not slow and not hardlife" \
  ${tests[@]+"${tests[@]}"} "$@"
