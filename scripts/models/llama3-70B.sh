# Meta-Llama-3-70B and its Instruct version.
MODEL_ARGS=(
    --num-layers 80
    --hidden-size 8192
    --ffn-hidden-size 28672
    --num-attention-heads 64
    --group-query-attention
    --num-query-groups 8
    --kv-channels 128
    --swiglu
    --normalization RMSNorm
    --norm-epsilon 1e-5
    --use-rotary-position-embeddings
    --position-embedding-type rope
    --rotary-base 500000
    --disable-bias-linear
    --vocab-size 128256
    --untie-embeddings-and-output-weights
)
