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

# The search stops when no micro-batch is this much above its target.
_TOLERANCE = 0.005
# Samples are exchanged with this many of the micro-batches that are furthest below their targets.
_PARTNERS = 64


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


def pack_in_lock_step(
    items: Items, ranks: int, cap: int, multiple: int = 1, at_least: int = 1
) -> list[list[list[int]]] | None:
    """Pack samples into equally many micro-batches per rank, so that the ``i``-th of all ranks cost alike.

    Starts from ``k = ceil(tokens / (ranks * cap))`` micro-batches per rank, and takes more while the cap cannot be
    met. Samples are placed longest first: with others that have their prompt while that does not exceed the target,
    else into the micro-batch that is furthest below its target. Then samples are moved and exchanged while that lowers
    the largest excess. Finally micro-batches are sorted by cost and dealt out.

    The search makes at most two steps per micro-batch, each of which looks at the samples of ``_PARTNERS`` others. It
    takes 50 to 80 ms of CPU time per thousand samples, and up to 130 where prompts are shared (2,048 to 16,384
    samples, 128 and 512 ranks).

    Args:
        ranks: number of data-parallel ranks.
        cap: tokens of a micro-batch; only a single sample that is longer may exceed it.
        multiple: the number of micro-batches per rank is a multiple of this.
        at_least: the smallest number of micro-batches per rank.

    Returns:
        ``[rank][micro-batch]``: positions of samples in ascending order. None where no such schedule was found: fewer
        samples than micro-batches, or long samples that do not come out even.
    """
    samples = _Samples.of(items)
    smallest = max(math.ceil(samples.least_tokens(cap) / (ranks * cap)), at_least, 1)
    bins = _pack(samples, ranks, cap, smallest, multiple)
    if bins is None:
        return None
    rows = _deal(items, bins, ranks)
    return [[row[rank] for row in rows] for rank in range(ranks)]


@dataclass(frozen=True)
class _Samples:
    """:class:`Items` as arrays ``[n]``. ``saved_tokens`` and ``saved_costs`` are what a sample saves beside another
    one with its prompt; ``keys`` numbers the prompts, and a prompt of its own has a number of its own."""

    tokens: np.ndarray
    costs: np.ndarray
    keys: np.ndarray
    saved_tokens: np.ndarray
    saved_costs: np.ndarray
    shares: bool

    @classmethod
    def of(cls, items: Items) -> _Samples:
        numbers: dict[Hashable, int] = {}
        named = [("own", i) if key is None else ("shared", key) for i, key in enumerate(items.prompts)]
        keys = np.asarray([numbers.setdefault(name, len(numbers)) for name in named], np.int64)
        return cls(
            np.asarray(items.tokens, np.int64),
            np.asarray(items.costs, np.float64),
            keys,
            np.asarray(items.prompt_tokens, np.int64),
            np.asarray(items.prompt_costs, np.float64),
            shares=len(numbers) < len(keys),
        )

    def least_tokens(self, cap: int) -> float:
        """Tokens that any schedule stores at least: a prompt once for every ``cap`` tokens of its samples."""
        return float(self._least(self.tokens, self.saved_tokens, cap))

    def least_cost(self, cap: int) -> float:
        return float(self._least(self.costs, self.saved_costs, cap))

    def _least(self, sizes: np.ndarray, saved: np.ndarray, cap: int) -> np.floating:
        if not self.shares:
            # A longer sample is alone and fills its micro-batch.
            return np.minimum(sizes, cap).sum() if sizes is self.tokens else sizes.sum()
        prompts, once = np.zeros(self.keys.max() + 1), np.zeros(self.keys.max() + 1)
        prompts[self.keys], once[self.keys] = self.saved_tokens, saved
        tokens = np.bincount(self.keys, np.minimum(self.tokens, cap) - self.saved_tokens)
        own = tokens if sizes is self.tokens else np.bincount(self.keys, sizes - saved)
        return (own + np.maximum(np.ceil(tokens / np.maximum(cap - prompts, 1)), 1) * once).sum()


def _pack(samples: _Samples, ranks: int, cap: int, smallest: int, multiple: int) -> list[list[int]] | None:
    """``k * ranks`` micro-batches for the smallest possible ``k``; None where no ``k`` is possible."""
    k = math.ceil(smallest / multiple) * multiple
    while k * ranks <= len(samples.tokens):
        packer = _Packer(samples, ranks, k, cap)
        if packer.place():
            packer.improve()
            return [sorted(batch) for batch in packer.members]
        k += multiple
    return None


class _Packer:
    """One attempt with a fixed number of micro-batches."""

    def __init__(self, samples: _Samples, ranks: int, k: int, cap: int) -> None:
        self.samples, self.ranks, self.k, self.cap = samples, ranks, k, cap
        self.where = np.full(len(samples.tokens), -1, np.int64)
        self.members: list[list[int]] = [[] for _ in range(ranks * k)]
        self.holders: dict[int, dict[int, int]] = {}
        """Of each prompt, the micro-batches that store it and how many of their samples have it."""
        self.used = np.zeros(ranks * k, np.int64)
        self.load = np.zeros(ranks * k, np.float64)
        self.target = self._targets(samples.least_cost(cap))

    def _targets(self, total: float) -> np.ndarray:
        largest_first = np.sort(self.samples.costs)[::-1]
        return np.repeat(_targets(largest_first, total / self.ranks, self.ranks, self.k), self.ranks)

    def place(self) -> bool:
        """Longest first. False where the cap is in the way."""
        costs, tokens = self.samples.costs, self.samples.tokens
        order = np.lexsort((np.arange(len(costs)), -costs)).tolist()
        empty = len(self.load)
        for position, u in enumerate(order):
            spare = len(order) - position > empty  # else each of the samples left has to open a micro-batch
            b = self._with_its_prompt(u) if spare and self.samples.shares else -1
            if b < 0:
                allowed = self.used == 0
                if spare:
                    allowed |= self.used + tokens[u] <= self.cap
                b = int(np.argmin(np.where(allowed, self.load - self.target, np.inf)))
                if not allowed[b]:
                    return False
            empty -= int(self.used[b] == 0)
            self._put(u, b)
        return True

    def _with_its_prompt(self, u: int) -> int:
        """The fullest micro-batch with the sample's prompt that it does not fill above its target; -1 where none is."""
        more = int(self.samples.tokens[u] - self.samples.saved_tokens[u])
        cost = float(self.samples.costs[u] - self.samples.saved_costs[u])
        best, fullest = -1, -math.inf
        for b in self.holders.get(int(self.samples.keys[u]), ()):
            excess = float(self.load[b] + cost - self.target[b])
            if self.used[b] + more <= self.cap and fullest < excess <= 0.0:
                best, fullest = b, excess
        return best

    def _put(self, u: int, b: int) -> None:
        """Place a sample, or move it."""
        samples, a = self.samples, int(self.where[u])
        holders = self.holders.setdefault(int(samples.keys[u]), {})
        if a >= 0:
            self.members[a].remove(u)
            holders[a] -= 1
            kept = holders[a] > 0
            if not kept:
                del holders[a]
            self.used[a] -= samples.tokens[u] - kept * samples.saved_tokens[u]
            self.load[a] -= samples.costs[u] - kept * samples.saved_costs[u]
        held = b in holders
        self.used[b] += samples.tokens[u] - held * samples.saved_tokens[u]
        self.load[b] += samples.costs[u] - held * samples.saved_costs[u]
        holders[b] = holders.get(b, 0) + 1
        self.members[b].append(u)
        self.where[u] = b

    def improve(self) -> None:
        """Move or exchange samples of the micro-batches with the largest excess while that lowers the excess."""
        self.target = self._targets(float(self.load.sum()))  # now it is known how often prompts are stored
        self._spread_what_does_not_fit()
        done = np.zeros(len(self.load), bool)
        budget = 2 * len(self.load)
        while budget:
            budget -= 1
            excess = self.load - self.target
            worst = int(np.argmax(np.where(done, -np.inf, excess)))
            if done.all() or excess[worst] <= _TOLERANCE * self.target[worst]:
                return
            done[worst] = not self._relieve(worst, excess)

    def _spread_what_does_not_fit(self) -> None:
        """The cap keeps micro-batches beside a very long sample below their target: others have to do more. Without
        this the full ones would look like the best partners of every exchange."""
        full = (self.used + self.samples.tokens.min() > self.cap) & (self.load < self.target)
        if full.all():
            return
        missing = float((self.target - self.load)[full].sum())
        self.target[full] = self.load[full]
        self.target[~full] += missing / int((~full).sum())

    def _relieve(self, a: int, excess: np.ndarray) -> bool:
        """Make the largest possible step that lowers the larger excess of ``a`` and another micro-batch."""
        count = min(_PARTNERS, len(excess))
        lowest = np.sort(np.argpartition(excess, count - 1)[:count])
        lowest = lowest[lowest != a]
        others = np.asarray([v for b in lowest.tolist() for v in self.members[b]], np.int64)
        if not len(others):
            return False
        best, step = float(excess[a]) - 1e-9 * float(self.target[a]), None
        partner, kept = self.where[others], self._kept(others)
        for u in self.members[a]:
            after = self._after_exchange(a, u, others, partner, kept, excess)
            v = int(np.argmin(after))
            if after[v] < best:
                best, step = float(after[v]), (u, int(others[v]), int(partner[v]))
            if len(self.members[a]) > 1:
                after = self._after_move(a, u, lowest, excess)
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

    def _kept(self, others: np.ndarray) -> np.ndarray:
        """Of each sample, whether its micro-batch stores its prompt without it too."""
        if not self.samples.shares:
            return np.zeros(len(others), bool)
        pairs = self.samples.keys[others] * len(self.load) + self.where[others]
        _, place, counts = np.unique(pairs, return_inverse=True, return_counts=True)
        return counts[place] > 1

    def _sizes(self, u: int | np.ndarray, held: bool | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and costs of samples in micro-batches that hold their prompt, or do not."""
        samples = self.samples
        return samples.tokens[u] - held * samples.saved_tokens[u], samples.costs[u] - held * samples.saved_costs[u]

    def _after_exchange(
        self, a: int, u: int, others: np.ndarray, partner: np.ndarray, kept: np.ndarray, excess: np.ndarray
    ) -> np.ndarray:
        """The larger excess of ``a`` and the other micro-batch once ``u`` and each of ``others`` are exchanged."""
        keys = self.samples.keys
        holders = self.holders[int(keys[u])]
        stays = holders[a] > 1
        if self.samples.shares:
            same = keys[others] == keys[u]
            in_a = np.isin(keys[others], keys[self.members[a]]) & (~same | stays)
            in_partner = np.isin(partner, np.fromiter(holders, np.int64)) & (~same | kept)
        else:
            in_a = in_partner = kept
        tokens_out, costs_out = self._sizes(u, stays)
        tokens_in, costs_in = self._sizes(others, in_a)
        partner_tokens_out, partner_costs_out = self._sizes(others, kept)
        partner_tokens_in, partner_costs_in = self._sizes(u, in_partner)
        fits = self.used[a] - tokens_out + tokens_in <= self.cap
        fits &= self.used[partner] - partner_tokens_out + partner_tokens_in <= self.cap
        mine, theirs = excess[a] - costs_out + costs_in, excess[partner] - partner_costs_out + partner_costs_in
        return np.where(fits, np.maximum(mine, theirs), np.inf)

    def _after_move(self, a: int, u: int, lowest: np.ndarray, excess: np.ndarray) -> np.ndarray:
        """The larger excess of ``a`` and each of ``lowest`` once ``u`` has moved there."""
        holders = self.holders[int(self.samples.keys[u])]
        _, costs_out = self._sizes(u, holders[a] > 1)
        tokens, costs = self._sizes(u, np.isin(lowest, np.fromiter(holders, np.int64)))
        after = np.maximum(excess[lowest] + costs, excess[a] - costs_out)
        return np.where(self.used[lowest] + tokens <= self.cap, after, np.inf)


def _targets(costs: np.ndarray, ideal: float, ranks: int, k: int) -> np.ndarray:
    """What the micro-batches of each of the ``k`` rows should cost.

    The targets add up to ``ideal``, the total over the number of ranks. They are equal, except that row ``i`` costs at
    least what the ``i * ranks``-th largest sample costs: a few very long samples should meet in one row instead of
    raising the cost of several.

    Args:
        costs: of single samples, the largest first.
    """
    floors = costs[: k * ranks : ranks]
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
