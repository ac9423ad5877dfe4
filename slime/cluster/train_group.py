"""Training ranks: one Ray actor each, driven together."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from slime.cluster.placement import thread_environment
from slime.config.layout import ParallelLayout
from slime.config.settings import role_args

if TYPE_CHECKING:
    from torch.distributed import Store

    from slime.backends.base import ModelTag, TrainBackend
    from slime.backends.token_budget import Measurement
    from slime.checkpoint.files import FileEntry
    from slime.checkpoint.shared_folder import Answer
    from slime.cluster.placement import Placement
    from slime.cluster.ray_wait import Waiter
    from slime.config.args import Args
    from slime.engines.handle import EngineHandle
    from slime.weights.audit import Calibration, Probe
    from slime.weights.changes import AuditMemory
    from slime.weights.transports.base import Transport
    from slime.weights.transports.peers import PeerLink
    from slime.weights.update import UpdateReport

Role = Literal["actor", "critic"]
CLOSE_DEADLINE_SECONDS = 10.0


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
        from slime.observability import progress

        progress.report(f"load {self.role}")
        self.master = (master_addr, master_port)
        local_rank = 0 if ray.get_gpu_ids() else self.rank
        self.backend = create_backend(
            self.args, self.role, self.rank, self.world_size, master_addr, master_port, local_rank
        )
        if load_path is not None:
            self.backend.load(Path(load_path))

    def train(self, rollout_id: int, batch_ref: Any, values_ref: Any = None) -> dict[str, Any]:
        """Train on this rank's part of a rollout.

        Returns ``metrics`` and ``timings`` (equal on all ranks for metrics), and for a critic
        ``values``: a reference to its values from before the update.
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
        values = [ray.put(batch["old_values"])] if self.role == "critic" else None
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
        from slime.engines.background import run
        from slime.observability import progress
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
            self._handles(urls),
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
        from slime.engines.background import run
        from slime.weights.transports import create_transport

        if self.transport is not None and same_host != self.same_host and self.weight_sync.transport != "disk":
            run(self.transport.close())
            self.transport = None
        if self.transport is None:
            self.transport, self.same_host = create_transport(self.weight_sync, colocated_host=same_host), same_host

    def check_probe(self, engine_urls: Sequence[str]) -> float:
        """Let the engines score the probe, and compare them with one another; returns the largest difference.
        Raises ``WeightAuditError``."""
        from slime.engines.background import run
        from slime.weights.audit import Calibration, probe_engines

        self.calibration = self.calibration or Calibration()
        assert self.probe is not None, "weights are sent before they are audited"
        return run(probe_engines(self.weight_sync, self._handles(engine_urls), self.probe, self.calibration))

    def _handles(self, engine_urls: Sequence[str]) -> list[EngineHandle]:
        from slime.engines.handle import EngineHandle

        return [EngineHandle(url) for url in engine_urls]

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
        from slime.engines.background import run

        if self.transport is not None:
            run(self.transport.close())

    def try_folder(self, folder: str, token: str, who: str) -> Answer:
        """See :mod:`slime.checkpoint.shared_folder`."""
        from slime.checkpoint.shared_folder import answer

        return answer(folder, token, who)

    def status(self) -> dict[str, Any]:
        from slime.observability import progress

        return progress.latest()


class TrainGroup:
    """All ranks of one role, as the driver sees them."""

    def __init__(
        self, args: Args, role: Role, placement: Placement, waiter: Waiter, log_dir: Path, load_path: Path | None
    ) -> None:

        args = role_args(args, role)
        self.args, self.role, self.waiter = args, role, waiter
        world_size = placement.slots.train
        actor_class = remote_class(TrainActor)
        environment = {"env_vars": {**thread_environment(args.threads_per_process), **dict(args.train_env_vars or {})}}
        self.ranks = [
            actor_class.options(**placement.train_options(rank), runtime_env=environment).remote(
                args, role, rank, world_size, str(log_dir)
            )
            for rank in range(world_size)
        ]
        self.resident: Literal["everything", "weights", "nothing"] = "everything"
        """On the accelerator; of interest where trainers and engines take turns."""
        self._named = {f"{role} rank {rank}": actor for rank, actor in enumerate(self.ranks)}
        self.host, port = self._call([self.ranks[0].address.remote()], "to start", self.args.start_timeout)[0]
        # Each rank reads its own shards, and those of others when their number changed.
        path = str(load_path) if load_path else None
        self.starting = [rank.init.remote(self.host, port, path) for rank in self.ranks]

    def wait_started(self) -> None:
        self._call(self.starting, "to load the model", self.args.start_timeout)

    def try_folder(self, folder: str, token: str) -> dict[str, Answer]:
        """What each rank finds in a folder that all of them are to write to, by their names."""
        refs = [rank.try_folder.remote(folder, token, who) for who, rank in self._named.items()]
        answers = self._call(refs, "to look into --save", self.args.start_timeout)
        return dict(zip(self._named, answers, strict=True))

    def train(self, rollout_id: int, batch_refs: Sequence[Any], values: Sequence[Any] | None = None) -> dict[str, Any]:
        """Train every rank on its part; the step is never cut short by a signal.

        Returns rank 0's ``metrics`` and ``timings``, and ``values`` of all ranks.
        """
        layout = ParallelLayout.from_args(self.args)
        refs = [
            rank.train.remote(rollout_id, [batch_refs[layout.data_rank(i)]], values[i] if values else None)
            for i, rank in enumerate(self.ranks)
        ]
        results = self._call(refs, f"to train on rollout {rollout_id}", self.args.phase_timeout, interruptible=False)
        return {**results[0], "values": [result["values"] for result in results]}

    def update_weights(
        self,
        engine_urls: Sequence[str],
        version: str,
        same_host: bool,
        slots: Mapping[str, range],
        check_equal: bool = False,
    ) -> UpdateReport:
        """Returns the report: of several senders, which work at the same time, the longest times."""
        token = f"weights-{version}-{secrets.token_hex(8)}"
        arguments = (list(engine_urls), version, same_host, dict(slots), token, check_equal)
        refs = [rank.update_weights.remote(*arguments) for rank in self.ranks]
        results = self._call(refs, f"to send weights {version}", self.args.phase_timeout)
        reports: list[UpdateReport] = [report for report in results if report is not None]
        return dataclasses.replace(
            reports[0],
            seconds=max(report.seconds for report in reports),
            pause_seconds=max(report.pause_seconds for report in reports),
            audit_seconds=max(report.audit_seconds for report in reports),
        )

    def check_probe(self, engine_urls: Sequence[str]) -> float:
        """Largest difference between trainer and engines on a fixed sequence; rank 0 asks."""
        ref = self.ranks[0].check_probe.remote(list(engine_urls))
        return float(self._call([ref], "to compare log-probs with the engines", self.args.phase_timeout)[0])

    def save(self, directory: Path) -> None:
        self._all("save", str(directory / self.role), interruptible=False)

    def is_saving(self) -> bool:
        """Whether a rank still writes what :meth:`save` began (``--async-save``)."""
        return any(self._call([rank.is_saving.remote() for rank in self.ranks], "to say how far it is", 60.0))

    def finish_save(self) -> list[FileEntry]:
        """The files of all ranks, with paths relative to the snapshot, for its manifest."""
        found: list[list[FileEntry]] = self._all("finish_save", interruptible=False)
        for rank, entries in enumerate(found):
            for entry in entries:
                entry["path"] = f"{self.role}/{entry['path']}"
                entry["rank"] = rank
        return [entry for entries in found for entry in entries]

    def save_hf(self, directory: str) -> None:
        self._all("save_hf", directory)

    def copy_weights(self, source: ModelTag, target: ModelTag) -> None:
        self._all("copy_weights", source, target)

    def refresh_old_actor(self, behind: bool) -> None:
        self._all("refresh_old_actor", behind)

    def sleep(self, keep_weights: bool = False) -> None:
        """Give accelerator memory back, with ``keep_weights`` but for the weights. Nothing if asleep already."""
        if self.resident != "nothing":
            self._all("sleep", keep_weights)
            self.resident = "weights" if keep_weights else "nothing"

    def wake(self) -> None:
        """Take all of it again. Nothing if awake already."""
        if self.resident != "everything":
            self._all("wake")
            self.resident = "everything"

    def memory(self) -> dict[str, float]:
        """GiB in use, see :func:`slime.observability.memory.memory_in_use`; the largest of any rank."""
        refs = [rank.memory.remote() for rank in self.ranks]
        each = self._call(refs, "to say what memory it uses", self.args.phase_timeout)
        return {name: max(used[name] for used in each) for name in each[0]}

    def measure_memory(self, share: float) -> list[Measurement]:
        """What each rank with a GPU finds."""
        refs = [rank.measure_memory.remote(share) for rank in self.ranks]
        found = self._call(refs, "to measure its memory", self.args.start_timeout)
        return [one for one in found if one is not None]

    def set_token_budgets(self, training: int, forward_only: int) -> None:
        self._all("set_token_budgets", training, forward_only)

    def close(self) -> None:
        """Let go of what outlives a process. A rank that hangs is not waited for."""
        import ray

        ray.get([rank.close.remote() for rank in self.ranks], timeout=CLOSE_DEADLINE_SECONDS)

    def _all(self, method: str, *arguments: Any, interruptible: bool = True) -> list[Any]:
        refs = [getattr(rank, method).remote(*arguments) for rank in self.ranks]
        return self._call(refs, f"to {method}", self.args.phase_timeout, interruptible=interruptible)

    def _call(self, refs: list[Any], what: str, deadline: float, interruptible: bool = True) -> list[Any]:
        what = f"the {self.role} {what}"
        return self.waiter.get(refs, what, deadline, actors=self._named, interruptible=interruptible)


OWN_THREADS = ("status", "try_folder")
"""Methods that answer while a step runs or a model is loaded, each on one thread of its own: a folder on a file system
that hangs must not keep ``status`` from answering, or the rank would look frozen."""


def remote_class(cls: type) -> Any:
    """The Ray actor class of ``cls``, with a concurrency group of one thread for each of :data:`OWN_THREADS`."""
    import ray

    names = [name for name in OWN_THREADS if hasattr(cls, name)]
    aside = {name: ray.method(concurrency_group=name)(getattr(cls, name)) for name in names}
    make: Any = ray.remote(concurrency_groups=dict.fromkeys(names, 1))  # type: ignore[call-overload]
    return make(type(cls.__name__, (cls,), aside))
