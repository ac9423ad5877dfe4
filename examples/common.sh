# What the scripts of the examples share: environment, model, data, servers, train. Source it from run_*.sh:
#
#   set -euo pipefail
#   source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"    # sets checkout, here, python, output_dir, engine
#   model="$(example_model)"                                # SmolLM2-135M-Instruct, or $MODEL
#   data="$(products train)" held_out="$(products eval)"    # "What is 3 times 4?", made by slime make-data
#   start_server judge http://127.0.0.1:9001/health "$python" "$here/judge.py" --port 9001
#   train my_example train.py --hf-checkpoint "$model" --prompt-data "$data" "${engine[@]}" ...
#
# MODEL            a Hugging Face folder (GPU scripts: or a hub id) instead of the example's own model
# OUTPUT_DIR       of runs and data (default: outputs)
# SLIME_ENV_DIR    of the environment, as for scripts/env.sh; SLIME_PYTHON=FILE: this interpreter, no scripts/env.sh
# SLIME_DATASETS   folder with gsm8k/, math500/, aime/, ...; examples that can use them make their own data without it
# SGLANG=1         CPU scripts: real SGLang instead of the embedded engine (an environment of its own)
# DRY_RUN=1        start nothing; print each training command

checkout="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
here="$(cd "$(dirname "${BASH_SOURCE[1]}")" && pwd)"  # the example's folder
if [ "${SGLANG:-}" = 1 ]; then
    export SLIME_EXTRA=sglang-cpu
    # 8192 tokens of cache are plenty for a few dozen short answers, and little memory.
    engine=(--rollout-backend sglang --sglang-device cpu --sglang-max-total-tokens 8192)
else
    engine=(--rollout-backend embedded)
fi
python="${SLIME_PYTHON:-$(bash "$checkout/scripts/env.sh" | tail -n 1)}"
output_dir="$(mkdir -p "${OUTPUT_DIR:-$checkout/outputs}" && cd "${OUTPUT_DIR:-$checkout/outputs}" && pwd)"
export PYTHONPATH="$checkout${PYTHONPATH:+:$PYTHONPATH}" OMP_WAIT_POLICY="${OMP_WAIT_POLICY:-PASSIVE}"
servers=()
launcher=()  # words before the training command, such as ray job submit ... --
trap stop_servers EXIT
cd "$checkout"

# The model's folder: $MODEL, or SmolLM2-135M-Instruct, fetched once (93 MB) into models/.
example_model() {
    if [ -n "${MODEL:-}" ] && [ -e "$MODEL/config.json" ]; then (cd "$MODEL" && pwd) && return; fi
    "$python" -m slime.cli.main fetch-model "${MODEL:-smollm2-135m-instruct}" | tail -n 1
}

# products train|eval: the file with 65 products of two digits to train on, or the 16 others.
products() {
    local file="$output_dir/data/products_$1.jsonl"
    [ -e "$file" ] || "$python" -m slime.cli.main make-data products --output-dir "$output_dir/data" >/dev/null
    echo "$file"
}

# dataset gsm8k/test.jsonl: its path below $SLIME_DATASETS, or nothing and status 1.
dataset() {
    [ -n "${SLIME_DATASETS:-}" ] && [ -e "$SLIME_DATASETS/$1" ] && echo "$SLIME_DATASETS/$1"
}

# A TCP port of this machine that is free now.
free_port() {
    "$python" -c "from slime.engines.process import free_port; print(free_port())"
}

# start_server NAME URL COMMAND...: runs it beside the training, waits up to $SERVER_SECONDS (120) until URL answers
# (an empty one: does not wait), and ends it with the script. Its words are in $output_dir/NAME.log.
start_server() {
    local name="$1" url="$2" log="$output_dir/$1.log"
    shift 2
    if [ "${DRY_RUN:-}" = 1 ]; then return; fi
    "$@" >"$log" 2>&1 &
    servers+=("$!")
    if [ -z "$url" ]; then return; fi
    "$python" - "$url" "$!" "${SERVER_SECONDS:-120}" <<'EOF_WAIT' || { tail -n 20 "$log" >&2; exit 1; }
import os, sys, time, urllib.error, urllib.request

url, pid, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
until = time.monotonic() + seconds
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # it is on this machine
while time.monotonic() < until:
    try:
        opener.open(url, timeout=5).close()
        sys.exit(0)
    except urllib.error.HTTPError:
        sys.exit(0)  # it answers
    except OSError:
        time.sleep(0.2)
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        sys.exit(f"the server of {url} has ended; its last words:")
sys.exit(f"{url} did not answer within {seconds:.0f} s; the server's last words:")
EOF_WAIT
    echo "$name answers at $url" >&2
}

stop_servers() {
    local pid
    for pid in ${servers[@]+"${servers[@]}"}; do kill "$pid" 2>/dev/null || true; done
    for pid in ${servers[@]+"${servers[@]}"}; do wait "$pid" 2>/dev/null || true; done
    servers=()
}

# train NAME train.py|train_async.py FLAGS...: one run, in $output_dir/NAME.
train() {
    local name="$1" script="$2"
    shift 2
    set -- --run-name "$name" --output-dir "$output_dir" "$@"
    if [ "${DRY_RUN:-}" = 1 ]; then
        printf 'python %s' "$script"
        printf ' %q' "$@"
        printf '\n'
        return
    fi
    ${launcher[@]+"${launcher[@]}"} "$python" "$checkout/$script" "$@"
}
