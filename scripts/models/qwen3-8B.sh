# Qwen3-8B.
MODEL_ARGS=(
    --num-layers 36
    --hidden-size 4096
    --ffn-hidden-size 12288
    --num-attention-heads 32
    --group-query-attention
    --num-query-groups 8
    --kv-channels 128
    --qk-layernorm
    --swiglu
    --normalization RMSNorm
    --norm-epsilon 1e-6
    --use-rotary-position-embeddings
    --position-embedding-type rope
    --rotary-base 1000000
    --disable-bias-linear
    --vocab-size 151936
    --untie-embeddings-and-output-weights
)
