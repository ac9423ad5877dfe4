"""Read a checkpoint into the memory of the CPU, before anything of it is on a GPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from slime.config.args import Args
from slime.config.checkpoint import InitialWeights, megatron_lm_folder
from slime.models.loading import is_multimodal, load_hf_config, load_hf_model
from slime.models.packed_attention import NAME as PACKED
from slime.weights.torch_dist import open_megatron_lm

VARLEN = "varlen"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def read_checkpoint(args: Args, empty: bool = False) -> PreTrainedModel:
    """Load the model of ``args`` on the CPU, or with ``empty`` without memory.

    Raises:
        ModelError: The checkpoint does not exist, is damaged, or does not fit the model.
    """
    path, how = InitialWeights.from_args(args).path(megatron=False), ModelFormat.from_args(args)
    narrow = (args.bf16_master_weights or args.lora_rank) and not args.lora_base_quantization
    dtype = loading_dtype(path, how, DTYPES[args.train_dtype] if narrow else torch.float32)
    return load_full_model(path, how, empty, dtype)


@dataclass(frozen=True)
class ModelFormat:
    """How checkpoints are read.

    Attributes:
        hf_checkpoint: Describes the model of a checkpoint that has no config.json, because Megatron-LM wrote it.
        model_name: The name of the family, if not that of config.json.
        implementation: The value of ``--attn-implementation``.
        trust: Whether Python code that is part of the checkpoint may run.
    """

    hf_checkpoint: str
    model_name: str | None
    implementation: str | None
    trust: bool

    @classmethod
    def from_args(cls, args: Args) -> ModelFormat:
        return cls(str(args.hf_checkpoint), args.model_name, args.attn_implementation, args.trust_remote_code)


def loading_dtype(path: str, how: ModelFormat, dtype: torch.dtype) -> torch.dtype:
    """Return in which dtype to load a checkpoint whose parameters will all be cast to ``dtype``.

    To load it in ``dtype`` takes half the CPU memory and time of float32. But transformers then creates buffers in this
    dtype too, for example the biases of MiniMax's routers, which must stay float32: then it is float32.
    """
    if dtype == torch.float32:
        return dtype
    wide, narrow = (
        {name: buffer.dtype for name, buffer in load_full_model(path, how, True, kind).named_buffers()}
        for kind in (torch.float32, dtype)
    )
    return dtype if wide == narrow else torch.float32


def load_full_model(
    path: str, how: ModelFormat, empty: bool = False, dtype: torch.dtype = torch.float32
) -> PreTrainedModel:
    """Load the model on the CPU. The master weights are float32 for every dtype of forward passes.

    Args:
        path: A Hugging Face folder or hub id, or a checkpoint of Megatron-LM.
        empty: Build the model without memory and values.

    Raises:
        ModelError: The checkpoint does not fit the model.
    """
    weights = None
    if megatron_lm_folder(path):
        weights = None if empty else open_megatron_lm(path, how.hf_checkpoint, how.model_name, how.trust)
        path = how.hf_checkpoint
    attention: str | dict[str, str] = PACKED
    if how.implementation not in (None, VARLEN):
        attention = str(how.implementation)
    elif is_multimodal(load_hf_config(path, how.trust)):
        attention = {"": "sdpa", "text_config": PACKED, "vision_config": "sdpa"}
    device = "meta" if empty else "cpu"
    return load_hf_model(path, dtype, device, attention, how.trust, weights)
