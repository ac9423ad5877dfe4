"""The number and the shapes of the parameters of a checkpoint, from the headers of its files."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from math import prod

from slime.config.hf_config import read_config
from slime.models.shards import ModelError, TensorHeader, local_folder, quantization_of, read_headers

STORED_BITS = {"I32": 32, "U32": 32, "I8": 8, "U8": 8}
"""The bits of an integer, which can hold several weights, by its dtype in a header."""
_BESIDE = re.compile(
    r"(^|[._])(\w*scales?(_inv|_2)?|zero_point|qzeros|shape|g_idx|absmax|quant_map|quant_state[\w.]*)$"
)


def count_parameters(checkpoint: str | None) -> int:
    """Return the number of parameters in the headers of a Hugging Face checkpoint; 0 if they cannot be read."""
    return sum(map(prod, parameter_shapes(checkpoint)))


def parameter_shapes(checkpoint: str | None) -> list[tuple[int, ...]]:
    """Return the shapes of all weights in the headers of a checkpoint; empty if they cannot be read here."""
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
