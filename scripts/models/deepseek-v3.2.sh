# DeepSeek V3.2 has the shape of V3, and an indexer that config.json describes.
source "$(dirname "${BASH_SOURCE[0]}")/deepseek-v3.sh"
