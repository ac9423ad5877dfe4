#!/usr/bin/env bash
# The tests marked slow: whole training runs, engines and ranks that are killed, every hook in a real run, and the
# commands of the original specification. What needs real SGLang or Megatron has scripts of its own.
#
#   bash scripts/test_runs.sh [pytest arguments]
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
# Runs mostly wait for processes to start, so two take turns; a group (tests/conftest.py) shares ports or fixtures.
if [ $# -eq 0 ]; then
    set -- -n 2 --dist loadgroup --no-loadscope-reorder  # the order of tests/conftest.py
fi
exec bash "$here/test.sh" -m "slow and not sglang and not megatron and not cuda" "$@"
