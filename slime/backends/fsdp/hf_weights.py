"""The trained weights as a Hugging Face checkpoint names them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.core_model_loading import WeightConverter, revert_weight_conversion

from slime.weights.hf_folder import copy_companions, write_tensors

_FIRST_INDEX = re.compile(r"^(.*?\.\d+)\.")


def iter_hf_weights(model: PreTrainedModel, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Full tensors under the names of the checkpoint on disk: one per expert, tied ones once.

    transformers fuses experts (and renames) in memory; its own conversions are reverted, layer by layer
    where a conversion may need several tensors, else tensor by tensor. A collective where the model is
    sharded. What comes may be the model's own memory: copy what is to outlive the next step.

    Args:
        dtype: of floating-point parameters; buffers keep theirs.
    """
    conversions = getattr(model, "_weight_conversions", None)
    if not conversions:
        yield from _full_tensors(model, dtype)
        return
    by_layer = any(isinstance(c, WeightConverter) for c in conversions)
    pending: dict[str, Tensor] = {}
    prefix: str | None = None
    for name, tensor in _full_tensors(model, dtype):
        match = _FIRST_INDEX.match(name)
        here = match.group(1) if match and by_layer else name
        if pending and here != prefix:
            yield from revert_weight_conversion(model, pending).items()
            pending = {}
        prefix, pending[name] = here, tensor
    yield from revert_weight_conversion(model, pending).items()


def _full_tensors(model: PreTrainedModel, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    parameters = dict(model.named_parameters(remove_duplicate=False))
    seen: set[int] = set()
    for name, value in model.state_dict().items():
        parameter = parameters.get(name)
        if parameter is not None:
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            value = value.detach().to(dtype)  # before the gather: half the bytes
        yield name, value.full_tensor() if isinstance(value, DTensor) else value


def save_hf_checkpoint(model: PreTrainedModel, path: Path, dtype: torch.dtype, source: str, writer: bool) -> None:
    """Write a folder that ``from_pretrained`` and every engine reads; a collective, one rank writes.

    Args:
        source: folder that the model came from: its tokenizer and processor files are copied.
    """
    write_tensors(iter_hf_weights(model, dtype), path, writer)
    if writer:
        _write_config(model, path, dtype)
        copy_companions(source, path)


def _write_config(model: PreTrainedModel, path: Path, dtype: torch.dtype) -> None:
    model.config.save_pretrained(path)
    config = json.loads((path / "config.json").read_text())
    config["dtype"] = str(dtype).removeprefix("torch.")
    config["architectures"] = [type(model).__name__.removeprefix("FSDP")]  # FSDP2 renames the class
    (path / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    if model.can_generate() and model.generation_config is not None:
        model.generation_config.save_pretrained(path)
