"""Read a checkpoint into the memory of the CPU, and yield and save the trained weights with its
names.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import WeightConverter, revert_weight_conversion

from slime.backends.collectives import (
    DTYPES,
    NamedTensor,
    gather_objects,
    local,
    sharded_like,
    whole_tensors,
)
from slime.backends.fsdp.lora import AdapterMerge
from slime.backends.fsdp.low_precision import rounded_weights
from slime.config.args import Args
from slime.config.run import InitialWeights, other_folder
from slime.config.trainer import ModelConfig
from slime.models.loading import ModelError, is_multimodal, load_hf_config, load_hf_model
from slime.models.lora import lora_layers
from slime.models.packed_attention import NAME as PACKED
from slime.models.shards import cached_folder
from slime.models.stored import write_tensors
from slime.registry import find
from slime.weights.hf_folder import (
    SCORE,
    ExportForm,
    MtpLayers,
    score_changes,
    write_side_files,
)

VARLEN = "varlen"


def read_checkpoint(args: Args, empty: bool = False) -> PreTrainedModel:
    """Load the model of ``args`` on the CPU, or with ``empty`` without memory.

    Raises:
        ModelError: The checkpoint does not exist, is damaged, or does not fit the model.
    """
    path = InitialWeights.of(args, args.hf_checkpoint).path(megatron=False)
    how = ModelFormat.of(args)
    narrow = (args.bf16_master_weights or args.lora_rank) and not args.lora_base_quantization
    dtype = loading_dtype(path, how, DTYPES[args.train_dtype] if narrow else torch.float32)
    return load_full_model(path, how, empty, dtype)


@dataclass(frozen=True)
class ModelFormat:
    """How checkpoints are read.

    Attributes:
        hf_checkpoint: Describes the model of a checkpoint that has no config.json, because
            Megatron-LM wrote it.
        model_name: The name of the family, if not that of config.json.
        implementation: The value of ``--attn-implementation``.
        trust: Whether Python code that is part of the checkpoint may run.
    """

    hf_checkpoint: str
    model_name: str | None
    implementation: str | None
    trust: bool

    @classmethod
    def of(cls, model: ModelConfig) -> ModelFormat:
        return cls(
            str(model.hf_checkpoint),
            model.model_name,
            model.attn_implementation,
            model.trust_remote_code,
        )


def loading_dtype(path: str, how: ModelFormat, dtype: torch.dtype) -> torch.dtype:
    """Return in which dtype to load a checkpoint whose parameters will all be cast to ``dtype``.

    To load it in ``dtype`` takes half the CPU memory and time of float32. But transformers then
    creates buffers in this dtype too, for example the biases of MiniMax's routers, which must stay
    float32: then it is float32.
    """
    if dtype == torch.float32:
        return dtype
    wide, narrow = (
        {
            name: buffer.dtype
            for name, buffer in load_full_model(path, how, True, kind).named_buffers()
        }
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
    if other_folder(path):
        if not empty:
            weights = find("checkpoint", "megatron_lm")(
                path, how.hf_checkpoint, how.model_name, how.trust
            )
        path = how.hf_checkpoint
    attention: str | dict[str, str] = PACKED
    if how.implementation not in (None, VARLEN):
        attention = str(how.implementation)
    elif is_multimodal(load_hf_config(path, how.trust)):
        attention = {"": "sdpa", "text_config": PACKED, "vision_config": "sdpa"}
    device = "meta" if empty else "cpu"
    return load_hf_model(path, dtype, device, attention, how.trust, weights)


logger = logging.getLogger(__name__)

_FIRST_INDEX = re.compile(r"^(.*?\.\d+)\.")


def iter_hf_weights(
    model: PreTrainedModel,
    dtype: torch.dtype,
    merge: bool = True,
    device: torch.device | None = None,
) -> Iterator[NamedTensor]:
    """Yield full tensors with the names of the checkpoint on disk: one per expert, and tied tensors
    once.

    transformers renames tensors and fuses experts in memory. Its conversions are reverted, layer by
    layer if a conversion may need several tensors, otherwise tensor by tensor. This is a collective
    operation if the model is sharded. The tensors may be the memory of the model, so copy those
    that must stay unchanged after the next step.

    Args:
        dtype: The dtype of floating-point parameters. Buffers keep their dtype.
        merge: Whether to add adapters (LoRA) to the weights of their layers. Otherwise they are
            left out.
        device: The device of the tensors, if the model's may be in CPU memory
            (``--fsdp-cpu-offload``); None for that of the model.
    """
    adapters = AdapterMerge(model) if merge else None

    def value_of(name: str, value: Tensor, is_parameter: bool) -> Tensor:
        if adapters is not None:
            value = adapters(name, value)
        value = value.to(dtype) if is_parameter else value
        return value if device is None else moved(value, device)

    # The cast comes before the gather, which then transfers half the bytes.
    cast = (
        (name, value_of(name, value, is_parameter)) for name, value, is_parameter in _tensors(model)
    )
    yield from _named_as_on_disk(model, whole_tensors(cast))


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on ``device``, with the same sharding. It is the same tensor if it is there
    already.
    """
    part = local(tensor)
    return tensor if part.device.type == device.type else sharded_like(part.to(device), tensor)


def share_weight_conversions(model: PreTrainedModel) -> None:
    """Give every rank the conversions that rank 0 used when it loaded the checkpoint. This is a
    collective operation.

    Only ``from_pretrained`` finds out which conversions of transformers a checkpoint needs. A model
    that is built without weights has none, and would name its tensors as transformers does in
    memory.
    """
    conversions = [getattr(model, "_weight_conversions", None)]
    dist.broadcast_object_list(conversions, src=0, device=torch.device("cpu"))
    model._weight_conversions = conversions[0]  # type: ignore[assignment]  # what from_pretrained sets


def require_same_names(model: PreTrainedModel) -> None:
    """Check that :func:`iter_hf_weights` yields the same names in the same order on every rank.

    This is a collective operation.

    Raises:
        ModelError: The names differ. Engines would get tensors with unknown names.
    """
    names = [name for name, _ in _named_as_on_disk(model, _empty_tensors(model))]
    digest = hashlib.sha256("\n".join(names).encode()).hexdigest()
    everyones = gather_objects((digest, len(names), names[:2]))
    for rank, (theirs, count, first) in enumerate(everyones):
        if theirs != everyones[0][0]:
            raise ModelError(
                f"rank {rank} names its {count} weights {first}…, rank 0 its {everyones[0][1]} "
                f"{everyones[0][2]}…: the conversion of {type(model).__name__} to the "
                "checkpoint's names differs between ranks"
            )


def names_with_adapters(model: PreTrainedModel) -> frozenset[str]:
    """Return the names in the checkpoint of the weights that have adapters."""
    trained = AdapterMerge(model).names
    return frozenset(
        disk
        for name, tensor in _empty_tensors(model)
        if name in trained
        for disk, _ in _named_as_on_disk(model, iter([(name, tensor)]))
    )


def _named_as_on_disk(
    model: PreTrainedModel, tensors: Iterator[NamedTensor]
) -> Iterator[NamedTensor]:
    conversions = getattr(model, "_weight_conversions", None)
    if not conversions:
        yield from tensors
        return
    # A converter may join tensors of one layer (experts, or gate and up). It is enough to collect
    # one layer at a time, so that the rest of the model need not be in memory.
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


def _empty_tensors(model: PreTrainedModel) -> Iterator[NamedTensor]:
    """Yield tensors with the whole shapes, but without memory."""
    for name, value, _ in _tensors(model):
        yield name, torch.empty(value.shape, dtype=value.dtype, device="meta")


def _tensors(model: PreTrainedModel) -> Iterator[tuple[str, Tensor, bool]]:
    """Yield the state dict in order, with weights in place of their codes and without adapters, and
    whether each tensor is a parameter. Tied parameters come once, unless the second has an adapter,
    which unties it."""
    yield from rounded_weights(_stored(model), model)


def _stored(model: PreTrainedModel) -> Iterator[tuple[str, Tensor, bool]]:
    parameters = dict(model.named_parameters(remove_duplicate=False))
    adapted = {f"{name}.weight" for name in lora_layers(model)}
    seen: set[int] = set()
    for name, value in model.state_dict().items():
        if name.endswith((".lora_A", ".lora_B")):
            continue
        parameter = parameters.get(name)
        if parameter is not None:
            if id(parameter) in seen and name not in adapted:
                continue
            seen.add(id(parameter))
        yield name, value.detach(), parameter is not None


def save_hf_checkpoint(
    model: PreTrainedModel,
    path: Path,
    dtype: torch.dtype,
    source: str,
    writer: bool,
    choice: str | None = None,
) -> None:
    """Write a folder that ``from_pretrained`` and every engine can load.

    This is a collective operation, in which one rank writes.

    Args:
        dtype: That of the export, unless ``choice`` names another.
        source: The folder or hub id of the original model. Its files besides the weights are
            copied.
        choice: The value of ``--save-hf-dtype``.

    Raises:
        ModelError: The export is to be as the source stores it, and the source is not there or does
            not fit.
    """
    # For a hub id these are the downloaded files, so that a save does not need the network.
    folder = cached_folder(source) if writer else None
    mtp = MtpLayers(folder)
    form = ExportForm(choice, folder, writer)
    write_tensors(
        form.tensors(chain(iter_hf_weights(model, form.dtype or dtype), mtp.tensors())),
        path,
        writer,
    )
    if writer:
        if folder is None:
            logger.warning("%s has no tokenizer files: %s is not on this machine", path, source)
        config = json.loads(model.config.to_json_string(use_diff=False)) if folder is None else None
        name = type(model).__name__.removeprefix("FSDP")  # FSDP2 renames the class
        changes = {
            "dtype": str(dtype).removeprefix("torch."),
            "architectures": [name],
            **form.config_changes(),
        }
        write_side_files(folder, path, mtp, changes, config)
        if mtp.notice:
            logger.warning("%s: %s", path, mtp.notice)


def save_scores_checkpoint(
    model: PreTrainedModel,
    head: Tensor,
    path: Path,
    dtype: torch.dtype,
    source: str,
    writer: bool,
) -> None:
    """Write a folder that ``AutoModelForSequenceClassification`` loads: a decoder whose score is
    that of the last token. It has no token for padding, so it scores one text at a time.

    This is a collective operation, in which one rank writes.

    Args:
        model: The decoder without a head.
        head: The weight of the head, ``[1, hidden]``; a bias would add the same to all scores.
        source: The folder or hub id of the original model, whose tokenizer is copied.
    """
    folder = cached_folder(source) if writer else None
    scores = whole_tensors([(SCORE, head.to(dtype))])
    decoder = ((f"model.{name}", tensor) for name, tensor in iter_hf_weights(model, dtype))
    write_tensors(chain(decoder, scores), path, writer)
    if writer:
        changes = score_changes(model.config.model_type, dtype)
        config = json.loads(model.config.to_json_string(use_diff=False)) if folder is None else None
        write_side_files(folder, path, None, changes, config)
