#!/usr/bin/env bash
# What the recipes scripts/run-*.sh share. Each is one training run; words after its name go to train.py last:
#
#   MODELS=/data/models DATA=/data/dapo-math-17k.jsonl bash scripts/run-qwen3-4B.sh --num-rollout 100
#   bash scripts/run-qwen3-4B.sh --override laptop.yaml          # another model, fewer GPUs: --override FILE
#   RAY_API_SERVER_ADDRESS=http://127.0.0.1:8265 bash scripts/run-glm4.5-355B-A32B.sh     # as a job of a Ray cluster
#
# MODELS      folder with the checkpoints, each under its hub name (default: models)
# DATA        prompts with labels, JSONL (default: data/dapo-math-17k/dapo-math-17k.jsonl)
# EVAL_DATA   held-out problems (default: data/aime-2024/aime-2024.jsonl; none: EVAL_DATA=)
# OUTPUTS     where runs go (default: outputs); several nodes: on a shared disk
# RAY_API_SERVER_ADDRESS   of a cluster's dashboard: the run is submitted there; without it, it starts here
# SLIME_PYTHON             the interpreter (default: python3)
# DRY_RUN=1                start nothing; print the command, one line of JSON: {"name", "script", "flags"}
set -euo pipefail

checkout="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
name="$(basename "${BASH_SOURCE[1]}" .sh)"
name="${name#run-}"
models="${MODELS:-models}"
save="${OUTPUTS:-outputs}/$name/checkpoints"

# DAPO's problems, judged by math-verify on what follows </think>.
DATA_ARGS=(
    --prompt-data "${DATA:-data/dapo-math-17k/dapo-math-17k.jsonl}"
    --input-key prompt
    --label-key label
    --apply-chat-template
    --rollout-shuffle
    --rm-type deepscaler
)
if [ -n "${EVAL_DATA-data/aime-2024/aime-2024.jsonl}" ]; then
    DATA_ARGS+=(
        --eval-interval 20
        --eval-prompt-data aime "${EVAL_DATA-data/aime-2024/aime-2024.jsonl}"
        --n-samples-per-eval-prompt 16
        --eval-max-response-len 16384
        --eval-top-p 1
    )
fi
# 32 prompts x 8 samples = 256 samples x 1 step.
ROLLOUT_ARGS=(
    --num-rollout 3000
    --rollout-batch-size 32
    --n-samples-per-prompt 8
    --global-batch-size 256
    --num-steps-per-rollout 1
    --rollout-max-response-len 8192
    --rollout-temperature 1
)
# No KL to the reference model. `--use-kl-loss --kl-loss-coef 0.001` after the recipe's name adds one; it costs a copy of
# the reference weights and a forward pass over every rollout, with coefficient 0 too.
GRPO_ARGS=(
    --advantage-estimator grpo
    --entropy-coef 0.00
    --eps-clip 0.2
    --eps-clip-high 0.28
)
OPTIMIZER_ARGS=(
    --optimizer adam
    --lr 1e-6
    --lr-decay-style constant
    --weight-decay 0.1
    --adam-beta1 0.9
    --adam-beta2 0.98
)
# The packs of a step hold about --max-tokens-per-gpu tokens; activations are computed again in the backward pass.
PERF_ARGS=(
    --train-backend megatron
    --recompute-granularity full
    --recompute-method uniform
    --recompute-num-layers 1
    --use-dynamic-batch-size
)

# checkpoint NAME: start from this model, keep a snapshot every 20 rollouts, and go on from the last one there is.
checkpoint() {
    CKPT_ARGS=(
        --hf-checkpoint "$models/$1"
        --ref-load "$models/$1"
        --load "$save"
        --save "$save"
        --save-interval 20
        --save-keep-last 2
    )
}

# launch FLAGS...: train.py here, or as a job.
launch() {
    set -- --run-name "$name" --output-dir "${OUTPUTS:-outputs}" "$@"
    local python="${SLIME_PYTHON:-python3}"
    if [ "${DRY_RUN:-}" = 1 ]; then
        "$python" -c 'import json, sys; print(json.dumps({"name": sys.argv[1], "script": "train.py", "flags": sys.argv[2:]}))' \
            "$name" "$@"
    elif [ -n "${RAY_API_SERVER_ADDRESS:-}" ]; then
        ray job submit --address="$RAY_API_SERVER_ADDRESS" \
            --runtime-env-json='{"env_vars": {"PYTHONPATH": "'"$checkout${PYTHONPATH:+:$PYTHONPATH}"'"}}' \
            -- "$python" "$checkout/train.py" "$@"
    else
        exec "$python" "$checkout/train.py" "$@"
    fi
}
