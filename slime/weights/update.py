"""A weight update: its version, and its tensors after a cast and divided into buckets.

A version is ``attempt.step``. ``attempt`` counts the starts of a run: it is 0, plus one for each resume. ``step`` is
the number of steps that trained these weights: step ``i`` trains version ``i``. Because of ``attempt``, a resume never
gives an old version to other weights.

Tensors have the names of the checkpoint on disk (one tensor per expert, and no in-memory names of FSDP or
transformers). All transports send the same buckets.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from slime.engines.payload import Bucket, NamedTensor

if TYPE_CHECKING:
    import torch

    from slime.models.fp8_format import Fp8Layout
    from slime.weights.transports.peers import PeerLink

Transform = Callable[[str, "torch.Tensor"], Iterable[NamedTensor]]
"""A transform of a tensor before it is sent: a cast, quantization, another name, or no tensor at all. The result may
have several tensors."""

DEFAULT_BUCKET_BYTES = 512 * 1024 * 1024
_PATTERN = re.compile(r"(\d+)\.(\d+)")
FULL_PRECISION = ("e_score_correction_bias", "expert_bias", "A_log")
"""Endings of the names of tensors that engines keep in a wider dtype, so that a cast would lose bits."""
FACTORS = (".lora_A.weight", ".lora_B.weight")
"""Endings of the names of an adapter's factors."""


class Version(NamedTuple):
    attempt: int
    step: int

    def __str__(self) -> str:
        return f"{self.attempt}.{self.step}"


def parse_version(text: str) -> Version:
    """Parse ``"attempt.step"``. Versions are ordered by the time at which they were trained.

    Raises:
        ValueError: ``text`` has another form, for example because it is the version of an engine before any update.
    """
    match = _PATTERN.fullmatch(text)
    if match is None:
        raise ValueError(f"weight version {text!r} does not have the form attempt.step, for example 0.12")
    return Version(int(match[1]), int(match[2]))


@dataclass
class WeightUpdate:
    """One version of the weights to send.

    Attributes:
        version: The version, ``attempt.step``; see :class:`Version`.
        buckets: The buckets, which contain all tensors to send even if ``allow_delta`` is set.
        allow_delta: Whether a transport that knows the previous version may send only the changes.
        peers: If engines span the GPUs of several training ranks, the link of this rank to the others, which offer
            their own copies of the buckets.
    """

    version: str
    buckets: Iterable[Bucket]
    allow_delta: bool = False
    peers: PeerLink | None = None


@dataclass
class UpdateReport:
    """The measurements of one sync. Times are wall-clock seconds on the sending rank."""

    version: str
    transport: str
    seconds: float = 0.0
    pause_seconds: float = 0.0
    nbytes: int = 0
    tensors: int = 0
    density: float = 1.0  # changed bytes divided by all bytes
    audit_seconds: float = 0.0
    digests: dict[str, str] = field(default_factory=dict)
    dtype: str | None = None
    """The dtype to which floating-point tensors were cast, without ``torch.``; None if they were not cast."""


class WeightSyncError(RuntimeError):
    """A weight sync did not reach every engine.

    Attributes:
        failed: The errors of the engines that caused the failure, by URL: they died, hung or refused. Their weights
            are undefined.
        torn: Engines that are alive but have a mix of old and new tensors, because the failure of another engine ended
            their broadcast. They stay paused; the next complete sync repairs them.
        synced: Engines that have ``version`` and generate again.
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
    """Divide a stream of tensors into buckets of at most ``max_bytes``. A larger tensor gets its own bucket.

    The order of the tensors is kept, and the final bucket has ``last`` set. Without tensors there is no bucket.
    """
    steps = list(transforms)
    pending: list[NamedTensor] = []
    size = 0
    index = 0
    for name, tensor in transformed(named_tensors, steps):
        nbytes = tensor.numel() * tensor.element_size()
        if pending and size + nbytes > max_bytes:
            yield Bucket(index, pending)
            index, pending, size = index + 1, [], 0
        pending.append((name, tensor))
        size += nbytes
    if pending:
        yield Bucket(index, pending, last=True)


def transformed(named_tensors: Iterable[NamedTensor], steps: Sequence[Transform]) -> Iterator[NamedTensor]:
    """Send each tensor through all ``steps``, in their order."""
    for name, tensor in named_tensors:
        stage: list[NamedTensor] = [(name, tensor)]
        for step in steps:
            stage = [out for pair in stage for out in step(*pair)]
        yield from stage


# --- transforms ------------------------------------------------------------------------------------


def cast_floating(dtype: torch.dtype, keep: tuple[str, ...] = FULL_PRECISION) -> Transform:
    """Return a cast of floating-point tensors to ``dtype``, except for names that end with one of ``keep``."""

    def step(name: str, tensor: torch.Tensor) -> Iterable[NamedTensor]:
        casts = tensor.is_floating_point() and not name.endswith(keep)
        return [(name, tensor.to(dtype) if casts else tensor)]

    return step


def quantize_fp8(layout: Fp8Layout) -> Transform:
    """Return a transform that replaces each weight of ``layout`` by its scales and its 8-bit values, in this order."""

    def step(name: str, tensor: torch.Tensor) -> Iterable[NamedTensor]:
        from slime.models.fp8 import quantized_parts

        return quantized_parts(name, tensor, layout)

    return step


def leave_out(unwanted: Callable[[str], bool]) -> Transform:
    """Return a transform that drops the tensors whose names are ``unwanted``."""

    def step(name: str, tensor: torch.Tensor) -> Iterable[NamedTensor]:
        return [] if unwanted(name) else [(name, tensor)]

    return step


def repeat_embedding(name: str, tensor: torch.Tensor) -> Iterable[NamedTensor]:
    """Send the input embedding as the output layer too, for engines that hold a tied one as a tensor of its own."""
    names = (name, "lm_head.weight") if name == "model.embed_tokens.weight" else (name,)
    return [(each, tensor) for each in names]


def frozen_by_flags(only_train: Iterable[str] | None, freeze: Iterable[str] | None) -> Callable[[str], bool] | None:
    """Return a function that says whether a name is frozen by the flags; None if neither flag is given.

    Args:
        only_train: ``--only-train-params-name-list``, regular expressions that are searched in the name.
        freeze: ``--freeze-params-name-list``, likewise.
    """
    train = [re.compile(pattern) for pattern in only_train or ()]
    frozen = [re.compile(pattern) for pattern in freeze or ()]
    if not train and not frozen:
        return None

    def is_frozen(name: str) -> bool:
        return (bool(train) and not any(p.search(name) for p in train)) or any(p.search(name) for p in frozen)

    return is_frozen
