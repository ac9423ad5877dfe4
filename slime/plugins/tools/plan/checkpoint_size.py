"""What the parameters of a run take in memory and on the disk, from the headers of its
checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from slime.config.hf_config import read_config
from slime.models.shards import (
    ModelError,
    TensorHeader,
    local_folder,
    quantization_of,
    read_headers,
)

if TYPE_CHECKING:
    from slime.config.args import Args

STORED_BITS = {"I32": 32, "U32": 32, "I8": 8, "U8": 8}
"""The bits of an integer, which can hold several weights, by its dtype in a header."""
_BESIDE = re.compile(
    r"(^|[._])(\w*scales?(_inv|_2)?|zero_point|qzeros|shape|g_idx|absmax|quant_map|quant_state[\w.]*)$"
)


def count_parameters(checkpoint: str | None) -> int:
    """Return the number of parameters in the headers of a Hugging Face checkpoint; 0 if they cannot
    be read.
    """
    return sum(map(prod, parameter_shapes(checkpoint)))


def parameter_shapes(checkpoint: str | None) -> list[tuple[int, ...]]:
    """Return the shapes of all weights in the headers of a checkpoint; empty if they cannot be read
    here.
    """
    folder = local_folder(checkpoint) if checkpoint else None
    if folder is None:
        return []
    try:
        headers = read_headers(folder)
        quantization = quantization_of(read_config(str(folder)) or {})
        if quantization is not None:
            return list(_unpacked(headers, packed_bits(quantization)))
        return [tuple(header.shape) for header in headers.values()]
    except ModelError:  # Another check reports it, or the files have PyTorch's older format.
        return []


def packed_bits(quantization: Mapping[str, object]) -> int:
    """Return the bits of a weight in a checkpoint with this ``quantization_config``: 4, or 8 if it
    names no others.
    """
    found: list[object] = [quantization.get("bits"), quantization.get("num_bits")]
    groups = quantization.get("config_groups")
    for group in groups.values() if isinstance(groups, dict) else ():
        weights = group.get("weights") if isinstance(group, dict) else None
        found.append(weights.get("num_bits") if isinstance(weights, dict) else None)
    if quantization.get("quant_method") == "mxfp4" or quantization.get("load_in_4bit"):
        found.append(4)
    return min((bits for bits in found if isinstance(bits, int) and bits in (2, 4, 8)), default=8)


def _unpacked(headers: Mapping[str, TensorHeader], bits: int) -> Iterator[tuple[int, ...]]:
    """The shapes of the weights of a quantized checkpoint: several integers of ``bits`` bits share
    a stored one.

    The tensors beside a weight (scales, zero points, shapes) are no parameters.
    """
    for name, header in headers.items():
        if not header.shape or _BESIDE.search(name):
            continue
        share = STORED_BITS.get(header.dtype, bits) // bits
        yield (*header.shape[:-1], header.shape[-1] * max(share, 1))


# --- what a run takes ---


def master_bytes(bfloat16: bool) -> int:
    """Bytes per trained parameter of its master weight, which are also those of its gradient."""
    return 2 if bfloat16 else 4


def moment_bytes(kept: bool, eight_bits: bool) -> int:
    """Bytes per trained parameter of Adam's two moments, without the scales of those in 8 bits
    (1/32 byte).
    """
    return (2 if eight_bits else 8) if kept else 0


def memory_lines(args: Args) -> Iterator[str]:
    """One line each for the model, the trainer, an engine and a snapshot; activations and KV caches
    are left out.
    """
    parameters = count_parameters(args.hf_checkpoint)
    if not parameters:
        yield "not known: the headers of the checkpoint cannot be read here"
        return
    yield f"model           {parameters / 1e6:,.1f} M parameters"
    if not args.debug_rollout_only:
        yield f"training        {_training(args, parameters)}"
    if not args.debug_train_only:
        gpus = args.rollout_num_gpus_per_engine or 1
        width = 4 if args.rollout_dtype == "float32" else 2
        split = f" on each of its {gpus} GPUs" if gpus > 1 else ""
        yield (
            f"an engine       {_gib(parameters * width / gpus)} of weights in "
            f"{args.rollout_dtype}{split}"
        )
    if args.save:
        yield f"a snapshot      {_gib(snapshot_bytes(args))} on the disk"


def snapshot_bytes(args: Args) -> int:
    """Approximate size of a snapshot in bytes: master weights and Adam's two moments; 0 if it
    cannot be known.
    """
    moments = moment_bytes(not (args.no_save_optim or args.use_stateless_adam), args.optimizer_8bit)
    each = master_bytes(args.bf16_master_weights) + moments
    return count_trained(args.hf_checkpoint, args.lora_rank) * each * (2 if args.use_critic else 1)


def check_save_folder(args: Args) -> list[str]:
    """Check that this machine can write to ``--save``, and that there is room for a snapshot."""
    from slime.checkpoint.files import try_to_write

    problem = try_to_write(Path(str(args.save)).expanduser(), snapshot_bytes(args))
    return [f"--save {args.save} {problem}: name another folder, or make room"] if problem else []


def count_trained(checkpoint: str, lora_rank: int) -> int:
    """Return the number of parameters that the optimizer changes: all, or the adapter's.

    An adapter is counted as if every matrix had one, which is its largest possible size.
    """
    if not lora_rank:
        return count_parameters(checkpoint)
    return sum(lora_rank * sum(shape) for shape in parameter_shapes(checkpoint) if len(shape) == 2)


def _training(args: Args, parameters: int) -> str:
    if args.train_backend != "fsdp":
        return "depends on Megatron's layout; it is measured when the ranks have started"
    shards = args.fsdp_shard_size or args.world_size
    roles = 2 if args.use_critic else 1
    each = 2 * master_bytes(args.bf16_master_weights)
    each += moment_bytes(not args.use_stateless_adam, args.optimizer_8bit)
    dtype = "bfloat16" if args.bf16_master_weights else "float32"
    kept = (
        ""
        if args.use_stateless_adam
        else ", Adam's moments in 8 bits"
        if args.optimizer_8bit
        else ", Adam's moments"
    )
    parts = f"{dtype} weights and gradients{kept}"
    split = f", over {shards} ranks" if shards > 1 else ""
    whose = " of actor and critic" if roles > 1 else ""
    where = " of CPU memory" if args.fsdp_cpu_offload else ""
    size = parameters * each
    if args.lora_rank:
        width = 4 if args.train_dtype == "float32" else 2
        size = parameters * width + count_trained(args.hf_checkpoint, args.lora_rank) * each
        parts = f"{args.train_dtype} weights of the base; {parts} of the adapter"
    return f"{_gib(size * roles / shards)}{where} per rank: {parts}{whose}{split}"


def _gib(count: float) -> str:
    return f"{count / 2**30:.2f} GiB"
