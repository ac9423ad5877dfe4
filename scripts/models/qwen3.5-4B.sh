# Qwen3.5-4B. config.json has the rest: which layers are gated delta nets, and their heads.
MODEL_ARGS=(
    --num-layers 32
    --hidden-size 2560
    --ffn-hidden-size 9216
    --num-attention-heads 16
    --group-query-attention
    --num-query-groups 4
    --kv-channels 256
    --qk-layernorm
    --use-gated-attention
    --attention-output-gate
    --swiglu
    --normalization RMSNorm
    --apply-layernorm-1p
    --norm-epsilon 1e-6
    --position-embedding-type rope
    --rotary-base 10000000
    --rotary-percent 0.25
    --disable-bias-linear
    --vocab-size 248320
)
