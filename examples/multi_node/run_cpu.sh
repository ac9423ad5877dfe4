#!/usr/bin/env bash
# Two Ray nodes on one machine, with the loopback addresses 127.0.0.2 and 127.0.0.3: train.py attached to them by
# RAY_ADDRESS, then the same command handed over by `ray job submit`. Two training processes, one on each node.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

# Ray's own protection: whoever joins or submits must know the token. On several machines all need the same one.
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN="$("$python" -c 'import secrets; print(secrets.token_hex(32))')"
export RAY_USAGE_STATS_ENABLED=0 RAY_enable_open_telemetry=0 GLOO_SOCKET_IFNAME=lo
port="$(free_port)" dashboard="$(free_port)"
ray=("$python" -m ray.scripts.scripts)

if [ -z "${DRY_RUN:-}" ]; then
    session="$(mktemp -d /tmp/ray-example.XXXXXX)"
    trap 'stop_servers; rm -rf "$session"' EXIT
    # --block: the node is this process, which the script ends by its id. `ray stop` would end everybody's.
    start_server ray_head "http://127.0.0.2:$dashboard/api/version" "${ray[@]}" start --head --block \
        --node-ip-address 127.0.0.2 --port "$port" --num-cpus 2 --object-store-memory 200000000 --temp-dir "$session" \
        --include-dashboard true --dashboard-host 127.0.0.2 --dashboard-port "$dashboard"
    start_server ray_worker "" "${ray[@]}" start --block --address "127.0.0.2:$port" \
        --node-ip-address 127.0.0.3 --num-cpus 2 --object-store-memory 200000000
    RAY_ADDRESS="127.0.0.2:$port" "$python" "$here/where.py" wait 2
fi

flags=(
    --hf-checkpoint "$(example_model)" --prompt-data "$(products train)" --apply-chat-template --rollout-shuffle
    --rm-type last_number --rollout-batch-size 4 --n-samples-per-prompt 4 --rollout-max-response-len 16 --num-rollout 2
    --actor-num-nodes 2 --actor-num-gpus-per-node 1 --rollout-num-gpus 1
    --rollout-data-postprocess-path "$here/where.py:trainer" --custom-rollout-log-function-path "$here/where.py:engines"
    --lr 1e-5 --train-backend fsdp --use-dynamic-batch-size --max-tokens-per-gpu 2048 "${engine[@]}"
)
RAY_ADDRESS="127.0.0.2:$port" train multi_node train.py "${flags[@]}"

environment="{\"env_vars\": {\"PYTHONPATH\": \"$checkout\"}}"
launcher=("${ray[@]}" job submit --address "http://127.0.0.2:$dashboard" --runtime-env-json "$environment" --)
if [ -z "${DRY_RUN:-}" ]; then  # a node's agent, which takes jobs, comes up some time after the node
    SECONDS=0
    until "${launcher[@]}" true >"$output_dir/ray_job.log" 2>&1; do
        [ "$SECONDS" -lt 300 ] || { tail -n 5 "$output_dir/ray_job.log" >&2; exit 1; }
        sleep 2
    done
fi
train multi_node_job train.py "${flags[@]}"

if [ -z "${DRY_RUN:-}" ]; then
    for name in multi_node multi_node_job; do
        echo "$name:"
        "$python" "$here/where.py" report "$output_dir/$name"
    done
fi
