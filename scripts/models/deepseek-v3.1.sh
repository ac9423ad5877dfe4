# DeepSeek V3.1 has the shape of V3.
source "$(dirname "${BASH_SOURCE[0]}")/deepseek-v3.sh"
