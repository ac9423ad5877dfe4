"""Tiny random checkpoints of Qwen3.5 in the form of the public ones: a vision part, a layer for
multi-token prediction, another end token than that of config.json, and experts in one tensor or
weights in FP8 blocks.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForImageTextToText

TESTS = Path(__file__).resolve().parents[2]
sys.path += [str(TESTS / "models"), str(TESTS.parent / "benchmarks")]
import random_model  # noqa: E402
from tiny_checkpoints import FP8_CONFIG, to_block_fp8  # noqa: E402

TEXT = "model.language_model."
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}


def save_dense(folder: Path) -> Path:
    """Tied embeddings, in bfloat16, with a tokenizer and a processor, which no sample uses."""
    random_model.write_model("tiny-qwen3.5-served", folder)
    # Qwen's own needs torchvision
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    transformers.LlavaProcessor(
        image_processor=transformers.CLIPImageProcessorPil(size={"shortest_edge": 14}),
        tokenizer=tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        chat_template=tokenizer.chat_template,
        image_token="<|image_pad|>",
    ).save_pretrained(folder)
    (file,) = folder.glob("*.safetensors")
    (folder / "model.safetensors.index.json").unlink()
    return _finish(folder, load_file(file.rename(folder / "model.safetensors")))


def save_experts(folder: Path, fp8: bool = False) -> Path:
    """An output layer of its own, and experts; in bfloat16 those of a layer are one tensor."""
    torch.manual_seed(0)
    dense = random_model.make_config("tiny-qwen3.5-served")
    text = dense.text_config.to_dict() | EXPERTS
    for name in ("model_type", "tie_word_embeddings", "dtype"):
        text.pop(name, None)
    config = transformers.Qwen3_5MoeConfig(
        text_config=text, vision_config=dense.vision_config.to_dict(), tie_word_embeddings=False
    )
    AutoModelForImageTextToText.from_config(config).to(torch.bfloat16).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    if not fp8:
        return _finish(folder, together(tensors))
    ours = {name: x for name, x in tensors.items() if ".experts." in name or "self_attn" in name}
    return _finish(folder, {**tensors, **to_block_fp8(ours, 16)}, 16)


def together(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors with all experts of a layer in one."""
    single = {name for name in tensors if re.search(r"\.experts\.\d+\.", name)}
    out = {name: x for name, x in tensors.items() if name not in single}
    for module in {name.partition("experts.")[0] for name in single}:
        each = [
            [tensors[f"{module}experts.{i}.{part}_proj.weight"] for part in ("gate", "up", "down")]
            for i in range(EXPERTS["num_experts"])
        ]
        out[f"{module}experts.gate_up_proj"] = torch.stack([torch.cat(x[:2]) for x in each])
        out[f"{module}experts.down_proj"] = torch.stack([x[2] for x in each])
    return out


def _finish(folder: Path, tensors: dict[str, Tensor], block: int | None = None) -> Path:
    torch.manual_seed(1)
    mtp = {
        "mtp.fc.weight": torch.randn(64, 128),
        "mtp.layers.0.input_layernorm.weight": torch.randn(64),
        "mtp.layers.0.mlp.experts.gate_up_proj": torch.randn(4, 64, 64),
        "mtp.norm.weight": torch.randn(64),
    }
    tensors |= {name: x.to(torch.bfloat16) for name, x in mtp.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["text_config"] |= {"mtp_num_hidden_layers": 1, "eos_token_id": 1}
    if block:
        config["quantization_config"] = FP8_CONFIG | {
            "weight_block_size": [block, block],
            "modules_to_not_convert": ["visual", "mtp", "lm_head"],
        }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 1]}))
    return folder


def tensors_of(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder, as they are stored."""
    return {name: x for file in folder.glob("*.safetensors") for name, x in load_file(file).items()}


def untrained(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Vision part and layers for multi-token prediction."""
    return {name: x for name, x in tensors.items() if name.startswith(("model.visual.", "mtp."))}
