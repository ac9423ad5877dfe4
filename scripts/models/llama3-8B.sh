# Meta-Llama-3-8B and its Instruct version.
MODEL_ARGS=(
    --num-layers 32
    --hidden-size 4096
    --ffn-hidden-size 14336
    --num-attention-heads 32
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
