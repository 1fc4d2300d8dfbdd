#!/usr/bin/env bash
# Builds the pages into a site, strictly: a broken link is an error.
#   bash scripts/docs.sh [DIR]                            # default: site/
#   python -m http.server --bind 127.0.0.1 -d site 8000   # shows it; from the disk, search does not work
set -euo pipefail
if [[ " $* " == *" --help "* ]]; then
  sed -n '/^#!/d; s/^# \{0,1\}//p; /^set /q' "${BASH_SOURCE[0]}"
  exit
fi
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PATH="$PWD/.venv/bin:$PATH" NO_MKDOCS_2_WARNING=1
out=${1:-site}
python -c 'import mkdocs' 2>/dev/null ||
  { echo "docs: mkdocs is not in .venv; 'TIER=tests bash scripts/setup.sh' installs it" >&2; exit 2; }
# Build the package first, because in the checkout tasks/ and converters/ are not below t0repro.
T0REPRO_BUILT=$(mktemp -d)
export T0REPRO_BUILT
trap 'rm -rf "$T0REPRO_BUILT"' EXIT
python -P setup.py --quiet build_py --build-lib "$T0REPRO_BUILT"
python -P -m mkdocs build --strict --quiet --site-dir "$(realpath -m "$out")"
