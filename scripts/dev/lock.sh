#!/usr/bin/env bash
# Resolves requirements/*.in into requirements/*.lock, and .ci/jax-0.11.in likewise: exact versions with hashes, without
# addresses, for every system and Python that a package has wheels for. Each tier's lock names what it adds to those
# before it. Needs uv (pip install uv) and the package index. Versions already locked are kept where they still fit.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
if ! command -v uv >/dev/null; then
  echo "lock: uv is not installed: python -m pip install uv" >&2
  exit 2
fi

# Asked for and left out: tensorflow, whose place tensorflow-cpu takes; libclang, which no program calls; and
# TensorBoard's second server, without which the command `tensorboard` uses its first.
left_out=(--no-emit-package tensorflow --no-emit-package libclang --no-emit-package tensorboard-data-server)

compile=(uv pip compile --universal --generate-hashes --no-header --no-annotate --quiet "${left_out[@]}")
# `lock TIER SOURCE...`: what SOURCE asks for, and the versions of the tiers before.
before=()
lock() {
  local tier=$1 target=requirements/$1.lock known=() each name
  for each in "${before[@]}"; do
    known+=(--constraint "$each")
    # A package that this lock needs on some systems only may be needed on all by a later one, as colorama is.
    for name in $(sed -n 's/^\([^ =]*\)==[^;]* \\$/\1/p' "$each"); do known+=(--no-emit-package "$name"); done
  done
  "${compile[@]}" --python-version 3.11 "${known[@]}" "${@:2}" "requirements/$tier.in" -o "$target"
  echo "$target: $(grep -c '==.* \\$' "$target") packages"
  before+=("$target")
}

lock core setup.py --extra jax
lock reference setup.py --extra gs
lock tests setup.py --extra s3 --extra vertex --extra browse

# The same core on another JAX, for itself: every other version is taken from the tiers' locks.
other=.ci/jax-0.11
resolved=$(mktemp)
cat "${before[@]}" >"$resolved"
"${compile[@]}" --python-version 3.12 setup.py --extra jax requirements/core.in "$other.in" --override "$other.in" \
  -o "$resolved"
cat "$resolved" >"$other.lock"
rm "$resolved"
echo "$other.lock: $(grep -c '==.* \\$' "$other.lock") packages"
