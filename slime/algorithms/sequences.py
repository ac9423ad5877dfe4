"""Sums and means over the sequences inside a flat token tensor.

Per-token tensors are flat, ``[R]``: the response tokens of all samples one after another;
``lengths`` says how many belong to each. Under context parallelism a rank holds only its own share
of every response (perhaps none), and ``reduce.over_sequence`` adds the shares up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .reduce import Identity, Reduce

if TYPE_CHECKING:
    from torch import Tensor

IDENTITY: Reduce = Identity()

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to ±20 before ``exp``: beyond that a ratio says nothing more, and an
overflow to infinity would make the gradient ``0 * inf = nan`` even where a clip discards it."""


def sequence_sums(x: Tensor, lengths: Sequence[int]) -> Tensor:
    """Sum of each sequence, ``[R] -> [n]``. In a fixed order, so the same on every run."""
    import torch

    if not lengths:
        return x.new_zeros(0)
    return torch.stack([part.sum() for part in x.split(list(lengths))])


def spread(per_sequence: Tensor, lengths: Sequence[int]) -> Tensor:
    """Give every token its sequence's value, ``[n] -> [R]``."""
    import torch

    repeats = torch.as_tensor(lengths, device=per_sequence.device, dtype=torch.int64)
    return per_sequence.repeat_interleave(repeats, output_size=sum(lengths))


def sequence_means(x: Tensor, mask: Tensor, lengths: Sequence[int], reduce: Reduce = IDENTITY) -> Tensor:
    """Mean of each whole sequence over its unmasked tokens, ``[R] -> [n]``; 0 where nothing is unmasked."""
    weight = mask.to(x.dtype)
    total = reduce.over_sequence(sequence_sums(x * weight, lengths))
    # With context parallelism a rank holds some tokens of a response. Sum and count are joined before the division; a
    # mean of the shares' means would weigh them wrongly.
    count = reduce.over_sequence(sequence_sums(weight, lengths))
    return total / count.clamp(min=1)


def exp_ratio(log_ratio: Tensor) -> Tensor:
    """``exp`` of a log-ratio, clamped to ±:data:`MAX_LOG_RATIO` first."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def keep_where(mask: Tensor, x: Tensor) -> Tensor:
    """``x`` where the mask is on, exactly 0 elsewhere, also where ``x`` is nan or infinite there.

    ``x * mask`` would keep a nan, in the value and in the gradient.
    """
    return x.where(mask.bool(), x.new_zeros(()))


def put_where(mask: Tensor, x: Tensor) -> Tensor:
    """The inverse of ``whole[mask]``: ``x`` (as many as the mask has ones) where the mask is on, 0 elsewhere."""
    whole = x.new_zeros(len(mask))
    whole[mask.bool()] = x
    return whole


def flatten(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate per-sample tensors; an empty list gives an empty float tensor."""
    import torch

    return torch.cat(list(parts)) if parts else torch.zeros(0)


def scan_from_end(x: Tensor, factor: float, chunk_size: int = 128) -> Tensor:
    """Discounted sums from each position to the end: ``y_t = x_t + factor * y_{t+1}``, ``[B, T] -> [B, T]``.

    Computed in chunks: inside a chunk by one product with a triangular matrix of powers, between
    chunks by carrying ``y`` of the next chunk's first position. ``T / chunk_size`` sequential steps
    instead of ``T``, and equal to the serial recurrence up to rounding.
    """
    import torch

    batch, length = x.shape
    if length == 0:
        return x
    chunks = -(-length // chunk_size)
    padded = torch.nn.functional.pad(x, (0, chunks * chunk_size - length)).view(batch, chunks, chunk_size)
    position = torch.arange(chunk_size, device=x.device)
    distance = position[:, None] - position[None, :]
    # As a matrix product the scan runs on the accelerator in T / chunk_size steps. Powers of the factor stay harmless
    # inside a chunk, where a closed form over the whole length would overflow.
    kernel = torch.tril(factor ** distance.clamp(min=0).to(x.dtype))  # [source, target], source >= target
    sums = padded @ kernel
    reach = factor ** (chunk_size - position).to(x.dtype)  # from a position to the next chunk's first
    carry = x.new_zeros(batch, 1)
    out = []
    for chunk in sums.unbind(1)[::-1]:
        chunk = chunk + carry * reach
        carry = chunk[:, :1]
        out.append(chunk)
    return torch.cat(out[::-1], dim=1)[:, :length]
