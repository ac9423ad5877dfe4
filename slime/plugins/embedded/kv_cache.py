"""The tensors of the slots: keys and values of attention layers, keys of indexers, and states of recurrent layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from slime.plugins.embedded.slots import Copy, Move, Swap


class KVCache:
    """Tensors ``[slots + 1, capacity, kv_heads, head_dim]``: keys and values of each attention layer.

    ``index_keys`` has the same of each layer with an indexer, for its own keys: one head of its own size. All of these
    belong to a position, so the first tokens of a slot can be copied alone.

    The tensors of a layer are allocated when the model first uses the layer, so their shapes need not be derived from
    the config. The last slot receives the keys and values of padding rows. New memory is zeroed, because masked
    positions are multiplied by zero, which would not remove a NaN. On the CPU, memory pages are allocated only when
    they are written.

    ``states`` has the tensors ``[slots + 1, ...]`` of each layer with a state, by the kind of state. A state belongs to
    all tokens of a slot that are computed, so a copy of a slot is a copy of its state.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype
        self.device = device
        self.num_slots = 0
        self.capacity = 0
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
        return sum(tensor.numel() * tensor.element_size() for store in self.stores for tensor in store.values())

    @property
    def slot_state_bytes(self) -> int:
        """The size of the states of one slot."""
        return sum(
            state[0].numel() * state.element_size() for kinds in self.states.values() for state in kinds.values()
        )

    def state(self, layer: int, kind: str, like: torch.Tensor) -> torch.Tensor:
        """Return the states ``[slots + 1, ...]`` of a layer, which are allocated for states like ``like``, ``[n,
        ...]``."""
        kinds = self.states.setdefault(layer, {})
        if kind not in kinds:
            kinds[kind] = like.new_zeros((self.num_slots + 1, *like.shape[1:]))
        return kinds[kind]

    def resize(self, num_slots: int, capacity: int) -> None:
        """Change the number of slots and their capacity, and keep the contents that fit into the new shape."""
        if (num_slots, capacity) == (self.num_slots, self.capacity):
            return
        slots, length = min(num_slots, self.num_slots), min(capacity, self.capacity)
        self.num_slots, self.capacity = num_slots, capacity
        for store in self.stores:
            for layer, old in store.items():
                store[layer] = self._zeros(old.shape[2], old.shape[3])
                store[layer][:slots, :length] = old[:slots, :length]
        for kinds in self.states.values():
            for kind, old in kinds.items():
                kinds[kind] = old.new_zeros((num_slots + 1, *old.shape[1:]))
                kinds[kind][:slots] = old[:slots]

    def _zeros(self, heads: int, dim: int) -> torch.Tensor:
        shape = (self.num_slots + 1, self.capacity, heads, dim)
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def write(self, layer: int, index: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store ``key`` and ``value``, ``[rows, kv_heads, head_dim]``.

        Args:
            index: ``[rows]`` int64, slot * capacity + position of each row.
        """
        self._store(self.keys, layer, index, key)
        self._store(self.values, layer, index, value)

    def write_index_keys(self, layer: int, index: torch.Tensor, key: torch.Tensor) -> None:
        """Store the keys of an indexer, ``[rows, 1, index_head_dim]``, as :meth:`write`."""
        self._store(self.index_keys, layer, index, key)

    def _store(self, store: dict[int, torch.Tensor], layer: int, index: torch.Tensor, rows: torch.Tensor) -> None:
        if layer not in store:
            store[layer] = self._zeros(rows.shape[1], rows.shape[2])
        # One scatter per layer stores all rows of the step, which may belong to many slots.
        store[layer].flatten(0, 1).index_copy_(0, index, rows.to(self.dtype))

    def move(self, moves: Sequence[Move]) -> None:
        """Execute the moves of the scheduler, in order."""
        for store in self.stores:
            for tensor in store.values():
                for move in moves:
                    if isinstance(move, Copy):
                        tensor[move.target, : move.length].copy_(tensor[move.source, : move.length])
                    else:
                        _swap(tensor, move)
        for kinds in self.states.values():
            for state in kinds.values():
                for move in moves:
                    if isinstance(move, Copy):
                        state[move.target].copy_(state[move.source])
                    else:
                        state[[move.a, move.b]] = state[[move.b, move.a]]

    def clear(self) -> None:
        """Free the memory. All cached keys and values are lost."""
        for store in self.stores:
            store.clear()
        self.states.clear()
        self.num_slots = self.capacity = 0


def _swap(tensor: torch.Tensor, move: Swap) -> None:
    # Only the valid tokens are moved, which are far fewer than those of two whole slots.
    kept = tensor[move.a, : move.length_a].clone()
    tensor[move.a, : move.length_b].copy_(tensor[move.b, : move.length_b])
    tensor[move.b, : move.length_a].copy_(kept)
