"""One digest for one tensor, the same on trainer and engine."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import xxhash

if TYPE_CHECKING:
    import torch


def tensor_digest(tensor: torch.Tensor) -> str:
    """XXH3-128 (hex) of the raw little-endian bytes, in row-major order.

    Any dtype, shape and device; a contiguous CPU tensor is read in place. Shape and dtype are not
    part of the digest: compare tensors by name, after the same cast.
    """
    import torch

    flat = tensor.detach().contiguous().reshape(-1)
    raw = flat.cpu().view(torch.uint8).numpy()
    if sys.byteorder == "big":  # torch keeps native order in memory
        raw = raw.reshape(-1, flat.element_size())[:, ::-1].copy()
    return xxhash.xxh3_128_hexdigest(raw.data)
