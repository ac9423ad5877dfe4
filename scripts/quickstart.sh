#!/usr/bin/env bash
# From nothing to a language model that has learned by RL: environment, model, data, training, result.
#
#   bash scripts/quickstart.sh [--seed 1] [--model FOLDER] [--num-rollout 12]
#   bash scripts/quickstart.sh --model gemma3-270m --accept-gemma-terms      # a base model with a few-shot prompt
#
# The first run installs packages and fetches SmolLM2-135M-Instruct; later ones start at once.
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
python="$(bash "$here/env.sh" | tail -n 1)"
export PYTHONPATH="$(dirname "$here")${PYTHONPATH:+:$PYTHONPATH}"
exec "$python" "$here/quickstart/run.py" "$@"
