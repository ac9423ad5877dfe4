#!/usr/bin/env bash
# The tests marked real that are not slow: they start engines, routers, Ray, ranks or commands, each within seconds.
#
#   bash scripts/test_processes.sh [pytest arguments]
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
# The tests of a file share the servers that its fixtures start, so one process runs all of them.
if [ $# -eq 0 ]; then
    set -- -n 2 --dist loadfile --no-loadscope-reorder  # the order of tests/conftest.py
fi
exec bash "$here/test.sh" -m "real and not slow and not sglang and not megatron and not cuda" "$@"
