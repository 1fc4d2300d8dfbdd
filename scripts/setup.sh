#!/usr/bin/env bash
# Makes .venv with exactly what the locks of a tier name, and this package. Run it again at no cost.
#   bash scripts/setup.sh                       # both stacks: all that the quick start and T0's commands need
#   TIER=core bash scripts/setup.sh             # without TensorFlow and SeqIO; Python 3.14 too
#   TIER=tests bash scripts/setup.sh            # what tests and docs need as well; scripts/test.sh asks for it
#   PYTHON=python3.12 bash scripts/setup.sh     # another interpreter
#   EXTRAS=hf,s3 bash scripts/setup.sh          # the package's extras too
# The tier and the extras stay until TIER= or EXTRAS= is given again.
set -euo pipefail
if [[ " $* " == *" --help "* ]]; then
  sed -n '/^#!/d; s/^# \{0,1\}//p; /^set /q' "${BASH_SOURCE[0]}"
  exit
fi
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=.venv
stamp=$venv/.t0repro-lock
kept_tier=$venv/.t0repro-tier
kept_extras=$venv/.t0repro-extras

say() { echo "setup: $*"; }

# ---- The tier, whose locks each name what they add ------------------------------------------------------
if [[ -z ${TIER+given} && -f $kept_tier ]]; then TIER=$(<"$kept_tier"); fi
TIER=${TIER:-reference}
case $TIER in
  core) tiers=(core) ;;
  reference) tiers=(core reference) ;;
  tests) tiers=(core reference tests) ;;
  *)
    echo "setup: there is no tier '$TIER'; TIER is core, reference or tests" >&2
    exit 2
    ;;
esac
locks=()
for tier in "${tiers[@]}"; do locks+=("requirements/$tier.lock"); done

# ---- An interpreter of 3.11 to 3.14; TensorFlow has wheels up to 3.13 -----------------------------------
newest=13
[[ $TIER != core ]] || newest=14
is_suitable() {
  "$1" -c "import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, $newest))" 2>/dev/null
}

find_python() {
  local candidate tried=
  for candidate in ${PYTHON:-python3.11 python3 python3.12 python3.13 python3.14}; do
    if is_suitable "$candidate"; then
      echo "$candidate"
      return
    fi
    tried+="  $candidate: $("$candidate" --version 2>/dev/null || echo "not found")"$'\n'
  done
  printf 'setup: no Python from 3.11 to 3.%s. Tried:\n%s' "$newest" "$tried" >&2
  echo "setup: install one, or name it: PYTHON=/path/to/python3.11 bash scripts/setup.sh" >&2
  [[ $TIER == core ]] ||
    echo "setup: TensorFlow has no wheels for 3.14; TIER=core does without it and runs there" >&2
  exit 2
}

# ---- The extras, which setup.py names -------------------------------------------------------------------
if [[ -z ${EXTRAS+given} && -f $kept_extras ]]; then EXTRAS=$(<"$kept_extras"); fi
# Blanks may separate them too.
EXTRAS=$(tr ', ' '\n' <<<"${EXTRAS:-}" | sed '/^$/d' | paste -sd,)
known=$(sed -n '/extras_require/,$s/^        "\([a-z0-9-]*\)": .*/\1/p' setup.py | tr '\n' ' ')
for extra in ${EXTRAS//,/ }; do
  if [[ " $known" != *" $extra "* ]]; then
    echo "setup: there is no extra '$extra'; EXTRAS is one or more of ${known% }, separated by commas" >&2
    exit 2
  fi
done

# ---- Nothing to do when the locks, the package's metadata and the extras are those installed ------------
wanted="$(cat "${locks[@]}" setup.py pyproject.toml scripts/setup.sh | cksum) extras:$EXTRAS ${PYTHON:-} $PWD"
if [[ -x $venv/bin/python && -f $stamp && "$(<"$stamp")" == "$wanted" ]]; then
  say ".venv is up to date with the $TIER tier"
  exit 0
fi

# ---- The environment ------------------------------------------------------------------------------------
version_of() { "$1" -c 'import platform; print(platform.python_version())' 2>/dev/null || true; }

# One from before there were tiers holds tensorflow, which shares its files with tensorflow-cpu.
if ! is_suitable "$venv/bin/python" || [[ ! -f $kept_tier ]] ||
  [[ -n ${PYTHON:-} && "$(version_of "$venv/bin/python")" != "$(version_of "$PYTHON")" ]]; then
  python=$(find_python)
  say "making .venv with $("$python" --version)"
  rm -rf "$venv"
  if ! "$python" -m venv "$venv"; then
    rm -rf "$venv"
    echo "setup: '$python -m venv' failed; on Debian and Ubuntu install the package python3-venv" >&2
    exit 2
  fi
fi
rm -f "$stamp"
echo "$TIER" >"$kept_tier"

export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1
pip() { "$venv/bin/python" -m pip "$@"; }

# ---- uv if it is installed, which takes a fraction of pip's time; otherwise pip ---------------------------
# Run, not only found: a version manager may have a stand-in for a uv that is not installed.
uv=()
for candidate in uv "python3 -m uv"; do
  read -r -a words <<<"$candidate"
  if "${words[@]}" --version >/dev/null 2>&1; then
    uv=("${words[@]}")
    break
  fi
done
# uv reads none of pip's variables; those that say where packages are apply to both.
[[ -z ${PIP_NO_INDEX:-} ]] || export UV_NO_INDEX=${UV_NO_INDEX:-1}
[[ -z ${PIP_FIND_LINKS:-} ]] || export UV_FIND_LINKS=${UV_FIND_LINKS:-${PIP_FIND_LINKS// /,}}
[[ -z ${PIP_INDEX_URL:-} ]] || export UV_DEFAULT_INDEX=${UV_DEFAULT_INDEX:-$PIP_INDEX_URL}

# promptsource 0.1.0 says Python < 3.8 and runs on 3.11: uv ignores such an upper bound, pip needs a flag.
# Compiled now, as pip does: with PYTHONDONTWRITEBYTECODE, as in many containers, each process would compile
# what it imports, TensorFlow among it.
install() {
  if [[ ${#uv[@]} -gt 0 ]]; then
    if "${uv[@]}" pip install --python "$venv/bin/python" --quiet --compile-bytecode \
      --reinstall-package t0repro "$@"; then
      return
    fi
    say "uv failed (above); installing with pip"
  fi
  say "pip's red lines about conflicting requirements are expected: those of t5 and others are stale"
  pip install --quiet --ignore-requires-python "$@"
}

# ---- What the locks do not name goes, unless extras, which they do not cover, brought it ------------------
strays() {
  "$venv/bin/python" - "${locks[@]}" <<'PY'
import fileinput
import importlib.metadata
import re


def normal(name):
    return re.sub(r"[-_.]+", "-", name).lower()


with fileinput.input(encoding="utf-8") as lines:
    locked = {normal(line.partition("==")[0].strip()) for line in lines if re.match(r"\w.*==", line)}
installed = {normal(found.metadata["Name"]) for found in importlib.metadata.distributions()}
print(*sorted(installed - locked - {"pip", "setuptools", "t0repro"}))
PY
}
if [[ -z $EXTRAS ]]; then
  read -r -a unlocked <<<"$(strays)"
  if [[ ${#unlocked[@]} -gt 0 ]]; then
    say "removing what the locks do not name: ${unlocked[*]}"
    pip uninstall --quiet --yes "${unlocked[@]}"
  fi
fi

# ---- What the locks name ---------------------------------------------------------------------------------
count=$(cat "${locks[@]}" | grep -c '^[a-z].*==')
say "installing the $TIER tier, $count locked packages${uv:+ with uv} (some minutes the first time)"
# --no-deps: the locks are complete, and t5's, promptsource's and tensorflow-estimator's own requirements
# are stale.
install --require-hashes --no-deps "${locks[@]/#/--requirement=}"

say "installing t0repro itself${EXTRAS:+ with the extras $EXTRAS}"
# Built with the locked setuptools: an isolated build would fetch another.
if [[ -n $EXTRAS ]]; then
  constraints=$(mktemp)
  trap 'rm -f "$constraints"' EXIT
  # Of all tiers: the tests' lock names what the extras s3 and vertex bring.
  sed -n 's/^\([^ ]*==[^\\]*\) \\$/\1/p' requirements/*.lock >"$constraints"
  install --no-build-isolation --editable ".[$EXTRAS]" --constraint "$constraints"
else
  install --no-deps --no-build-isolation --editable .
fi

echo "$EXTRAS" >"$kept_extras"
echo "$wanted" >"$stamp"
say "done; '.venv/bin/t0repro doctor' checks it"
