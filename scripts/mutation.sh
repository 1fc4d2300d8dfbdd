#!/usr/bin/env bash
# Mutation testing: each small change to the modules that [tool.mutmut] in pyproject.toml names should
# make one of the tests named there fail. docs/reliability.md has the last result.
#   EXTRAS=mutation bash scripts/setup.sh              # the tool, once
#   bash scripts/mutation.sh                           # all modules: 2,000 changes, hours
#   bash scripts/mutation.sh 't0repro.evaluation.rank*' # these changes; those tried before are kept in mutants/
#   .venv/bin/mutmut results                           # what no test noticed
#   .venv/bin/mutmut show NAME                         # one of them, as a diff
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PATH="$PWD/.venv/bin:$PATH"
if ! command -v mutmut >/dev/null; then
  echo "mutation: mutmut is not installed: EXTRAS=mutation bash scripts/setup.sh" >&2
  exit 2
fi
# What XLA compiles for one mutant serves the next.
export JAX_COMPILATION_CACHE_DIR="$PWD/build/mutation"
export JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0 JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES=-1
exec mutmut run --max-children "${MUTATION_WORKERS:-1}" "$@"
