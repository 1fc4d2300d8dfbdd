#!/usr/bin/env bash
# Makes .venv with exactly requirements.lock and this package. Run it again at no cost.
#   PYTHON=python3.12 bash scripts/setup.sh     # another interpreter
#   EXTRAS=hf,vertex bash scripts/setup.sh      # the package's extras too
set -euo pipefail
cd "$(dirname "$0")/.."

venv=.venv
stamp=$venv/.t0repro-lock

# ---- An interpreter of 3.11 or later ----------------------------------------------------------------
find_python() {
  local candidate
  for candidate in ${PYTHON:-python3.11 python3 python3.12 python3.13}; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  echo "setup: no Python 3.11 or later found. Install one, or name it: PYTHON=/path/to/python bash scripts/setup.sh" >&2
  exit 2
}

# ---- Nothing to do when the lock, the package's metadata and the extras are those installed -------------
wanted="$(cat requirements.lock setup.py pyproject.toml scripts/setup.sh | sha256sum | cut -d' ' -f1) ${EXTRAS:-} $PWD"
if [[ -x $venv/bin/python && -f $stamp && "$(cat "$stamp")" == "$wanted" ]]; then
  echo "setup: .venv is up to date with requirements.lock"
  exit 0
fi

# ---- The environment ------------------------------------------------------------------------------------
if ! "$venv/bin/python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
  python=$(find_python)
  echo "setup: making .venv with $("$python" --version)"
  rm -rf "$venv"
  "$python" -m venv "$venv"
fi
rm -f "$stamp"

export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1
echo "setup: installing $(grep -c '==' requirements.lock) locked packages (some minutes the first time)"
# --no-deps: the lock is complete, and t5's, promptsource's and tensorflow-estimator's own requirements
# are stale. --ignore-requires-python: promptsource 0.1.0 says Python < 3.8 and runs on 3.11.
"$venv/bin/python" -m pip install --quiet --require-hashes --no-deps --ignore-requires-python -r requirements.lock

echo "setup: installing t0repro itself"
# Built with the locked setuptools: an isolated build would fetch another.
"$venv/bin/python" -m pip install --quiet --no-deps --no-build-isolation --editable .
if [[ -n ${EXTRAS:-} ]]; then
  echo "setup: installing the extras $EXTRAS"
  "$venv/bin/python" -m pip install --quiet --constraint <(sed -n 's/^\([^ ]*==[^ ]*\).*/\1/p' requirements.lock) ".[${EXTRAS}]"
  "$venv/bin/python" -m pip install --quiet --no-deps --no-build-isolation --editable .
fi

echo "$wanted" >"$stamp"
echo "setup: done; '.venv/bin/t0repro doctor' checks it"
