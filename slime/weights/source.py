"""The stream of a trainer's tensors, in which all ranks take part."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slime.engines.flat import NamedTensor
    from slime.weights.settings import AdapterSource


class WeightSource:
    """The stream of tensors of all ranks, each of which starts it once and iterates it to its end."""

    def __init__(self, whole: Iterable[NamedTensor], adapter: AdapterSource | None) -> None:
        self.whole, self.adapter = whole, adapter
        self._tensors: Iterator[NamedTensor] | None = None

    def start(self, base: bool) -> Iterator[NamedTensor]:
        """Return the stream. This is a collective operation if there is an adapter.

        Args:
            base: Whether this rank sends the base. If no rank does, the stream has only the factors of the adapter.
        """
        alone = self.adapter is not None and not self.adapter.any_rank(base)
        self._tensors = iter(self.adapter.factors if alone and self.adapter is not None else self.whole)
        return self._tensors

    def finish(self) -> None:
        """Iterate to the end, also after an error, because the other ranks wait in these collective operations."""
        for _ in self.start(base=False) if self._tensors is None else self._tensors:
            pass
