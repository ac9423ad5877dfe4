"""Send one weight update from the trainer to all engines.

All training ranks gather full tensors in a collective operation. The ranks that have engines to serve send them::

    trainer's thread                    event loop of the sender                    each engine
    ----------------                    ------------------------                    -----------
                                        get its version, connect the transport      generates
    gather bucket 0 ─────────────────►  stage bucket 0                              generates
    gather bucket 1                     open the window: pause                      ┐ running requests end, are
                                                         flush the KV cache         │ retracted, or wait in place
                                                         begin the update           │
                                        send bucket 0 ───────────────────────────►  │ loads bucket 0
    gather bucket 2   ◄── taken ──────  send bucket 1 ───────────────────────────►  │ loads bucket 1
    ...                                 ...                                         │
    no more tensors                     close the window: end the update            │ has the new version
                                                          continue                  ┘ generates
                                        audit: compare checksums                    generates
    (later, when engines have a KV cache again) the probe: :func:`slime.weights.audit.probe_engines`

Gathering happens on the trainer's thread, because all ranks must take part in the same order. Sending happens on the
background event loop, so that the next bucket is gathered while one is sent. Transports that write files open the
window only when the files are complete, and engines that load files need no calls to begin and end an update.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from slime.engines.background import background_loop, run
from slime.engines.handle import EngineHandle, Failures, on_each
from slime.engines.payload import Bucket, NamedTensor
from slime.engines.sglang_api import EngineInfo
from slime.models.cpu_memory import no_collections
from slime.models.fp8_format import layout_of
from slime.weights import audit, fused
from slime.weights.changes import AuditMemory, Held, fingerprints
from slime.weights.engine_facts import describe, engine_dtype
from slime.weights.handoff import Handoff
from slime.weights.settings import AdapterSource, WeightSyncSettings
from slime.weights.source import WeightSource
from slime.weights.transports import Transport
from slime.weights.transports.adapter import AdapterTransport
from slime.weights.transports.ipc import IpcTransport
from slime.weights.transports.peers import PeerLink
from slime.weights.update import (
    FACTORS,
    Transform,
    UpdateReport,
    WeightSyncError,
    WeightUpdate,
    cast_floating,
    frozen_by_flags,
    iter_buckets,
    leave_out,
    parse_version,
    quantize_fp8,
    repeat_embedding,
    transformed,
)  # fmt: skip
from slime.weights.window import TORN, UpdateWindow

if TYPE_CHECKING:
    import torch


@dataclass
class _Plan:
    """What is known about the engines before anything is sent."""

    reached: list[EngineHandle]
    infos: dict[str, EngineInfo]
    failed: Failures = field(default_factory=dict)
    fused: set[str] = field(default_factory=set)  # URLs of engines whose checksums can be predicted


def sync_weights(
    settings: WeightSyncSettings,
    named_weights: Iterable[NamedTensor],
    engines: Sequence[EngineHandle],
    transport: Transport | None,
    version: str,
    is_sender: bool,
    *,
    check_equal: bool = False,
    peers: PeerLink | None = None,
    memory: AuditMemory | None = None,
    adapter: AdapterSource | None = None,
) -> UpdateReport | None:
    """Send one version of the weights to every engine. All ranks must call this; senders get a report, others None.

    Args:
        named_weights: Full tensors with their names in the checkpoint. Iterating may be a collective operation.
        engines, transport: The engines and the transport of a sender; ignored on other ranks.
        version: The version, ``attempt.step``.
        check_equal: The engines have the same weights already. Overwrite every tensor on the engines before the
            update, and compare the tensors afterwards (``--check-weight-update-equal``).
        peers: If engines read from the memory of several training ranks, the link of this rank to the others.
        memory: The state of previous updates, for the audit of engines whose checksums cannot be predicted. It is
            updated.
        adapter: The factors of an adapter, if they are the last of ``named_weights``. Only they are iterated if no
            sender must send the base, so that the base is not gathered.

    Raises:
        WeightSyncError: Some engines died, hung or refused. All others either have ``version`` and generate, or are
            named as torn and stay paused until a later sync.
        audit.WeightAuditError: The weights of an engine differ from those that were sent. The error names the engine
            and the tensors.
    """
    source = WeightSource(named_weights, adapter)
    if not is_sender:
        try:
            tensors = source.start(base=False)
            if peers is not None and peers.engines():
                _contribute(settings, tensors, transport, peers)
        finally:
            source.finish()
        return None
    assert transport is not None, "the sending rank needs a transport"
    parse_version(version)
    sender = Sender(settings, engines, transport, version, check_equal, peers, memory or AuditMemory())
    with no_collections():
        return sender.run(source)


def _contribute(
    settings: WeightSyncSettings, source: Iterable[NamedTensor], transport: Transport | None, peers: PeerLink
) -> None:
    """Offer this rank's copy of the weights to engines of another sender, with the buckets and dtype of that sender."""
    import torch

    transport = transport.base if isinstance(transport, AdapterTransport) else transport
    assert isinstance(transport, IpcTransport), "only handles are read from several ranks"
    orders = peers.settings()
    if orders is None:
        return
    dtype = getattr(torch, orders["dtype"]) if orders["dtype"] else None
    transforms = transforms_of(settings, dtype, orders["leave_out_frozen"])
    size = settings.bucket_bytes(transport.bucket_bytes)
    buckets = _finished(_buckets(settings, source, size, transforms))
    transport.contribute(peers, (bucket for bucket in buckets if not bucket.adapter))


class Sender:
    """One sync on a sending rank."""

    def __init__(
        self,
        settings: WeightSyncSettings,
        engines: Sequence[EngineHandle],
        transport: Transport,
        version: str,
        check_equal: bool,
        peers: PeerLink | None,
        memory: AuditMemory,
    ) -> None:
        self.settings, self.engines, self.transport, self.version = settings, engines, transport, version
        self.check_equal, self.peers = check_equal, peers
        deadline = settings.step_seconds
        how = transport.bracketed, check_equal, settings.pause_mode
        named = settings.adapter is not None and settings.adapter_name is not None
        self.window = UpdateWindow(version, *how, deadline, None if named else settings.adapter, ends_requests=named)
        self.report = UpdateReport(version, transport.name)
        self.fused: dict[int, fused.FusedDigests] = {}  # by number of tensor-parallel ranks
        self.memory, self.fingerprints = memory, dict(memory.sent)
        self._scales: dict[str, torch.Tensor] = {}

    def run(self, source: WeightSource) -> UpdateReport:
        start = time.perf_counter()
        sending: Future[None] | None = None
        try:
            # Connect before the first tensor is gathered, because the dtype to send and the digests to compute depend
            # on the engines.
            plan = run(self._connect())
            tensors = source.start(base=not self.engines_are_ours(plan))
            handoff = Handoff(self.settings.phase_seconds)
            sending = asyncio.run_coroutine_threadsafe(self._send(plan, handoff), background_loop())
            # When sending has ended, for any reason, the gathering thread must not wait for it to take a bucket.
            sending.add_done_callback(lambda _: handoff.abandon())
            self._gather(tensors, plan, handoff)
            sending.result()
        finally:
            if self.peers is not None:
                self.peers.close()
            source.finish()
            if sending is not None:  # after an error in gathering, the engines are marked as torn before it propagates
                wait([sending])
        self.report.pause_seconds = self.window.closed - self.window.opened
        self.report.seconds = time.perf_counter() - start
        if self.settings.audit:
            run(self._audit(plan))
        return self.report

    # --- on the trainer's thread -------------------------------------------------------------

    def _gather(self, source: Iterable[NamedTensor], plan: _Plan, handoff: Handoff) -> None:
        """Divide the stream into buckets and pass them on, and compute the digests that the audit needs."""
        dtype = engine_dtype(plan.infos.values(), self.settings.rollout_dtype)
        leave_out_frozen = self.engines_are_ours(plan)
        self.report.dtype = str(dtype).removeprefix("torch.") if dtype is not None else None
        try:
            if self.peers is not None:
                self.peers.open({"dtype": self.report.dtype, "leave_out_frozen": leave_out_frozen})
            transforms = transforms_of(self.settings, dtype, leave_out_frozen)
            size = self.settings.bucket_bytes(self.transport.bucket_bytes)
            for bucket in _finished(_buckets(self.settings, source, size, transforms)):
                if not bucket.adapter:  # a named adapter has digests of its own, see AdapterPayload
                    held = self._dequantized(bucket.tensors, dtype)
                    self._digest([(name, t) for name, t in held if _has_dtype(t, dtype)], plan)
                if not handoff.put(bucket):
                    return
        except BaseException as error:
            handoff.close(error)
            raise
        handoff.close()

    def _dequantized(self, tensors: Sequence[NamedTensor], dtype: torch.dtype | None) -> Iterator[NamedTensor]:
        """Replace quantized tensors by the weights that engines compute their checksums of: dequantized, in ``dtype``.

        The scales of a weight come before its values, but may be in an earlier bucket.
        """
        how = self.settings.fp8
        if how is None or not self.settings.audit:
            yield from tensors
            return
        from slime.models.fp8 import DTYPE, dequantize

        names = layout_of(self.settings.model, how).names
        for name, tensor in tensors:
            if name.removesuffix(how.scale_ending) in names and name not in names:
                self._scales[name.removesuffix(how.scale_ending)] = tensor
            elif name in names and tensor.dtype == DTYPE:
                wide = dequantize(tensor, self._scales.pop(name))
                yield name, wide if dtype is None else wide.to(dtype)
            else:
                yield name, tensor

    def engines_are_ours(self, plan: _Plan) -> bool:
        """Return whether every engine still holds a version that this sender has sent, with the frozen tensors.

        Then frozen tensors need not be sent, except with transports that write complete versions to files. The version
        alone does not tell, because an external engine may have one of the same attempt from another run.
        """
        files = self.transport.name in ("disk", "delta") and self.settings.adapter_name is None
        if files or self.check_equal or self.settings.engines_lose_weights:
            return False
        attempt = parse_version(self.version).attempt
        held = [info.weight_version for info in plan.infos.values()]
        ours = all(version.startswith(f"{attempt}.") and not version.endswith(TORN) for version in held)
        return ours and self.memory.updated.issuperset(plan.infos)

    def _digest(self, tensors: list[NamedTensor], plan: _Plan) -> None:
        """Compute the digests with which the checksums of engines are compared later."""
        if not self.settings.audit:
            return
        if any(engine.capabilities.named_checksums for engine in plan.reached):
            from slime.models.digest import tensor_digest

            self.report.digests.update((name, tensor_digest(tensor)) for name, tensor in tensors)
        for ranks in {plan.infos[url].tensor_parallel_size for url in plan.fused}:
            known = self.fused.setdefault(ranks, fused.FusedDigests(ranks, fused.key_value_heads(self.settings.model)))
            for name, tensor in tensors:
                known.add(name, tensor)
        if tracked := [plan.infos[url].tensor_parallel_size for url in self._tracked(plan)]:
            self.fingerprints |= fingerprints(tensors, max(tracked))

    def _tracked(self, plan: _Plan) -> list[str]:
        """Return the engines whose checksums cannot be predicted, but must change with the sent tensors.

        Quantized engines are not among them: their tensors need not change.
        """
        infos = {e.url: plan.infos[e.url] for e in plan.reached if not e.capabilities.named_checksums}
        return [url for url, info in infos.items() if url not in plan.fused and not info.extra.get("quantization")]

    def _sent_to(self, engine: EngineHandle, plan: _Plan) -> dict[str, str]:
        """Return the expected checksums of an engine; empty if they cannot be predicted."""
        if engine.capabilities.named_checksums:
            return self.report.digests
        if engine.url not in plan.fused:
            return {}
        known = self.fused.get(plan.infos[engine.url].tensor_parallel_size)
        return {} if known is None else known.digests  # only the factors of an adapter were sent

    # --- on the event loop -------------------------------------------------------------------

    async def _connect(self) -> _Plan:
        deadline = self.settings.step_seconds
        infos, failed = await on_each(self.engines, describe, "report its version", deadline)
        reached = [engine for engine in self.engines if engine.url in infos]
        unreached = await self.transport.connect(reached) if reached else {}
        failed.update(unreached)
        reached = [engine for engine in reached if engine.url not in unreached]
        if not reached:
            raise WeightSyncError(self.version, failed, [], [])
        known: set[str] = set()
        if self.settings.audit:
            fp8 = self.settings.fp8 is not None
            model = self.settings.model
            known = {e.url for e in reached if fused.has_predictable_checksums(model, infos[e.url], fp8)}
        return _Plan(reached, infos, failed, known)

    async def _send(self, plan: _Plan, handoff: Handoff) -> None:
        """Send all buckets and close the window. Raises :class:`WeightSyncError` if some engines were not updated; the
        others generate again by then."""
        update = WeightUpdate(self.version, handoff, allow_delta=not self.check_equal, peers=self.peers)
        try:
            result = await self.transport.send(update, plan.reached, partial(self.window.open, plan.reached))
        except BaseException:  # the update itself could not be read, so no engine has all of it
            await self.window.mark_torn(self.window.entered)
            raise
        if not self.window.opened:
            raise ValueError(f"weights {self.version} were not sent, because they have no tensors")
        self.report.nbytes, self.report.tensors, self.report.density = result.nbytes, result.tensors, result.density
        whole, torn = await self.window.close(result)
        self.memory.updated |= {engine.url for engine in whole}
        failed = {**plan.failed, **self.window.failed}
        if failed or torn:
            raise WeightSyncError(self.version, failed, [e.url for e in torn], [e.url for e in whole])

    async def _audit(self, plan: _Plan) -> None:
        start = time.perf_counter()
        sent = {engine.url: self._sent_to(engine, plan) for engine in plan.reached}
        tracked = self._tracked(plan)
        sums = await audit.audit_engines(plan.reached, plan.infos, sent, self.settings.step_seconds, tracked)
        for url in tracked:
            audit.check_changes(url, sums[url], self.fingerprints, self.memory.held.get(url))
            self.memory.held[url] = Held(sums[url], self.fingerprints)
        self.memory.sent = self.fingerprints
        self.report.audit_seconds = time.perf_counter() - start


def transforms_of(settings: WeightSyncSettings, dtype: torch.dtype | None, leave_out_frozen: bool) -> list[Transform]:
    """Return the transforms that each tensor goes through. ``dtype`` is that of the engines; None for no cast."""
    transforms: list[Transform] = []
    frozen = frozen_by_flags(settings.only_train, settings.freeze)
    if frozen is not None and leave_out_frozen:
        transforms.append(leave_out(fused.whole_frozen(frozen)))
    if dtype is not None:
        transforms.append(cast_floating(dtype))
    if settings.untied_engines:
        transforms.append(repeat_embedding)
    if settings.fp8 is not None:
        transforms.append(quantize_fp8(layout_of(settings.model, settings.fp8)))
    return transforms


def _buckets(
    settings: WeightSyncSettings, source: Iterable[NamedTensor], size: int, transforms: list[Transform]
) -> Iterator[Bucket]:
    """Divide the stream into buckets. The factors of an adapter that engines load by name are a bucket of their own,
    the last one."""
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


def _finished(buckets: Iterable[Bucket]) -> Iterator[Bucket]:
    """Wait for the kernels that write each bucket, because other threads will read it on other streams."""
    import torch

    for bucket in buckets:
        tensor = bucket.tensors[0][1]
        if tensor.is_cuda:
            torch.cuda.current_stream(tensor.device).synchronize()
        yield bucket


def _has_dtype(tensor: torch.Tensor, dtype: torch.dtype | None) -> bool:
    """Return whether an engine keeps exactly these bytes. It casts a tensor that is sent in another dtype."""
    return dtype is None or tensor.dtype == dtype or not tensor.is_floating_point()
