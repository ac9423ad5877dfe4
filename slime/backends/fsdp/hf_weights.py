"""The trained weights as a Hugging Face checkpoint names them."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.core_model_loading import WeightConverter, revert_weight_conversion

SHARD_BYTES = 4 * 1024**3
_FIRST_INDEX = re.compile(r"^(.*?\.\d+)\.")
COPIED_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "*.jinja",
    "*processor*.json",
    "*.py",
)


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
    shards: list[tuple[str, list[str]]] = []
    pending: dict[str, Tensor] = {}
    total = size = 0
    if writer:
        path.mkdir(parents=True, exist_ok=True)

    def flush() -> None:
        file = f"model-{len(shards) + 1:05d}.safetensors"
        save_file(pending, str(path / file), metadata={"format": "pt"})
        shards.append((file, list(pending)))
        pending.clear()

    for name, tensor in iter_hf_weights(model, dtype):
        if not writer:
            continue
        nbytes = tensor.numel() * tensor.element_size()
        if pending and size + nbytes > SHARD_BYTES:
            flush()
            size = 0
        pending[name] = tensor.detach().to("cpu", copy=True).contiguous()
        size, total = size + nbytes, total + nbytes
    if not writer:
        return
    flush()
    _write_index(path, shards, total)
    _write_config(model, path, dtype)
    for pattern in COPIED_FILES:
        for file in Path(source).glob(pattern):
            shutil.copy2(file, path / file.name)


def _write_index(path: Path, shards: list[tuple[str, list[str]]], total: int) -> None:
    if len(shards) == 1:
        (path / shards[0][0]).rename(path / "model.safetensors")
        return
    weight_map = {name: file for file, names in shards for name in names}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def _write_config(model: PreTrainedModel, path: Path, dtype: torch.dtype) -> None:
    model.config.save_pretrained(path)
    config = json.loads((path / "config.json").read_text())
    config["dtype"] = str(dtype).removeprefix("torch.")
    config["architectures"] = [type(model).__name__.removeprefix("FSDP")]  # FSDP2 renames the class
    (path / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    if model.can_generate() and model.generation_config is not None:
        model.generation_config.save_pretrained(path)
