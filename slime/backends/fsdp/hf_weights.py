"""The trained weights as a Hugging Face checkpoint names them."""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import WeightConverter, revert_weight_conversion

from slime.backends.fsdp.gathering import whole_tensors
from slime.models.loading import ModelError
from slime.models.stored import local_folder
from slime.weights.hf_folder import (
    copy_companions,
    without_mtp_layers,
    write_tensors,
    zero_mtp_counts,
)

logger = logging.getLogger(__name__)

_FIRST_INDEX = re.compile(r"^(.*?\.\d+)\.")


def iter_hf_weights(model: PreTrainedModel, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Full tensors under the names of the checkpoint on disk: one per expert, tied ones once.

    transformers fuses experts (and renames) in memory; its own conversions are reverted, layer by layer
    where a conversion may need several tensors, else tensor by tensor. A collective where the model is
    sharded. What comes may be the model's own memory: copy what is to outlive the next step.

    Args:
        dtype: of floating-point parameters; buffers keep theirs.
    """
    # Cast before the gather: half the bytes.
    cast = ((name, value.to(dtype) if is_parameter else value) for name, value, is_parameter in _tensors(model))
    yield from _named_as_on_disk(model, whole_tensors(cast))


def share_weight_conversions(model: PreTrainedModel) -> None:
    """Give every rank the conversions that rank 0 used when it loaded the checkpoint; a collective.

    Only ``from_pretrained`` finds out which of transformers' conversions a checkpoint needs. A model that is built
    without weights has none, and would give its tensors transformers' in-memory names.
    """
    conversions = [getattr(model, "_weight_conversions", None)]
    dist.broadcast_object_list(conversions, src=0, device=torch.device("cpu"))
    model._weight_conversions = conversions[0]  # type: ignore[assignment]  # what from_pretrained sets


def require_same_names(model: PreTrainedModel) -> None:
    """Check that :func:`iter_hf_weights` yields the same names in the same order on every rank; a collective.

    Raises:
        ModelError: it does not. Engines would get tensors that they do not know.
    """
    names = [name for name, _ in _named_as_on_disk(model, _empty_tensors(model))]
    digest = hashlib.sha256("\n".join(names).encode()).hexdigest()
    everyones: list[tuple[str, int, list[str]]] = [("", 0, [])] * dist.get_world_size()
    dist.all_gather_object(everyones, (digest, len(names), names[:2]))
    for rank, (theirs, count, first) in enumerate(everyones):
        if theirs != everyones[0][0]:
            raise ModelError(
                f"rank {rank} names its {count} weights {first}…, rank 0 its {everyones[0][1]} {everyones[0][2]}…: "
                f"the conversion of {type(model).__name__} to the checkpoint's names differs between ranks"
            )


def _named_as_on_disk(model: PreTrainedModel, tensors: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    conversions = getattr(model, "_weight_conversions", None)
    if not conversions:
        yield from tensors
        return
    # A converter may join tensors of one layer (experts, gate and up). Holding one layer back is enough for it, and
    # keeps the rest of the model out of memory.
    by_layer = any(isinstance(c, WeightConverter) for c in conversions)
    pending: dict[str, Tensor] = {}
    prefix: str | None = None
    for name, tensor in tensors:
        match = _FIRST_INDEX.match(name)
        here = match.group(1) if match and by_layer else name
        if pending and here != prefix:
            yield from revert_weight_conversion(model, pending).items()
            pending = {}
        prefix, pending[name] = here, tensor
    yield from revert_weight_conversion(model, pending).items()


def _empty_tensors(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Names and whole shapes, without memory."""
    for name, value, _ in _tensors(model):
        yield name, torch.empty(value.shape, dtype=value.dtype, device="meta")


def _tensors(model: PreTrainedModel) -> Iterator[tuple[str, Tensor, bool]]:
    """The state dict in its order, tied parameters once; whether each is a parameter."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    seen: set[int] = set()
    for name, value in model.state_dict().items():
        parameter = parameters.get(name)
        if parameter is not None:
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
        yield name, value.detach(), parameter is not None


def save_hf_checkpoint(model: PreTrainedModel, path: Path, dtype: torch.dtype, source: str, writer: bool) -> None:
    """Write a folder that ``from_pretrained`` and every engine reads; a collective, one rank writes.

    Args:
        source: folder, or hub id, that the model came from: its tokenizer and processor files are copied.
    """
    write_tensors(iter_hf_weights(model, dtype), path, writer)
    if writer:
        _write_config(model, path, dtype)
        folder = local_folder(source)  # of a hub id what was downloaded: a save does not wait for a network
        if folder is None:
            logger.warning("%s has no tokenizer files: %s is not on this machine", path, source)
            return
        copy_companions(folder, path)
        if notice := without_mtp_layers(folder)[1]:
            logger.warning("%s: %s", path, notice)


def _write_config(model: PreTrainedModel, path: Path, dtype: torch.dtype) -> None:
    model.config.save_pretrained(path)
    config = json.loads((path / "config.json").read_text())
    config.update(zero_mtp_counts(config)[0])  # transformers builds no such layers, but keeps their count
    config["dtype"] = str(dtype).removeprefix("torch.")
    config["architectures"] = [type(model).__name__.removeprefix("FSDP")]  # FSDP2 renames the class
    (path / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    if model.can_generate() and model.generation_config is not None:
        model.generation_config.save_pretrained(path)
