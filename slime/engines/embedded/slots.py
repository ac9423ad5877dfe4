"""Which KV slot holds what: allocation, shared prefixes, compaction. Pure bookkeeping, no tensors.

A slot is a row of the KV cache with room for ``capacity`` tokens. Running sequences always fill the
slots ``0 .. active-1``, so that a decode step reads one contiguous block; slots behind them keep what
finished sequences left, until they are needed, as prefixes to share.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

CAPACITY_STEP = 64
_NOTHING = np.empty(0, dtype=np.int64)


@dataclass(frozen=True)
class Copy:
    """Copy the first ``length`` tokens of slot ``source`` to ``target``, before the forward."""

    source: int
    target: int
    length: int


@dataclass(frozen=True)
class Swap:
    """Exchange two slots, of which ``length_a`` and ``length_b`` tokens count."""

    a: int
    b: int
    length_a: int
    length_b: int


Move = Copy | Swap


@dataclass
class Slot:
    """``tokens[:valid]`` have their KV here. ``stale``: computed with older weights, never shared."""

    tokens: np.ndarray = field(default_factory=lambda: _NOTHING)
    valid: int = 0
    stale: bool = False
    used: int = 0  # when it was last of use


@dataclass
class SlotTable:
    """Slots ``0 .. active-1`` run; the rest are free but may hold a prefix."""

    max_slots: int
    max_total_tokens: int
    capacity: int = 0
    active: int = 0
    slots: list[Slot] = field(default_factory=list)
    clock: int = 0

    def fits(self, reserve: int) -> bool:
        """Whether one more sequence of up to ``reserve`` tokens can run now."""
        capacity = self._capacity_for(reserve)
        return self.active < self._count_for(capacity)

    def _capacity_for(self, reserve: int) -> int:
        rounded = -(-reserve // CAPACITY_STEP) * CAPACITY_STEP
        return max(rounded, self.capacity if self.active else 0)

    def _count_for(self, capacity: int) -> int:
        return min(self.max_slots, self.max_total_tokens // capacity)

    def make_room(self, reserve: int) -> None:
        """Let every slot hold ``reserve`` tokens; doubles, so that growing stays rare. Call when ``fits``."""
        need = self._capacity_for(reserve)
        wanted = max(need, self.capacity)
        if need > self.capacity:
            # All slots grow, which copies the whole cache. Doubling keeps that rare, unless it would leave too few
            # slots for the sequences that run now.
            doubled = max(need, 2 * self.capacity)
            wanted = doubled if self.active < self._count_for(doubled) else need
        if self.active == 0 and self._count_for(wanted) < self.max_slots:
            wanted = need  # nobody needs the long slots any more: have more of them again
        if wanted != self.capacity or not self.slots:
            if wanted < self.capacity:
                self.slots = []  # what they hold may be longer than the new capacity
            self.capacity = wanted
            count = self._count_for(wanted)
            self.slots = self.slots[:count] + [Slot() for _ in range(count - len(self.slots))]

    def best_prefix(self, tokens: np.ndarray, limit: int) -> tuple[int, int]:
        """(slot, length) of the longest prefix of ``tokens[:limit]`` whose KV is here; length 0 when none."""
        best, best_length = -1, 0
        for index, slot in enumerate(self.slots):
            # Comparing the token at the best length so far first skips most slots without comparing whole arrays.
            room = min(slot.valid, limit)
            if slot.stale or room <= best_length or slot.tokens[best_length] != tokens[best_length]:
                continue
            differs = slot.tokens[:room] != tokens[:room]
            length = int(differs.argmax()) if differs.any() else room
            if length > best_length:
                best, best_length = index, length
        return best, best_length

    def allocate(self, tokens: np.ndarray, share_limit: int) -> tuple[int, int, list[Move]]:
        """Take the slot after the running ones.

        Returns the slot, how many tokens of it are filled by copying, and the copies to make first.
        """
        target = self.active
        source, length = self.best_prefix(tokens, share_limit)
        moves: list[Move] = []
        self.clock += 1
        if source >= 0:
            self.slots[source].used = self.clock
        # Moves are carried out in order, so what the target holds is saved before the copy overwrites it. When the
        # target itself is the source, the prefix is there already.
        if source != target and self.slots[target].valid:
            self._keep_elsewhere(target, source, moves)
        if source >= 0 and source != target:
            moves.append(Copy(source, target, length))
        self.slots[target] = Slot(tokens, length, used=self.clock)
        self.active += 1
        return target, length, moves

    def _keep_elsewhere(self, target: int, source: int, moves: list[Move]) -> None:
        """Save what the target slot holds in the least recently used free slot, if that one is older."""
        free = range(target + 1, len(self.slots))
        victim = min(free, key=lambda i: self.slots[i].used, default=-1)
        # The source is about to be copied from, and what was used later is more likely to be shared again.
        if victim < 0 or victim == source or self.slots[victim].used > self.slots[target].used:
            return
        moves.append(Copy(target, victim, self.slots[target].valid))
        self.slots[victim] = self.slots[target]

    def free(self, slot: int, tokens: list[int], computed: int, last_computed: int) -> list[Move]:
        """Give a running slot back, and let the last running one take its place.

        Args:
            tokens: of the sequence that ends; its first ``computed`` stay as a prefix to share (0: none).
            last_computed: tokens with KV in the last running slot.
        """
        self.clock += 1
        kept = self.slots[slot]
        computed = 0 if kept.stale else computed  # KV of older weights must not reach a new sequence
        kept.tokens, kept.valid = np.asarray(tokens[:computed], dtype=np.int64), computed
        kept.stale = False
        kept.used = self.clock
        self.active -= 1
        last = self.active
        if slot == last:
            return []
        other = self.slots[last]
        self.slots[slot], self.slots[last] = other, kept
        return [Swap(slot, last, kept.valid, last_computed)]

    def forget_free(self) -> None:
        """Drop every shareable prefix."""
        for slot in self.slots[self.active :]:
            slot.valid = 0
        # Running sequences may go on with the KV that they have (pause mode in_place), but nobody may share it.
        for slot in self.slots[: self.active]:
            slot.stale = True

    def note_computed(self, slot: int, computed: int) -> None:
        """More tokens of a running slot have their KV (only those known at allocation can be shared)."""
        entry = self.slots[slot]
        entry.valid = min(computed, len(entry.tokens))
