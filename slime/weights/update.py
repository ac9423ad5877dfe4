"""A weight update as a value: its version, and tensors under checkpoint names, cast and cut into buckets.

A version is ``attempt.step``. ``attempt`` counts the starts of a run (0, and one more for each resume), ``step`` the
steps that had trained these weights: step ``i`` trains version ``i``. After a resume a version is therefore never met
twice with other weights.

Names are those of the checkpoint on disk (one tensor per expert, no in-memory names of FSDP or
transformers). The same buckets go through every transport.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from slime.engines.flat import Bucket, NamedTensor

if TYPE_CHECKING:
    import torch

    from slime.weights.transports.peers import PeerLink

Transform = Callable[[str, "torch.Tensor"], Iterable[NamedTensor]]
"""One step on the way out: cast, quantise, rename or leave out. It may turn one tensor into several."""

DEFAULT_BUCKET_BYTES = 512 * 1024 * 1024
_PATTERN = re.compile(r"(\d+)\.(\d+)")
FULL_PRECISION = ("e_score_correction_bias", "expert_bias", "A_log")
"""Endings of names that engines keep in their own, wider dtype; casting them would lose bits."""


class Version(NamedTuple):
    attempt: int
    step: int

    def __str__(self) -> str:
        return f"{self.attempt}.{self.step}"


def parse_version(text: str) -> Version:
    """Read ``"attempt.step"``; versions compare in the order in which they were made.

    Raises:
        ValueError: ``text`` is something else, for example the version of an engine that was never updated.
    """
    match = _PATTERN.fullmatch(text)
    if match is None:
        raise ValueError(f"weight version {text!r} is not of the form attempt.step, for example 0.12")
    return Version(int(match[1]), int(match[2]))


@dataclass
class WeightUpdate:
    """One version of the weights.

    Attributes:
        version: ``attempt.step``, see :class:`Version`.
        buckets: always hold all tensors.
        allow_delta: a transport that can compare the buckets with the previous version may send only the changes.
        peers: where an engine spans the GPUs of several training ranks: this rank's link to the others, which offer
            their own copies of the buckets.
    """

    version: str
    buckets: Iterable[Bucket]
    allow_delta: bool = False
    peers: PeerLink | None = None


@dataclass
class UpdateReport:
    """The figures of one sync. Seconds are wall time on the sending rank."""

    version: str
    transport: str
    seconds: float = 0.0
    pause_seconds: float = 0.0
    nbytes: int = 0
    tensors: int = 0
    density: float = 1.0  # changed bytes over all bytes
    audit_seconds: float = 0.0
    digests: dict[str, str] = field(default_factory=dict)


class WeightSyncError(RuntimeError):
    """A weight sync did not reach every engine.

    Attributes:
        failed: engines that are to blame, by URL: dead, hung or refusing. Their weights are undefined.
        torn: engines that live but hold a mix of old and new tensors (another engine's failure ended
            their broadcast). They stay paused; the next complete sync heals them.
        synced: engines that hold ``version`` and generate again.
    """

    def __init__(
        self, version: str, failed: Mapping[str, Exception], torn: Sequence[str], synced: Sequence[str]
    ) -> None:
        self.version, self.failed, self.torn, self.synced = version, dict(failed), list(torn), list(synced)
        reasons = "; ".join(f"engine {url}: {type(error).__name__}: {error}" for url, error in failed.items())
        rest = [
            f"{', '.join(urls)} {what}" for urls, what in ((torn, "must be synced again"), (synced, "updated")) if urls
        ]
        super().__init__(f"weights {version} did not reach every engine: {'; '.join([reasons or 'no engine', *rest])}")

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.version, self.failed, self.torn, self.synced)


def iter_buckets(
    named_tensors: Iterable[NamedTensor], max_bytes: int = DEFAULT_BUCKET_BYTES, transforms: Iterable[Transform] = ()
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


# --- steps on the way out --------------------------------------------------------------------------


def cast_floating(dtype: torch.dtype, keep: tuple[str, ...] = FULL_PRECISION) -> Transform:
    """Cast floating tensors to ``dtype``; integer tensors and names that end in ``keep`` pass as they are."""

    def step(name: str, tensor: torch.Tensor) -> Iterable[NamedTensor]:
        casts = tensor.is_floating_point() and not name.endswith(keep)
        return [(name, tensor.to(dtype) if casts else tensor)]

    return step


def leave_out(unwanted: Callable[[str], bool]) -> Transform:
    """Drop tensors by name: frozen parameters that the engines have already."""

    def step(name: str, tensor: torch.Tensor) -> Iterable[NamedTensor]:
        return [] if unwanted(name) else [(name, tensor)]

    return step


def frozen_by_flags(only_train: Iterable[str] | None, freeze: Iterable[str] | None) -> Callable[[str], bool] | None:
    """Whether a name is frozen by ``--only-train-params-name-list`` or ``--freeze-params-name-list``.

    Both are lists of regular expressions that are searched in the name. None when neither is given.
    """
    train = [re.compile(pattern) for pattern in only_train or ()]
    frozen = [re.compile(pattern) for pattern in freeze or ()]
    if not train and not frozen:
        return None

    def is_frozen(name: str) -> bool:
        return (bool(train) and not any(p.search(name) for p in train)) or any(p.search(name) for p in frozen)

    return is_frozen
