"""Tiny models and batches for the tests of the FSDP backend."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3Config,
    Qwen3MoeConfig,
)

from slime.backends.fsdp.backend import FsdpBackend
from slime.config.args import Args
from slime.data.fields import RankBatch
from slime.plugins.tools.verify.reference import RandomSample, make_batch, make_samples
from slime.plugins.tools.verify.small import VOCAB

__all__ = ["VOCAB", "make_batch", "make_samples"]


LORA = dict(
    lora_rank=4,
    lora_alpha=8.0,
    use_rslora=False,
    lora_target_modules=["all-linear"],
    lora_sync="merged",
    lr=1e-2,
)
"""Flags of an adapter on all linear layers."""


def save_tiny_llama(path: Path, seed: int = 0, **changes: Any) -> Path:
    """Two layers, grouped-query heads, tied embeddings."""
    torch.manual_seed(seed)
    config = dict(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
    config |= dict(
        num_key_value_heads=2,
        tie_word_embeddings=True,
        max_position_embeddings=128,
        initializer_range=0.2,
    )
    AutoModelForCausalLM.from_config(LlamaConfig(**config | changes)).save_pretrained(path)  # type: ignore[arg-type]
    return path


def save_tiny_qwen3(path: Path, seed: int = 0, **changes: Any) -> Path:
    torch.manual_seed(seed)
    config = dict(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
    config |= dict(
        num_key_value_heads=2, head_dim=12, tie_word_embeddings=False, initializer_range=0.2
    )
    AutoModelForCausalLM.from_config(Qwen3Config(**config | changes)).save_pretrained(path)  # type: ignore[arg-type]
    return path


def save_tiny_qwen3_moe(path: Path, seed: int = 0, **changes: Any) -> Path:
    """Four experts, two active: one tensor per expert on disk, fused in memory."""
    torch.manual_seed(seed)
    config: dict[str, Any] = dict(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, moe_intermediate_size=16
    )
    config |= dict(
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_experts=4
    )
    config |= dict(num_experts_per_tok=2, tie_word_embeddings=False, initializer_range=0.2)
    AutoModelForCausalLM.from_config(Qwen3MoeConfig(**config | changes)).save_pretrained(path)
    return path


def save_tiny_qwen2_5_vl(path: Path, seed: int = 0) -> Path:
    """A vision-language model whose names on disk are not those in memory."""
    torch.manual_seed(seed)
    text = dict(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
    text |= dict(
        num_key_value_heads=2, rope_parameters={"rope_type": "default", "mrope_section": [2, 1, 1]}
    )
    vision = dict(
        depth=1, hidden_size=32, intermediate_size=48, num_heads=4, out_hidden_size=32, patch_size=4
    )
    config = Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=58,
        video_token_id=59,
        vision_start_token_id=57,
    )
    Qwen2_5_VLForConditionalGeneration(config).save_pretrained(path)
    return path


def make_args(checkpoint: Path | str, **changes: Any) -> Args:
    """Flags as the parser would leave them for a run on the CPU."""
    args = Args()
    settings = dict(
        hf_checkpoint=str(checkpoint),
        ref_load=str(checkpoint),
        train_backend="fsdp",
        train_dtype="float32",
        attn_implementation=None,
        num_rollout=10,
        rollout_batch_size=4,
        n_samples_per_prompt=4,
        global_batch_size=16,
        micro_batch_size=4,
        lr=1e-3,
        eps_clip_high=0.2,
        kl_loss_type="low_var_kl",
        weight_decay=0.01,
        deterministic=False,
        threads_per_process=1,
    )
    for name, value in (settings | changes).items():
        setattr(args, name, value)
    args.use_critic = args.advantage_estimator == "ppo"
    return args


def whole_batch(
    samples: list[RandomSample], micro_batch_size: int = 4, steps: int = 1
) -> RankBatch:
    """One rank that holds everything."""
    order = list(range(len(samples)))
    per_step = len(samples) // steps
    micro_batches = [
        [
            order[i : i + micro_batch_size]
            for i in range(s * per_step, (s + 1) * per_step, micro_batch_size)
        ]
        for s in range(steps)
    ]
    return make_batch(samples, micro_batches, samples)


def make_backend(args: Args, role: str = "actor") -> FsdpBackend:
    return FsdpBackend(args, role, 0, 1, torch.device("cpu"))


def weights_of(backend: FsdpBackend) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in backend.named_weights()}
