#!/usr/bin/env bash
# The tests that start processes (engines, ranks, Ray) or whole runs, without SGLang's, vLLM's and those of the long circle.
# It lists the slowest at its end; the last line is pytest's own summary.
#
#   bash scripts/test_processes.sh                      # all of them, shared by two processes
#   bash scripts/test_processes.sh tests/e2e            # those of folders
#   bash scripts/test_processes.sh tests/e2e -k train   # any arguments of pytest
#
# With SLIME_TESTS=long, those of the long circle.
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
cd "$here/.."
if ! printf '%s\n' "$@" | grep -qvE '^(tests[a-z0-9_/]*)?$'; then # nothing but folders
    # A group is a file, or a whole run. Those of most tests come first, and of the whole runs, which are one test each, those
    # that take half a minute to a minute and a half: at the end, one process would wait for the other's.
    # Only files with such a mark are imported, which takes half of the time that all take.
    long='/test_(lost_ranks|critic_apart|train_megatron|hub_qwen|preference_megatron)\.py$'
    found="$(grep -rlE 'mark\.(real|slow|megatron)\b' "${@:-tests}" --include='test_*.py' | sort)"
    if [ "${SLIME_TESTS:-}" = long ]; then found="$(xargs grep -lE 'mark\.(long|more)\b|@given' <<<"$found")"; fi
    # Each of the two may find nothing. Without any file, pytest would run all tests.
    mapfile -t files < <(grep -E "$long" <<<"$found" || true; grep -vE "$long" <<<"$found" || true)
    set -- -n 2 --dist loadfile --durations 40 "${files[@]}"
fi
exec bash "$here/test.sh" -m "(real or slow or megatron) and not sglang and not vllm and not cuda" "$@"
