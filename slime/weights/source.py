"""The stream of a trainer's tensors, in which all ranks take part."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slime.engines.payload import NamedTensor
    from slime.weights.settings import AdapterSource


class WeightSource:
    """The stream of tensors of all ranks, each of which starts it once and iterates it to its end."""

    def __init__(self, whole: Iterable[NamedTensor], adapter: AdapterSource | None) -> None:
        self.whole, self.adapter = whole, adapter
        self._started = False
        self._tensors: Iterator[NamedTensor] = iter(())

    def start(self, base: bool) -> Iterator[NamedTensor]:
        """Return the stream. This is a collective operation if there is an adapter.

        Args:
            base: Whether this rank sends the base. If no rank does, the stream has only the factors of the adapter.
        """
        self._started = True  # before the ranks meet, so that they do not meet twice if that fails
        if self.adapter is None or self.adapter.any_rank(base):
            self._tensors = iter(self.whole)
        else:
            self._tensors = iter(self.adapter.factors)
        return self._tensors

    def finish(self) -> None:
        """Iterate to the end, also after an error, because the other ranks wait in these collective operations."""
        for _ in self._tensors if self._started else self.start(base=False):
            pass
