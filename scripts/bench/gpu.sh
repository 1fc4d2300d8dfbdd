#!/usr/bin/env bash
# Measures a GPU machine without network in one run of at most ten minutes:
#
#     bash scripts/bench/gpu.sh OUT [--minutes 8] [--suite SUITE.npz]
#
# The machine has Python 3.12, JAX 0.11 for CUDA, flax, optax, orbax, torch, transformers, PEFT and
# pytest. What else is needed comes as wheels in build/wheels, which a machine with network writes:
#
#     pip download --no-deps --only-binary=:all: --python-version 3.12 --dest build/wheels \
#         --require-hashes -r <(python scripts/bench/gpu.py --wheels)
#
# OUT/gpu.json has the figures, written after each part, and OUT/gpu.md a table. A run that was cut
# off goes on with the parts that are missing if it is started again, with the same OUT or another;
# without build/gpu-run all are measured again.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
python=${PYTHON:-python3}
if ! "$python" -P -c "import t0repro.converters" 2>/dev/null; then
  # Beside the machine's packages, whichever environment they are in.
  export PYTHONPATH=$PWD/build/gpu
  pip=("$python" -m pip install --quiet --no-index --no-deps --upgrade --target "$PYTHONPATH")
  "${pip[@]}" build/wheels/*.whl
  "${pip[@]}" --no-build-isolation .
fi
exec "$python" -P scripts/bench/gpu.py "$@"
