# Kimi K2 Thinking (weights in bfloat16); pass --model-name deepseek_v3 --trust-remote-code. Kimi K2 with two other numbers.
NORM_EPSILON=1e-5
ROTARY_SCALING_FACTOR=64.0
source "$(dirname "${BASH_SOURCE[0]}")/kimi-k2.sh"
unset NORM_EPSILON ROTARY_SCALING_FACTOR
