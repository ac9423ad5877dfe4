"""Send one weight update from the trainer to all engines.

All training ranks gather full tensors in a collective operation. The ranks that have engines to
serve send them::

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

Gathering happens on the trainer's thread, because all ranks must take part in the same order.
Sending happens on the background event loop, so that the next bucket is gathered while one is sent.
Transports that write files open the window only when the files are complete, and engines that load
files need no calls to begin and end an update.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from slime.engines.background import background_loop, run
from slime.engines.handle import EngineHandle, Failures, on_each
from slime.engines.payload import Bucket, NamedTensor
from slime.engines.sglang_api import EngineInfo
from slime.models.cpu_memory import no_collections
from slime.models.fp8_format import layout_of
from slime.weights import audit
from slime.weights.settings import AdapterSource, WeightSyncSettings
from slime.weights.transports import Transport, transport_kind
from slime.weights.transports.adapter import AdapterTransport
from slime.weights.transports.ipc import IpcTransport
from slime.weights.transports.peers import PeerLink
from slime.weights.update import (
    Handoff,
    UpdateReport,
    WeightSource,
    WeightSyncError,
    WeightUpdate,
    finished,
    parse_version,
    sent_buckets,
    transforms_of,
)
from slime.weights.window import TORN, UpdateWindow, describe, engine_dtype

if TYPE_CHECKING:
    import torch


@dataclass
class _Plan:
    """What is known about the engines before anything is sent."""

    reached: list[EngineHandle]
    infos: dict[str, EngineInfo]
    failed: Failures


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
    updated: set[str] | None = None,
    adapter: AdapterSource | None = None,
) -> UpdateReport | None:
    """Send one version of the weights to every engine. All ranks must call this; senders get a
    report, others None.

    Args:
        named_weights: Full tensors with their names in the checkpoint. Iterating may be a
            collective operation.
        engines, transport: The engines and the transport of a sender; ignored on other ranks.
        version: The version, ``attempt.step``.
        check_equal: The engines have the same weights already. Overwrite every tensor on the
            engines before the update, and compare the tensors afterwards
            (``--check-weight-update-equal``).
        peers: If engines read from the memory of several training ranks, the link of this rank to
            the others.
        updated: The URLs of the engines that got an earlier update from this sender. Those that get
            this one are added.
        adapter: The factors of an adapter, if they are the last of ``named_weights``. Only they are
            iterated if no sender must send the base, so that the base is not gathered.

    Raises:
        WeightSyncError: Some engines died, hung or refused. All others either have ``version`` and
            generate, or are named as torn and stay paused until a later sync.
        audit.WeightAuditError: The weights of an engine differ from those that were sent. The error
            names the engine and the tensors.
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
    sender = Sender(
        settings,
        engines,
        transport,
        version,
        check_equal,
        peers,
        set() if updated is None else updated,
    )
    with no_collections():
        return sender.run(source)


def _contribute(
    settings: WeightSyncSettings,
    source: Iterable[NamedTensor],
    transport: Transport | None,
    peers: PeerLink,
) -> None:
    """Offer this rank's copy of the weights to engines of another sender, with the buckets and
    dtype of that sender.
    """
    import torch

    transport = transport.base if isinstance(transport, AdapterTransport) else transport
    assert isinstance(transport, IpcTransport), "only handles are read from several ranks"
    orders = peers.settings()
    if orders is None:
        return
    dtype = getattr(torch, orders["dtype"]) if orders["dtype"] else None
    transforms = transforms_of(settings, dtype, orders["leave_out_frozen"])
    buckets = finished(sent_buckets(settings, source, transport.bucket_bytes, transforms))
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
        updated: set[str],
    ) -> None:
        self.settings = settings
        self.engines = engines
        self.transport = transport
        self.version = version
        self.check_equal = check_equal
        self.peers = peers
        self.updated = updated
        named = settings.adapter is not None and settings.adapter_name is not None
        self.window = UpdateWindow(
            version,
            transport.bracketed,
            check_equal,
            settings.sync.update_weight_pause_mode,
            settings.step_seconds,
            None if named else settings.adapter,
            ends_requests=named,
        )
        self.report = UpdateReport(version, transport.name)
        self._scales: dict[str, torch.Tensor] = {}

    def run(self, source: WeightSource) -> UpdateReport:
        start = time.perf_counter()
        sending: Future[None] | None = None
        try:
            # Connect before the first tensor is gathered, because the dtype to send and the digests
            # to compute depend on the engines.
            plan = run(self._connect())
            tensors = source.start(base=not self.engines_are_ours(plan))
            handoff = Handoff(self.settings.phase_seconds)
            sending = asyncio.run_coroutine_threadsafe(self._send(plan, handoff), background_loop())
            # When sending has ended, for any reason, the gathering thread must not wait for it to
            # take a bucket.
            sending.add_done_callback(lambda _: handoff.abandon())
            self._gather(tensors, plan, handoff)
            sending.result()
        finally:
            if self.peers is not None:
                self.peers.close()
            source.finish()
            # after an error in gathering, the engines are marked as torn before it propagates
            if sending is not None:
                wait([sending])
        self.report.pause_seconds = self.window.closed - self.window.opened
        self.report.seconds = time.perf_counter() - start
        if self.settings.sync.audit_weights:
            run(self._audit(plan))
        return self.report

    # --- on the trainer's thread -------------------------------------------------------------

    def _gather(self, source: Iterable[NamedTensor], plan: _Plan, handoff: Handoff) -> None:
        """Divide the stream into buckets and pass them on, and compute the digests that the audit
        needs.
        """
        dtype = engine_dtype(plan.infos.values(), self.settings.rollout_dtype)
        leave_out_frozen = self.engines_are_ours(plan)
        self.report.dtype = str(dtype).removeprefix("torch.") if dtype is not None else None
        try:
            if self.peers is not None:
                self.peers.open({"dtype": self.report.dtype, "leave_out_frozen": leave_out_frozen})
            transforms = transforms_of(self.settings, dtype, leave_out_frozen)
            usual = self.transport.bucket_bytes
            for bucket in finished(sent_buckets(self.settings, source, usual, transforms)):
                if not bucket.adapter:  # a named adapter has digests of its own, see AdapterPayload
                    self._digest(bucket, dtype, plan)
                if not handoff.put(bucket):
                    return
        except BaseException as error:
            handoff.close(error)
            raise
        handoff.close()

    def _dequantized(
        self, tensors: Sequence[NamedTensor], dtype: torch.dtype | None
    ) -> Iterator[NamedTensor]:
        """Replace quantized tensors by the weights that engines compute their checksums of:
        dequantized, in ``dtype``.

        The scales of a weight come before its values, but may be in an earlier bucket.
        """
        how = self.settings.fp8
        if how is None:
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
        """Return whether every engine still holds a version that this sender has sent, with the
        frozen tensors.

        Then frozen tensors need not be sent, except with transports that write complete versions to
        files. The version alone does not tell, because an external engine may have one of the same
        attempt from another run.
        """
        # An adapter's transport writes only the factors to its files; the base goes to the engines
        # once.
        whole_versions = (
            transport_kind(self.settings).through_folder and self.settings.adapter_name is None
        )
        if whole_versions or self.check_equal or self.settings.engines_lose_weights:
            return False
        attempt = parse_version(self.version).attempt
        held = [info.weight_version for info in plan.infos.values()]
        ours = all(
            version.startswith(f"{attempt}.") and not version.endswith(TORN) for version in held
        )
        return ours and self.updated.issuperset(plan.infos)

    def _digest(self, bucket: Bucket, dtype: torch.dtype | None, plan: _Plan) -> None:
        """Compute the digests with which the named checksums of engines are compared later."""
        named = any(engine.capabilities.named_checksums for engine in plan.reached)
        if not self.settings.sync.audit_weights or not named:
            return
        from slime.models.digest import tensor_digest

        for name, tensor in self._dequantized(bucket.tensors, dtype):
            # An engine casts a tensor that is sent in another dtype, so it does not keep exactly
            # these bytes.
            if dtype is None or tensor.dtype == dtype or not tensor.is_floating_point():
                self.report.digests[name] = tensor_digest(tensor)

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
        return _Plan(reached, infos, failed)

    async def _send(self, plan: _Plan, handoff: Handoff) -> None:
        """Send all buckets and close the window. Raises :class:`WeightSyncError` if some engines
        were not updated; the others generate again by then."""
        update = WeightUpdate(
            self.version, handoff, allow_delta=not self.check_equal, peers=self.peers
        )
        try:
            result = await self.transport.send(
                update, plan.reached, partial(self.window.open, plan.reached)
            )
        except BaseException:  # the update itself could not be read, so no engine has all of it
            await self.window.mark_torn(self.window.entered)
            raise
        if not self.window.opened:
            raise ValueError(f"weights {self.version} were not sent, because they have no tensors")
        self.report.nbytes = result.nbytes
        self.report.tensors = result.tensors
        self.report.density = result.density
        whole, torn = await self.window.close(result)
        self.updated |= {engine.url for engine in whole}
        failed = {**plan.failed, **self.window.failed}
        if failed or torn:
            raise WeightSyncError(
                self.version, failed, [e.url for e in torn], [e.url for e in whole]
            )

    async def _audit(self, plan: _Plan) -> None:
        start = time.perf_counter()
        await audit.audit_engines(
            plan.reached, plan.infos, self.report.digests, self.settings.step_seconds
        )
        self.report.audit_seconds = time.perf_counter() - start
