#!/usr/bin/env bash
# SmolLM2-135M learns products from an agent written against the openai client: as a function, then as a command.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

flags=(
    --hf-checkpoint "$(example_model)" --prompt-data "$(products train)" --rollout-shuffle
    --n-samples-per-prompt 8 --rollout-max-response-len 160 --lr 2e-5 --train-backend fsdp
    --use-dynamic-batch-size --max-tokens-per-gpu 2048 --log-multi-turn "${engine[@]}"
)
train blackbox_agent train.py "${flags[@]}" --agent-function-path "$here/agent.py:run" \
    --eval-prompt-data products "$(products eval)" --eval-interval 6 --rollout-batch-size 8 --num-rollout "${NUM_ROLLOUT:-6}"
train blackbox_agent_command train.py "${flags[@]}" --agent-command "$python $here/agent.py" \
    --rollout-batch-size 2 --num-rollout 1
