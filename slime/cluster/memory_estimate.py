"""What the parameters of a run take in memory and on the disk, from the headers of its checkpoint."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from math import prod
from typing import TYPE_CHECKING

from slime.config.hf_config import read_config

if TYPE_CHECKING:
    from slime.config.args import Args
    from slime.models.shards import TensorHeader

MASTER_AND_GRADIENTS = 8
"""Bytes per parameter of float32 master weights and float32 gradients."""
MOMENTS = 8
"""Bytes per parameter of Adam's two moments, also in float32."""
STORED_BITS = {"I32": 32, "U32": 32, "I8": 8, "U8": 8}
"""The bits of an integer, which can hold several weights, by its dtype in a header."""
_BESIDE = re.compile(
    r"(^|[._])(\w*scales?(_inv|_2)?|zero_point|qzeros|shape|g_idx|absmax|quant_map|quant_state[\w.]*)$"
)


def memory_lines(args: Args) -> Iterator[str]:
    """One line each for the model, the trainer, an engine and a snapshot; activations and KV caches are left out."""
    parameters = count_parameters(args.hf_checkpoint)
    if not parameters:
        yield "not known: the headers of the checkpoint cannot be read here"
        return
    yield f"model           {parameters / 1e6:,.1f} M parameters"
    if not args.debug_rollout_only:
        yield f"training        {_training(args, parameters)}"
    if not args.debug_train_only:
        gpus, width = args.rollout_num_gpus_per_engine or 1, 4 if args.rollout_dtype == "float32" else 2
        split = f" on each of its {gpus} GPUs" if gpus > 1 else ""
        yield f"an engine       {_gib(parameters * width / gpus)} of weights in {args.rollout_dtype}{split}"
    if args.save:
        yield f"a snapshot      {_gib(snapshot_bytes(args))} on the disk"


def snapshot_bytes(args: Args) -> int:
    """Approximate size of a snapshot in bytes: float32 weights and Adam's two moments; 0 if it cannot be known."""
    moments = 0 if args.no_save_optim or args.use_stateless_adam else MOMENTS
    return count_trained(args) * (4 + moments) * (2 if args.use_critic else 1)


def count_parameters(checkpoint: str | None) -> int:
    """Return the number of parameters in the headers of a Hugging Face checkpoint; 0 if they cannot be read."""
    return sum(map(prod, _shapes(checkpoint)))


def count_trained(args: Args) -> int:
    """Return the number of parameters that the optimizer changes: all, or the adapter's.

    An adapter is counted as if every matrix had one, which is its largest possible size.
    """
    if not args.lora_rank:
        return count_parameters(args.hf_checkpoint)
    return sum(args.lora_rank * sum(shape) for shape in _shapes(args.hf_checkpoint) if len(shape) == 2)


def _shapes(checkpoint: str | None) -> list[tuple[int, ...]]:
    from slime.models.folder import local_folder
    from slime.models.shards import ModelError, read_headers

    folder = local_folder(checkpoint) if checkpoint else None
    if folder is None:
        return []
    try:
        headers = read_headers(folder)
        quantization = _quantization(read_config(str(folder)) or {})
        if quantization is not None:
            return list(_unpacked(headers, packed_bits(quantization)))
        return [tuple(header.shape) for header in headers.values()]
    except ModelError:  # Another check reports it, or the files have PyTorch's older format.
        return []


def _quantization(config: Mapping[str, object]) -> Mapping[str, object] | None:
    for part in (config, config.get("text_config")):
        for name in ("quantization_config", "compression_config"):
            if isinstance(part, Mapping) and isinstance(found := part.get(name), Mapping):
                return found
    return None


def packed_bits(quantization: Mapping[str, object]) -> int:
    """Return the bits of a weight in a checkpoint with this ``quantization_config``: 4, or 8 if it names no others."""
    found: list[object] = [quantization.get("bits"), quantization.get("num_bits")]
    groups = quantization.get("config_groups")
    for group in groups.values() if isinstance(groups, dict) else ():
        weights = group.get("weights") if isinstance(group, dict) else None
        found.append(weights.get("num_bits") if isinstance(weights, dict) else None)
    if quantization.get("quant_method") == "mxfp4" or quantization.get("load_in_4bit"):
        found.append(4)
    return min((bits for bits in found if isinstance(bits, int) and bits in (2, 4, 8)), default=8)


def _unpacked(headers: Mapping[str, TensorHeader], bits: int) -> Iterator[tuple[int, ...]]:
    """The shapes of the weights of a quantized checkpoint: several integers of ``bits`` bits share a stored one.

    The tensors beside a weight (scales, zero points, shapes) are no parameters.
    """
    for name, header in headers.items():
        if not header.shape or _BESIDE.search(name):
            continue
        share = STORED_BITS.get(header.dtype, bits) // bits
        yield (*header.shape[:-1], header.shape[-1] * max(share, 1))


def _training(args: Args, parameters: int) -> str:
    if args.train_backend != "fsdp":
        return "depends on Megatron's layout; it is measured when the ranks have started"
    shards, roles = args.fsdp_shard_size or args.world_size, 2 if args.use_critic else 1
    moments = 0 if args.use_stateless_adam else MOMENTS
    parts = "float32 weights and gradients" + (", Adam's moments" if moments else "")
    split = f", over {shards} ranks" if shards > 1 else ""
    whose = " of actor and critic" if roles > 1 else ""
    size = parameters * (MASTER_AND_GRADIENTS + moments)
    if args.lora_rank:
        width = 4 if args.train_dtype == "float32" else 2
        size = parameters * width + count_trained(args) * (MASTER_AND_GRADIENTS + moments)
        parts = f"{args.train_dtype} weights of the base; {parts} of the adapter"
    return f"{_gib(size * roles / shards)} per rank: {parts}{whose}{split}"


def _gib(count: float) -> str:
    return f"{count / 2**30:.2f} GiB"
