#!/usr/bin/env bash
# The quick tests, in the environment of scripts/env.sh. The last line is pytest's own summary.
#
#   bash scripts/test.sh                        # the quick tests, shared by three processes (SLIME_TEST_PROCESSES)
#   bash scripts/test.sh tests/engines -k keys  # any arguments of pytest
#   bash scripts/test.sh --affected [COMMIT]    # the tests that the changes since a commit (main) can break
#
# None of them runs what is marked slow or megatron (scripts/test_processes.sh), sglang (scripts/test_sglang.sh) or vllm
# (scripts/test_vllm.sh), unless there is a -m. Without arguments, tests that start engines, Ray or other processes (marked real) are left out as well.
# The model that some tests need is fetched once (93 MB); without a network these tests are skipped.
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
cd "$here/.."
python="$(bash scripts/env.sh | tail -n 1)"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" OMP_WAIT_POLICY=PASSIVE
# With bytecode in __pycache__, which git ignores, neither test files nor slime are compiled again by every process.
unset PYTHONDONTWRITEBYTECODE

if [ -z "${SLIME_TEST_MODEL:-}" ] && [ ! -e models/SmolLM2-135M-Instruct/model.safetensors ]; then
    "$python" -m slime.cli.main fetch-model smollm2-135m-instruct >/dev/null ||
        echo "slime: the model could not be fetched; tests that need it are skipped" >&2
fi

if [ "${1:-}" = --affected ]; then
    mapfile -t files < <("$python" tools/affected.py "${2:-main}")
    if [ "${#files[@]}" -eq 0 ]; then
        echo "slime: no test depends on the changes since ${2:-main}" >&2
        exit 0
    fi
    set -- -n 2 --dist loadfile -m "not slow and not sglang and not vllm and not megatron" "${files[@]}"
fi
if [ $# -eq 0 ]; then
    # Three on two cores, because a quarter of the time tests wait for deadlines. A process that has finished its share takes
    # tests from the end of another's, so that all end together.
    set -- -n "${SLIME_TEST_PROCESSES:-3}" --dist worksteal -m "not real and not slow and not sglang and not vllm and not megatron"
fi
# pytest takes the last -m, so one among the arguments replaces this one.
exec "$python" -m pytest -m "not slow and not sglang and not vllm and not megatron" "$@"
