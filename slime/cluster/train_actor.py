"""One training rank: an actor with a backend, which sends weights and writes its part of each
snapshot.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Concatenate, Literal, ParamSpec, TypeAlias, TypedDict, TypeVar

from slime.backends.create import backend_class, create_backend
from slime.backends.token_budget import SAMPLE_TOKENS, CudaMeter, Measurement, measure
from slime.checkpoint.files import Answer, FileEntry, answer
from slime.cluster.actors import ActorProcess, Ref, door
from slime.config.process import ONE_AT_A_TIME
from slime.data.schedule import PackingSettings
from slime.engines.background import run
from slime.engines.handle import EngineHandle
from slime.engines.process import free_port
from slime.models.cpu_memory import large_imports
from slime.observability import progress
from slime.observability.profiler import Profiler, memory_in_use
from slime.weights.audit import Calibration, Probe, probe_engines, probe_tokens
from slime.weights.settings import WeightSyncSettings
from slime.weights.transports import Transport, create_transport, ranks_of_engines, transport_kind
from slime.weights.transports.peers import PeerLink, connect_store

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import Store
    from transformers import PreTrainedModel

    from slime.backends.base import ModelTag, TrainBackend
    from slime.backends.fsdp.backend import FsdpBackend
    from slime.backends.train_loop import Parts
    from slime.config.args import Args
    from slime.data.fields import RankBatch, TrainData, Wire
    from slime.engines.keys import ServerKeys
    from slime.types import AdamSettings
    from slime.weights.update import UpdateReport

P = ParamSpec("P")
T = TypeVar("T")
Role = Literal["actor", "critic"]
Batches: TypeAlias = "Sequence[Ref[Wire]]"
"""References to the parts of a rollout, one for each data-parallel rank."""
Entries: TypeAlias = "Sequence[Ref[TrainData]]"
"""References to entries that other passes have computed for the batch of one rank: the actor's
log-probs, and the critic's values from before its update."""


class TrainResult(TypedDict):
    """What a rank returns after a step. The metrics are equal on all ranks."""

    metrics: dict[str, float]
    timings: dict[str, float]
    entries: Entries


class TrainActor:
    """One rank. All calls run on one thread in the order of their arrival, except those in
    ``OWN_THREADS``.
    """

    def __init__(
        self,
        args: Args,
        role: Role,
        rank: int,
        world_size: int,
        log_dir: Path,
        engine_keys: ServerKeys,
    ) -> None:
        door().log_to(log_dir, f"train-{role}-{rank}")
        self.args = args
        self.role = role
        self.rank = rank
        self.world_size = world_size
        self.engine_keys = engine_keys
        self.timers = progress.Timers()  # of what this rank does, for the traces of rollouts
        self.weight_sync = WeightSyncSettings.from_args(args)
        traces = log_dir.parent / "traces"
        profiled = range(0)
        if args.use_pytorch_profiler:
            profiled = range(args.profile_step_start, args.profile_step_end)
        self.profiler = Profiler(
            f"{role}-{rank}",
            traces,
            profiled,
            args.profile_target,
            (args.memory_snapshot_num_steps or 1) if args.record_memory_history else 0,
            Path(args.memory_snapshot_dir or traces),
        )
        # of the rollout that is being generated (--train-during-rollout)
        self.early_parts: Parts | None = None
        # until init, the checkpoint in the memory of the CPU
        self.preloaded: PreTrainedModel | None = None
        self.backend: TrainBackend  # created by init
        self.transport: Transport | None = None
        self.same_host = True
        self.probe: Probe | None = None
        self.calibration: Calibration | None = None
        # URLs of the engines that have got an update from this rank
        self.updated_engines: set[str] = set()
        self.written: list[FileEntry] = []  # the files of the last save
        self.master = ("", 0)  # address and port of the process group's key-value store
        self.store: Store | None = None  # a connection to it

    def address(self) -> tuple[str, int]:
        """Address and port on which rank 0 will listen for the rendezvous of the process group."""
        host = door().address()
        return host, free_port(host)

    def process(self) -> ActorProcess:
        """The process of this rank."""
        return door().own_process()

    def import_backend(self) -> None:
        """Import what :meth:`init` needs, and read the checkpoint into the memory of the CPU, if
        the backend can. The GPU may belong to an engine that is still starting."""
        progress.report("import the training backend")
        # In one process, an engine loads its model meanwhile, and transformers cannot load two.
        with ONE_AT_A_TIME:
            backend = backend_class(self.args.train_backend)
            if self.args.compile_layers:
                with large_imports():
                    # takes seconds, which would be those of init
                    importlib.import_module("torch._inductor.compile_fx")
            if backend.read_ahead is not None and self.rank == 0 and door().own_gpus():
                progress.report("read the checkpoint")
                self.preloaded = backend.read_ahead(self.args)

    def init(self, master_addr: str, master_port: int, load_path: Path | None) -> None:
        """Join the process group, build the model, and load a snapshot if ``load_path`` names
        one.
        """
        progress.report(f"load {self.role}")
        args = self.args
        self.master = master_addr, master_port
        # An actor of Ray sees only its own GPU, as device 0.
        local_rank = 0 if door().own_gpus() else self.rank
        with ONE_AT_A_TIME:
            self.backend = create_backend(
                args,
                self.role,
                self.rank,
                self.world_size,
                master_addr,
                master_port,
                local_rank,
                self.preloaded,
            )
        self.preloaded = None
        if load_path is not None:
            self.backend.load(load_path)
        if args.compile_layers and self.backend.device.type == "cuda" and not args.debug_train_only:
            # While engines start: the pass of the first weight sync compiles the layers without
            # gradients. Passes of two sizes compile them for all sizes, but take memory, which an
            # engine on the same GPU measures, and a replay makes none.
            progress.report("compile the layers")
            if self.role == "actor":
                self._score_probe()
            if not (args.colocate or args.deterministic):
                for samples in 1, 2:
                    self.backend.rehearse(samples * SAMPLE_TOKENS)
            self.backend.clear_memory()
        self.weight_sync = self.weight_sync.for_adapter(self.backend.adapter_sync)

    def score(self, rollout_id: int, batch_ref: Batches, entries: Entries = ()) -> TrainResult:
        """Run the forward passes on this rank's part of a rollout, before either role trains on
        it.
        """
        from slime.backends.train_loop import score_rollout

        self.profiler.rollout_id = rollout_id
        batch = self._batch(batch_ref, entries)
        added, timings = score_rollout(self.backend, batch, self.profiler, self.timers)
        added["partition"] = batch["partition"]
        return {"metrics": {}, "timings": timings, "entries": [door().put(added)]}

    def train(self, rollout_id: int, batch_ref: Batches, entries: Entries = ()) -> TrainResult:
        """Train on this rank's part of a rollout.

        Args:
            batch_ref: A list with one reference. Ray would resolve a bare reference before the
                call, and hand over the data instead.
            entries: What other passes have computed for this batch.
        """
        from slime.backends.train_loop import train_on_rollout
        from slime.observability.debug_data import save_train_batches

        args = self.args
        batch = self._batch(batch_ref, entries)
        early_parts = self.early_parts
        self.early_parts = None
        with self.profiler.rollout(rollout_id):
            metrics, timings = train_on_rollout(
                self.backend, batch, self.profiler, self.timers, early_parts
            )
        # After a step, since the first one creates the optimizer's state, of which the memory must
        # hold a copy.
        if args.async_save and args.save:
            self.backend.take_save_memory()
        template = args.save_debug_train_data
        if template and self.role == "actor":
            save_train_batches(template, rollout_id, dict(batch), self.backend)
        # Engines on the same accelerator take memory next.
        if args.offload_train or args.offload_rollout:
            self.backend.clear_memory()
        # As a reference, so that the values go from the critic's rank to the actor's without the
        # driver in between.
        entries = ()
        if self.role == "critic":
            entries = [door().put({name: batch[name] for name in ("values", "partition")})]
        return {"metrics": metrics, "timings": timings, "entries": entries}

    def train_early_part(self, batch_ref: Batches, number: int) -> TrainResult:
        """Train on this rank's share of part ``number`` of a rollout, without an optimizer step."""
        from slime.backends.train_loop import Parts, train_early_part

        if self.early_parts is None or number == 0:
            self.early_parts = Parts()
        train_early_part(self._fsdp(), self._batch(batch_ref), self.early_parts, self.timers)
        return {"metrics": {}, "timings": {}, "entries": []}

    # --- the primitives of slime.Session -----------------------------------------------------

    def forward_backward(
        self, batch_ref: Batches, loss: str, options: Mapping[str, float]
    ) -> tuple[dict[str, float], list[Tensor]]:
        """See :func:`slime.backends.primitives.forward_backward`."""
        from slime.backends import primitives

        return primitives.forward_backward(self._fsdp(), self._batch(batch_ref), loss, options)

    def optim_step(self, adam: AdamSettings | None) -> dict[str, float]:
        """See :func:`slime.backends.primitives.optim_step`."""
        from slime.backends import primitives

        return primitives.optim_step(self._fsdp(), adam)

    def forward(self, batch_ref: Batches, temperature: float) -> list[Tensor]:
        """Return the log-probs of the scored tokens of this rank's samples."""
        return self.backend.log_probs(self._batch(batch_ref), temperature=temperature)["log_probs"]

    def load(self, directory: Path) -> None:
        """Load what :meth:`save` wrote, and drop the gradients."""
        self.backend.load(directory)
        self.backend.clear_memory()

    def on_backend(
        self, call: Callable[Concatenate[FsdpBackend, P], T], *arguments: P.args, **more: P.kwargs
    ) -> T:
        """Call a function with the backend, on the thread of this rank."""
        return call(self._fsdp(), *arguments, **more)

    def _fsdp(self) -> FsdpBackend:
        from slime.backends.fsdp.backend import FsdpBackend

        assert isinstance(self.backend, FsdpBackend), "slime.Session refuses other backends"
        return self.backend

    def _batch(self, batch_ref: Batches, entries: Entries = ()) -> RankBatch:
        from slime.data.fields import add_entries, to_rank_batch

        with self.timers("get_batch"):
            batch = to_rank_batch(door().get(batch_ref[:1])[0])
            add_entries(batch, door().get(entries))
        return batch

    def update_weights(
        self,
        engine_urls: Sequence[str],
        version: str,
        same_host: bool,
        slots: Mapping[str, range],
        token: str,
        model: ModelTag,
        check_equal: bool,
    ) -> UpdateReport | None:
        """Send this group's weights to the engines; ranks that send to engines return a report.

        Checksums are compared at once. The probe is scored later (:meth:`check_probe`), since
        colocated engines have no KV cache for it yet.

        Args:
            slots: By engine URL, its GPU slots; see :func:`ranks_of_engines`.
            token: Names this call; the same on all ranks.
            model: The copy of the weights to send.
            check_equal: The engines hold these weights already; see
                :func:`slime.weights.sync.sync_weights`.
        """
        from slime.weights.sync import sync_weights

        progress.report("update weights")
        backend = self.backend
        # An engine may read from several ranks. The first of them sends, the others only offer
        # their memory.
        ranks = ranks_of_engines(self.weight_sync, engine_urls, slots, self.world_size, same_host)
        urls = [url for url in engine_urls if ranks[url][0] == self.rank]
        if any(self.rank in places for places in ranks.values()):
            self.choose_transport(same_host)
        # Other ranks send to this rank's former engines now; these engines must not wait in its
        # process group.
        elif self.transport is not None:
            run(self.transport.close())
        with backend.using(model):
            # Scored now, while all ranks hold the weights: before the audit, a colocated trainer
            # goes to sleep.
            if self.weight_sync.sync.audit_weights:
                self.probe = self._score_probe()
            with self.timers("update_weights"):
                report = sync_weights(
                    self.weight_sync,
                    backend.named_weights(),
                    self._handles(urls),
                    self.transport,
                    version,
                    is_sender=bool(urls),
                    check_equal=check_equal,
                    peers=self._peers(ranks, token),
                    updated=self.updated_engines,
                    adapter=backend.adapter_source(),
                )
        if self.args.offload_rollout:  # The engines take memory for their KV cache next.
            backend.clear_memory()
        return report

    def _handles(self, urls: Sequence[str]) -> list[EngineHandle]:
        return [EngineHandle(url, keys=self.engine_keys) for url in urls]

    def _peers(self, ranks: Mapping[str, range], token: str) -> PeerLink | None:
        """The link between ranks that serve one engine together; None if every engine reads from
        one training rank.
        """
        if all(len(places) == 1 for places in ranks.values()):
            return None
        self.store = self.store or connect_store(*self.master, self.args.phase_timeout)
        return PeerLink(self.store, token, self.rank, ranks, self.args.phase_timeout)

    def choose_transport(self, same_host: bool) -> None:
        """Create the transport, and again if engines come back on other hosts; a folder serves all
        hosts.
        """
        moved = same_host != self.same_host and not transport_kind(self.weight_sync).through_folder
        if self.transport is not None and moved:
            run(self.transport.close())
            self.transport = None
        if self.transport is None:
            self.transport = create_transport(self.weight_sync, colocated_host=same_host)
            self.same_host = same_host

    def check_probe(self, engine_urls: Sequence[str]) -> float:
        """Let the engines score the probe; returns the largest log-prob difference from the
        trainer.

        Raises:
            WeightAuditError: An engine differs too much from the trainer or from the other engines.
        """
        self.calibration = self.calibration or Calibration()
        assert self.probe is not None, "weights are sent before they are audited"
        return run(
            probe_engines(
                self.weight_sync, self._handles(engine_urls), self.probe, self.calibration
            )
        )

    def _score_probe(self) -> Probe:
        """Score a fixed token sequence with the trainer's weights; all ranks take part in this."""
        from transformers import AutoConfig

        from slime.backends.train_loop import score_probe

        args = self.args
        config = AutoConfig.from_pretrained(
            args.hf_checkpoint, trust_remote_code=args.trust_remote_code
        )
        tokens = probe_tokens(config.get_text_config().vocab_size, args.seed)
        return Probe(tokens, score_probe(self.backend, tokens))

    def copy_weights(self, source: ModelTag, target: ModelTag) -> None:
        self.backend.copy_weights(source, target)

    def pop_spans(self) -> list[progress.Span]:
        """What this rank has done since the last call."""
        self.timers.pop()
        return [
            {**span, "process": f"{self.role} rank {self.rank}"} for span in self.timers.pop_spans()
        ]

    def save(self, directory: Path) -> None:
        with self.timers("save_model"):
            self.written = self.backend.save(directory)

    def repeat_save(self) -> None:
        """Write the files of the last :meth:`save` again, in the background as before
        (``--async-save``).

        All ranks must call this together.
        """
        assert self.backend.saving is not None, "no save in the background failed"
        self.backend.saving.repeat()

    def is_saving(self) -> bool:
        """Whether files of the last :meth:`save` are still being written (``--async-save``)."""
        return self.backend.saving is not None and not self.backend.saving.done()

    def finish_save(self) -> list[FileEntry]:
        """Wait until this rank's part of the last :meth:`save` is complete; returns its files."""
        if (saving := self.backend.saving) is not None:
            self.written = saving.finish(self.args.phase_timeout)
            self.backend.saving = None
        return self.written

    def save_hf(self, directory: Path) -> None:
        self.backend.save_hf(directory)

    def sleep(self, keep_weights: bool = False) -> None:
        self.backend.sleep(keep_weights)

    def wake(self) -> None:
        self.backend.wake()

    def memory(self) -> dict[str, float]:
        """GiB in use by this process and on its accelerator."""
        return memory_in_use()

    def measure_memory(self, share: float) -> Measurement | None:
        """Measure how many tokens fit into a micro-batch within ``share`` of the memory; None
        without CUDA.

        All ranks must call this together, since it runs collectives.
        """
        if self.backend.device.type != "cuda":
            return None
        return measure(self.backend, share, CudaMeter())

    def set_token_budgets(self, budgets: Mapping[str, int]) -> None:
        """Replace the values of the flags by measured ones."""
        self.args = self.args.with_values(**budgets)
        self.backend.args, self.backend.packing = self.args, PackingSettings.from_args(self.args)

    def close(self) -> None:
        """Leave the process groups of weight updates, and free their shared memory."""
        if self.transport is not None:
            run(self.transport.close())

    def try_folder(self, folder: str, token: str, who: str) -> Answer:
        """See :mod:`slime.checkpoint.files`."""
        return answer(folder, token, who)

    def status(self) -> progress.Progress:
        return progress.latest()
