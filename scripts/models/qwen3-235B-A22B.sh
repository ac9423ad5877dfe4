# Qwen3-235B-A22B; for its 2507 versions: MODEL_ARGS_ROTARY_BASE=5000000.
MODEL_ARGS=(
    --num-layers 94
    --hidden-size 4096
    --ffn-hidden-size 12288
    --num-attention-heads 64
    --group-query-attention
    --num-query-groups 4
    --kv-channels 128
    --qk-layernorm
    --swiglu
    --normalization RMSNorm
    --norm-epsilon 1e-6
    --use-rotary-position-embeddings
    --position-embedding-type rope
    --rotary-base "${MODEL_ARGS_ROTARY_BASE:-1000000}"
    --disable-bias-linear
    --vocab-size 151936
    --untie-embeddings-and-output-weights
    --moe-ffn-hidden-size 1536
    --moe-router-score-function softmax
    --moe-token-dispatcher-type alltoall
    --moe-router-topk 8
    --moe-layer-freq "([0]*0+[1]*94)"
    --num-experts 128
    --moe-grouped-gemm
    --moe-router-dtype fp32
    --moe-permute-fusion
    --moe-aux-loss-coeff 0
)
