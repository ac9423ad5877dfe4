"""One training rank: a Ray actor with a backend, which sends weights and writes its part of each snapshot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias, TypedDict

from slime.engines.background import run
from slime.engines.handle import EngineHandle
from slime.observability import progress

if TYPE_CHECKING:
    import torch
    from ray import ObjectRef
    from torch.distributed import Store

    from slime.backends.base import ModelTag, TrainBackend
    from slime.backends.token_budget import Measurement
    from slime.checkpoint.files import FileEntry
    from slime.checkpoint.shared_folder import Answer
    from slime.config.args import Args
    from slime.data.wire import Wire
    from slime.observability.progress import Progress
    from slime.weights.audit import Calibration, Probe
    from slime.weights.changes import AuditMemory
    from slime.weights.transports.base import Transport
    from slime.weights.transports.peers import PeerLink
    from slime.weights.update import UpdateReport

Role = Literal["actor", "critic"]
Batches: TypeAlias = "Sequence[ObjectRef[Wire]]"
"""References to the shares of a rollout that data-parallel ranks train."""
Values: TypeAlias = "Sequence[ObjectRef[list[torch.Tensor]]]"
"""One reference to a critic's values of one rank's samples, from before the update."""


class TrainResult(TypedDict):
    """What a rank returns of a step. The metrics are equal on all ranks."""

    metrics: dict[str, float]
    timings: dict[str, float]
    values: Values | None


class TrainActor:
    """One rank. All calls but :meth:`status` run on one thread, in the order they came."""

    def __init__(self, args: Args, role: Role, rank: int, world_size: int, log_dir: str) -> None:
        from slime.cluster.logs import redirect_output
        from slime.observability.profiler import Profiler
        from slime.weights.settings import WeightSyncSettings

        redirect_output(Path(log_dir), f"train-{role}-{rank}")
        self.args, self.role, self.rank, self.world_size = args, role, rank, world_size
        self.weight_sync = WeightSyncSettings.from_args(args)
        self.profiler = Profiler(args, Path(log_dir).parent / "traces", role, rank)
        self.backend: TrainBackend  # made by init, the first call of every rank
        self.transport: Transport | None = None
        self.same_host = True
        self.probe: Probe | None = None
        self.calibration: Calibration | None = None
        self.audit_memory: AuditMemory | None = None  # what earlier updates sent, for the audit of later ones
        self.written: list[FileEntry] = []  # what the last save wrote
        self.master = ("", 0)  # address and port of the process group's key-value store
        self.store: Store | None = None  # a connection to it

    def address(self) -> tuple[str, int]:
        """Where rank 0 will listen for the process group."""
        import ray

        from slime.engines.process import free_port

        host = str(ray.util.get_node_ip_address())
        return host, free_port(host)

    def init(self, master_addr: str, master_port: int, load_path: str | None) -> None:
        """Join the process group, build the model, and read a snapshot if there is one."""
        import ray

        from slime.backends.create import create_backend

        progress.report(f"load {self.role}")
        self.master = (master_addr, master_port)
        local_rank = 0 if ray.get_gpu_ids() else self.rank
        self.backend = create_backend(
            self.args, self.role, self.rank, self.world_size, master_addr, master_port, local_rank
        )
        if load_path is not None:
            self.backend.load(Path(load_path))

    def train(self, rollout_id: int, batch_ref: Batches, values_ref: Values | None = None) -> TrainResult:
        """Train on this rank's part of a rollout.

        Args:
            batch_ref: holds one reference; Ray would fetch a bare one before the call, on the thread that calls.
            values_ref: of a critic, for the advantages of the actor.
        """
        import ray

        from slime.backends.train_loop import train_on_rollout
        from slime.data.wire import to_rank_batch
        from slime.observability.debug_data import save_train_batches

        batch = to_rank_batch(ray.get(batch_ref[0]))
        if values_ref is not None:
            batch["old_values"] = ray.get(values_ref[0])
        with self.profiler.rollout(rollout_id):
            metrics, timings = train_on_rollout(self.backend, self.args, batch, self.profiler)
        if self.args.async_save and self.args.save:
            self.backend.take_save_memory()
        if self.args.save_debug_train_data and self.role == "actor":
            save_train_batches(self.args, rollout_id, batch.under_hook_names(), self.backend)
        if self.args.offload_train or self.args.offload_rollout:  # engines on the same accelerator get memory next
            self.backend.clear_memory()
        values: Values | None = [ray.put(batch["old_values"])] if self.role == "critic" else None
        return {"metrics": metrics, "timings": timings, "values": values}

    def update_weights(
        self,
        engine_urls: Sequence[str],
        version: str,
        same_host: bool,
        slots: Mapping[str, range],
        token: str,
        check_equal: bool = False,
    ) -> UpdateReport | None:
        """Send this group's weights to the engines; ranks that have engines to serve return a report.

        Checksums are compared at once; the probe comes later (:meth:`check_probe`), since colocated
        engines have no cache to score with yet.

        Args:
            slots: engine URL to its places, see :func:`ranks_of_engines`.
            token: names this call, the same on all ranks.
            check_equal: the engines hold these weights already; see :func:`slime.weights.sync.sync_weights`.
        """
        from slime.weights.changes import AuditMemory
        from slime.weights.sync import sync_weights
        from slime.weights.transports import ranks_of_engines

        progress.report("update weights")
        ranks = ranks_of_engines(self.weight_sync, engine_urls, slots, self.world_size, same_host)
        urls = [url for url in engine_urls if ranks[url][0] == self.rank]
        if any(self.rank in places for places in ranks.values()):
            self._choose_transport(same_host)
        elif self.transport is not None:  # other ranks send to its engines now: these must not wait in its group
            run(self.transport.close())
        peers = self._peers(ranks, token)
        self.audit_memory = self.audit_memory or AuditMemory()
        if self.weight_sync.audit:
            self.probe = self._score_probe()
        report = sync_weights(
            self.weight_sync,
            self.backend.named_weights(),
            [EngineHandle(url) for url in urls],
            self.transport,
            version,
            is_sender=bool(urls),
            check_equal=check_equal,
            peers=peers,
            memory=self.audit_memory,
        )
        if self.args.offload_rollout:  # the engines take their KV cache back next
            self.backend.clear_memory()
        return report

    def _peers(self, ranks: Mapping[str, range], token: str) -> PeerLink | None:
        """None where every engine reads from one training rank."""
        from slime.weights.transports.peers import PeerLink, connect_store

        if all(len(places) == 1 for places in ranks.values()):
            return None
        self.store = self.store or connect_store(*self.master, self.args.phase_timeout)
        return PeerLink(self.store, token, self.rank, ranks, self.args.phase_timeout)

    def _choose_transport(self, same_host: bool) -> None:
        """Once, and again when engines come back on other hosts; a folder is one for all."""
        from slime.weights.transports import create_transport

        if self.transport is not None and same_host != self.same_host and self.weight_sync.transport != "disk":
            run(self.transport.close())
            self.transport = None
        if self.transport is None:
            self.transport, self.same_host = create_transport(self.weight_sync, colocated_host=same_host), same_host

    def check_probe(self, engine_urls: Sequence[str]) -> float:
        """Let the engines score the probe, and compare them with one another; returns the largest difference.
        Raises ``WeightAuditError``."""
        from slime.weights.audit import Calibration, probe_engines

        self.calibration = self.calibration or Calibration()
        assert self.probe is not None, "weights are sent before they are audited"
        return run(
            probe_engines(self.weight_sync, [EngineHandle(url) for url in engine_urls], self.probe, self.calibration)
        )

    def _score_probe(self) -> Probe:
        """A fixed sequence as the trainer scores it now; all ranks take part."""
        from transformers import AutoConfig

        from slime.backends.train_loop import score_probe
        from slime.weights.audit import Probe, probe_tokens

        config = AutoConfig.from_pretrained(self.args.hf_checkpoint, trust_remote_code=self.args.trust_remote_code)
        tokens = probe_tokens(config.get_text_config().vocab_size, self.args.seed)
        return Probe(tokens, score_probe(self.backend, tokens))

    def copy_weights(self, source: ModelTag, target: ModelTag) -> None:
        self.backend.copy_weights(source, target)

    def refresh_old_actor(self, behind: bool) -> None:
        """The engines have got the actor's weights: make ``old_actor`` equal to them (``--keep-old-actor``).

        Args:
            behind: make it equal to what the engines held before instead, if they held anything. Those weights are
                the copy ``rollout_actor``, which exists from the first call on.
        """
        before: ModelTag = "rollout_actor" if behind and "rollout_actor" in self.backend.moving_copies else "actor"
        self.backend.copy_weights(before, "old_actor")
        if behind:
            self.backend.copy_weights("actor", "rollout_actor")

    def save(self, directory: str) -> None:
        self.written = self.backend.save(Path(directory))

    def is_saving(self) -> bool:
        """Whether files of the last :meth:`save` are still being written (``--async-save``)."""
        return self.backend.saving is not None and not self.backend.saving.done()

    def finish_save(self) -> list[FileEntry]:
        """Wait until this rank's part of the last :meth:`save` is complete; returns its files."""
        if self.backend.saving is not None:
            self.written = self.backend.saving.finish(self.args.phase_timeout)
            self.backend.saving = None
        return self.written

    def save_hf(self, directory: str) -> None:
        self.backend.save_hf(Path(directory))

    def sleep(self, keep_weights: bool = False) -> None:
        self.backend.sleep(keep_weights)

    def wake(self) -> None:
        self.backend.wake()

    def memory(self) -> dict[str, float]:
        """GiB in use by this process and on its accelerator."""
        from slime.observability.memory import memory_in_use

        return memory_in_use()

    def measure_memory(self, share: float) -> Measurement | None:
        """How many tokens a micro-batch may hold within ``share`` of the memory; a collective. None without CUDA."""
        from slime.backends.token_budget import CudaMeter, measure

        if self.backend.device.type != "cuda":
            return None
        return measure(self.backend, share, CudaMeter())

    def set_token_budgets(self, training: int, forward_only: int) -> None:
        """In place of the flags' own."""
        self.args = self.args.with_values(max_tokens_per_gpu=training, log_probs_max_tokens_per_gpu=forward_only)

    def close(self) -> None:
        """Leave the groups and the shared memory of weight updates."""

        if self.transport is not None:
            run(self.transport.close())

    def try_folder(self, folder: str, token: str, who: str) -> Answer:
        """See :mod:`slime.checkpoint.shared_folder`."""
        from slime.checkpoint.shared_folder import answer

        return answer(folder, token, who)

    def status(self) -> Progress:

        return progress.latest()
