"""One weight update from the trainer to all engines: pause, flush, begin, push, end, continue.

Every rank of the trainer calls :func:`sync_weights` and exhausts ``named_weights`` (a collective); one of
them sends. Gathering stays on the caller's thread, sending runs on the event loop, so the next bucket is
gathered while one is on its way.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from slime.engines.handle import EngineError, EngineHandle, EngineInfo, PauseMode
from slime.weights import audit, fused
from slime.weights.changes import AuditMemory, Held, fingerprints
from slime.weights.fleet import Failures, WeightSyncError, on_each
from slime.weights.handoff import Handoff
from slime.weights.transforms import cast_floating, frozen_by_flags, leave_out
from slime.weights.transports import Transport, sync_deadline
from slime.weights.transports.ipc import IpcTransport
from slime.weights.transports.peers import PeerLink
from slime.weights.update import Bucket, NamedTensor, Transform, UpdateReport, WeightUpdate, iter_buckets
from slime.weights.versions import parse_version

if TYPE_CHECKING:
    import torch


TORN = "-torn"  # behind the version of an engine that holds a mix


@dataclass
class _Plan:
    """What the engines said before anything was sent."""

    reached: list[EngineHandle]
    infos: dict[str, EngineInfo]
    failed: Failures = field(default_factory=dict)
    fused: set[str] = field(default_factory=set)  # URLs of engines whose own names and digests are known


@dataclass
class _Window:
    """The time in which the engines are paused, and what became of each of them."""

    opened: float = 0.0
    closed: float = 0.0
    entered: list[EngineHandle] = field(default_factory=list)
    before: dict[str, dict[str, str]] = field(default_factory=dict)  # checksums, to compare with afterwards
    failed: Failures = field(default_factory=dict)


def sync_weights(
    args: Any,
    named_weights: Iterable[NamedTensor],
    engines: Sequence[EngineHandle],
    transport: Transport | None,
    version: str,
    is_sender: bool,
    *,
    probe: audit.Probe | None = None,
    check_equal: bool = False,
    peers: PeerLink | None = None,
    memory: AuditMemory | None = None,
) -> UpdateReport | None:
    """Bring one version of the weights to every engine. Called on all ranks; the sender gets a report.

    Args:
        args: reads ``update_weight_buffer_size``, ``rollout_dtype``, ``train_dtype``, ``audit_weights``,
            ``audit_threshold``, ``only_train_params_name_list``, ``freeze_params_name_list``,
            ``distributed_timeout_minutes``, ``phase_timeout``.
        named_weights: full tensors under their checkpoint names; iterating may be a collective.
        engines, transport: of the sender; ignored elsewhere.
        version: ``attempt.step``.
        probe: tokens and the trainer's log-probs of them, for the audit through ``/generate``.
        check_equal: the weights are those that the engines hold already: overwrite every tensor there
            before the update and compare afterwards (``--check-weight-update-equal``).
        peers: where engines read from the memory of several training ranks: this rank's link to the others.
        memory: of the updates before, for the audit of engines whose checksums cannot be predicted; is brought up to
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
                _contribute(args, source, transport, peers)
        finally:
            for _ in source:
                pass
        return None
    assert transport is not None, "the sending rank needs a transport"
    parse_version(version)
    with ThreadPoolExecutor(1, thread_name_prefix="weights-sync") as pool:
        sender = _Sender(args, engines, transport, version, check_equal, peers, memory or AuditMemory())
        return sender.run(pool, named_weights, probe)


def _contribute(args: Any, source: Iterable[NamedTensor], transport: Transport | None, peers: PeerLink) -> None:
    """Offer this rank's copy of the weights, cut and cast as the sender says, to engines that it sends to."""
    import torch

    assert isinstance(transport, IpcTransport), "only handles are read from several ranks"
    settings = peers.settings()
    if settings is None:
        return
    dtype = getattr(torch, settings["dtype"]) if settings["dtype"] else None
    transforms = _transforms(args, dtype, settings["leave_out_frozen"])
    transport.contribute(peers, _finished(iter_buckets(source, args.update_weight_buffer_size, transforms)))


class _Sender:
    """One sync on the sending rank."""

    def __init__(
        self,
        args: Any,
        engines: Sequence[EngineHandle],
        transport: Transport,
        version: str,
        check_equal: bool,
        peers: PeerLink | None,
        memory: AuditMemory,
    ) -> None:
        self.args, self.engines, self.transport, self.version = args, engines, transport, version
        self.check_equal, self.peers = check_equal, peers
        self.deadline = sync_deadline(args)
        self.window = _Window()
        self.report = UpdateReport(version, transport.name)
        self.fused: dict[int, fused.FusedDigests] = {}  # by tensor-parallel ranks
        self.memory, self.fingerprints = memory, dict(memory.sent)

    def run(
        self, pool: ThreadPoolExecutor, named_weights: Iterable[NamedTensor], probe: audit.Probe | None
    ) -> UpdateReport:
        start = time.perf_counter()
        source = iter(named_weights)
        try:
            plan = self._on_loop(pool, self._connect()).result()
            handoff = Handoff(self.args.phase_timeout)
            sending = self._on_loop(pool, self._send(plan, handoff))
            sending.add_done_callback(lambda _: handoff.abandon())
            self._gather(source, plan, handoff)
            sending.result()
        finally:
            if self.peers is not None:
                self.peers.close()
            for _ in source:  # the other ranks wait in this collective, whatever happened here
                pass
        self.report.pause_seconds = self.window.closed - self.window.opened
        self.report.seconds = time.perf_counter() - start
        if self.args.audit_weights:
            self._on_loop(pool, self._audit(plan, probe)).result()
        return self.report

    def _on_loop(self, pool: ThreadPoolExecutor, coroutine: Any) -> Future[Any]:
        from slime.engines.background import run

        return pool.submit(run, coroutine)

    # --- on the trainer's thread -------------------------------------------------------------

    def _gather(self, source: Iterable[NamedTensor], plan: _Plan, handoff: Handoff) -> None:
        """Cut the stream into buckets and hand them over, with their digests when engines can show theirs."""
        dtype, leave_out_frozen = _engine_dtype(plan, self.args), self._engines_are_ours(plan)
        try:
            if self.peers is not None:
                name = str(dtype).removeprefix("torch.") if dtype is not None else None
                self.peers.open({"dtype": name, "leave_out_frozen": leave_out_frozen})
            transforms = _transforms(self.args, dtype, leave_out_frozen)
            for bucket in _finished(iter_buckets(source, self.args.update_weight_buffer_size, transforms)):
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
        """Note what the engines will have to show, for those that can."""
        if not self.args.audit_weights:
            return
        if any(engine.capabilities.named_checksums for engine in plan.reached):
            from slime.models.digest import tensor_digest

            self.report.digests.update((name, tensor_digest(tensor)) for name, tensor in tensors)
        for ranks in {plan.infos[url].tensor_parallel_size for url in plan.fused}:
            known = self.fused.setdefault(ranks, fused.FusedDigests(ranks, fused.groups_of(self.args)))
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
        infos, failed = await on_each(self.engines, lambda engine: engine.info(), "say what it is", self.deadline)
        reached = [engine for engine in self.engines if engine.url in infos]
        unreached = await self.transport.connect(reached) if reached else {}
        failed.update(unreached)
        reached = [engine for engine in reached if engine.url not in unreached]
        if not reached:
            raise WeightSyncError(self.version, failed, [], [])
        known = {e.url for e in reached if self.args.audit_weights and fused.comparable(self.args, infos[e.url])}
        return _Plan(reached, infos, failed, known)

    async def _send(self, plan: _Plan, handoff: Handoff) -> None:
        """Raises :class:`WeightSyncError` when any engine was not reached; the rest is in order by then."""
        try:
            update = WeightUpdate(self.version, handoff, "full" if self.check_equal else "delta", self.peers)
            result = await self.transport.send(update, plan.reached, lambda: self._open_window(plan.reached))
        except BaseException:  # the update itself could not be read: nobody has the whole of it
            await self._mark_torn(self.window.entered)
            raise
        if not self.window.opened:
            raise ValueError(f"weights {self.version}: there was no tensor to send")
        self.report.nbytes, self.report.tensors, self.report.density = result.nbytes, result.tensors, result.density
        self.window.failed.update(result.failed)
        torn = [engine for engine in self.window.entered if engine.url in result.torn]
        whole = [e for e in self.window.entered if e not in torn and e.url not in self.window.failed]
        await self._mark_torn(torn)
        if self.transport.bracketed:
            whole = await self._each(whole, lambda engine: engine.end_update(self.version), "end the update")
        if self.check_equal:
            await audit.check_restored(whole, self.window.before, self.deadline)
        whole = await self._each(whole, lambda engine: engine.continue_generation(), "continue generation")
        self.window.closed = time.perf_counter()
        failed = {**plan.failed, **self.window.failed}
        if failed or torn:
            raise WeightSyncError(self.version, failed, [e.url for e in torn], [e.url for e in whole])

    async def _open_window(self, engines: Sequence[EngineHandle]) -> list[EngineHandle]:
        """Pause, flush and begin on all engines; returns those that are ready."""
        self.window.opened = time.perf_counter()
        ready = await self._each(engines, self._pause_and_flush, "pause and flush")
        if self.check_equal:
            ready = await self._each(ready, self._overwrite, "overwrite its weights")
        if self.transport.bracketed:
            ready = await self._each(ready, lambda engine: engine.begin_update(), "begin the update")
        self.window.entered = ready
        return ready

    async def _overwrite(self, engine: EngineHandle) -> None:
        self.window.before[engine.url] = await audit.overwrite(engine)

    async def _pause_and_flush(self, engine: EngineHandle) -> None:
        mode: PauseMode | None = await self._pause_mode(engine)
        await engine.pause(mode or "in_place")
        if mode is None:
            try:
                await engine.flush_cache()
                return
            except EngineError:  # a request slipped in between the question and the pause
                mode = self._busy_mode(engine)
                await engine.pause(mode)
        if mode != "in_place":  # requests that go on in place hold on to their cache
            await engine.flush_cache()

    async def _pause_mode(self, engine: EngineHandle) -> PauseMode | None:
        """None when nothing runs: then no mode has anything to do, and ``in_place`` is the quickest."""
        load = await engine.load()
        return self._busy_mode(engine) if load["running"] or load["waiting"] else None

    def _busy_mode(self, engine: EngineHandle) -> PauseMode:
        """As asked; else requests keep their tokens and compute their cache again, where the engine can do
        that, and end with what they have where it cannot."""
        asked = getattr(self.args, "update_weight_pause_mode", None)
        if asked is None or asked == "drain":  # then only requests of others than the rollout can be under way
            return "retract" if engine.capabilities.retract else "abort"
        if asked == "in_place" and not engine.capabilities.version_spans:
            raise EngineError(
                f"{engine.url} does not say which weights made which token, so answers that go on in place would be of "
                "the wrong version: take --update-weight-pause-mode abort"
            )
        mode: PauseMode = asked
        return mode

    async def _mark_torn(self, engines: Sequence[EngineHandle]) -> None:
        """Close the bracket under a version that no sample may carry; these engines stay paused."""
        if self.transport.bracketed:
            torn = f"{self.version}{TORN}"
            await on_each(engines, lambda engine: engine.end_update(torn), "end the update", self.deadline)

    async def _each(
        self, engines: Sequence[EngineHandle], call: Callable[[EngineHandle], Any], what: str
    ) -> list[EngineHandle]:
        """``call`` on all; those that failed are noted and left out of what is returned."""
        _, failed = await on_each(engines, call, what, self.deadline)
        self.window.failed.update(failed)
        return [engine for engine in engines if engine.url not in failed]

    async def _audit(self, plan: _Plan, probe: audit.Probe | None) -> None:
        start = time.perf_counter()
        threshold = audit.threshold(self.args, plan.infos.values())
        sent = {engine.url: self._sent_to(engine, plan) for engine in plan.reached}
        tracked = self._tracked(plan)
        sums = await audit.audit_engines(plan.reached, plan.infos, sent, probe, threshold, self.deadline, tracked)
        for url in tracked:
            audit.check_changes(url, sums[url], self.fingerprints, self.memory.held.get(url))
            self.memory.held[url] = Held(sums[url], self.fingerprints)
        self.memory.sent = self.fingerprints
        self.report.audit_seconds = time.perf_counter() - start


def _engine_dtype(plan: _Plan, args: Any) -> torch.dtype | None:
    """The dtype that all engines hold their weights in; None (send as they are) when they differ or do not say."""
    import torch

    said = {info.dtype.removeprefix("torch.") for info in plan.infos.values()}
    name = said.pop() if len(said) == 1 else None
    dtype = getattr(torch, name, None) if name else None
    if not isinstance(dtype, torch.dtype):
        dtype = getattr(torch, args.rollout_dtype) if args.rollout_dtype else None
    return dtype


def _transforms(args: Any, dtype: torch.dtype | None, leave_out_frozen: bool) -> list[Transform]:
    """What happens to each tensor on its way out; ``dtype``: of the engines, None to send tensors as they are."""
    transforms: list[Transform] = []
    frozen = frozen_by_flags(args.only_train_params_name_list, args.freeze_params_name_list)
    if frozen is not None and leave_out_frozen:
        transforms.append(leave_out(frozen))
    if dtype is not None:
        transforms.append(cast_floating(dtype))
    return transforms


def _finished(buckets: Iterable[Bucket]) -> Iterator[Bucket]:
    for bucket in buckets:
        _finish_kernels(bucket.tensors[0][1])
        yield bucket


def _has_dtype(tensor: torch.Tensor, dtype: torch.dtype | None) -> bool:
    """Whether the engine keeps these very bytes (a tensor that is sent in another dtype is cast there)."""
    return dtype is None or tensor.dtype == dtype or not tensor.is_floating_point()


def _finish_kernels(tensor: torch.Tensor) -> None:
    """Other threads are about to read what this thread's stream is still writing."""
    import torch

    if tensor.is_cuda:
        torch.cuda.current_stream(tensor.device).synchronize()
