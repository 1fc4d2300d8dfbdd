#!/usr/bin/env bash
# All checks before a change is merged: lint, format, imports, types, tests. Arguments go to pytest.
#   bash scripts/test.sh                   # all that take no more than three seconds each, and the main job's
#   bash scripts/test.sh --all             # all
#   bash scripts/test.sh --part 1/8        # all of an eighth of the files too, as continuous integration does
#   bash scripts/test.sh tests/mtf -x      # all of these
#   bash scripts/test.sh --record          # all, and keep what each took in tests/seconds.json
#   bash scripts/test.sh --coverage        # which lines and branches the tests run; slower by a third
#   bash scripts/test.sh -m slow           # those that take more than a minute each
#   bash scripts/test.sh -m hardlife       # kills, full disks, power loss, remote stores: nightly
set -euo pipefail
if [[ " $* " == *" --help "* ]]; then
  sed -n '/^#!/d; s/^# \{0,1\}//p; /^set /q' "${BASH_SOURCE[0]}"
  exit
fi
cd "$(dirname "${BASH_SOURCE[0]}")/.."
TIER=tests bash scripts/setup.sh
export PATH="$PWD/.venv/bin:$PATH"
# Many containers set this; a thousand processes would compile the package and the tests anew.
unset PYTHONDONTWRITEBYTECODE

run=(pytest)
if [[ ${1:-} == --coverage ]]; then
  shift
  run=(coverage run -m pytest)
  mkdir -p build/coverage
  coverage erase
  # Reported after failures too.
  trap 'coverage combine --quiet && coverage report' EXIT
fi

# Imports and types are checked on the built package: in the checkout, tasks/, converters/ and gin/ are not below
# t0repro, and gin/ would be mistaken for gin-config.
check_imports_and_types() {
  local built=build/typed
  rm -rf "$built"
  python -P setup.py --quiet build_py --build-lib "$built"
  cp pyproject.toml "$built"
  ln -s ../../.venv "$built/.venv"
  cd "$built"
  echo "== import contracts"
  PYTHONPATH=. lint-imports --no-logo
  echo "== basedpyright"
  basedpyright --level error t0repro
}

# Without files' names, the tests write some 3 GB, most of it checkpoints; on a full disk they fail by hundreds.
temporary=${TMPDIR:-/tmp}
free=$(df -Pk "$temporary" | awk 'NR == 2 { print int($4 / 1048576) }')
if ((free < 4)) && [[ "$*" != *tests/* ]]; then
  echo "test.sh: $temporary has $free GB free, and the tests need 4; TMPDIR=DIR names another folder" >&2
  exit 1
fi

echo "== ruff"
ruff check
ruff format --check
mkdir -p build
(check_imports_and_types) >build/checks.log 2>&1 &
checks=$!
echo "== pytest"
# loadfile, because the tests of a file share fixtures, such as one training run. Three workers on two cores, because
# tests often wait for processes that they started.
failed=0
"${run[@]}" -n "${TEST_WORKERS:-3}" --dist loadfile --no-loadscope-reorder -m "not slow and not hardlife" "$@" ||
  failed=$?
wait "$checks" || failed=1
cat build/checks.log
exit "$failed"
