"""A Hugging Face folder in the shape of a public model, with random weights and a tokenizer made
here.

    python benchmarks/random_model.py --shape qwen3-4b --output /tmp/qwen3-4b

For measurements of speed: nothing is downloaded. The tokenizer takes one token per byte; its other
entries are made-up words, which only a model produces.
"""

from __future__ import annotations

import argparse
import fcntl
import json
from pathlib import Path
from typing import Any

QWEN3 = dict(
    head_dim=128,
    hidden_act="silu",
    rms_norm_eps=1e-6,
    rope_theta=1e6,
    max_position_embeddings=40960,
    vocab_size=151936,
)
SHAPES: dict[str, dict[str, Any]] = {  # from the config.json of the public models
    "qwen3-0.6b": dict(
        hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
        num_key_value_heads=8, tie_word_embeddings=True, **QWEN3,
    ),
    "qwen3-4b": dict(
        hidden_size=2560, intermediate_size=9728, num_hidden_layers=36, num_attention_heads=32,
        num_key_value_heads=8, tie_word_embeddings=True, **QWEN3,
    ),
    "qwen3-8b": dict(
        hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32,
        num_key_value_heads=8, tie_word_embeddings=False, **QWEN3,
    ),
    "qwen3-14b": dict(
        hidden_size=5120, intermediate_size=17408, num_hidden_layers=40, num_attention_heads=40,
        num_key_value_heads=8, tie_word_embeddings=False, **QWEN3,
    ),
    "qwen3-32b": dict(
        hidden_size=5120, intermediate_size=25600, num_hidden_layers=64, num_attention_heads=64,
        num_key_value_heads=8, tie_word_embeddings=False, **QWEN3,
    ),
    "qwen3-30b-a3b": dict(
        hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768, num_hidden_layers=48,
        num_attention_heads=32, num_key_value_heads=4, num_experts=128, num_experts_per_tok=8, norm_topk_prob=True,
        tie_word_embeddings=False, **QWEN3,
    ),
    "tiny": dict(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        tie_word_embeddings=True, **{**QWEN3, "head_dim": 16, "vocab_size": 512, "max_position_embeddings": 2048},
    ),
}  # fmt: skip
SHAPES["tiny-experts"] = {
    **SHAPES["tiny"],
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
}
# as many experts and as wide heads as qwen3-30b-a3b, but 0.5 billion parameters
SHAPES["small-experts-10-layers"] = {
    **SHAPES["qwen3-30b-a3b"], "num_hidden_layers": 10, "hidden_size": 512, "intermediate_size": 1024,
    "moe_intermediate_size": 256, "num_attention_heads": 8, "vocab_size": 512, "max_position_embeddings": 2048,
}  # fmt: skip
# float32 masters fit in 80 GB
SHAPES["qwen3-8b-8-layers"] = {**SHAPES["qwen3-8b"], "num_hidden_layers": 8}
# as much as 141 GB train
SHAPES["qwen3-30b-a3b-10-layers"] = {**SHAPES["qwen3-30b-a3b"], "num_hidden_layers": 10}
SHAPE_FAMILIES = ("qwen3", "qwen3_moe")  # the model types of SHAPES
# transformers' config class, and what differs from its defaults
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt-oss-20b-4-layers": (  # 24 layers in the public model: as much as one GPU trains
        "GptOssConfig", dict(num_hidden_layers=4, num_local_experts=32, swiglu_limit=7.0),
    ),
    "qwen3.5-4b": (
        "Qwen3_5TextConfig", dict(hidden_size=2560, intermediate_size=9216, tie_word_embeddings=True),
    ),
    "llama-8-layers": (
        "LlamaConfig",
        dict(
            hidden_size=1024, intermediate_size=2816, num_hidden_layers=8, num_attention_heads=16,
            num_key_value_heads=4, head_dim=64, vocab_size=32000, initializer_range=0.05, max_position_embeddings=8192,
        ),
    ),
    "tiny-llama": (
        "LlamaConfig",
        dict(
            hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            head_dim=16, vocab_size=512, initializer_range=0.2,
        ),
    ),
    "tiny-gpt-oss": (
        "GptOssConfig",
        dict(
            hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_local_experts=4, num_attention_heads=4,
            num_key_value_heads=2, head_dim=16, vocab_size=512, num_experts_per_tok=2, sliding_window=16,
            swiglu_limit=7.0,
        ),
    ),
    "tiny-qwen3.5": (
        "Qwen3_5TextConfig",
        dict(
            hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
            head_dim=16, vocab_size=512, linear_key_head_dim=16, linear_value_head_dim=16, linear_num_key_heads=2,
            linear_num_value_heads=4,
        ),
    ),
}  # fmt: skip
# As much as 80 GB train. Fewer whole periods of the layers: the kinds keep their proportions.
FAMILIES["gpt-oss-20b-2-layers"] = (
    "GptOssConfig",
    {**FAMILIES["gpt-oss-20b-4-layers"][1], "num_hidden_layers": 2},
)
FAMILIES["qwen3.5-4b-16-layers"] = (
    "Qwen3_5TextConfig",
    {**FAMILIES["qwen3.5-4b"][1], "num_hidden_layers": 16},
)
# The entries of the tokenizer for images and videos, and how config.json calls them.
MEDIA = {
    "vision_start_token_id": "<|vision_start|>", "vision_end_token_id": "<|vision_end|>",
    "image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>",
}  # fmt: skip
PROCESSOR = {
    "processor_class": "Qwen3VLProcessor",
    "image_processor": {"image_processor_type": "Qwen2VLImageProcessor"},
    "video_processor": {"video_processor_type": "Qwen2VLVideoProcessor"},
}


def _served(shape: str, mrope_section: list[int]) -> tuple[str, dict[str, Any]]:
    """Qwen3.5 as the public checkpoints have it, with a small vision part: SGLang has no class for
    the text alone.
    """
    text = {
        "vocab_size": 248320,
        **FAMILIES[shape][1],
        "tie_word_embeddings": True,
        "mamba_ssm_dtype": "float32",
    }
    text["rope_parameters"] = dict(
        rope_type="default", rope_theta=1e7, partial_rotary_factor=0.25, mrope_interleaved=True,
        mrope_section=mrope_section,
    )  # fmt: skip
    vision = dict(
        depth=2, hidden_size=64, intermediate_size=128, num_heads=2, out_hidden_size=text["hidden_size"],
        # SGLang's default is Qwen3-VL's
        patch_size=14, num_position_embeddings=100, deepstack_visual_indexes=[],
    )  # fmt: skip
    ids = {name: text["vocab_size"] - len(MEDIA) + i for i, name in enumerate(MEDIA)}
    return "Qwen3_5Config", dict(
        text_config=text, vision_config=vision, tie_word_embeddings=True, **ids
    )


FAMILIES["qwen3.5-4b-served"] = _served("qwen3.5-4b", [11, 11, 10])
FAMILIES["tiny-qwen3.5-served"] = _served("tiny-qwen3.5", [1, 1, 0])
SHARD_BYTES = 4 * 2**30
CHAT_TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def make_config(shape: str) -> Any:
    """The transformers config of a shape; Mixture-of-Experts where it has experts."""
    import transformers

    values = SHAPES.get(shape, {})
    name = "Qwen3MoeConfig" if "num_experts" in values else "Qwen3Config"
    if shape in FAMILIES:
        name, values = FAMILIES[shape]
    config = getattr(transformers, name)(**values)
    text = config.get_text_config()
    kind = "ForCausalLM" if text is config else "ForConditionalGeneration"
    config.architectures = [name.replace("TextConfig", "Config").replace("Config", kind)]
    config.dtype = text.dtype = "bfloat16"
    text.eos_token_id, text.pad_token_id, text.bos_token_id = 1, 0, None
    if text is not config:
        text.full_attention_interval = 4  # SGLang reads it, and transformers does not write it
    return config


def write_config(shape: str, output: Path) -> Any:
    """Write what a folder has beside weights; with a vision part, also a processor. Returns the
    config.
    """
    config = make_config(shape)
    config.save_pretrained(output)
    served = hasattr(config, "vision_config")
    # transformers' tokenizer of Qwen3.5 adds the first
    last = ["<|endoftext|>", *MEDIA.values()] if served else []
    _write_tokenizer(config.get_text_config().vocab_size, output, last)
    if served:
        (output / "processor_config.json").write_text(json.dumps(PROCESSOR))
    return config


def write_model(shape: str, output: Path, seed: int = 0, weights: bool = True) -> Path:
    """Write config, tokenizer and with ``weights`` bf16 weights; a folder that is complete is left
    as it is.
    """
    output.mkdir(parents=True, exist_ok=True)
    with open(output / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another benchmark on another GPU may write it now
        if not (output / "complete").exists():
            config = write_config(shape, output)
            if weights:
                _write_weights(config, output, seed)
            (output / "complete").touch()
    return output


def _write_tokenizer(vocab_size: int, output: Path, last: list[str]) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<pad>", "<eos>", *letters]
    tokens += [f"Ġw{i}" for i in range(vocab_size - len(tokens) - len(last))]
    tokens += last
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>")
    fast.add_tokens(last, special_tokens=True)
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(output)


def _write_weights(config: Any, output: Path, seed: int) -> None:
    import torch
    from safetensors.torch import save_file

    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(seed)
    weight_map: dict[str, str] = {}
    pending: dict[str, Any] = {}
    total = size = 0

    def flush() -> None:
        file = f"model-{len(set(weight_map.values())) + 1:05d}.safetensors"
        save_file(pending, str(output / file), metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(pending, file))
        pending.clear()

    torch.manual_seed(seed)
    vectors = {} if config.model_type in SHAPE_FAMILIES else initial_vectors(config)
    for name, shape in checkpoint_shapes(config).items():
        if name in vectors:
            tensor = vectors[name].to(torch.bfloat16)
        elif len(shape) == 1:
            tensor = torch.zeros(shape) if name.endswith("bias") else torch.ones(shape)
            tensor = tensor.to(torch.bfloat16)
        else:
            tensor = torch.empty(shape, dtype=torch.bfloat16, device=device)
            tensor = tensor.normal_(
                0.0, config.get_text_config().initializer_range, generator=generator
            ).cpu()
        pending[name] = tensor
        size += tensor.nbytes
        total += tensor.nbytes
        if size > SHARD_BYTES:
            flush()
            size = 0
    if pending:
        flush()
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (output / "model.safetensors.index.json").write_text(json.dumps(index))


def checkpoint_shapes(config: Any) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor on disk: one per expert, tied ones once."""
    if config.model_type not in SHAPE_FAMILIES:
        return _shapes_of_transformers(config)
    c = config
    heads, kv_heads = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (c.vocab_size, c.hidden_size)
    }
    for i in range(c.num_hidden_layers):
        layer = f"model.layers.{i}"
        for name, shape in {
            "q_proj": (heads, c.hidden_size),
            "k_proj": (kv_heads, c.hidden_size),
            "v_proj": (kv_heads, c.hidden_size),
            "o_proj": (c.hidden_size, heads),
            "q_norm": (c.head_dim,),
            "k_norm": (c.head_dim,),
        }.items():
            shapes[f"{layer}.self_attn.{name}.weight"] = shape
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{layer}.{name}.weight"] = (c.hidden_size,)
        experts = getattr(c, "num_experts", 0)
        width = c.moe_intermediate_size if experts else c.intermediate_size
        if experts:
            shapes[f"{layer}.mlp.gate.weight"] = (experts, c.hidden_size)
        for mlp in [f"{layer}.mlp.experts.{e}" for e in range(experts)] or [f"{layer}.mlp"]:
            shapes[f"{mlp}.gate_proj.weight"] = shapes[f"{mlp}.up_proj.weight"] = (
                width,
                c.hidden_size,
            )
            shapes[f"{mlp}.down_proj.weight"] = (c.hidden_size, width)
    shapes["model.norm.weight"] = (c.hidden_size,)
    if not c.tie_word_embeddings:
        shapes["lm_head.weight"] = (c.vocab_size, c.hidden_size)
    return shapes


def _without_memory(config: Any) -> Any:
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    auto = AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM
    with torch.device("meta"):
        return auto.from_config(config)


def initial_vectors(config: Any) -> dict[str, Any]:
    """The vectors of norms and of recurrent layers as transformers initializes them.

    A norm that multiplies by 1 + weight begins with zeros. With ones, each norm doubles what it
    returns, and rounding to bfloat16 changes the log-probs of a model of 32 layers four times as
    much.
    """
    model = _without_memory(config)
    found: dict[str, Any] = {}
    for prefix, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False))
        if own and all(tensor.dim() == 1 for tensor in own.values()):
            module.to_empty(device="cpu", recurse=False)
            model._init_weights(module)
            found |= {
                f"{prefix}.{name}": tensor.detach()
                for name, tensor in module.named_parameters(recurse=False)
            }
    return found


def _shapes_of_transformers(config: Any) -> dict[str, tuple[int, ...]]:
    """Of the families whose tensors in memory are those on disk."""
    model = _without_memory(config)
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    return {
        name: tuple(tensor.shape) for name, tensor in model.state_dict().items() if name not in tied
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=[*SHAPES, *FAMILIES], default="qwen3-4b")
    parser.add_argument("--output", type=Path, required=True, help="folder to write")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print(write_model(options.shape, options.output, options.seed))


if __name__ == "__main__":
    main()
