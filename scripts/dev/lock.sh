#!/usr/bin/env bash
# Resolves requirements/*.in into requirements/*.lock: exact versions with hashes, without addresses, for
# every system and Python that a package has wheels for. Each lock names what it adds to those before it.
# Needs uv (pip install uv) and the package index. Versions already locked are kept where they still fit.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
if ! command -v uv >/dev/null; then
  echo "lock: uv is not installed: python -m pip install uv" >&2
  exit 2
fi

# Asked for and left out: tensorflow, whose place tensorflow-cpu takes; libclang, which no program calls; and
# TensorBoard's second server, without which the command `tensorboard` uses its first.
left_out=(--no-emit-package tensorflow --no-emit-package libclang --no-emit-package tensorboard-data-server)

# `lock TIER SOURCE...`: what SOURCE asks for, and the versions of the tiers before.
before=()
lock() {
  local tier=$1 target=requirements/$1.lock known=("${left_out[@]}") each name
  for each in "${before[@]}"; do
    known+=(--constraint "$each")
    # A package that this lock needs on some systems only may be needed on all by a later one, as colorama is.
    for name in $(sed -n 's/^\([^ =]*\)==[^;]* \\$/\1/p' "$each"); do known+=(--no-emit-package "$name"); done
  done
  uv pip compile --universal --python-version 3.11 --generate-hashes --no-header --no-annotate --quiet \
    "${known[@]}" "${@:2}" "requirements/$tier.in" -o "$target"
  echo "$target: $(grep -c '==.* \\$' "$target") packages"
  before+=("$target")
}

lock core setup.py --extra jax
lock reference setup.py --extra gs
lock tests setup.py --extra s3 --extra vertex --extra browse
