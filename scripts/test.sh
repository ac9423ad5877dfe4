#!/usr/bin/env bash
# The tests, in the environment of scripts/env.sh; ends with pytest's closing line.
#
#   bash scripts/test.sh [pytest arguments]        default: everything that is not marked slow, nor
#                                                  sglang or megatron, which have scripts of their own
#
# The model that some tests need is fetched once (93 MB); without a network they are skipped.
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
cd "$here/.."
python="$(bash scripts/env.sh | tail -n 1)"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" OMP_WAIT_POLICY=PASSIVE

if [ -z "${SLIME_TEST_MODEL:-}" ] && [ ! -e models/SmolLM2-135M-Instruct/model.safetensors ]; then
    "$python" -m slime.cli.main fetch-model smollm2-135m-instruct >/dev/null ||
        echo "slime: the model could not be fetched; tests that need it are skipped" >&2
fi

if [ $# -eq 0 ]; then  # all: two processes, a file at a time, for a long test mostly waits for processes to start
    set -- -n 2 --dist loadfile
fi
case " $* " in
*" -m "*) exec "$python" -m pytest "$@" ;;
*) exec "$python" -m pytest -m "not slow and not sglang and not megatron" "$@" ;;
esac
