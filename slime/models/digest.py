"""The digest of a tensor, which is the same on trainer and engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import xxhash

if TYPE_CHECKING:
    import torch


def tensor_digest(tensor: torch.Tensor) -> str:
    """Return the XXH3-128 (hex) of the raw little-endian bytes of a tensor, in row-major order.

    The tensor may have any dtype, shape and device. A contiguous CPU tensor is not copied. Shape
    and dtype are not part of the digest, so compare tensors with the same name after a cast to the
    same dtype.
    """
    import torch

    flat = tensor.detach().contiguous().reshape(-1)
    raw = flat.cpu().view(torch.uint8).numpy()
    return xxhash.xxh3_128_hexdigest(raw.data)
