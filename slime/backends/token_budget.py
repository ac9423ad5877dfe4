"""Find out how many tokens a micro-batch may have, with training passes over packs of two sizes.

The peak of allocated memory grows linearly with the tokens of a pack, because attention kernels do
not store scores, and logits are computed in chunks. A line through two peaks gives the memory per
token and the memory that does not depend on tokens (weights, optimizer state, gradients, one chunk
of logits), and so the number of tokens that fit into the available memory. The estimate is
conservative: if the logits of a small model determine the peak of the two packs, the memory per
token is overestimated.
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
"""The tokens of the first pack, which is the least default budget. The second pack has twice as
many.
"""
MOST_TOKENS = 65536
"""The largest budget. A larger one gives no more throughput, and kernels with 32-bit indices are
near their limit: for example, the activations of a feed-forward layer with a width of 28,672."""
LEAST_TOKENS = 1024
MULTIPLE = 256
SAMPLE_TOKENS = 1024


@dataclass(frozen=True)
class Measurement:
    """The result of one rank: how many tokens fit, the bytes per token, and the bytes available for
    tokens.
    """

    tokens: int
    bytes_per_token: float
    bytes_for_tokens: float


class Meter(Protocol):
    """Measures accelerator memory in bytes."""

    def available(self) -> int:
        """Return the memory that the process has plus the free memory, which is the most that it
        can have.
        """

    def allocated(self) -> int: ...

    def start(self) -> None:
        """Reset the peak."""

    def peak(self) -> int:
        """Return the largest :meth:`allocated` since :meth:`start`."""


class CudaMeter:
    """Measures the memory of the current CUDA device with torch's allocator."""

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
    """Run training passes of ``backend`` and return how many tokens per GPU fit. This is a
    collective operation.

    Args:
        backend: The backend. Its weights, optimizer state and gradients do not change.
        share: The part of the available memory that may be used at the peak.

    Raises:
        MemoryError: Not even a small pack fits.
    """
    import torch

    from slime.backends.collectives import DataParallelReduce

    reduce = DataParallelReduce(backend.world_size, torch.device("cpu"))
    try:
        # the first pass creates compiled kernels, workspaces and communication buffers
        backend.rehearse(FIRST_SIZE)
    except torch.OutOfMemoryError as error:
        raise MemoryError(
            f"a training pass over {FIRST_SIZE} tokens does not fit into the memory of rank "
            f"{backend.rank}: use --gradient-checkpointing, more GPUs or a smaller "
            "--sglang-mem-fraction-static, or give a smaller budget with --max-tokens-per-gpu "
            f"({error})"
        ) from error
    # Two sizes give the line of memory over tokens. Each is run twice if kernels are compiled for
    # it.
    available = meter.available()
    idle = meter.allocated()
    peaks: dict[int, int] = {}
    for size in (FIRST_SIZE, 2 * FIRST_SIZE):
        if peaks:
            # kernels that were compiled for one size are compiled again for all sizes
            backend.rehearse(size)
        meter.start()
        backend.rehearse(size)
        peaks[size] = meter.peak()
        # Twice as many tokens need at most twice as much memory. If one rank ran out of memory, the
        # others would wait for it, so either all ranks continue or none.
        if reduce.maximum([idle + 2 * (peaks[size] - idle) - share * available])[0] > 0:
            break
    backend.clear_memory()
    return fit(peaks, idle, share * available)


def fit(peaks: Mapping[int, float], idle: float, usable: float) -> Measurement:
    """Compute how many tokens have a peak of ``usable`` bytes.

    Args:
        peaks: The peak in bytes by the number of tokens, for one or two packs.
        idle: The bytes between passes. With one pack, all memory above it is attributed to tokens.
    """
    (few, low), (many, high) = min(peaks.items()), max(peaks.items())
    per_token = (high - low) / (many - few) if many > few else (high - idle) / many
    per_token = max(per_token, 1.0)
    # The memory that is left after everything that does not grow with tokens (weights, optimizer
    # state, gradients and one chunk of logits), which is the intercept of the line.
    room = usable - (high - per_token * many)
    return Measurement(max(math.floor(room / per_token), 0), per_token, max(room, 0.0))


def budget(found: Sequence[Measurement], longest: int) -> int:
    """Return the budget for all ranks: the number of tokens that fit on the rank with the least
    memory, within bounds.

    Args:
        found: The measurements of all ranks.
        longest: The tokens of the longest sample on one GPU, which may be more than
            :data:`MOST_TOKENS`.
    """
    # All ranks must have the same budget, so the rank with the least memory determines it.
    tokens = min(one.tokens for one in found)
    tokens = max(min(tokens, max(MOST_TOKENS, longest)), LEAST_TOKENS)
    return tokens - tokens % MULTIPLE


def rehearsal_batch(tokens: int, vocab_size: int) -> RankBatch:
    """Return samples with ``tokens`` tokens in total, without common prompts. All but the first
    token are response.
    """
    import torch

    from slime.data.fields import RankBatch

    lengths = [SAMPLE_TOKENS] * (tokens // SAMPLE_TOKENS)
    if tokens % SAMPLE_TOKENS > 1:
        lengths.append(tokens % SAMPLE_TOKENS)
    generator = torch.Generator().manual_seed(0)
    # avoids the ids of images and other media at the end of a vocabulary
    high = max(min(vocab_size, 30_000), 2)
    return RankBatch(
        {
            "tokens": [torch.randint(high, (length,), generator=generator) for length in lengths],
            "total_lengths": lengths,
            "response_lengths": [length - 1 for length in lengths],
            "group_indices": list(range(len(lengths))),
        }
    )


def explanation(tokens: int, longest: int, measurements: Sequence[Measurement]) -> str:
    """One line that says what was measured. ``longest`` is the most tokens per GPU that the flags
    allow a sample.
    """
    least = min(measurements, key=lambda one: one.tokens)
    text = (
        f"--max-tokens-per-gpu {tokens}: a token takes {least.bytes_per_token / 2**10:.0f} KiB in "
        f"training, and the tightest of {len(measurements)} rank(s) has "
        f"{least.bytes_for_tokens / 2**30:.1f} GiB for them"
    )
    if least.tokens > tokens and tokens >= MOST_TOKENS:
        text += " (more would not train faster)"
    if tokens < longest:
        text += (
            f"; warning: the flags allow samples of {longest} tokens per GPU, which may not fit: "
            "lower --rollout-max-response-len, or use --gradient-checkpointing or "
            "--context-parallel-size"
        )
    return text
