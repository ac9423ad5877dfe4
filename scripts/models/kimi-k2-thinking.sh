# Kimi K2 Thinking (weights in bfloat16); pass --model-name deepseek_v3 --trust-remote-code. Kimi K2 with two other numbers.
source "$(dirname "${BASH_SOURCE[0]}")/kimi-k2.sh"
MODEL_ARGS+=(
    --norm-epsilon 1e-5
    --rotary-scaling-factor 64.0
)
