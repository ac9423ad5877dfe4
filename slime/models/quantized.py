"""Quantized checkpoints: which stored tensors form one weight, and how its values are computed.

A ``quant_method`` of config.json is a part of the kind ``quantization``
(:mod:`slime.plugins.quantized` has those of slime).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from slime.models.shards import ModelError, TensorHeader
from slime.registry import find, parts

EXPONENTS = (torch.uint8, torch.float8_e8m0fnu)
"""Dtypes of scales that are stored as exponents of 2."""
_ACTIVATIONS = (
    "input_scale",
    "activation_scale",
    "input_zero_point",
    "k_scale",
    "v_scale",
    "q_scale",
    "output_scale",
)
Read = Callable[[str], Tensor]
Stored = dict[str, Tensor]


class Weight(NamedTuple):
    """One weight that is computed from several stored tensors."""

    parts: tuple[str, ...]
    shape: tuple[int, ...]
    compute: Callable[[Read], Tensor]
    """Computes the weight, in float32 or bfloat16, with a function that reads stored tensors."""
    store: Callable[[Tensor, Read], Stored]
    """Returns the tensors that a checkpoint stores for other values of the weight, by name: the
    inverse.
    """


class Plan(NamedTuple):
    weights: dict[str, Weight]
    left_out: frozenset[str]
    """Stored tensors that plain weights do not need: scales of activations."""


def without_quantization(config: Mapping[str, object]) -> dict[str, object]:
    """Return a config.json for the dequantized weights."""
    plain = {
        key: value
        for key, value in config.items()
        if key not in ("quantization_config", "compression_config")
    }
    return {
        key: without_quantization(v) if key == "text_config" and isinstance(v, dict) else v
        for key, v in plain.items()
    }


def plan(
    where: str, quantization: Mapping[str, object], headers: Mapping[str, TensorHeader], read: Read
) -> Plan:
    """Plan how the weights are computed from the stored tensors.

    Args:
        where: The checkpoint, for messages.
        read: Reads a stored tensor. It is used only for the shapes of packed tensors, which headers
            do not contain.

    Raises:
        ModelError: The quantization method is not supported, or tensors do not fit each other. The
            message names them.
    """
    method = str(quantization.get("quant_method", "none"))
    if method == "modelopt" and str(quantization.get("quant_algo", "")).upper() != "FP8":
        method = f"modelopt {quantization.get('quant_algo')}"
    if method not in parts("quantization"):
        raise ModelError(
            f"checkpoint {where} is quantized with {method!r}, which slime cannot read: it reads "
            f"{', '.join(parts('quantization'))}; use the bfloat16 version of the model, or convert it"
        )
    try:
        weights: dict[str, Weight] = find("quantization", method)(quantization, headers, read)
    except ValueError as error:
        raise ModelError(f"checkpoint {where} ({method}): {error}") from error
    except (TypeError, AttributeError, ArithmeticError) as error:
        raise ModelError(
            f"checkpoint {where} ({method}): the quantization in config.json or the shapes of "
            f"scales cannot be right ({type(error).__name__}: {error})"
        ) from error
    used = {part for weight in weights.values() for part in weight.parts}
    idle = (
        n
        for n in headers
        if n not in used and (n.rpartition(".")[2] in _ACTIVATIONS or n.endswith("_input_scale"))
    )
    return Plan(weights, frozenset(idle))


def scaled(values: Tensor, scales: Tensor, sizes: tuple[int, ...] | None) -> Tensor:
    """Return ``values * scales`` in float32, with each scale repeated over its block.

    Args:
        values: 8-bit floats or integers ``[..., R, C]``.
        scales: Floats, or exponents of 2 (``float8_e8m0fnu``, or uint8 with a bias of 127).
        sizes: Block length along each axis; None for a single scale.
    """
    factors = factors_of(scales)
    if sizes is None:
        return values.float() * factors.reshape(())
    factors = factors.reshape([*factors.shape, *[1] * (values.dim() - factors.dim())])
    for axis, size in enumerate(sizes):
        if size == values.shape[axis]:
            continue  # broadcast
        factors = factors.repeat_interleave(size, axis).narrow(axis, 0, values.shape[axis])
    return values.float() * factors


def factors_of(scales: Tensor) -> Tensor:
    return torch.exp2(scales.float() - 127.0) if scales.dtype == torch.uint8 else scales.float()
