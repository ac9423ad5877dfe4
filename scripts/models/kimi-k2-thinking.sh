# Kimi K2 Thinking (weights in bfloat16); pass --model-name deepseek_v3 --trust-remote-code. Kimi K2 with two other numbers.
KIMI_NORM_EPSILON=1e-5
KIMI_ROTARY_SCALING_FACTOR=64.0
source "$(dirname "${BASH_SOURCE[0]}")/kimi-k2.sh"
unset KIMI_NORM_EPSILON KIMI_ROTARY_SCALING_FACTOR
