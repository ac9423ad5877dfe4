#!/usr/bin/env bash
# All tests: those of each commit and those of the long circle (marked long), with 10,000 cases of each fuzzer, the
# specification's commands and all examples to their end, every layout of Megatron, and the Dockerfile. It takes hours.
#
#   bash scripts/test_all.sh          # from where the last call stopped, if that was not at the end
#   bash scripts/test_all.sh --again  # from the beginning
#
# Each stage leaves its output and its result in the folder below, which a call with --again empties. A stage that has
# passed is not run again, so an interrupted call loses one stage at most. The table at the end has one line per stage.
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
cd "$here/.."
folder="${SLIME_ALL_DIR:-${XDG_CACHE_HOME:-$HOME/.cache}/slime/test-all}/$(git rev-parse --short HEAD 2>/dev/null || echo tree)"
if [ "${1:-}" = --again ]; then rm -rf "$folder"; fi
mkdir -p "$folder"
export SLIME_TESTS=all

stage() { # NAME COMMAND...: runs the command unless it has passed before; status 77: this machine cannot run it
    local name="$1" began="$SECONDS"
    if [ "$(cut -d' ' -f1 "$folder/$name.result" 2>/dev/null)" = passed ]; then return; fi
    echo "== $name ($(date +%H:%M))"
    local result=passed
    "${@:2}" >"$folder/$name.log" 2>&1 || { if [ $? = 77 ]; then result=skipped; else result=failed; fi; }
    echo "$result $((SECONDS - began)) $(grep -E '(passed|failed|error|skipped)' "$folder/$name.log" | tail -n 1 | tr -d '=')" >"$folder/$name.result"
    echo "   $(cat "$folder/$name.result")"
}

stage quick bash scripts/test.sh
stage processes bash scripts/test_processes.sh
stage torchao bash scripts/test_torchao.sh tests/backends/test_fsdp_precision.py tests/backends/test_fsdp_quantized_base.py tests/weights/test_sync_lora.py
stage torchvision bash scripts/test_torchvision.sh tests/examples/test_geo3k_vlm.py tests/examples/test_geo3k_vlm_multi_turn.py
stage sglang bash scripts/test_sglang.sh --ignore tests/engines/test_sglang_vision.py --ignore tests/e2e/test_sglang_vision_run.py
stage sglang-vision env SLIME_EXTRA=sglang-cpu bash scripts/test_torchvision.sh -m sglang tests/engines/test_sglang_vision.py tests/e2e/test_sglang_vision_run.py
stage vllm bash scripts/test_vllm.sh
stage agents bash scripts/test_agents.sh
stage fuzz env SLIME_FUZZ_CASES=10000 bash scripts/test.sh tests/fuzz
stage image bash scripts/build_image.sh
stage figures bash -c '"$(bash scripts/env.sh | tail -n 1)" tools/figures.py --check'
stage mutants bash -c '"$(bash scripts/env.sh | tail -n 1)" tools/mutate.py'

printf '\n%-16s %-8s %8s  %s\n' stage result seconds summary
status=0
for name in quick processes torchao torchvision sglang sglang-vision vllm agents fuzz image figures mutants; do
    read -r result seconds summary <"$folder/$name.result"
    printf '%-16s %-8s %8s  %s\n' "$name" "$result" "$seconds" "$summary"
    if [ "$result" = failed ]; then status=1; fi
done
exit "$status"
