"""Packs samples into micro-batches for ranks that run their micro-batches in lock step.

With FSDP and with expert parallelism, every rank waits for the slowest one in each micro-batch. So the cost of a step
is the sum over ``i`` of the largest cost that any rank has in its ``i``-th micro-batch. Its lower bound is the total
cost divided by the number of ranks. Balancing only the *total* cost of each rank does not reach the bound: two ranks
with equal totals still wait for each other if their ``i``-th micro-batches differ.

Terms: a *row* is the set of the ``i``-th micro-batches of all ranks, the *target* is what a micro-batch should cost,
and the *excess* is its cost minus its target.
"""

from __future__ import annotations

import math

import numpy as np

from slime.data.lock_step_items import Items, Samples

# The search stops when no micro-batch exceeds its target by more than this fraction of it.
_TOLERANCE = 0.005
# Samples are only exchanged with this many micro-batches, those furthest below their targets. This bounds the time of
# one step of the search.
_PARTNERS = 64
# A step with twice as many micro-batches is packed in parts of this size, because the time of the search grows with the
# square. A part has at least so many rows (times the number of which the rows are a multiple): one of them is for its
# longest samples, and one may not be full.
TOGETHER = 1024
LEAST_ROWS = 32


def pack_in_lock_step(
    items: Items, ranks: int, cap: int, multiple: int = 1, at_least: int = 1
) -> list[list[list[int]]] | None:
    """Pack samples into the same number of micro-batches per rank, such that the ``i``-th ones cost about the same.

    1. Start with ``k = ceil(tokens / (ranks * cap))`` micro-batches per rank; increase ``k`` while the samples do not
       fit under the cap.
    2. Place the samples, longest first: beside samples with the same prompt as long as this does not exceed the target,
       otherwise into the micro-batch that is furthest below its target.
    3. Move and exchange samples while this lowers the largest excess.
    4. Sort the micro-batches by cost, and distribute them over the ranks.

    The search makes at most two steps per micro-batch, each of which considers the samples of ``_PARTNERS`` others. It
    takes 50 to 80 ms of CPU time per thousand samples, and up to 130 ms with shared prompts (2,048 to 16,384 samples,
    128 and 512 ranks). A large step is packed in parts, consecutive samples with about equal numbers of tokens, so that
    the time per sample does not grow with the step.

    Args:
        ranks: Number of data-parallel ranks.
        cap: Maximum tokens of a micro-batch; only a single longer sample may exceed it.
        multiple: The number of micro-batches per rank is a multiple of this.
        at_least: Minimum number of micro-batches per rank.

    Returns:
        ``[rank][micro-batch]``: positions of samples in ascending order. None if no such schedule was found, because
        there are fewer samples than micro-batches, or because long samples cannot be distributed evenly.
    """
    samples = Samples.of(items)
    # No schedule with fewer micro-batches per rank can hold so many tokens.
    smallest = max(math.ceil(samples.least_tokens(cap) / (ranks * cap)), at_least, 1)
    count = smallest // max(TOGETHER // ranks, LEAST_ROWS * multiple)
    parts = _parts(items, count) if count > 1 else []
    if len(parts) > 1 and (packed := _pack_parts(items, parts, ranks, cap, multiple, at_least)) is not None:
        return packed
    bins = _pack(samples, ranks, cap, smallest, multiple)
    if bins is None:
        return None
    rows = _deal(items, bins, ranks)
    return [[row[rank] for row in rows] for rank in range(ranks)]


def _pack_parts(
    items: Items, parts: list[range], ranks: int, cap: int, multiple: int, at_least: int
) -> list[list[list[int]]] | None:
    """Pack each part as :func:`pack_in_lock_step` does, one after the other; None if one of them has no schedule."""
    packed: list[list[list[int]]] = [[] for _ in range(ranks)]
    for part in parts:
        ours = pack_in_lock_step(items.take(part), ranks, cap, multiple, math.ceil(at_least / len(parts)))
        if ours is None:
            return None
        for rank, batches in enumerate(ours):
            packed[rank] += [[part[i] for i in batch] for batch in batches]
    return packed


def _parts(items: Items, count: int) -> list[range]:
    """Divide samples into at most ``count`` runs of about equal numbers of tokens; a prompt's samples stay together."""
    size = sum(items.tokens) / count
    starts, tokens = [0], 0
    for i in range(1, len(items.tokens)):
        tokens += items.tokens[i - 1]
        prompt = items.prompts[i]
        if tokens >= len(starts) * size and (prompt is None or prompt != items.prompts[i - 1]):
            starts.append(i)
    return [range(start, end) for start, end in zip(starts, [*starts[1:], len(items.tokens)], strict=True)]


def _pack(samples: Samples, ranks: int, cap: int, smallest: int, multiple: int) -> list[list[int]] | None:
    """Pack into ``k * ranks`` micro-batches with the smallest ``k`` that works; None if none does.

    Steps between attempts double until one works, then what lies between is bisected: where lengths do not divide the
    cap, the smallest ``k`` is far above the lower bound, by a tenth and more. What works with some ``k`` rarely fails
    with a larger one; if it does, the ``k`` that is found is not the smallest.
    """
    below, largest = math.ceil(smallest / multiple) - 1, len(samples.tokens) // (ranks * multiple)

    def attempt(count: int) -> Packer | None:
        packer = Packer(samples, ranks, count * multiple, cap)
        return packer if packer.place() else None

    untried, count, step, found = list(range(below + 1, largest + 1)), below + 1, 1, None
    while count <= largest and (found := attempt(count)) is None:
        untried.remove(count)
        below, count = count, count + 1 if count >= largest else min(count + step, largest)
        step *= 2
    while found is not None and count - below > 1:
        middle = (below + count) // 2
        better = attempt(middle)
        below, count, found = (below, middle, better) if better is not None else (middle, count, found)
    if found is None:  # not even with as many micro-batches as samples
        found = next(filter(None, map(attempt, untried)), None)
    if found is None:
        return None
    found.improve()
    return [sorted(batch) for batch in found.members]


class Packer:
    """One attempt with a fixed number of micro-batches."""

    def __init__(self, samples: Samples, ranks: int, k: int, cap: int) -> None:
        self.samples, self.ranks, self.k, self.cap = samples, ranks, k, cap
        self.where = np.full(len(samples.tokens), -1, np.int64)  # micro-batch of each sample; -1: not placed yet
        self.members: list[list[int]] = [[] for _ in range(ranks * k)]  # samples of each micro-batch
        self.holders: dict[int, dict[int, int]] = {}
        """For each prompt, the micro-batches that store it, and how many of their samples have it."""
        self.used = np.zeros(ranks * k, np.int64)  # tokens of each micro-batch
        self.load = np.zeros(ranks * k, np.float64)  # cost of each micro-batch
        self.target = self._targets(samples.least_cost(cap))
        self._key_marks = np.zeros(int(samples.keys.max()) + 1, bool)
        self._batch_marks = np.zeros(ranks * k, bool)

    def _targets(self, total: float) -> np.ndarray:
        largest_first = np.sort(self.samples.costs)[::-1]
        return np.repeat(_targets(largest_first, total / self.ranks, self.ranks, self.k), self.ranks)

    def place(self) -> bool:
        """Place all samples, longest first; returns False if the cap prevents it."""
        costs, tokens = self.samples.costs, self.samples.tokens
        # Equal costs are ordered by position, so that the result only depends on the samples.
        order = np.lexsort((np.arange(len(costs)), -costs)).tolist()
        empty = len(self.load)
        for position, u in enumerate(order):
            # Every micro-batch needs a sample, since all ranks run the same number of them. If there are as many empty
            # ones as samples left, each of these samples must open one.
            spare = len(order) - position > empty
            b = self._with_its_prompt(u) if spare and self.samples.shares else -1
            if b < 0:
                allowed = self.used == 0  # An empty micro-batch takes any sample, even one that is longer than the cap.
                if spare:
                    allowed |= self.used + tokens[u] <= self.cap
                b = int(np.argmin(np.where(allowed, self.load - self.target, np.inf)))
                if not allowed[b]:
                    return False
            empty -= int(self.used[b] == 0)
            self._put(u, b)
        return True

    def _with_its_prompt(self, u: int) -> int:
        """Best fit: of the micro-batches with the sample's prompt, the fullest within target and cap; -1 if none."""
        more = int(self.samples.tokens[u] - self.samples.saved_tokens[u])
        cost = float(self.samples.costs[u] - self.samples.saved_costs[u])
        best, fullest = -1, -math.inf
        for b in self.holders.get(int(self.samples.keys[u]), ()):
            excess = float(self.load[b] + cost - self.target[b])
            if self.used[b] + more <= self.cap and fullest < excess <= 0.0:
                best, fullest = b, excess
        return best

    def _put(self, u: int, b: int) -> None:
        """Place sample ``u`` in micro-batch ``b``, or move it there."""
        # The prompt's tokens leave ``a`` only with the last sample that has it, and add to ``b`` only with the first.
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
        """Move or exchange samples of the micro-batches with the largest excess while this lowers the excess."""
        # The first targets assumed that prompts are stored as rarely as possible. Now the actual cost is known.
        self.target = self._targets(float(self.load.sum()))
        self._spread_what_does_not_fit()
        done = np.zeros(len(self.load), bool)  # micro-batches that no step could improve
        budget = 2 * len(self.load)
        while budget:
            budget -= 1
            excess = self.load - self.target
            worst = int(np.argmax(np.where(done, -np.inf, excess)))
            if done.all() or excess[worst] <= _TOLERANCE * self.target[worst]:
                return
            done[worst] = not self._relieve(worst, excess)

    def _spread_what_does_not_fit(self) -> None:
        """Lower the targets of micro-batches that are full below their target, and raise those of the others.

        The cap keeps such a micro-batch, for example one with a very long sample, below its target, so the others have
        to do more. Without this, the full ones would look like the best partners of every exchange.
        """
        full = (self.used + self.samples.tokens.min() > self.cap) & (self.load < self.target)
        if full.all():
            return
        missing = float((self.target - self.load)[full].sum())
        self.target[full] = self.load[full]
        self.target[~full] += missing / int((~full).sum())

    def _relieve(self, a: int, excess: np.ndarray) -> bool:
        """Make the step that lowers the most the larger excess of ``a`` and another micro-batch; False if none does.

        A step either exchanges a sample of ``a`` with a sample of the other micro-batch, or moves one there.
        """
        count = min(_PARTNERS, len(excess))
        lowest = np.sort(np.argpartition(excess, count - 1)[:count])
        lowest = lowest[lowest != a]
        others = np.asarray([v for b in lowest.tolist() for v in self.members[b]], np.int64)
        if not len(others):
            return False
        # A step must improve by more than a rounding error, or the search would waste steps on equal samples.
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
        """For each sample, whether its micro-batch would still store its prompt without it."""
        if not self.samples.shares:
            return np.zeros(len(others), bool)
        pairs = self.samples.keys[others] * len(self.load) + self.where[others]
        _, place, counts = np.unique(pairs, return_inverse=True, return_counts=True)
        return counts[place] > 1

    def _sizes(self, u: int | np.ndarray, held: bool | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and costs that samples add to micro-batches; ``held``: these already store the sample's prompt."""
        samples = self.samples
        return samples.tokens[u] - held * samples.saved_tokens[u], samples.costs[u] - held * samples.saved_costs[u]

    def _after_exchange(
        self, a: int, u: int, others: np.ndarray, partner: np.ndarray, kept: np.ndarray, excess: np.ndarray
    ) -> np.ndarray:
        """The larger excess of ``a`` and its partner after ``u`` was exchanged with each of ``others``; inf if one of
        the two would exceed the cap."""
        keys = self.samples.keys
        holders = self.holders[int(keys[u])]
        stays = holders[a] > 1  # whether ``a`` still stores the prompt of ``u`` after ``u`` has left
        # Whether a micro-batch stores the prompt of the sample that comes in. If both samples have the same prompt, it
        # only does so if another sample with this prompt stays there.
        if self.samples.shares:
            same = keys[others] == keys[u]
            in_a = _among(keys[others], keys[self.members[a]], self._key_marks) & (~same | stays)
            in_partner = _among(partner, list(holders), self._batch_marks) & (~same | kept)
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
        """The larger excess of ``a`` and each of ``lowest`` after ``u`` has moved there; inf if it does not fit."""
        holders = self.holders[int(self.samples.keys[u])]
        _, costs_out = self._sizes(u, holders[a] > 1)
        tokens, costs = self._sizes(u, _among(lowest, list(holders), self._batch_marks))
        after = np.maximum(excess[lowest] + costs, excess[a] - costs_out)
        return np.where(self.used[lowest] + tokens <= self.cap, after, np.inf)


def _among(values: np.ndarray, wanted: np.ndarray | list[int], marks: np.ndarray) -> np.ndarray:
    """As :func:`numpy.isin`, which takes ten times as long for a few values; ``marks`` is False for all numbers."""
    marks[wanted] = True
    found: np.ndarray = marks[values]
    marks[wanted] = False
    return found


def _targets(costs: np.ndarray, ideal: float, ranks: int, k: int) -> np.ndarray:
    """What a micro-batch of each of the ``k`` rows should cost.

    The targets add up to ``ideal``, the total cost divided by the number of ranks. They are equal, except that the
    target of row ``i`` is at least the cost of the ``i * ranks``-th largest sample. So a few very long samples are
    collected in one row, instead of raising the cost of several rows.

    Args:
        costs: The costs of the samples, the largest first.
    """
    # Find the smallest number of rows that need their floor: the rest is distributed equally over the other rows.
    floors = costs[: k * ranks : ranks]
    for high in range(k):
        level = (ideal - float(floors[:high].sum())) / (k - high)
        if level >= floors[high]:
            return np.concatenate([floors[:high], np.full(k - high, level)])
    return floors


def _deal(items: Items, bins: list[list[int]], ranks: int) -> list[list[list[int]]]:
    """Distribute micro-batches as ``[row][rank]``; sorted by cost, so that those in one row cost about the same.

    The direction alternates from row to row, so that no rank gets the most expensive micro-batch of every row. Rows are
    trained in the order of their first sample.
    """
    order = sorted(bins, key=lambda batch: (-items.size(batch)[1], batch))
    rows = [order[start : start + ranks] for start in range(0, len(order), ranks)]
    rows = [row if i % 2 == 0 else row[::-1] for i, row in enumerate(rows)]
    return sorted(rows, key=lambda row: min(batch[0] for batch in row))
