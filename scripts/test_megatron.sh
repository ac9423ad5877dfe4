#!/usr/bin/env bash
# Real megatron-core on the CPU: every model family, every parallel layout of up to four ranks.
#
#   bash scripts/test_megatron.sh [pytest arguments]
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
cd "$here/.."
python="$(bash scripts/env.sh | tail -n 1)"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
export OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE
unset PYTHONDONTWRITEBYTECODE  # as in scripts/test.sh

exec "$python" -m pytest -m megatron "$@"
