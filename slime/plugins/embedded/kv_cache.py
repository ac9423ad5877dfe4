"""The KV slots: which contents they have, and their tensors.

A slot is a row of the KV cache with space for ``capacity`` tokens. Running sequences always use the
slots ``0 .. active-1``, so that a decode step reads one contiguous block. The slots after them keep
the KV of finished sequences, as prefixes to share, until they are needed. The table of the slots
has no tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

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
    """Exchange slots ``a`` and ``b``, which have ``length_a`` and ``length_b`` valid tokens."""

    a: int
    b: int
    length_a: int
    length_b: int


Move = Copy | Swap


@dataclass
class Slot:
    """The contents of one slot. ``tokens[:valid]`` have their KV here."""

    tokens: np.ndarray = field(default_factory=lambda: _NOTHING)
    valid: int = 0
    stale: bool = False  # the KV was computed with old weights and is never shared
    used: int = 0  # the clock of the table at the last use


@dataclass
class SlotTable:
    """All slots. The slots ``0 .. active-1`` are used by running sequences; the others may hold a
    prefix.

    With ``whole_prefixes``, a slot is shared only with all of its tokens, because the model has a
    state that belongs to them. The state of a running sequence moves on with each token, so only
    free slots are shared then.
    """

    max_slots: int
    max_total_tokens: int
    whole_prefixes: bool = False
    capacity: int = 0
    active: int = 0
    slots: list[Slot] = field(default_factory=list)
    clock: int = 0

    def fits(self, reserve: int) -> bool:
        """Return whether one more sequence of up to ``reserve`` tokens can run now."""
        capacity = self._capacity_for(reserve)
        return self.active < self._count_for(capacity)

    def _capacity_for(self, reserve: int) -> int:
        rounded = -(-reserve // CAPACITY_STEP) * CAPACITY_STEP
        return max(rounded, self.capacity if self.active else 0)

    def _count_for(self, capacity: int) -> int:
        return min(self.max_slots, self.max_total_tokens // capacity)

    def make_room(self, reserve: int) -> None:
        """Give every slot space for ``reserve`` tokens. :meth:`fits` must be true."""
        need = self._capacity_for(reserve)
        wanted = max(need, self.capacity)
        if need > self.capacity:
            # Growing copies the whole cache, so the capacity is doubled to make this rare, unless
            # there would then be too few slots for the running sequences.
            doubled = max(need, 2 * self.capacity)
            wanted = doubled if self.active < self._count_for(doubled) else need
        if self.active == 0 and self._count_for(wanted) < self.max_slots:
            # no sequence needs long slots any more, so shorter ones allow more sequences again
            wanted = need
        if wanted != self.capacity or not self.slots:
            if wanted < self.capacity:
                self.slots = []  # their contents may be longer than the new capacity
            self.capacity = wanted
            count = self._count_for(wanted)
            self.slots = self.slots[:count] + [Slot() for _ in range(count - len(self.slots))]

    def best_prefix(self, tokens: np.ndarray, limit: int) -> tuple[int, int]:
        """Return slot and length of the longest prefix of ``tokens[:limit]`` with KV in a slot, or
        (-1, 0).
        """
        best = -1
        best_length = 0
        for index, slot in enumerate(self.slots):
            # A longer match must include the token at the best length so far. Comparing this token
            # first skips most slots without comparing whole arrays.
            room = min(slot.valid, limit)
            if slot.stale or room <= best_length or slot.tokens[best_length] != tokens[best_length]:
                continue
            differs = slot.tokens[:room] != tokens[:room]
            length = int(differs.argmax()) if differs.any() else room
            if self.whole_prefixes and (index < self.active or length < slot.valid):
                continue
            if length > best_length:
                best = index
                best_length = length
        return best, best_length

    def allocate(self, tokens: np.ndarray, share_limit: int) -> tuple[int, int, list[Move]]:
        """Allocate the slot after those of the running sequences.

        Returns:
            The slot, the number of its tokens that already have KV from a shared prefix, and the
            copies to make before the next forward.
        """
        target = self.active
        source, length = self.best_prefix(tokens, share_limit)
        moves: list[Move] = []
        self.clock += 1
        if source >= 0:
            self.slots[source].used = self.clock
        # Moves are executed in order, so the contents of the target are saved before the copy
        # overwrites them. If the target itself is the source, the prefix is there already.
        if source != target and self.slots[target].valid:
            self._keep_elsewhere(target, source, moves)
        if source >= 0 and source != target:
            moves.append(Copy(source, target, length))
        self.slots[target] = Slot(tokens, length, used=self.clock)
        self.active += 1
        return target, length, moves

    def _keep_elsewhere(self, target: int, source: int, moves: list[Move]) -> None:
        """Move the contents of the target slot to the least recently used free slot, if that was
        used earlier.
        """
        free = range(target + 1, len(self.slots))
        victim = min(free, key=lambda i: self.slots[i].used, default=-1)
        # The source must not be overwritten before it is copied. And of two prefixes, the one used
        # later is more likely to be shared again.
        if victim < 0 or victim == source or self.slots[victim].used > self.slots[target].used:
            return
        moves.append(Copy(target, victim, self.slots[target].valid))
        self.slots[victim] = self.slots[target]

    def free(self, slot: int, tokens: np.ndarray, computed: int, last_computed: int) -> list[Move]:
        """Free the slot of a running sequence, and move the last running sequence to it.

        Args:
            tokens: The tokens of the sequence that ends.
            computed: Keep so many of the tokens as a prefix to share; 0 for none.
            last_computed: The number of tokens with KV in the last running slot.
        """
        self.clock += 1
        kept = self.slots[slot]
        computed = 0 if kept.stale else computed  # a new sequence must not use KV of old weights
        kept.tokens = tokens[:computed]
        kept.valid = computed
        kept.stale = False
        kept.used = self.clock
        self.active -= 1
        last = self.active
        if slot == last:
            return []
        other = self.slots[last]
        self.slots[slot] = other
        self.slots[last] = kept
        return [Swap(slot, last, kept.valid, last_computed)]

    def forget_free(self) -> None:
        """Drop all prefixes that could be shared."""
        for slot in self.slots[self.active :]:
            slot.valid = 0
        # Running sequences may continue with their own KV (pause mode in_place), but no other
        # sequence may share it.
        for slot in self.slots[: self.active]:
            slot.stale = True

    def note_computed(self, slot: int, computed: int) -> None:
        """Record that more tokens of a running slot have KV. Only tokens known at allocation can be
        shared.
        """
        entry = self.slots[slot]
        entry.valid = min(computed, len(entry.tokens))


class KVCache:
    """Tensors ``[slots + 1, capacity, kv_heads, head_dim]``: keys and values of each attention
    layer.

    ``index_keys`` has the same of each layer with an indexer, for its own keys: one head of its own
    size. All of these belong to a position, so the first tokens of a slot can be copied alone.

    The tensors of a layer are allocated when the model first uses the layer, so their shapes need
    not be derived from the config. The last slot receives the keys and values of padding rows. New
    memory is zeroed, because masked positions are multiplied by zero, which would not remove a NaN.
    On the CPU, memory pages are allocated only when they are written.

    ``states`` has the tensors ``[slots + 1, ...]`` of each layer with a state, by the kind of
    state. A state belongs to all tokens of a slot that are computed, so a copy of a slot is a copy
    of its state.

    Attributes:
        generation: How often all tensors were replaced.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype
        self.device = device
        self.num_slots = 0
        self.capacity = 0
        self.generation = 0
        self.keys: dict[int, torch.Tensor] = {}
        self.values: dict[int, torch.Tensor] = {}
        self.index_keys: dict[int, torch.Tensor] = {}
        self.states: dict[int, dict[str, torch.Tensor]] = {}

    @property
    def bin_slot(self) -> int:
        return self.num_slots

    @property
    def stores(self) -> tuple[dict[int, torch.Tensor], ...]:
        """The tensors with an entry for each position, by layer."""
        return self.keys, self.values, self.index_keys

    @property
    def nbytes(self) -> int:
        """The size of what belongs to positions."""
        return sum(
            tensor.numel() * tensor.element_size()
            for store in self.stores
            for tensor in store.values()
        )

    @property
    def slot_state_bytes(self) -> int:
        """The size of the states of one slot."""
        return sum(
            state[0].numel() * state.element_size()
            for kinds in self.states.values()
            for state in kinds.values()
        )

    def state(self, layer: int, kind: str, like: torch.Tensor) -> torch.Tensor:
        """Return the states ``[slots + 1, ...]`` of a layer, which are allocated for states like
        ``like``, ``[n, ...]``."""
        kinds = self.states.setdefault(layer, {})
        if kind not in kinds:
            kinds[kind] = like.new_zeros((self.num_slots + 1, *like.shape[1:]))
        return kinds[kind]

    def resize(self, num_slots: int, capacity: int) -> None:
        """Change the number of slots and their capacity, and keep the contents that fit into the
        new shape.
        """
        if (num_slots, capacity) == (self.num_slots, self.capacity):
            return
        slots = min(num_slots, self.num_slots)
        length = min(capacity, self.capacity)
        self.num_slots = num_slots
        self.capacity = capacity
        self.generation += 1
        for store in self.stores:
            for layer, old in store.items():
                store[layer] = self._zeros(old.shape[2], old.shape[3])
                store[layer][:slots, :length] = old[:slots, :length]
        for kinds in self.states.values():
            for kind, old in kinds.items():
                kinds[kind] = old.new_zeros((num_slots + 1, *old.shape[1:]))
                kinds[kind][:slots] = old[:slots]

    def _zeros(self, heads: int, dim: int) -> torch.Tensor:
        shape = self.num_slots + 1, self.capacity, heads, dim
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def write(
        self, layer: int, index: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> None:
        """Store ``key`` and ``value``, ``[rows, kv_heads, head_dim]``.

        Args:
            index: ``[rows]`` int64, slot * capacity + position of each row.
        """
        self._store(self.keys, layer, index, key)
        self._store(self.values, layer, index, value)

    def write_index_keys(self, layer: int, index: torch.Tensor, key: torch.Tensor) -> None:
        """Store the keys of an indexer, ``[rows, 1, index_head_dim]``, as :meth:`write`."""
        self._store(self.index_keys, layer, index, key)

    def _store(
        self, store: dict[int, torch.Tensor], layer: int, index: torch.Tensor, rows: torch.Tensor
    ) -> None:
        if layer not in store:
            store[layer] = self._zeros(rows.shape[1], rows.shape[2])
        # One scatter per layer stores all rows of the step, which may belong to many slots.
        store[layer].flatten(0, 1).index_copy_(0, index, rows.to(self.dtype))

    def move(self, moves: Sequence[Move]) -> None:
        """Execute the moves of the scheduler, as if one after the other."""
        # The slot whose contents a slot has in the end. All moves are one gather and one scatter
        # for each tensor, because launching a kernel on a GPU takes longer than copying a slot.
        origins: dict[int, int] = {}
        longest = 0
        for move in moves:
            if isinstance(move, Copy):
                origins[move.target] = origins.get(move.source, move.source)
                longest = max(longest, move.length)
            else:
                a = origins.get(move.a, move.a)
                origins[move.a] = origins.get(move.b, move.b)
                origins[move.b] = a
                longest = max(longest, move.length_a, move.length_b)
        moved = [pair for pair in origins.items() if pair[0] != pair[1]]
        if not moved:
            return
        targets, sources = torch.tensor(moved, device=self.device).T
        parts = [tensor[:, :longest] for store in self.stores for tensor in store.values()]
        parts += [state for kinds in self.states.values() for state in kinds.values()]
        for part in parts:
            part[targets] = part[sources]

    def clear(self) -> None:
        """Free the memory. All cached keys and values are lost."""
        for store in self.stores:
            store.clear()
        self.states.clear()
        self.num_slots = self.capacity = 0
        self.generation += 1
