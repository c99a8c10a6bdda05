#!/usr/bin/env bash
# Checks every kernel on the GPU of this machine and measures it: benchmarks/gpu/check.py says how.
# Needs python3 (or $PYTHON) with torch, triton and numpy; installs nothing and uses no network.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PYTHONPATH="$PWD"
exec "${PYTHON:-python3}" -m benchmarks.gpu.check "$@"
