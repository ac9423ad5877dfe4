#!/usr/bin/env bash
# Tests with torchao, an extra: 8-bit optimizer states, bfloat16 master weights, float8 layers.
#
#   bash scripts/test_torchao.sh [pytest arguments]
#
# torchao is installed into a folder beside the environment of scripts/env.sh and not into it, because transformers
# imports it wherever it is there, which takes seconds in each process.
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
cd "$here/.."
python="$(bash scripts/env.sh | tail -n 1)"
folder="$(dirname "$(dirname "$python")")-torchao-0.18.0"
if [ ! -e "$folder" ]; then
    made="$(mktemp -d "$folder.XXXXXX")"
    echo "torchao==0.18.0 --hash=sha256:6540b148e40ba81cbd4de86392225a076a1591146e9cebb099b3b234ba9feebe" >"$made/pin"
    "$python" -m pip install --quiet --no-deps --require-hashes --target "$made" -r "$made/pin"
    mv -T "$made" "$folder" || rm -r "$made" # another call was quicker
fi
export PYTHONPATH="$PWD:$folder${PYTHONPATH:+:$PYTHONPATH}" OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec "$python" -m pytest -m "not slow and not cuda" "$@"
