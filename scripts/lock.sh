#!/usr/bin/env bash
# Resolves requirements.in into requirements.lock: exact versions with hashes, without addresses.
# Needs uv (pip install uv) and the package index. Versions already locked are kept where they still fit.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if ! command -v uv >/dev/null; then
  echo "lock: uv is not installed: python -m pip install uv" >&2
  exit 2
fi
uv pip compile --universal --python-version 3.11 --generate-hashes --no-header --no-annotate \
  --quiet requirements.in -o requirements.lock
echo "requirements.lock: $(grep -c '==' requirements.lock) packages"
