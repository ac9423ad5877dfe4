"""Tiny checkpoints in the layouts of the hub, plain and quantized."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    GptOssConfig,
    LlamaConfig,
    Qwen3MoeConfig,
)


def llama_config(**more: Any) -> LlamaConfig:
    values: dict[str, Any] = dict(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=False,
    )  # fmt: skip
    return LlamaConfig(**{**values, **more})


def moe_config() -> Qwen3MoeConfig:
    return Qwen3MoeConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
        max_position_embeddings=64,
    )  # fmt: skip


def deepseek_config() -> DeepseekV3Config:
    """Widths that are no multiples of the block of 128, as in the published models (576 rows)."""
    return DeepseekV3Config(
        vocab_size=128, hidden_size=160, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=64, moe_intermediate_size=128, num_experts_per_tok=2,
        kv_lora_rank=32, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32, n_routed_experts=4,
        n_shared_experts=1, first_k_dense_replace=1, q_lora_rank=64, n_group=2, topk_group=1,
        routed_scaling_factor=2.5, pad_token_id=None,
    )  # fmt: skip


def save_model(config: Any, folder: Path, dtype: torch.dtype = torch.float32, **more: Any) -> Path:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).to(dtype).save_pretrained(folder, **more)
    return folder


def read_tensors(folder: Path) -> dict[str, Tensor]:
    return {
        name: tensor
        for file in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


def rewrite(source: Path, target: Path, tensors: dict[str, Tensor], **config: Any) -> Path:
    """A copy of ``source`` with other tensors and changed entries of config.json."""
    target.mkdir(parents=True, exist_ok=True)
    save_file(
        {n: t.contiguous() for n, t in tensors.items()},
        target / "model.safetensors",
        metadata={"format": "pt"},
    )
    values = {**json.loads((source / "config.json").read_text()), **config}
    (target / "config.json").write_text(json.dumps(values))
    return target


def linear_names(tensors: dict[str, Tensor]) -> list[str]:
    return [name for name, t in tensors.items() if t.dim() == 2 and "proj" in name]


FP8_CONFIG = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "weight_block_size": [128, 128],
    "activation_scheme": "dynamic",
}


def to_block_fp8(tensors: dict[str, Tensor], block: int = 128) -> dict[str, Tensor]:
    """DeepSeek-V3's layout."""
    out = dict(tensors)
    for name in linear_names(tensors):
        full = tensors[name].float()
        rows, columns = full.shape
        scales = torch.zeros(-(-rows // block), -(-columns // block))
        quantized = torch.zeros(rows, columns, dtype=torch.float8_e4m3fn)
        for i in range(scales.shape[0]):
            for j in range(scales.shape[1]):
                part = slice(i * block, (i + 1) * block), slice(j * block, (j + 1) * block)
                scales[i, j] = full[part].abs().max() / 448
                quantized[part] = (full[part] / scales[i, j]).to(torch.float8_e4m3fn)
        out[name], out[f"{name}_scale_inv"] = quantized, scales
    return out


def to_scaled_fp8(tensors: dict[str, Tensor], per_row: bool) -> dict[str, Tensor]:
    """One scale per row (``[R, 1]``), or per tensor with a scale of the activations beside it."""
    out = dict(tensors)
    for name in linear_names(tensors):
        full = tensors[name].float()
        scale = full.abs().amax(1, keepdim=True) / 448 if per_row else full.abs().max() / 448
        out[name], out[f"{name}_scale"] = (full / scale).to(torch.float8_e4m3fn), scale
        if not per_row:
            out[name.replace(".weight", ".input_scale")] = torch.tensor(1.0)
    return out


INT4_CONFIG = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 4,
                "group_size": 32,
                "strategy": "group",
                "symmetric": True,
                "type": "int",
            },
        }
    },
    "ignore": ["lm_head"],
    "quantization_status": "compressed",
}


def to_int4(tensors: dict[str, Tensor], group: int = 32, bits: int = 4) -> dict[str, Tensor]:
    """Kimi-K2's layout: int32 words of eight values, the first in the lowest bits; packed here in
    plain Python.
    """
    out = dict(tensors)
    for name in linear_names(tensors):
        full = out.pop(name).float()
        rows, columns = full.shape
        top = 2 ** (bits - 1)
        scales = (full.reshape(rows, -1, group).abs().amax(-1) / (top - 0.5)).to(torch.bfloat16)
        values = (full / scales.float().repeat_interleave(group, 1)).round().clamp(
            -top, top - 1
        ).int() + top
        per_word = 32 // bits
        words = []
        for row in values.tolist():
            row += [0] * (-columns % per_word)
            pieces = [row[i : i + per_word] for i in range(0, len(row), per_word)]
            packed = [sum(v << (bits * k) for k, v in enumerate(piece)) for piece in pieces]
            words.append([word - 2**32 if word >= 2**31 else word for word in packed])
        out[f"{name}_packed"] = torch.tensor(words, dtype=torch.int32)
        out[f"{name}_scale"], out[f"{name}_shape"] = scales, torch.tensor([rows, columns])
    return out


MXFP4_CONFIG = {"quant_method": "mxfp4"}


def gpt_oss_config() -> GptOssConfig:
    return GptOssConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, num_local_experts=2, num_experts_per_tok=1, max_position_embeddings=64,
    )  # fmt: skip


def to_mxfp4(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """gpt-oss' layout, with random values: bytes of two 4-bit floats, and an exponent for 32 of
    them.
    """
    out, generator = dict(tensors), torch.Generator().manual_seed(0)
    for name in [n for n in tensors if n.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, columns, rows = out.pop(name).shape
        sizes = (experts, rows, columns // 32)
        out[f"{name}_blocks"] = torch.randint(
            0, 256, (*sizes, 16), generator=generator, dtype=torch.uint8
        )
        out[f"{name}_scales"] = torch.randint(
            118, 124, sizes, generator=generator, dtype=torch.uint8
        )
    return out
