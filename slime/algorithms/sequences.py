"""Sums and means over the sequences in a flat token tensor, and their reduction to the scalar of an
optimizer step.

Per-token tensors are flat, ``[R]``: the concatenated response tokens of all samples. ``lengths``
has the number of tokens of each sample. With context parallelism, a rank has only a part of every
response, which may be empty, and ``reduce.over_sequence`` sums over the parts.

A reducer returns a plain sum over rollouts or tokens. Divided by the number of rollouts or tokens
in the whole optimizer step, it is the part of the micro-batch. The parts of all micro-batches and
ranks add up to the value of the step, which so does not depend on how samples are packed and
divided.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, TypeAlias

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class Reduce(Protocol):
    """Sums over the ranks that hold other samples (data parallel) or other tokens of the same
    samples (context parallel). Backends implement it over their process groups."""

    def over_data(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over data- and context-parallel ranks, without gradient. Any shape."""

    def over_sequence(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over context-parallel ranks, with gradient, for any shape. Each rank gets the
        gradient of its own part."""


class Identity:
    """The implementation for one rank, which has all data: sums over ranks change nothing."""

    def over_data(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def over_sequence(self, x: torch.Tensor) -> torch.Tensor:
        return x


IDENTITY: Reduce = Identity()

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to ±20 before ``exp``. A larger ratio has no more meaning, and an overflow
to infinity would give the gradient ``0 * inf = nan`` even if a clip discards the value."""


def sequence_sums(x: Tensor, lengths: Sequence[int]) -> Tensor:
    """Return the sum of each sequence, ``[R] -> [n]``. The order of summation is fixed, so it is
    reproducible.
    """
    import torch

    if not lengths:
        return x.new_zeros(0)
    return torch.stack([part.sum() for part in x.split(list(lengths))])


def spread(per_sequence: Tensor, lengths: Sequence[int]) -> Tensor:
    """Return for every token the value of its sequence, ``[n] -> [R]``."""
    import torch

    # A copy with ``device=`` would wait for all kernels that are queued there.
    repeats = torch.as_tensor(lengths).to(per_sequence.device, torch.int64, non_blocking=True)
    return per_sequence.repeat_interleave(repeats, output_size=sum(lengths))


def sequence_means(
    x: Tensor, mask: Tensor, lengths: Sequence[int], reduce: Reduce = IDENTITY
) -> Tensor:
    """Return the mean of each whole sequence over its unmasked tokens, ``[R] -> [n]``; 0 if all are
    masked.
    """
    weight = mask.to(x.dtype)
    total = reduce.over_sequence(sequence_sums(x * weight, lengths))
    # With context parallelism, a rank has some tokens of a response. Sum and count are reduced
    # before the division, because a mean of means would give wrong weights to parts of different
    # lengths.
    count = reduce.over_sequence(sequence_sums(weight, lengths))
    return total / count.clamp(min=1)


def exp_ratio(log_ratio: Tensor) -> Tensor:
    """Return ``exp`` of a log-ratio after a clamp to ±:data:`MAX_LOG_RATIO`."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def keep_where(mask: Tensor, x: Tensor) -> Tensor:
    """Return ``x`` where the mask is not 0, and exactly 0 elsewhere, even if ``x`` is NaN or
    infinite there.

    ``x * mask`` would keep a NaN, in the value and in the gradient.
    """
    return x.where(mask.bool(), x.new_zeros(()))


def put_where(mask: Tensor, x: Tensor) -> Tensor:
    """Return a tensor with ``x`` where the mask is not 0, and 0 elsewhere: the inverse of
    ``whole[mask]``.
    """
    whole = x.new_zeros(len(mask))
    whole[mask.bool()] = x
    return whole


def flatten(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate the tensors of samples. An empty list gives an empty float tensor."""
    import torch

    return torch.cat(list(parts)) if parts else torch.zeros(0)


def scan_from_end(x: Tensor, factor: float, chunk_size: int = 128) -> Tensor:
    """Return discounted sums from each position to the end: ``y_t = x_t + factor * y_{t+1}``, ``[B,
    T] -> [B, T]``.

    They are computed in chunks: within a chunk by a product with a triangular matrix of powers, and
    between chunks with ``y`` at the first position of the next chunk. This takes ``T / chunk_size``
    sequential steps instead of ``T``, and is equal to the serial recurrence up to rounding.
    """
    import torch

    batch, length = x.shape
    if length == 0:
        return x
    chunks = -(-length // chunk_size)
    padded = torch.nn.functional.pad(x, (0, chunks * chunk_size - length)).view(
        batch, chunks, chunk_size
    )
    position = torch.arange(chunk_size, device=x.device)
    distance = position[:, None] - position
    # A closed form over the whole length would need powers of the factor that overflow. Within a
    # chunk the powers are small enough.
    # [source, target], source >= target
    kernel = torch.tril(factor ** distance.clamp(min=0).to(x.dtype))
    sums = padded @ kernel
    # discount from a position to the start of the next chunk
    reach = factor ** (chunk_size - position).to(x.dtype)
    carry = x.new_zeros(batch, 1)
    out = []
    for chunk in sums.unbind(1)[::-1]:
        chunk = chunk + carry * reach
        carry = chunk[:, :1]
        out.append(chunk)
    return torch.cat(out[::-1], dim=1)[:, :length]


Reducer: TypeAlias = "Callable[[Tensor], Tensor]"
"""Reduces a per-token tensor ``[R]`` to a scalar. Masked tokens are ignored, even if their values
are NaN.
"""


def rollout_mean_reducer(
    mask: Tensor, rollout_mask_sums: Tensor, lengths: Sequence[int]
) -> Reducer:
    """Return a reducer that computes the sum over rollouts of the mean over the tokens of each
    rollout.

    The formula is Σ_i Σ_t m·x / max(mask sum of the whole rollout, 1).

    Args:
        mask: ``[R]``. Rejected tokens are 0 here, but the divisor still counts them.
        rollout_mask_sums: ``[n]``, for each sample the mask sum over all samples of its rollout.
    """
    # The divisor is that of the whole rollout, so that a rollout with several samples has the same
    # weight as a rollout with one.
    divisor = spread(rollout_mask_sums.clamp(min=1), lengths)
    return lambda x: (keep_where(mask, x) * mask.to(x.dtype) / divisor.to(x.dtype)).sum()


def token_sum_reducer(mask: Tensor) -> Reducer:
    """Return a reducer that computes Σ m·x, a scalar, for ``--calculate-per-token-loss``. The mask
    is ``[R]``, like x."""
    return lambda x: (keep_where(mask, x) * mask.to(x.dtype)).sum()


def constant_reducer(mask: Tensor, divisor: float) -> Reducer:
    """Return a reducer that computes Σ m·x / divisor, a scalar, with the same divisor for every
    response. The mask is ``[R]``, like x."""
    return lambda x: (keep_where(mask, x) * mask.to(x.dtype)).sum() / divisor
