"""How many tokens a micro-batch may hold: measured in training passes over packs of two sizes.

The peak of allocated memory grows linearly with the tokens of a pack: attention kernels keep no scores, and logits
are made in chunks. A line through two peaks says what a token takes and what is needed besides (weights, optimizer
state, gradients, one chunk of logits), and so how many tokens fit into what the process can get. The estimate is on the
safe side: where the logits of a small model set the peak of the two packs, a token seems to take more than it does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from slime.backends.base import TrainBackend
    from slime.data.fields import RankBatch

FIRST_SIZE = 4096
"""Tokens of the first pack, as many as the default budget has at least. The second has twice as many."""
MOST_TOKENS = 65536
"""A larger budget gains no throughput, and kernels that index a tensor with 32 bits, such as a feed-forward layer's
activations of this many tokens and a width of 28,672, would be near their limit."""
LEAST_TOKENS = 1024
MULTIPLE = 256
SAMPLE_TOKENS = 1024


@dataclass(frozen=True)
class Measurement:
    """What one rank found: tokens that fit, bytes that each takes, and bytes that are there for them."""

    tokens: int
    bytes_per_token: float
    bytes_for_tokens: float


class Meter(Protocol):
    """Bytes of accelerator memory."""

    def available(self) -> int:
        """What the process holds and what is free: all that it could have."""

    def allocated(self) -> int: ...

    def start(self) -> None:
        """Forget the peak."""

    def peak(self) -> int:
        """The largest :meth:`allocated` since :meth:`start`."""


class CudaMeter:
    """Of the current device, by torch's allocator."""

    def __init__(self) -> None:
        import torch

        self.cuda = torch.cuda

    def available(self) -> int:
        self.cuda.synchronize()
        self.cuda.empty_cache()
        free, _ = self.cuda.mem_get_info()
        return int(free + self.cuda.memory_reserved())

    def allocated(self) -> int:
        return int(self.cuda.memory_allocated())

    def start(self) -> None:
        self.cuda.synchronize()
        self.cuda.reset_peak_memory_stats()

    def peak(self) -> int:
        self.cuda.synchronize()
        return int(self.cuda.max_memory_allocated())


def measure(backend: TrainBackend, share: float, meter: Meter) -> Measurement:
    """Run training passes of ``backend`` and say how many tokens per GPU fit; a collective.

    Args:
        backend: its weights, optimizer state and gradients are as before.
        share: of the available memory that may be used at the peak.

    Raises:
        MemoryError: not even a small pack fits.
    """
    import torch

    from slime.backends.collectives import DataParallelReduce

    reduce = DataParallelReduce(backend.world_size, torch.device("cpu"))
    try:
        backend.rehearse(FIRST_SIZE)  # compiled kernels, workspaces and communication buffers exist from here on
    except torch.OutOfMemoryError as error:
        raise MemoryError(
            f"a training pass over {FIRST_SIZE} tokens does not fit into the memory of rank {backend.rank}: use "
            "--gradient-checkpointing, more GPUs or a smaller --sglang-mem-fraction-static, or give a smaller budget "
            f"with --max-tokens-per-gpu ({error})"
        ) from error
    available, idle = meter.available(), meter.allocated()
    peaks: dict[int, int] = {}
    for size in (FIRST_SIZE, 2 * FIRST_SIZE):
        if peaks:
            backend.rehearse(size)  # kernels that were compiled for one size are compiled again for any
        meter.start()
        backend.rehearse(size)
        peaks[size] = meter.peak()
        # Twice the tokens take at most twice what these took. A rank that ran out of memory would leave the others
        # waiting, so all of them go on or none.
        if reduce.maximum([idle + 2 * (peaks[size] - idle) - share * available])[0] > 0:
            break
    backend.clear_memory()
    return fit(peaks, idle, share * available)


def fit(peaks: Mapping[int, float], idle: float, usable: float) -> Measurement:
    """How many tokens have a peak of ``usable`` bytes.

    Args:
        peaks: bytes by tokens of a pack, of one or two packs.
        idle: bytes between passes. With one pack, all above it is taken to be due to tokens.
    """
    (few, low), (many, high) = min(peaks.items()), max(peaks.items())
    per_token = (high - low) / (many - few) if many > few else (high - idle) / many
    per_token = max(per_token, 1.0)
    # What is left after everything that does not grow with tokens: weights, optimizer state, gradients and one chunk of
    # logits, which is where the line meets the axis.
    room = usable - (high - per_token * many)
    return Measurement(max(math.floor(room / per_token), 0), per_token, max(room, 0.0))


def budget(found: Sequence[Measurement], longest: int) -> int:
    """The same for all ranks: what fits on the rank with the least room, within bounds.

    Args:
        found: of all ranks.
        longest: tokens of the longest sample on one GPU; it may exceed :data:`MOST_TOKENS`.
    """
    # Ranks pack alike only with one budget, so the rank with the least room decides.
    tokens = min(one.tokens for one in found)
    tokens = max(min(tokens, max(MOST_TOKENS, longest)), LEAST_TOKENS)
    return tokens - tokens % MULTIPLE


def rehearsal_batch(tokens: int, vocab_size: int) -> RankBatch:
    """Samples with no prompt in common that have ``tokens`` tokens together, all but their first a response."""
    import torch

    from slime.data.fields import RankBatch

    lengths = [SAMPLE_TOKENS] * (tokens // SAMPLE_TOKENS)
    if tokens % SAMPLE_TOKENS > 1:
        lengths.append(tokens % SAMPLE_TOKENS)
    generator = torch.Generator().manual_seed(0)
    high = max(min(vocab_size, 30_000), 2)  # ids of images and other media come last in a vocabulary
    return RankBatch(
        {
            "tokens": [torch.randint(high, (length,), generator=generator) for length in lengths],
            "total_lengths": lengths,
            "response_lengths": [length - 1 for length in lengths],
            "group_indices": list(range(len(lengths))),
        }
    )
