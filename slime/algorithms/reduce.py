"""The interface with which algorithms sum over ranks, without depending on process groups."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


class Reduce(Protocol):
    """Sums over the ranks that hold other samples (data parallel) or other tokens of the same
    samples (context parallel). Backends implement it over their process groups."""

    def over_data(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over data- and context-parallel ranks, without gradient. Any shape."""

    def over_sequence(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over context-parallel ranks, with gradient, for any shape. Each rank gets the gradient of its own
        part."""


class Identity:
    """The implementation for one rank, which has all data: sums over ranks change nothing."""

    def over_data(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def over_sequence(self, x: torch.Tensor) -> torch.Tensor:
        return x
