"""Dequantize checkpoints: which stored tensors form one weight, by the ``quant_method`` of config.json.

These formats are supported, with the names on disk for a weight ``W`` (``...proj.weight``, or a
fused ``...experts.down_proj``):

=============================== =====================
==============================================================
``quant_method``                stored                value
=============================== =====================
==============================================================
``fp8``, ``fbgemm_fp8``,        ``W`` 8-bit float,    ``W * scale``; one scale per block (``weight_block_size``), row
``modelopt`` (``FP8``)          ``W_scale_inv`` or    or tensor
                                ``W_scale``
``compressed-tensors``,         ``W`` 8-bit float or  the same
``float-quantized``, ...        int8, ``W_scale``
``compressed-tensors``,         ``W_packed`` int32,   4- or 8-bit integers plus ``2**(bits-1)``, packed from the lowest
``pack-quantized``              ``W_scale``,          bits up, times the scale of their group
                                ``W_shape``
``mxfp4``                       ``W_blocks`` uint8    two 4-bit floats (E2M1) a byte, the low one first, times
                                ``[E, R, G, 16]``,    ``2**(scale - 127)``; transposed to ``[E, G*32, R]``
                                ``W_scales`` uint8
                                ``[E, R, G]``
=============================== =====================
==============================================================

Sources: DeepSeek-V3's ``weights_dequant``; compressed-tensors 0.18 ``pack_quantized``; OCP
Microscaling Formats 1.0. Scales of activations and of the KV cache are ignored, because the
dequantized weights do not need them.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from slime.models.quantized import Read, Stored, Weight, scaled
from slime.models.shards import TensorHeader, shorten
from slime.plugins.quantized.formats import from_mxfp4, to_mxfp4, to_packed, to_scaled, unpacked

_FLOAT8 = ("F8_E4M3", "F8_E5M2")
_SCALED_FORMATS = ("float-quantized", "int-quantized", "naive-quantized", "dense")
_EXPLAINS = (
    "slime reads fp8 (block, row and tensor scales), compressed-tensors (pack-quantized, "
    "float-quantized and int-quantized, symmetric) and mxfp4; use the bfloat16 version of the "
    "model, or convert it"
)
_DTYPES = {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "I8": torch.int8}


# --- 8-bit values and a scale ---


def read_scaled(
    quantization: Mapping[str, object], headers: Mapping[str, TensorHeader], read: Read
) -> dict[str, Weight]:
    block = quantization.get("weight_block_size")
    weights = {}
    for name, header in headers.items():
        if header.dtype not in (*_FLOAT8, "I8"):
            continue
        scale = next(
            (f"{name}{end}" for end in ("_scale_inv", "_scale") if f"{name}{end}" in headers), None
        )
        if scale is None:
            if header.dtype == "I8":
                continue  # not quantized: compared with the model later, as all tensors of integers
            raise ValueError(
                f"{name} ({header.dtype} in {header.file}) has no {name}_scale_inv or {name}_scale"
            )
        if f"{name}_zero_point" in headers:
            raise ValueError(
                f"{name} is asymmetric ({name}_zero_point), which slime cannot read: {_EXPLAINS}"
            )
        sizes = _block_sizes(name, header.shape, headers[scale].shape, block)
        compute = partial(_read_scaled, name, scale, sizes)
        store = partial(_store_scaled, name, scale, _DTYPES[header.dtype], sizes)
        weights[name] = Weight((name, scale), header.shape, compute, store)
    return weights


def _block_sizes(
    name: str, shape: tuple[int, ...], scales: tuple[int, ...], block: object
) -> tuple[int, ...] | None:
    """Return the number of elements per scale along each axis; None if one scale applies to the
    whole tensor.
    """
    if all(n == 1 for n in scales) or not shape:
        return None
    if len(scales) == 1 and scales[0] == shape[0]:
        scales += (1,) * (len(shape) - 1)
    if len(scales) != len(shape):
        raise ValueError(
            f"{name} has shape {list(shape)}, which does not fit scales of shape {list(scales)}"
        )
    given = (
        [1] * (len(shape) - 2) + [int(n) for n in block]
        if isinstance(block, list) and len(shape) >= 2
        else []
    )
    sizes = []
    for axis, (length, count) in enumerate(zip(shape, scales, strict=True)):
        if given and -(-length // given[axis]) == count:
            sizes.append(given[axis])  # the last block of an axis may be shorter
        elif count and length % count == 0:
            sizes.append(length // count)
        else:
            raise ValueError(
                f"{name} of shape {list(shape)} cannot be divided into blocks for scales of shape "
                f"{list(scales)}" + (f" (weight_block_size {block})" if block else "")
            )
    return tuple(sizes)


def _read_scaled(name: str, scale: str, sizes: tuple[int, ...] | None, read: Read) -> Tensor:
    return scaled(read(name), read(scale), sizes)


def _store_scaled(
    name: str,
    scale: str,
    dtype: torch.dtype,
    sizes: tuple[int, ...] | None,
    weight: Tensor,
    read: Read,
) -> Stored:
    values, scales = to_scaled(weight, read(scale), dtype, sizes)
    return {name: values, scale: scales}


# --- compressed-tensors ---


def read_compressed(
    quantization: Mapping[str, object], headers: Mapping[str, TensorHeader], read: Read
) -> dict[str, Weight]:
    named = quantization.get("config_groups")
    default = quantization.get("format")
    configured = list(named.values()) if isinstance(named, dict) else []
    # Groups of one checkpoint may have different formats and numbers of bits; a tensor does not say
    # to which group it belongs, so what fits its shape decides.
    groups = [group.get("weights") or {} for group in configured]
    formats = {str(group.get("format") or default) for group in configured} or {str(default)}
    unknown = formats - {"pack-quantized", "mixed-precision", *_SCALED_FORMATS}
    if unknown:
        raise ValueError(f"slime cannot read the format {shorten(sorted(unknown))}: {_EXPLAINS}")
    asymmetric = [n for n in headers if n.endswith((".weight_zero_point", ".weight_g_idx"))]
    if asymmetric:
        raise ValueError(
            f"{shorten(asymmetric, 2)}: slime cannot read asymmetric or reordered groups: "
            f"{_EXPLAINS}"
        )
    bits = {int(g["num_bits"]) for g in groups if g.get("num_bits")} or {4, 8}
    weights = read_scaled({}, headers, read)
    for packed, header in headers.items():
        if packed.endswith("_packed"):
            name = packed.removesuffix("_packed")
            weights[name] = _packed_weight(name, header, headers, bits, read)
    return weights


def _packed_weight(
    name: str, packed: TensorHeader, headers: Mapping[str, TensorHeader], bits: set[int], read: Read
) -> Weight:
    scale = f"{name}_scale"
    shape = f"{name}_shape"
    lost = [part for part in (scale, shape) if part not in headers]
    if lost:
        raise ValueError(f"{name}_packed has no {' and no '.join(lost)}")
    if packed.dtype != "I32" or len(packed.shape) != 2 or len(headers[scale].shape) != 2:
        raise ValueError(
            f"{name}_packed is {packed.dtype} {list(packed.shape)}, but must be an int32 matrix"
        )
    # A tensor does not say how many bits its values have. The number of words in a row does.
    rows, columns = (int(n) for n in read(shape))
    fitting = [b for b in sorted(bits) if 32 % b == 0 and -(-columns * b // 32) == packed.shape[1]]
    groups = headers[scale].shape[1]
    if (
        len(fitting) != 1
        or rows != packed.shape[0]
        or headers[scale].shape[0] != rows
        or columns % groups
    ):
        raise ValueError(
            f"{name} of shape {[rows, columns]} does not fit its packed values "
            f"{list(packed.shape)} of {sorted(bits)} bits and scales {list(headers[scale].shape)}"
        )
    sizes = (1, columns // groups)
    width = fitting[0]

    def compute(read: Read) -> Tensor:
        return scaled(unpacked(read(f"{name}_packed"), width, columns), read(scale), sizes)

    def store(weight: Tensor, read: Read) -> Stored:
        values, scales = to_packed(weight, read(scale), width)
        return {f"{name}_packed": values, scale: scales, shape: read(shape)}

    return Weight((f"{name}_packed", scale, shape), (rows, columns), compute, store)


# --- MXFP4 ---


def read_mxfp4(
    quantization: Mapping[str, object], headers: Mapping[str, TensorHeader], read: Read
) -> dict[str, Weight]:
    weights = {}
    for blocks, header in headers.items():
        if not blocks.endswith("_blocks"):
            continue
        name = blocks.removesuffix("_blocks")
        scales = f"{name}_scales"
        if scales not in headers:
            raise ValueError(f"{blocks} has no {scales}")
        if (
            header.dtype != "U8"
            or len(header.shape) != 4
            or headers[scales].shape != header.shape[:3]
        ):
            raise ValueError(
                f"{blocks} is {header.dtype} {list(header.shape)} with scales "
                f"{list(headers[scales].shape)}, but must be uint8 [experts, rows, groups, 16] "
                "with scales [experts, rows, groups]"
            )
        experts, rows, groups, half = header.shape
        shape = experts, groups * half * 2, rows
        parts = blocks, scales
        weights[name] = Weight(
            parts, shape, partial(_read_fp4, *parts), partial(_store_fp4, *parts)
        )
    return weights


def _read_fp4(blocks: str, scales: str, read: Read) -> Tensor:
    return torch.stack([from_mxfp4(b, s) for b, s in zip(read(blocks), read(scales), strict=True)])


def _store_fp4(blocks: str, scales: str, weight: Tensor, read: Read) -> Stored:
    pairs = [to_mxfp4(w, s) for w, s in zip(weight, read(scales), strict=True)]
    return {blocks: torch.stack([b for b, _ in pairs]), scales: torch.stack([s for _, s in pairs])}
