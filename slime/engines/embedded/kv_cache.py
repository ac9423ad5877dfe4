"""The tensors of the slots: the keys and values of attention layers, and the states of recurrent ones."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from slime.engines.embedded.slots import Copy, Move, Swap


class KVCache:
    """One pair of tensors ``[slots + 1, capacity, kv_heads, head_dim]`` per attention layer.

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
        self.states: dict[int, dict[str, torch.Tensor]] = {}

    @property
    def bin_slot(self) -> int:
        return self.num_slots

    @property
    def nbytes(self) -> int:
        tensors = [*self.keys.values(), *self.values.values()]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

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
        for store in (self.keys, self.values):
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
        if layer not in self.keys:
            self.keys[layer] = self._zeros(key.shape[1], key.shape[2])
            self.values[layer] = self._zeros(value.shape[1], value.shape[2])
        # One scatter per layer stores all rows of the step, which may belong to many slots.
        self.keys[layer].flatten(0, 1).index_copy_(0, index, key.to(self.dtype))
        self.values[layer].flatten(0, 1).index_copy_(0, index, value.to(self.dtype))

    def move(self, moves: Sequence[Move]) -> None:
        """Execute the moves of the scheduler, in order."""
        for store in (self.keys, self.values):
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
        self.keys.clear()
        self.values.clear()
        self.states.clear()
        self.num_slots = self.capacity = 0


def _swap(tensor: torch.Tensor, move: Swap) -> None:
    # Only the valid tokens are moved, which are far fewer than those of two whole slots.
    kept = tensor[move.a, : move.length_a].clone()
    tensor[move.a, : move.length_b].copy_(tensor[move.b, : move.length_b])
    tensor[move.b, : move.length_a].copy_(kept)
