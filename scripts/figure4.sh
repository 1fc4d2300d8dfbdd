#!/usr/bin/env bash
# T0's zero-shot evaluation (Figure 4 of its paper) of a released checkpoint, from nothing to the report.
#
#   bash scripts/figure4.sh bigscience/T0_3B
#   bash scripts/figure4.sh bigscience/T0_3B --limit 100 --yes
#
# Prints what it takes and asks once. Started again, it continues. Further arguments go to
# `t0repro reproduce`; OUT names the folder (default runs/figure4/<name>).
set -euo pipefail
if [[ " $* " == *" --help "* ]]; then
  sed -n '/^#!/d; s/^# \{0,1\}//p; /^set /q' "${BASH_SOURCE[0]}"
  exit
fi
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
export PATH="$root/.venv/bin:$PATH"
name=${1:?name a checkpoint, as in: bash scripts/figure4.sh bigscience/T0_3B}
exec t0repro reproduce "$name" --out "${OUT:-runs/figure4/${name//\//_}}" "${@:2}"
