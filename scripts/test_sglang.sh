#!/usr/bin/env bash
# The tests that need real SGLang (marker sglang), on the CPU, in an environment of its own.
#
#   bash scripts/test_sglang.sh [pytest arguments]
#
# Nothing is skipped but what an engine on a CPU cannot do, and a test pins that list. The environment is made
# once (SLIME_EXTRA=sglang-cpu bash scripts/env.sh). Each start of a server takes some 50 CPU seconds, so each commit runs
# the contract suite and one cell of each kind; the others are of the long circle:
#
#   SLIME_TESTS=long bash scripts/test_sglang.sh
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
cd "$here/.."
python="$(SLIME_EXTRA=sglang-cpu bash scripts/env.sh | tail -n 1)"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" OMP_WAIT_POLICY=PASSIVE
unset PYTHONDONTWRITEBYTECODE  # as in scripts/test.sh

# Without a file or folder among the arguments: only the files that have such tests are imported, not all.
files=() ignored="" previous=""
for word in "$@"; do
    if [ "$previous" = --ignore ]; then ignored+="$word "; elif [[ "$word" = tests* ]]; then files=("$word"); fi
    previous="$word"
done
if [ "${#files[@]}" -eq 0 ]; then
    for file in $(grep -rlE 'mark\.sglang\b|getattr\(pytest\.mark|\b(engine_url|contract_engine)\b' tests --include='test_*.py' | sort); do
        if [[ " $ignored" != *" $file "* ]]; then files+=("$file"); fi
    done
    set -- "$@" "${files[@]}"
fi
exec "$python" -m pytest -m sglang -rs "$@"  # a later -m wins
