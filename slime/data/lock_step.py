"""Packs samples into micro-batches for ranks that run their micro-batches in lock step.

With FSDP and with expert parallelism, every rank waits for the slowest one in each micro-batch. So
the cost of a step is the sum over ``i`` of the largest cost that any rank has in its ``i``-th
micro-batch. Its lower bound is the total cost divided by the number of ranks. Balancing only the
*total* cost of each rank does not reach the bound: two ranks with equal totals still wait for each
other if their ``i``-th micro-batches differ.

Terms: a *row* is the set of the ``i``-th micro-batches of all ranks, and the *target* is what a
micro-batch should cost.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Items:
    """The samples of one optimizer step.

    ``tokens`` and ``costs`` refer to whole samples. Samples with the same key in ``prompts`` can
    store their prompt once per micro-batch, so each further one saves ``prompt_tokens`` and
    ``prompt_costs``. The key ``None`` means that a sample shares its prompt with no other. Costs
    are positive numbers in any unit.
    """

    tokens: Sequence[int]
    costs: Sequence[float]
    prompts: Sequence[Hashable | None]
    prompt_tokens: Sequence[int]
    prompt_costs: Sequence[float]

    def size(self, members: Sequence[int]) -> tuple[int, float]:
        """Tokens and cost of samples in one micro-batch; a shared prompt counts once."""
        tokens = sum(self.tokens[i] for i in members)
        cost = sum(self.costs[i] for i in members)
        seen: set[Hashable] = set()
        for i in members:
            key = self.prompts[i]
            if key is not None and key in seen:
                tokens -= self.prompt_tokens[i]
                cost -= self.prompt_costs[i]
            elif key is not None:
                seen.add(key)
        return tokens, cost

    def least_tokens(self, cap: int) -> int:
        """Lower bound of the tokens that micro-batches of ``cap`` tokens store. A sample that is
        longer than the cap is alone, so it uses up exactly one micro-batch.
        """
        fitting = [i for i, tokens in enumerate(self.tokens) if tokens <= cap]
        return self.size(fitting)[0] + cap * (len(self.tokens) - len(fitting))


def pack_in_lock_step(
    items: Items, ranks: int, cap: int, multiple: int = 1, at_least: int = 1
) -> list[list[list[int]]] | None:
    """Pack samples into the same number of micro-batches per rank, such that the ``i``-th ones cost
    about the same.

    1. Start with the fewest micro-batches that could hold the tokens, and take more while the
       samples do not fit.
    2. Place the samples, longest first: beside samples with the same prompt as long as this does
       not exceed the target, otherwise into the micro-batch that is furthest below its target.
    3. Sort the micro-batches by cost, and distribute them over the ranks.

    A search that then exchanges samples would shorten a step by some 1% (benchmarks/history.md).

    Args:
        ranks: Number of data-parallel ranks.
        cap: Maximum tokens of a micro-batch; only a single longer sample may exceed it.
        multiple: The number of micro-batches per rank is a multiple of this.
        at_least: Minimum number of micro-batches per rank.

    Returns:
        ``[rank][micro-batch]``: positions of samples in ascending order. None if no such schedule
        was found, because there are fewer samples than micro-batches, or because long samples
        cannot be distributed evenly.
    """
    fewest = max(math.ceil(items.least_tokens(cap) / (ranks * cap)), at_least, 1)
    count = math.ceil(fewest / multiple) * multiple
    most = len(items.tokens) // (ranks * multiple) * multiple
    while count <= most:
        batches = _placed(items, ranks, count, cap)
        if batches is not None:
            return deal(batches, [items.size(batch)[1] for batch in batches], ranks)
        if count == most:
            break
        # Steps grow with the number, so that a large batch needs few attempts; it has at most 3%
        # too many.
        count = min(count + math.ceil(count / 32 / multiple) * multiple, most)
    return None


def _placed(items: Items, ranks: int, rows: int, cap: int) -> list[list[int]] | None:
    """Place all samples in ``rows`` micro-batches per rank, longest first; None if the cap prevents
    it.
    """
    # Equal costs are ordered by position, so that the result only depends on the samples.
    order = sorted(range(len(items.costs)), key=lambda i: -items.costs[i])
    excess = -_targets([items.costs[i] for i in order], ranks, rows)  # the cost minus the target
    tokens = np.zeros(ranks * rows, np.int64)
    members: list[list[int]] = [[] for _ in range(ranks * rows)]
    holders: dict[Hashable, list[int]] = {}  # the micro-batches that store each prompt
    empty = len(members)
    for position, sample in enumerate(order):
        key = items.prompts[sample]
        holding = [] if key is None else holders.setdefault(key, [])
        size = items.tokens[sample]
        cost = items.costs[sample]
        more_tokens = size - items.prompt_tokens[sample]
        more_cost = cost - items.prompt_costs[sample]
        # All ranks run the same number of micro-batches, so none may stay empty: if as many are
        # empty as samples are left, each of these samples must open one.
        may_join = len(order) - position > empty
        beside = [
            place
            for place in holding
            if may_join and tokens[place] + more_tokens <= cap and excess[place] + more_cost <= 0
        ]
        if beside:  # best fit
            place = max(beside, key=lambda place: excess[place])
        else:
            # An empty micro-batch takes any sample, even one that is longer than the cap.
            room = tokens == 0
            if may_join:
                room |= tokens + size <= cap
            place = int(np.argmin(np.where(room, excess, np.inf)))
            if not room[place]:
                return None
        empty -= not members[place]
        members[place].append(sample)
        if place in holding:
            tokens[place] += more_tokens
            excess[place] += more_cost
        else:
            holding.append(place)
            tokens[place] += size
            excess[place] += cost
    return members


def _targets(costs: Sequence[float], ranks: int, rows: int) -> np.ndarray:
    """What each micro-batch should cost, for samples with these costs, the largest first.

    The targets are equal, except that the target of row ``i`` is at least the cost of the ``i *
    ranks``-th largest sample. So a few very long samples are collected in one row, instead of
    raising the cost of several rows.
    """
    # Find the smallest number of rows that need their floor: the rest is distributed equally over
    # the other rows.
    targets = np.asarray(costs[: rows * ranks : ranks], np.float64)
    rest = sum(costs) / ranks
    for row in range(rows):
        equal = rest / (rows - row)
        if equal >= targets[row]:
            targets[row:] = equal
            break
        rest -= targets[row]
    return np.repeat(targets, ranks)


def deal(batches: list[list[int]], costs: Sequence[float], ranks: int) -> list[list[list[int]]]:
    """Distribute micro-batches as ``[rank][micro-batch]``, such that those in one row cost about
    the same.

    They are sorted by cost. The direction alternates from row to row, so that no rank gets the most
    expensive micro-batch of every row. Rows are trained in the order of their first sample.

    Args:
        costs: The cost of each micro-batch, whose number is a multiple of ``ranks``.
    """
    order = sorted(range(len(batches)), key=lambda j: (-costs[j], min(batches[j])))
    sorted_batches = [sorted(batches[j]) for j in order]
    rows = [sorted_batches[start : start + ranks] for start in range(0, len(order), ranks)]
    rows = [row if i % 2 == 0 else row[::-1] for i, row in enumerate(rows)]
    rows.sort(key=lambda row: min(batch[0] for batch in row))
    return [[row[rank] for row in rows] for rank in range(ranks)]
