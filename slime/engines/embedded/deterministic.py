"""Row counts under which a row's bits do not depend on the rest of the batch.

The same row of a larger matrix product may round differently, an elementwise function takes another code
path in the tail of an array, and a batched attention may be split differently. So deterministic mode runs
forwards of a few fixed row counts only, and measures at start-up which of those agree with one another,
bit for bit, at every place in the block. One row per forward agrees with itself by construction, so there
is always an answer.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable

import torch

from slime.engines.embedded.rows import Rows, row_context
from slime.engines.embedded.runner import FIXED_ROWS, Runner

logger = logging.getLogger(__name__)

_CAPACITY = 64
_VECTOR = 32  # elements that torch's widest elementwise loop takes at once (AVX-512, two fp32 registers)
_PARALLEL_GRAIN = 32768  # elements from which torch splits an elementwise loop over threads


@torch.inference_mode()
def choose_row_counts(runner: Runner, vocab_size: int, seed: int = 0) -> tuple[int, ...]:
    """The row counts that ``runner`` may use, ascending. Leaves the KV cache empty.

    A count must pass two tests: no elementwise loop over its rows has a tail (whose scalar code may round
    differently), and random rows through the whole model give the bits of the largest count, wherever in
    the block they stand.
    """
    aligned = [count for count in FIXED_ROWS if _no_tails(runner, count)]
    generator = torch.Generator().manual_seed(seed)
    if runner.packed is not None:
        runner.packed.refresh()
    try:
        while aligned:
            accepted = _agreeing(runner, aligned, vocab_size, generator)
            if accepted:
                return accepted
            aligned.pop()
    finally:
        runner.cache.clear()
    logger.warning("no row count larger than 1 is bitwise reproducible here: deterministic mode computes row by row")
    return (1,)


def _no_tails(runner: Runner, count: int) -> bool:
    threads = torch.get_num_threads()
    for width in _widths(runner.model):
        elements = count * width
        if elements % _VECTOR or (elements > _PARALLEL_GRAIN and elements % (_VECTOR * threads)):
            return False
    return True


def _widths(model: torch.nn.Module) -> set[int]:
    return {size for p in model.parameters() if p.dim() == 2 for size in p.shape} or {math.prod((1,))}


def _agreeing(runner: Runner, counts: list[int], vocab: int, generator: torch.Generator) -> tuple[int, ...]:
    """Those of ``counts`` that give the bits of the largest; empty when the largest depends on the place."""
    largest = counts[-1]
    runner.cache.resize(largest, _CAPACITY)
    tokens = torch.randint(0, vocab, (largest,), generator=generator).tolist()
    positions = torch.randint(0, _CAPACITY, (largest,), generator=generator).tolist()
    reference = _logits(runner, tokens, positions, range(largest))
    turned = [(row + largest // 2 + 1) % largest for row in range(largest)]
    if not _equal(_logits(runner, tokens, positions, turned), reference[turned]):
        return ()
    accepted = []
    for count in counts[:-1]:
        starts = range(0, largest, count) if count > 1 else range(0, largest, 8)
        blocks = [[turned[i] for i in range(start, start + count)] for start in starts]
        if all(_equal(_logits(runner, tokens, positions, rows), reference[rows]) for rows in blocks):
            accepted.append(count)
    return (*accepted, largest)


def _equal(probs: torch.Tensor, reference: torch.Tensor) -> bool:
    return torch.equal(probs, reference)


def _logits(runner: Runner, tokens: list[int], positions: list[int], rows: Iterable[int]) -> torch.Tensor:
    """Probabilities ``[rows, vocab]`` of the given rows, each in the slot of its own number, as one forward."""
    picked = list(rows)
    block = Rows(
        [tokens[row] for row in picked],
        [positions[row] for row in picked],
        [0] * len(picked),
        picked,
        list(range(len(picked))),
        list(range(len(picked))),
    )
    logits = runner.forward(block, row_context(runner.cache, block, fixed=True), block.wanted)
    assert logits is not None
    return torch.softmax(logits.float(), dim=-1)
