"""A weight update as a value: HF-named tensors, cut into buckets.

Names are those of the checkpoint on disk (one tensor per expert, no in-memory names of FSDP or
transformers). The same buckets go through every transport.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

    from slime.weights.transports.peers import PeerLink

NamedTensor = tuple[str, "torch.Tensor"]
Transform = Callable[[str, "torch.Tensor"], Iterable[NamedTensor]]
"""One step on the way out: cast, quantise or rename. May turn one tensor into several."""

DEFAULT_BUCKET_BYTES = 512 * 1024 * 1024


@dataclass
class Bucket:
    """Some tensors that travel together. The sender keeps them alive until the engine has answered.

    ``flat`` is set when all tensors are views into one uint8 buffer: it can be handed over as a whole.
    """

    index: int
    tensors: list[NamedTensor]
    last: bool = False
    flat: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for _, tensor in self.tensors)


@dataclass
class WeightUpdate:
    """One version of the weights.

    ``version`` is ``attempt.step`` (decisions 15). The buckets always hold all tensors; ``kind`` says
    whether a transport that can compare them with the version before may send only what changed.
    """

    version: str
    buckets: Iterable[Bucket]
    kind: Literal["full", "delta"] = "full"
    peers: PeerLink | None = None
    """Where engines span the GPUs of several training ranks: how these offer their copies of the buckets."""


@dataclass
class UpdateReport:
    """What one sync cost. Seconds are wall time on the sending rank."""

    version: str
    transport: str
    seconds: float = 0.0
    pause_seconds: float = 0.0
    nbytes: int = 0
    tensors: int = 0
    density: float = 1.0  # changed bytes over all bytes
    audit_seconds: float = 0.0
    digests: dict[str, str] = field(default_factory=dict)


def iter_buckets(
    named_tensors: Iterable[NamedTensor],
    max_bytes: int = DEFAULT_BUCKET_BYTES,
    transforms: Iterable[Transform] = (),
) -> Iterator[Bucket]:
    """Cut a stream of tensors into buckets of at most ``max_bytes`` (a larger tensor goes alone).

    Order is kept; exactly the final bucket has ``last`` set. Nothing is yielded for no tensors.
    """
    steps = list(transforms)
    pending: list[NamedTensor] = []
    size = 0
    index = 0
    for name, tensor in _transformed(named_tensors, steps):
        nbytes = tensor.numel() * tensor.element_size()
        if pending and size + nbytes > max_bytes:
            yield Bucket(index, pending)
            index, pending, size = index + 1, [], 0
        pending.append((name, tensor))
        size += nbytes
    if pending:
        yield Bucket(index, pending, last=True)


def _transformed(named_tensors: Iterable[NamedTensor], steps: list[Transform]) -> Iterator[NamedTensor]:
    for name, tensor in named_tensors:
        stage: list[NamedTensor] = [(name, tensor)]
        for step in steps:
            stage = [out for pair in stage for out in step(*pair)]
        yield from stage
