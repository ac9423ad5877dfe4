"""One weight update from the trainer to all engines.

The training ranks gather full tensors together (a collective); the ranks that have engines to serve send them::

    trainer's thread                    event loop of the sender                    each engine
    ----------------                    ------------------------                    -----------
                                        ask what it is, connect the transport       generates
    gather bucket 0 ─────────────────►  stage it                                    generates
    gather bucket 1                     open the window: pause                      ┐ running requests end, are
                                                         flush the KV cache         │ retracted, or wait in place
                                                         begin the update           │
                                        send bucket 0 ───────────────────────────►  │ loads it
    gather bucket 2   ◄── taken ──────  send bucket 1 ───────────────────────────►  │ loads it
    ...                                 ...                                         │
    no more tensors                     close the window: end the update            │ has the new version
                                                          continue                  ┘ generates
                                        audit: compare checksums                    generates
    (later, when engines have a KV cache again) the probe: :func:`slime.weights.audit.probe_engines`

Gathering stays on the trainer's thread, because all ranks must take part in the same order. Sending runs on the
background event loop, so that the next bucket is gathered while one is on its way. Transports that write files open the
window only when the files are complete, and engines that load files need no brackets (begin, end).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from slime.engines.background import background_loop, run
from slime.engines.fan_out import Failures, on_each
from slime.engines.flat import Bucket, NamedTensor
from slime.engines.handle import EngineHandle
from slime.engines.sglang_api import EngineInfo
from slime.weights import audit, fused
from slime.weights.changes import AuditMemory, Held, fingerprints
from slime.weights.handoff import Handoff
from slime.weights.settings import WeightSyncSettings
from slime.weights.transports import Transport
from slime.weights.transports.ipc import IpcTransport
from slime.weights.transports.peers import PeerLink
from slime.weights.update import (
    Transform,
    UpdateReport,
    WeightSyncError,
    WeightUpdate,
    cast_floating,
    frozen_by_flags,
    iter_buckets,
    leave_out,
    parse_version,
)  # fmt: skip
from slime.weights.window import TORN, UpdateWindow

if TYPE_CHECKING:
    import torch


@dataclass
class _Plan:
    """What is known of the engines before anything is sent."""

    reached: list[EngineHandle]
    infos: dict[str, EngineInfo]
    failed: Failures = field(default_factory=dict)
    fused: set[str] = field(default_factory=set)  # URLs of engines whose own names and digests are known


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
) -> UpdateReport | None:
    """Bring one version of the weights to every engine. Called on all ranks; a sender gets a report.

    Args:
        named_weights: full tensors under their checkpoint names; iterating may be a collective.
        engines, transport: those of a sender; ignored elsewhere.
        version: ``attempt.step``.
        check_equal: the weights are those that the engines hold already: overwrite every tensor there
            before the update and compare afterwards (``--check-weight-update-equal``).
        peers: where engines read from the memory of several training ranks: this rank's link to the others.
        memory: of the previous updates, for the audit of engines whose checksums cannot be predicted; is brought up to
            date.

    Raises:
        WeightSyncError: engines died, hung or refused; the others either hold ``version`` and generate, or
            are named as torn and stay paused until a later sync.
        audit.WeightAuditError: an engine holds something else than was sent; names tensors and engine.
    """
    if not is_sender:
        source = iter(named_weights)
        try:
            if peers is not None and peers.engines():
                _contribute(settings, source, transport, peers)
        finally:
            for _ in source:  # the other ranks wait in this collective, whatever happened here
                pass
        return None
    assert transport is not None, "the sending rank needs a transport"
    parse_version(version)
    sender = _Sender(settings, engines, transport, version, check_equal, peers, memory or AuditMemory())
    return sender.run(named_weights)


def _contribute(
    settings: WeightSyncSettings, source: Iterable[NamedTensor], transport: Transport | None, peers: PeerLink
) -> None:
    """Offer this rank's copy of the weights, cut and cast as the sender says, to engines that it sends to."""
    import torch

    assert isinstance(transport, IpcTransport), "only handles are read from several ranks"
    orders = peers.settings()
    if orders is None:
        return
    dtype = getattr(torch, orders["dtype"]) if orders["dtype"] else None
    transforms = _transforms(settings, dtype, orders["leave_out_frozen"])
    size = settings.bucket_bytes(transport.bucket_bytes)
    transport.contribute(peers, _finished(iter_buckets(source, size, transforms)))


class _Sender:
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
        self.window = UpdateWindow(version, transport.bracketed, check_equal, settings.pause_mode, deadline)
        self.report = UpdateReport(version, transport.name)
        self.fused: dict[int, fused.FusedDigests] = {}  # by tensor-parallel ranks
        self.memory, self.fingerprints = memory, dict(memory.sent)

    def run(self, named_weights: Iterable[NamedTensor]) -> UpdateReport:
        start = time.perf_counter()
        source = iter(named_weights)
        sending: Future[None] | None = None
        try:
            # Connecting comes before the first tensor is gathered: which dtype is sent, and which digests are computed,
            # depends on what the engines are.
            plan = run(self._connect())
            handoff = Handoff(self.settings.phase_seconds)
            sending = asyncio.run_coroutine_threadsafe(self._send(plan, handoff), background_loop())
            # However the sending ends, the gathering thread must not wait for it to take another bucket.
            sending.add_done_callback(lambda _: handoff.abandon())
            self._gather(source, plan, handoff)
            sending.result()
        finally:
            if self.peers is not None:
                self.peers.close()
            for _ in source:  # the other ranks wait in this collective, whatever happened here
                pass
            if sending is not None:  # where gathering failed, the engines are marked as torn before anyone hears of it
                wait([sending])
        self.report.pause_seconds = self.window.closed - self.window.opened
        self.report.seconds = time.perf_counter() - start
        if self.settings.audit:
            run(self._audit(plan))
        return self.report

    # --- on the trainer's thread -------------------------------------------------------------

    def _gather(self, source: Iterable[NamedTensor], plan: _Plan, handoff: Handoff) -> None:
        """Cut the stream into buckets and hand them over, with their digests when engines can show theirs."""
        dtype, leave_out_frozen = _engine_dtype(plan, self.settings.rollout_dtype), self._engines_are_ours(plan)
        try:
            if self.peers is not None:
                name = str(dtype).removeprefix("torch.") if dtype is not None else None
                self.peers.open({"dtype": name, "leave_out_frozen": leave_out_frozen})
            transforms = _transforms(self.settings, dtype, leave_out_frozen)
            size = self.settings.bucket_bytes(self.transport.bucket_bytes)
            for bucket in _finished(iter_buckets(source, size, transforms)):
                self._digest([(name, t) for name, t in bucket.tensors if _has_dtype(t, dtype)], plan)
                if not handoff.put(bucket):
                    return
        except BaseException as error:
            handoff.close(error)
            raise
        handoff.close()

    def _engines_are_ours(self, plan: _Plan) -> bool:
        """Every engine holds a version that this run sent, so it has the frozen tensors already."""
        if self.transport.name in ("disk", "delta") or self.check_equal:
            return False
        attempt = parse_version(self.version).attempt
        held = [info.weight_version for info in plan.infos.values()]
        return all(version.startswith(f"{attempt}.") and not version.endswith(TORN) for version in held)

    def _digest(self, tensors: list[NamedTensor], plan: _Plan) -> None:
        """Note the digests that engines will have to show, for those that can show any."""
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
        """Engines whose checksums cannot be predicted, but must change with what is sent. What a quantised engine holds
        need not."""
        infos = {e.url: plan.infos[e.url] for e in plan.reached if not e.capabilities.named_checksums}
        return [url for url, info in infos.items() if url not in plan.fused and not info.extra.get("quantization")]

    def _sent_to(self, engine: EngineHandle, plan: _Plan) -> dict[str, str]:
        """Digests of what was sent, as this engine shows what it holds; empty where that is not known."""
        if engine.capabilities.named_checksums:
            return self.report.digests
        if engine.url not in plan.fused:
            return {}
        return self.fused[plan.infos[engine.url].tensor_parallel_size].digests

    # --- on the event loop -------------------------------------------------------------------

    async def _connect(self) -> _Plan:
        deadline = self.settings.step_seconds
        infos, failed = await on_each(self.engines, lambda engine: engine.info(), "say what it is", deadline)
        reached = [engine for engine in self.engines if engine.url in infos]
        unreached = await self.transport.connect(reached) if reached else {}
        failed.update(unreached)
        reached = [engine for engine in reached if engine.url not in unreached]
        if not reached:
            raise WeightSyncError(self.version, failed, [], [])
        known: set[str] = set()
        if self.settings.audit:
            known = {e.url for e in reached if fused.has_predictable_checksums(self.settings.model, infos[e.url])}
        return _Plan(reached, infos, failed, known)

    async def _send(self, plan: _Plan, handoff: Handoff) -> None:
        """Raises :class:`WeightSyncError` when an engine was not reached; the others generate again by then."""
        update = WeightUpdate(self.version, handoff, allow_delta=not self.check_equal, peers=self.peers)
        try:
            result = await self.transport.send(update, plan.reached, lambda: self.window.open(plan.reached))
        except BaseException:  # the update itself could not be read: no engine has the whole of it
            await self.window.mark_torn(self.window.entered)
            raise
        if not self.window.opened:
            raise ValueError(f"weights {self.version}: there was no tensor to send")
        self.report.nbytes, self.report.tensors, self.report.density = result.nbytes, result.tensors, result.density
        whole, torn = await self.window.close(result)
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


def _engine_dtype(plan: _Plan, rollout_dtype: str | None) -> torch.dtype | None:
    """The dtype that all engines hold their weights in; None (send as they are) when they differ or do not say."""
    import torch

    said = {info.dtype.removeprefix("torch.") for info in plan.infos.values()}
    name = said.pop() if len(said) == 1 else None
    dtype = getattr(torch, name, None) if name else None
    if not isinstance(dtype, torch.dtype):
        dtype = getattr(torch, rollout_dtype) if rollout_dtype else None
    return dtype


def _transforms(settings: WeightSyncSettings, dtype: torch.dtype | None, leave_out_frozen: bool) -> list[Transform]:
    """What happens to each tensor on its way out; ``dtype``: of the engines, None to send tensors as they are."""
    transforms: list[Transform] = []
    frozen = frozen_by_flags(settings.only_train, settings.freeze)
    if frozen is not None and leave_out_frozen:
        transforms.append(leave_out(frozen))
    if dtype is not None:
        transforms.append(cast_floating(dtype))
    return transforms


def _finished(buckets: Iterable[Bucket]) -> Iterator[Bucket]:
    """Wait for the kernels that write each bucket: other threads, on other streams, are about to read it."""
    import torch

    for bucket in buckets:
        tensor = bucket.tensors[0][1]
        if tensor.is_cuda:
            torch.cuda.current_stream(tensor.device).synchronize()
        yield bucket


def _has_dtype(tensor: torch.Tensor, dtype: torch.dtype | None) -> bool:
    """Whether the engine keeps exactly these bytes (it casts a tensor that is sent in another dtype)."""
    return dtype is None or tensor.dtype == dtype or not tensor.is_floating_point()
