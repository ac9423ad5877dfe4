"""Packs samples into micro-batches for ranks that run their micro-batches in lock step.

With FSDP and with expert parallelism, every rank waits for the slowest one in each micro-batch. So
the cost of a step is the sum over ``i`` of the largest cost that any rank has in its ``i``-th
micro-batch. Its lower bound is the total cost divided by the number of ranks. Balancing only the
*total* cost of each rank does not reach the bound: two ranks with equal totals still wait for each
other if their ``i``-th micro-batches differ.

Terms: a *row* is the set of the ``i``-th micro-batches of all ranks, the *target* is what a
micro-batch should cost, and the *excess* is its cost minus its target.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

# The search stops when no micro-batch exceeds its target by more than this fraction of it.
_TOLERANCE = 0.005
# Samples are only exchanged with so many micro-batches, those furthest below their targets. This
# bounds the time of one step of the search.
_PARTNERS = 64
# So many of the exchanges that look best are computed exactly.
_CANDIDATES = 16


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
        """Lower bound of the tokens that micro-batches of ``cap`` tokens store."""
        total = 0
        responses: dict[Hashable, int] = {}
        prompts: dict[Hashable, int] = {}
        for tokens, key, prompt in zip(self.tokens, self.prompts, self.prompt_tokens, strict=True):
            if key is None or tokens > cap:
                # A sample that is longer than the cap is alone, so it uses up exactly one
                # micro-batch.
                total += min(tokens, cap)
            else:
                responses[key] = responses.get(key, 0) + tokens - prompt
                prompts[key] = prompt
        for key, tokens in responses.items():
            # Beside the prompt, a micro-batch has room for ``cap - prompt`` response tokens.
            copies = max(math.ceil(tokens / max(cap - prompts[key], 1)), 1)
            total += tokens + copies * prompts[key]
        return total


def pack_in_lock_step(
    items: Items, ranks: int, cap: int, multiple: int = 1, at_least: int = 1
) -> list[list[list[int]]] | None:
    """Pack samples into the same number of micro-batches per rank, such that the ``i``-th ones cost
    about the same.

    1. Start with the fewest micro-batches that could hold the tokens, and take more while the
       samples do not fit.
    2. Place the samples, longest first: beside samples with the same prompt as long as this does
       not exceed the target, otherwise into the micro-batch that is furthest below its target.
    3. Exchange samples of the micro-batch with the largest excess with those with the smallest
       ones, while this lowers it: at most two exchanges per micro-batch.
    4. Sort the micro-batches by cost, and distribute them over the ranks.

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
        packing = _Packing(items, ranks, count, cap)
        if packing.place():
            packing.exchange()
            return deal(packing.members, packing.load.tolist(), ranks)
        if count == most:
            break
        # Steps grow with the number, so that a large batch needs few attempts; it has at most 3%
        # too many.
        count = min(count + math.ceil(count / 32 / multiple) * multiple, most)
    return None


class _Packing:
    """One attempt with ``rows`` micro-batches per rank."""

    def __init__(self, items: Items, ranks: int, rows: int, cap: int) -> None:
        self.items = items
        self.ranks = ranks
        self.rows = rows
        self.cap = cap
        self.tokens = np.asarray(items.tokens, np.int64)
        self.costs = np.asarray(items.costs, np.float64)
        self.members: list[list[int]] = [[] for _ in range(ranks * rows)]
        self.used = np.zeros(ranks * rows, np.int64)  # tokens of each micro-batch
        self.load = np.zeros(ranks * rows, np.float64)  # cost of each micro-batch
        self.target = self._targets(float(self.costs.sum()))

    def _targets(self, total: float) -> np.ndarray:
        """What each micro-batch should cost, if all together cost ``total``.

        The targets are equal, except that the target of row ``i`` is at least the cost of the ``i *
        ranks``-th largest sample. So a few very long samples are collected in one row, instead of
        raising the cost of several rows.
        """
        # Find the smallest number of rows that need their floor: the rest is distributed equally
        # over the other rows.
        targets = np.sort(self.costs)[::-1][: self.rows * self.ranks : self.ranks].copy()
        for high in range(self.rows):
            rest = total / self.ranks - float(targets[:high].sum())
            if rest / (self.rows - high) >= targets[high]:
                targets[high:] = rest / (self.rows - high)
                break
        return np.repeat(targets, self.ranks)

    def place(self) -> bool:
        """Place all samples, longest first; returns False if the cap prevents it."""
        holders: dict[Hashable, list[int]] = {}  # the micro-batches that store each prompt
        # Equal costs are ordered by position, so that the result only depends on the samples.
        order = np.lexsort((np.arange(len(self.costs)), -self.costs)).tolist()
        empty = len(self.members)
        for position, sample in enumerate(order):
            key = self.items.prompts[sample]
            # All ranks run the same number of micro-batches, so none may stay empty: if as many are
            # empty as samples are left, each of these samples must open one.
            may_join = len(order) - position > empty
            place = (
                self._beside_its_prompt(sample, holders.get(key, []))
                if may_join and key is not None
                else -1
            )
            shares = place >= 0
            if not shares:
                # An empty micro-batch takes any sample, even one that is longer than the cap.
                room = self.used == 0
                if may_join:
                    room |= self.used + self.tokens[sample] <= self.cap
                place = int(np.argmin(np.where(room, self.load - self.target, np.inf)))
                if not room[place]:
                    return False
                shares = key is not None and place in holders.get(key, [])
                if key is not None and not shares:
                    holders.setdefault(key, []).append(place)
            empty -= int(self.used[place] == 0)
            self.members[place].append(sample)
            self.used[place] += self.tokens[sample] - shares * self.items.prompt_tokens[sample]
            self.load[place] += self.costs[sample] - shares * self.items.prompt_costs[sample]
        return True

    def _beside_its_prompt(self, sample: int, holders: Sequence[int]) -> int:
        """Best fit: of the micro-batches with the sample's prompt, the fullest within target and
        cap; -1 if none.
        """
        tokens = self.items.tokens[sample] - self.items.prompt_tokens[sample]
        cost = self.items.costs[sample] - self.items.prompt_costs[sample]
        best = -1
        fullest = -math.inf
        for place in holders:
            excess = float(self.load[place] + cost - self.target[place])
            if self.used[place] + tokens <= self.cap and fullest < excess <= 0.0:
                best = place
                fullest = excess
        return best

    def exchange(self) -> None:
        """Relieve the micro-batch with the largest excess, again and again, while that helps."""
        # The first targets counted every prompt as often as it has samples. Now the actual cost is
        # known.
        self.target = self._targets(float(self.load.sum()))
        # The cap keeps micro-batches with very long samples below their targets, so the others
        # have to do more. Without this, the full ones would look like the best partners.
        full = (self.used + self.tokens.min() > self.cap) & (self.load < self.target)
        if not full.all():
            missing = float((self.target - self.load)[full].sum())
            self.target[full] = self.load[full]
            self.target[~full] += missing / int((~full).sum())
        done = np.zeros(len(self.load), bool)  # micro-batches that no step could relieve
        for _ in range(2 * len(self.load)):
            excess = self.load - self.target
            high = int(np.argmax(np.where(done, -np.inf, excess)))
            if done[high] or excess[high] <= _TOLERANCE * self.target[high]:
                break
            done[high] = not self._relieve(high, excess)

    def _relieve(self, high: int, excess: np.ndarray) -> bool:
        """Exchange a sample of ``high`` with one of a micro-batch that has a small excess, or move
        it there.

        Returns:
            Whether the larger excess of the two is lower now; otherwise nothing has changed.
        """
        lowest = np.argsort(excess, kind="stable")[:_PARTNERS]
        lowest = lowest[lowest != high]
        partner = np.repeat(lowest, [len(self.members[b]) + 1 for b in lowest])
        back = np.asarray([i for b in lowest for i in (*self.members[b], -1)], np.int64)
        out = np.asarray(self.members[high])
        # What each pair would change, [samples of high, samples of the lowest]; -1: none comes
        # back. The sizes are those of whole samples, as if no prompt were shared.
        costs = self.costs[out][:, None] - np.where(back < 0, 0.0, self.costs[back])
        tokens = self.tokens[out][:, None] - np.where(back < 0, 0, self.tokens[back])
        after = np.maximum(excess[high] - costs, excess[partner] + costs)
        after[(self.used[high] - tokens > self.cap) | (self.used[partner] + tokens > self.cap)] = (
            np.inf
        )
        if len(out) == 1:
            after[:, back < 0] = np.inf  # ``high`` must not become empty
        # Improvements by rounding errors are not worth an exchange.
        limit = excess[high] - 1e-9 * self.target[high]
        # The best of them with their exact sizes.
        for best in np.argsort(after, axis=None, kind="stable")[:_CANDIDATES].tolist():
            row, column = divmod(best, len(back))
            if after[row, column] >= limit:
                break
            if self._replace(high, int(out[row]), int(partner[column]), int(back[column]), limit):
                return True
        return False

    def _replace(self, high: int, out: int, low: int, back: int, limit: float) -> bool:
        """Move ``out`` from ``high`` to ``low``, and ``back`` from there if it is not -1, unless one
        of the two would exceed the cap or have an excess of ``limit``.
        """
        changed = {
            high: [i for i in [*self.members[high], back] if i not in (out, -1)],
            low: [i for i in [*self.members[low], out] if i != back],
        }
        sizes = {place: self.items.size(members) for place, members in changed.items()}
        if any(
            tokens > self.cap or cost - self.target[place] >= limit
            for place, (tokens, cost) in sizes.items()
        ):
            return False
        for place, members in changed.items():
            self.members[place] = members
            self.used[place], self.load[place] = sizes[place]
        return True


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
