#!/usr/bin/env bash
# The long circle, before a release: what each commit runs (.ci/run), and then what that leaves out: the tests marked long,
# all cases of those that try a part at each commit, 10,000 cases of each fuzzer, agents with their real packages, planted
# mistakes, and the Dockerfile. Some two hours on two idle cores.
#
#   bash scripts/test_all.sh          # from where the last call stopped, if that was not at the end
#   bash scripts/test_all.sh --again  # from the beginning
#
# Each stage leaves its output and its result in the folder below, which a call with --again empties. A stage that has
# passed is not run again, so an interrupted call loses one stage at most, or two that run side by side. The table at the
# end has one line per stage.
# tests/scripts/test_ci_stages.py checks that each test is run by one of the stages.
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
cd "$here/.."
cache="${XDG_CACHE_HOME:-$HOME/.cache}/slime"
export folder="${SLIME_ALL_DIR:-$cache/test-all}/$(git rev-parse --short HEAD 2>/dev/null || echo tree)"
if [ "${1:-}" = --again ]; then rm -rf "$folder"; fi
mkdir -p "$folder"
export CI="${CI:-true}" # all stages use the environment of .ci/run

stage() { # NAME COMMAND...: runs the command unless it has passed before; status 77: this machine cannot run it
    local name="$1" began="$SECONDS"
    if [ "$(cut -d' ' -f1 "$folder/$name.result" 2>/dev/null)" = passed ]; then return; fi
    echo "== $name ($(date +%H:%M))"
    local result=passed
    "${@:2}" >"$folder/$name.log" 2>&1 || { if [ $? = 77 ]; then result=skipped; else result=failed; fi; }
    echo "$result $((SECONDS - began)) $(grep -E '(passed|failed|error|skipped|killed)' "$folder/$name.log" | tail -n 1 | tr -d '=')" >"$folder/$name.result"
    echo "   $name: $(cat "$folder/$name.result")"
}

stage ci bash .ci/run
export SLIME_ENV_DIR="${SLIME_ENV_DIR:-$(dirname "$(dirname "$(bash scripts/env.sh | tail -n 1)")")}" # and its environments
export SLIME_TEST_MODEL="${SLIME_TEST_MODEL:-$cache/models/SmolLM2-135M-Instruct}" # where that has put it

# SGLang's and vLLM's tests leave a core idle most of the time; so those in one process run beside others in one process.
engines() {
    stage sglang env SLIME_TESTS=long bash scripts/test_sglang.sh --ignore tests/engines/test_sglang_vision.py --ignore tests/e2e/test_sglang_vision_run.py
    stage sglang-vision env SLIME_TESTS=long SLIME_EXTRA=sglang-cpu bash scripts/test_torchvision.sh -m sglang tests/engines/test_sglang_vision.py tests/e2e/test_sglang_vision_run.py
    stage vllm env SLIME_TESTS=long bash scripts/test_vllm.sh
    stage agents bash scripts/test_agents.sh
}
export -f stage engines
beside=""
trap 'if [ -n "$beside" ]; then kill -- "-$beside" 2>/dev/null || true; fi' EXIT
setsid bash -euo pipefail -c engines &
beside=$!
stage fuzz env SLIME_FUZZ_CASES=10000 bash scripts/test.sh tests/fuzz
stage mutants bash -c '"$(bash scripts/env.sh | tail -n 1)" tools/mutate.py'
wait "$beside"
beside="" # it has ended

stage quick-long env SLIME_TESTS=long bash scripts/test.sh
stage megatron-long env SLIME_TESTS=long bash scripts/test_processes.sh tests/plugins/megatron
stage rooms-long env SLIME_TESTS=long bash scripts/test_processes.sh tests/backends tests/benchmarks tests/checkpoint tests/cluster tests/data tests/docs tests/engines tests/models tests/observability tests/plugins/agents tests/plugins/embedded tests/plugins/tools tests/plugins/true_on_policy tests/plugins/workers tests/rollout tests/weights
stage runs-long env SLIME_TESTS=long bash scripts/test_processes.sh tests/e2e
stage users-long env SLIME_TESTS=long bash scripts/test_processes.sh tests/cli tests/examples tests/scripts
stage figures bash -c '"$(bash scripts/env.sh | tail -n 1)" tools/figures.py --check'
stage image bash scripts/build_image.sh

printf '\n%-16s %-8s %8s  %s\n' stage result seconds summary
status=0
for name in $(sed -nE 's/^ *stage ([a-z-]+) .*/\1/p' "$here/test_all.sh"); do
    if ! read -r result seconds summary <"$folder/$name.result"; then result=failed seconds=- summary="interrupted"; fi
    printf '%-16s %-8s %8s  %s\n' "$name" "$result" "$seconds" "$summary"
    if [ "$result" = failed ]; then status=1; fi
done
exit "$status"
