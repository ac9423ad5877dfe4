"""Packing samples into micro-batches for ranks that run their micro-batches in lock step.

With FSDP and with expert parallelism every rank waits for the slowest one in each micro-batch, so a step costs the
sum over micro-batches ``i`` of the largest cost that any rank has in its micro-batch ``i``. The lower bound is the
total cost divided by the number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

# A group that shares its prompt is cut into units of at most this fraction of a micro-batch. Large units store the
# prompt less often, small ones balance better: every size is tried, and the cheapest schedule is used.
_UNIT_FRACTIONS = (1.0, 0.5, 0.25)
# The search stops when no micro-batch is this much above its target.
_TOLERANCE = 0.005
# Units are exchanged with this many of the micro-batches that are furthest below their targets.
_PARTNERS = 64
# What a further micro-batch per rank costs in overhead, as a fraction of the step.
_OVERHEAD = 0.01


@dataclass(frozen=True)
class Items:
    """The samples of one optimizer step.

    ``tokens`` and ``costs`` are those of each whole sample. Samples with the same key in ``prompts`` can store their
    prompt once per micro-batch: each further one saves ``prompt_tokens`` and ``prompt_costs``. ``None`` is a prompt of
    its own. Costs are positive numbers of any unit.
    """

    tokens: Sequence[int]
    costs: Sequence[float]
    prompts: Sequence[Hashable | None]
    prompt_tokens: Sequence[int]
    prompt_costs: Sequence[float]

    def size(self, members: Sequence[int]) -> tuple[int, float]:
        """Tokens and cost of samples that are packed together; a shared prompt counts once."""
        tokens, cost = sum(self.tokens[i] for i in members), sum(self.costs[i] for i in members)
        seen: set[Hashable] = set()
        for i in members:
            key = self.prompts[i]
            if key is not None and key in seen:
                tokens -= self.prompt_tokens[i]
                cost -= self.prompt_costs[i]
            elif key is not None:
                seen.add(key)
        return tokens, cost


def pack_in_lock_step(items: Items, ranks: int, cap: int, multiple: int = 1) -> list[list[list[int]]] | None:
    """Pack samples into equally many micro-batches per rank, so that the ``i``-th of all ranks cost alike.

    Starts from ``k = ceil(tokens / (ranks * cap))`` micro-batches per rank, and takes more while the cap cannot be
    met. Samples are placed longest first into the micro-batch that is furthest below its target; then samples are
    moved and exchanged while that lowers the largest excess. Finally micro-batches are sorted by cost and dealt out.

    Args:
        ranks: number of data-parallel ranks.
        cap: tokens of a micro-batch; only a single sample that is longer may exceed it.
        multiple: the number of micro-batches per rank is a multiple of this.

    Returns:
        ``[rank][micro-batch]``: positions of samples in ascending order. None where no such schedule was found: fewer
        samples than micro-batches, or long samples that do not come out even.
    """
    known = [key for key in items.prompts if key is not None]
    sharing = len(set(known)) < len(known)
    best, lowest = None, math.inf
    for fraction in (*_UNIT_FRACTIONS, 0.0) if sharing else (0.0,):
        bins = _pack_units(items, _units(items, fraction * cap), ranks, cap, multiple)
        if bins is None:
            continue
        rows = _deal(items, bins, ranks)
        price = sum(max(items.size(batch)[1] for batch in row) for row in rows) * (1 + _OVERHEAD * len(rows))
        if price < lowest:
            best, lowest = rows, price
    return None if best is None else [[row[rank] for row in best] for rank in range(ranks)]


def _units(items: Items, limit: float) -> list[list[int]]:
    """Samples that stay together: those of a prompt, first-fit by decreasing length up to ``limit`` tokens."""
    groups: dict[Hashable, list[int]] = {}
    for i, key in enumerate(items.prompts):
        groups.setdefault(("alone", i) if key is None else ("prompt", key), []).append(i)
    units: list[list[int]] = []
    for group in groups.values():
        open_units: list[tuple[int, list[int]]] = []
        for i in sorted(group, key=lambda i: (-items.tokens[i], i)):
            for u, (size, unit) in enumerate(open_units):
                added = size + items.tokens[i] - items.prompt_tokens[i]
                if added <= limit:
                    open_units[u] = (added, [*unit, i])
                    break
            else:
                open_units.append((items.tokens[i], [i]))
        units += [unit for _, unit in open_units]
    return units


def _pack_units(items: Items, units: list[list[int]], ranks: int, cap: int, multiple: int) -> list[list[int]] | None:
    """``k * ranks`` micro-batches of units for the smallest possible ``k``; None where no ``k`` is possible."""
    sizes = [items.size(unit) for unit in units]
    tokens = np.asarray([size[0] for size in sizes], np.int64)
    costs = np.asarray([size[1] for size in sizes], np.float64)
    wanted = int(np.minimum(tokens, cap).sum())  # a longer unit is a single sample, which is alone
    k = max(math.ceil(wanted / (ranks * cap * multiple)), 1) * multiple
    while k * ranks <= len(units):
        packer = _Packer(tokens, costs, ranks, k, cap)
        if packer.place():
            packer.improve()
            return [sorted(i for u in batch for i in units[u]) for batch in packer.members]
        k += multiple
    return None


class _Packer:
    """One attempt with a fixed number of micro-batches."""

    def __init__(self, tokens: np.ndarray, costs: np.ndarray, ranks: int, k: int, cap: int) -> None:
        self.tokens, self.costs, self.cap = tokens, costs, cap
        self.where = np.full(len(tokens), -1, np.int64)
        self.members: list[list[int]] = [[] for _ in range(ranks * k)]
        self.used = np.zeros(ranks * k, np.int64)
        self.load = np.zeros(ranks * k, np.float64)
        self.target = np.repeat(_targets(np.sort(costs)[::-1], ranks, k), ranks)

    def place(self) -> bool:
        """Longest first, into the micro-batch that is furthest below its target. False where the cap is in the way."""
        order = np.lexsort((np.arange(len(self.costs)), -self.costs)).tolist()
        empty = len(self.load)
        for position, u in enumerate(order):
            allowed = self.used == 0
            if len(order) - position > empty:  # else each of the units left has to open a micro-batch
                allowed |= self.used + self.tokens[u] <= self.cap
            b = int(np.argmin(np.where(allowed, self.load - self.target, np.inf)))
            if not allowed[b]:
                return False
            empty -= int(self.used[b] == 0)
            self._put(u, b)
        return True

    def _put(self, u: int, b: int) -> None:
        a = self.where[u]
        if a >= 0:
            self.members[a].remove(u)
            self.used[a] -= self.tokens[u]
            self.load[a] -= self.costs[u]
        self.members[b].append(u)
        self.where[u] = b
        self.used[b] += self.tokens[u]
        self.load[b] += self.costs[u]

    def improve(self) -> None:
        """Move or exchange units of the micro-batches with the largest excess while that lowers the excess."""
        done = np.zeros(len(self.load), bool)
        budget = 2 * len(self.load)
        while budget:
            budget -= 1
            excess = self.load - self.target
            worst = int(np.argmax(np.where(done, -np.inf, excess)))
            if done.all() or excess[worst] <= _TOLERANCE * self.target[worst]:
                return
            done[worst] = not self._relieve(worst, excess)

    def _relieve(self, a: int, excess: np.ndarray) -> bool:
        """Make the largest possible step that lowers the larger excess of ``a`` and another micro-batch."""
        count = min(_PARTNERS, len(excess))
        lowest = np.sort(np.argpartition(excess, count - 1)[:count])
        lowest = lowest[lowest != a]
        units = np.asarray([v for b in lowest.tolist() for v in self.members[b]], np.int64)
        best, step = float(excess[a]) - 1e-9 * float(self.target[a]), None
        if not len(units):
            return False
        partner = self.where[units]
        for u in self.members[a]:
            # Exchange u for v, for all v at once.
            gain, more = self.costs[u] - self.costs[units], self.tokens[u] - self.tokens[units]
            fits = (self.used[a] - more <= self.cap) & (self.used[partner] + more <= self.cap)
            after = np.where(fits, np.maximum(excess[a] - gain, excess[partner] + gain), np.inf)
            v = int(np.argmin(after))
            if after[v] < best:
                best, step = float(after[v]), (u, int(units[v]), int(partner[v]))
            if len(self.members[a]) > 1:  # move u
                fits = self.used[lowest] + self.tokens[u] <= self.cap
                after = np.maximum(excess[lowest] + self.costs[u], excess[a] - self.costs[u])
                after = np.where(fits, after, np.inf)
                b = int(np.argmin(after))
                if after[b] < best:
                    best, step = float(after[b]), (u, -1, int(lowest[b]))
        if step is None:
            return False
        u, v, b = step
        self._put(u, b)
        if v >= 0:
            self._put(v, a)
        return True


def _targets(costs: np.ndarray, ranks: int, k: int) -> np.ndarray:
    """What the micro-batches of each of the ``k`` rows should cost.

    The targets add up to the ideal, the total over the number of ranks. They are equal, except that row ``i`` costs at
    least what the ``i * ranks``-th largest unit costs: a few very long samples should meet in one row instead of
    raising the cost of several.
    """
    floors = costs[: k * ranks : ranks]
    ideal = float(costs.sum()) / ranks
    for high in range(k):
        level = (ideal - float(floors[:high].sum())) / (k - high)
        if level >= floors[high]:
            return np.concatenate([floors[:high], np.full(k - high, level)])
    return floors


def _deal(items: Items, bins: list[list[int]], ranks: int) -> list[list[list[int]]]:
    """``[micro-batch][rank]``: sorted by cost, so that each row holds micro-batches that cost alike.

    Rows go back and forth over the ranks, so that no rank gets the larger one of every row; they are trained in the
    order of their first sample.
    """
    order = sorted(bins, key=lambda batch: (-items.size(batch)[1], batch))
    rows = [order[start : start + ranks] for start in range(0, len(order), ranks)]
    rows = [row if i % 2 == 0 else row[::-1] for i, row in enumerate(rows)]
    return sorted(rows, key=lambda row: min(batch[0] for batch in row))
