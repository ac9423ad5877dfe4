"""A weight update: its version, and the stream of its tensors on the way to the transport.

A version is ``attempt.step``. ``attempt`` counts the starts of a run: it is 0, plus one for each
resume. ``step`` is the number of steps that trained these weights: step ``i`` trains version ``i``.
Because of ``attempt``, a resume never gives an old version to other weights.

Tensors have the names of the checkpoint on disk (one tensor per expert, and no in-memory names of
FSDP or transformers). All ranks iterate the stream (:class:`WeightSource`), because gathering is a
collective operation. A sender casts the tensors and divides them into buckets
(:func:`sent_buckets`), the same for all transports, and passes them from the thread that gathers to
the event loop that sends (:class:`Handoff`).
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from slime.engines.payload import Bucket, NamedTensor
from slime.models.fp8_format import FUSED, layout_of
from slime.weights.settings import AdapterSource, WeightSyncSettings

if TYPE_CHECKING:
    import torch

    from slime.models.fp8_format import Fp8Layout
    from slime.weights.transports.peers import PeerLink


Transform = Callable[[str, "torch.Tensor"], Iterable[NamedTensor]]
"""A transform of a tensor before it is sent: a cast, quantization, another name, or no tensor at
all. The result may have several tensors."""

DEFAULT_BUCKET_BYTES = 512 * 1024 * 1024
_PATTERN = re.compile(r"(\d+)\.(\d+)")
FULL_PRECISION = ("e_score_correction_bias", "expert_bias", "A_log")
"""Endings of the names of tensors that engines keep in a wider dtype, so that a cast would lose
bits.
"""
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
        ValueError: ``text`` has another form, for example because it is the version of an engine
            before any update.
    """
    match = _PATTERN.fullmatch(text)
    if match is None:
        raise ValueError(
            f"weight version {text!r} does not have the form attempt.step, for example 0.12"
        )
    return Version(int(match[1]), int(match[2]))


@dataclass
class WeightUpdate:
    """One version of the weights to send.

    Attributes:
        version: The version, ``attempt.step``; see :class:`Version`.
        buckets: The buckets, which contain all tensors to send even if ``allow_delta`` is set.
        allow_delta: Whether a transport that knows the previous version may send only the changes.
        peers: If engines span the GPUs of several training ranks, the link of this rank to the
            others, which offer their own copies of the buckets.
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
    """The dtype to which floating-point tensors were cast, without ``torch.``; None if they were
    not cast.
    """


class WeightSyncError(RuntimeError):
    """A weight sync did not reach every engine.

    Attributes:
        failed: The errors of the engines that caused the failure, by URL: they died, hung or
            refused. Their weights are undefined.
        torn: Engines that are alive but have a mix of old and new tensors, because the failure of
            another engine ended their broadcast. They stay paused; the next complete sync repairs
            them.
        synced: Engines that have ``version`` and generate again.
    """

    def __init__(
        self,
        version: str,
        failed: Mapping[str, Exception],
        torn: Sequence[str],
        synced: Sequence[str],
    ) -> None:
        self.version = version
        self.failed = dict(failed)
        self.torn = list(torn)
        self.synced = list(synced)
        reasons = "; ".join(
            f"engine {url}: {type(error).__name__}: {error}" for url, error in failed.items()
        )
        rest = [
            f"{', '.join(urls)} {what}"
            for urls, what in ((torn, "must be synced again"), (synced, "updated"))
            if urls
        ]
        super().__init__(
            f"weights {version} did not reach every engine: "
            f"{'; '.join([reasons or 'no engine', *rest])}"
        )

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.version, self.failed, self.torn, self.synced)


def iter_buckets(
    named_tensors: Iterable[NamedTensor],
    max_bytes: int = DEFAULT_BUCKET_BYTES,
    transforms: Iterable[Transform] = (),
) -> Iterator[Bucket]:
    """Divide a stream of tensors into buckets of at most ``max_bytes``. A larger tensor gets its
    own bucket.

    The order of the tensors is kept, and the final bucket has ``last`` set. Without tensors there
    is no bucket.
    """
    steps = list(transforms)
    pending: list[NamedTensor] = []
    size = 0
    index = 0
    for name, tensor in transformed(named_tensors, steps):
        nbytes = tensor.numel() * tensor.element_size()
        if pending and size + nbytes > max_bytes:
            yield Bucket(index, pending)
            index = index + 1
            pending = []
            size = 0
        pending.append((name, tensor))
        size += nbytes
    if pending:
        yield Bucket(index, pending, last=True)


def transformed(
    named_tensors: Iterable[NamedTensor], steps: Sequence[Transform]
) -> Iterator[NamedTensor]:
    """Send each tensor through all ``steps``, in their order."""
    for name, tensor in named_tensors:
        stage: list[NamedTensor] = [(name, tensor)]
        for step in steps:
            stage = [out for pair in stage for out in step(*pair)]
        yield from stage


# --- transforms ---


def cast_floating(dtype: torch.dtype, keep: tuple[str, ...] = FULL_PRECISION) -> Transform:
    """Return a cast of floating-point tensors to ``dtype``, except for names that end with one of
    ``keep``.
    """

    def step(name: str, tensor: torch.Tensor) -> Iterable[NamedTensor]:
        casts = tensor.is_floating_point() and not name.endswith(keep)
        return [(name, tensor.to(dtype) if casts else tensor)]

    return step


def quantize_fp8(layout: Fp8Layout) -> Transform:
    """Return a transform that replaces each weight of ``layout`` by its scales and its 8-bit
    values, in this order.
    """

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
    """Send the input embedding as the output layer too, for engines that hold a tied one as a
    tensor of its own.
    """
    names = (name, "lm_head.weight") if name == "model.embed_tokens.weight" else (name,)
    return [(each, tensor) for each in names]


def frozen_by_flags(
    only_train: Iterable[str] | None, freeze: Iterable[str] | None
) -> Callable[[str], bool] | None:
    """Return a function that says whether a name is frozen by the flags; None if neither flag is
    given.

    Args:
        only_train: ``--only-train-params-name-list``, regular expressions that are searched in the
            name.
        freeze: ``--freeze-params-name-list``, likewise.
    """
    train = [re.compile(pattern) for pattern in only_train or ()]
    frozen = [re.compile(pattern) for pattern in freeze or ()]
    if not train and not frozen:
        return None

    def is_frozen(name: str) -> bool:
        return (bool(train) and not any(p.search(name) for p in train)) or any(
            p.search(name) for p in frozen
        )

    return is_frozen


def whole_frozen(frozen: Callable[[str], bool]) -> Callable[[str], bool]:
    """Return whether a tensor is frozen together with all those that SGLang keeps in one tensor
    with it.

    SGLang may rearrange such a tensor when it has loaded one, so an update has either all parts of
    it or none.
    """

    def test(name: str) -> bool:
        module = name.split(".")[-2] if "." in name else ""
        parts = next((parts for parts in FUSED if module in parts), (module,))
        return all(frozen(name.replace(f".{module}.", f".{part}.")) for part in parts)

    return test


class WeightSource:
    """The stream of tensors of all ranks, each of which starts it once and iterates it to its
    end.
    """

    def __init__(self, whole: Iterable[NamedTensor], adapter: AdapterSource | None) -> None:
        self.whole = whole
        self.adapter = adapter
        self._started = False
        self._tensors: Iterator[NamedTensor] = iter(())

    def start(self, base: bool) -> Iterator[NamedTensor]:
        """Return the stream. This is a collective operation if there is an adapter.

        Args:
            base: Whether this rank sends the base. If no rank does, the stream has only the factors
                of the adapter.
        """
        self._started = True  # before the ranks meet, so that they do not meet twice if that fails
        if self.adapter is None or self.adapter.any_rank(base):
            self._tensors = iter(self.whole)
        else:
            self._tensors = iter(self.adapter.factors)
        return self._tensors

    def finish(self) -> None:
        """Iterate to the end, also after an error, because the other ranks wait in these collective
        operations.
        """
        for _ in self._tensors if self._started else self.start(base=False):
            pass


def transforms_of(
    settings: WeightSyncSettings, dtype: torch.dtype | None, leave_out_frozen: bool
) -> list[Transform]:
    """Return the transforms that each tensor goes through. ``dtype`` is that of the engines; None
    for no cast.
    """
    transforms: list[Transform] = []
    frozen = frozen_by_flags(settings.only_train, settings.freeze)
    if frozen is not None and leave_out_frozen:
        transforms.append(leave_out(whole_frozen(frozen)))
    if dtype is not None:
        transforms.append(cast_floating(dtype))
    if settings.untied_engines:
        transforms.append(repeat_embedding)
    if settings.fp8 is not None:
        transforms.append(quantize_fp8(layout_of(settings.model, settings.fp8)))
    return transforms


def sent_buckets(
    settings: WeightSyncSettings,
    source: Iterable[NamedTensor],
    usual_bytes: int,
    transforms: list[Transform],
) -> Iterator[Bucket]:
    """Divide the stream into buckets. The factors of an adapter that engines load by name are a
    bucket of their own, the last one.

    Args:
        usual_bytes: The size of a bucket that the transport prefers; the flag wins.
    """
    size = settings.sync.update_weight_buffer_size or usual_bytes
    if settings.adapter is None or settings.adapter_name is None:
        yield from iter_buckets(source, size, transforms)
        return
    factors: list[NamedTensor] = []
    count = -1

    def base() -> Iterator[NamedTensor]:
        for name, tensor in source:
            if name.endswith(FACTORS):
                factors.extend(transformed([(name, tensor)], transforms))
            else:
                yield name, tensor

    for bucket in iter_buckets(base(), size, transforms):
        count = bucket.index
        yield bucket
    yield Bucket(count + 1, factors, last=True, adapter=True)


def finished(buckets: Iterable[Bucket]) -> Iterator[Bucket]:
    """Wait for the kernels that write each bucket, because other threads will read it on other
    streams.
    """
    import torch

    for bucket in buckets:
        tensor = bucket.tensors[0][1]
        if tensor.is_cuda:
            torch.cuda.current_stream(tensor.device).synchronize()
        yield bucket


class Handoff:
    """An iterable of buckets that holds one bucket at a time. Both sides wait with a deadline.

    The gathering side calls :meth:`put` for each bucket and then :meth:`close`. The sending side
    iterates, on any thread. :meth:`put` returns after the bucket was taken, so at most one bucket
    is gathered while one is sent.
    """

    def __init__(self, deadline: float) -> None:
        self._deadline = deadline
        self._changed = threading.Condition()
        self._item: Bucket | None = None
        self._closed = False
        self._abandoned = False
        self._error: BaseException | None = None

    def put(self, bucket: Bucket) -> bool:
        """Pass one bucket. Return False if the sending side has given up: nothing more will be
        sent, but gathering must still be completed on all ranks."""
        with self._changed:
            if self._abandoned:
                return False
            self._item = bucket
            self._changed.notify_all()
            self._wait(
                lambda: self._item is None or self._abandoned,
                f"bucket {bucket.index} to be taken by the sender",
            )
            self._item = None
            return not self._abandoned

    def close(self, error: BaseException | None = None) -> None:
        """End the iteration after the last bucket, with ``error`` by raising it in the sending
        side.
        """
        with self._changed:
            self._closed = True
            self._error = error
            self._changed.notify_all()

    def abandon(self) -> None:
        """End the waits of both sides, because the sending side has given up or is done."""
        with self._changed:
            self._abandoned = True
            self._changed.notify_all()

    def __iter__(self) -> Iterator[Bucket]:
        while True:
            with self._changed:
                self._wait(
                    lambda: self._item is not None or self._closed or self._abandoned,
                    "the trainer to gather the next bucket",
                )
                if self._item is None:
                    if self._error is not None:
                        raise self._error
                    return
                bucket = self._item
                self._item = None
                self._changed.notify_all()
            yield bucket

    def _wait(self, done: Callable[[], bool], what: str) -> None:
        if not self._changed.wait_for(done, self._deadline):
            raise TimeoutError(f"gave up after waiting {self._deadline:.0f} s for {what}")
