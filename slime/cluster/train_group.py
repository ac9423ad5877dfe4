"""The training ranks of one role, as the driver sees them."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Concatenate, Literal, ParamSpec, TypeVar

from slime.cluster.actors import ActorHandle, ActorProcess, Ref, door
from slime.cluster.placement import Placement, pinning_environment, thread_environment
from slime.cluster.train_actor import Batches, Entries, Role, TrainActor, TrainResult
from slime.config.cluster import environment_texts
from slime.config.layout import ParallelLayout
from slime.config.settings import role_args

if TYPE_CHECKING:
    from slime.backends.base import ModelTag
    from slime.backends.token_budget import Measurement
    from slime.checkpoint.files import Answer, FileEntry
    from slime.cluster.ray_wait import Waiter
    from slime.config.args import Args
    from slime.engines.keys import ServerKeys
    from slime.observability.progress import Span
    from slime.weights.update import UpdateReport

P = ParamSpec("P")
T = TypeVar("T")
CLOSE_DEADLINE_SECONDS = 10.0
END_SECONDS = 30.0


class TrainGroup:
    """All training ranks of one role. Every call waits for all ranks, and fails as soon as one of
    them fails.
    """

    def __init__(
        self,
        args: Args,
        role: Role,
        placement: Placement,
        waiter: Waiter,
        log_dir: Path,
        load_path: Path | None,
        engine_keys: ServerKeys,
    ) -> None:
        args = role_args(args, role)
        self.args = args
        self.role = role
        self.waiter = waiter
        self.layout = ParallelLayout.from_args(args)
        world_size = self.layout.world_size
        own = {
            **thread_environment(args.threads_per_process),
            **environment_texts(args.train_env_vars),
        }
        environment = {
            # A collective that times out leaves a record of each rank's last operations, which
            # slime doctor compares.
            "TORCH_FR_DUMP_TEMP_FILE": str(log_dir / f"flight_recorder_{role}_rank_"),
            "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
            **own,
            **pinning_environment(own),
        }
        self.ranks = ranks = [
            door().create(
                TrainActor,
                args,
                role,
                rank,
                world_size,
                log_dir,
                engine_keys,
                options=placement.train_options(rank, role),
                environment=environment,
                own_threads=True,
            )
            for rank in range(world_size)
        ]
        self.resident: Literal["everything", "weights", "nothing"] = "everything"
        """What is on the accelerator; changes only if trainers and engines take turns
        (``--offload-train``).
        """
        self._named = {f"{role} rank {rank}": actor for rank, actor in enumerate(ranks)}
        # Rank 0 chooses a free port on its own node, before any rank joins the process group there.
        self.host, port = self._call([ranks[0].address.remote()], "to start", starting=True)[0]
        self._processes: list[ActorProcess] = []
        self._asked = [rank.process.remote() for rank in ranks]
        self.starting = [rank.import_backend.remote() for rank in ranks]
        # Each rank reads its own shards, and those of other ranks if their number has changed since
        # the snapshot.
        self._init = self.host, port, load_path

    def load(self) -> None:
        """Let the ranks load their models in the background, which takes memory of their GPUs."""
        self.starting += [rank.init.remote(*self._init) for rank in self.ranks]

    def wait_started(self) -> None:
        self._processes = self._call(self._asked, "to start", starting=True)
        self._call(self.starting, "to load the model", starting=True)

    def try_folder(self, folder: str, token: str) -> dict[str, Answer]:
        """What each rank finds in a folder to which all of them must write, by name of the rank."""
        refs = [rank.try_folder.remote(folder, token, who) for who, rank in self._named.items()]
        answers = self._call(refs, "to look into --save", starting=True)
        return dict(zip(self._named, answers, strict=True))

    def run(
        self,
        method: Literal["score", "train"],
        rollout_id: int,
        batch_refs: Batches,
        entries: Sequence[Entries] | None = None,
    ) -> tuple[TrainResult, list[Entries]]:
        """Let every rank train on its part of a rollout, or run its forward passes.

        Args:
            entries: For each rank, what other passes have computed for its part.

        Returns:
            The result of rank 0, and for each rank what it has computed for others (the values of a
            critic).
        """
        return self.finish(self.begin(method, rollout_id, batch_refs, entries), rollout_id)

    def begin(
        self,
        method: Literal["score", "train"],
        rollout_id: int,
        batch_refs: Batches,
        entries: Sequence[Entries] | None = None,
    ) -> list[Ref[TrainResult]]:
        """Start what :meth:`run` does; :meth:`finish` waits for it."""
        return [
            getattr(rank, method).remote(rollout_id, part, entries[i] if entries else ())
            for i, (rank, part) in enumerate(self._parts(batch_refs))
        ]

    def finish(
        self, refs: Sequence[Ref[TrainResult]], rollout_id: int
    ) -> tuple[TrainResult, list[Entries]]:
        results = self._call(refs, f"to train on rollout {rollout_id}")
        return results[0], [result["entries"] for result in results]

    def entries_from(self, other: TrainGroup, entries: list[Entries]) -> list[Entries]:
        """For each rank, where to find what the ranks of ``other`` have computed for its samples."""
        if other.layout == self.layout:
            return entries
        # The ranks of one data-parallel group of ``other`` have computed the same.
        once: dict[int, Entries] = {}
        for rank, of_rank in enumerate(entries):
            once.setdefault(other.layout.data_rank(rank), of_rank)
        return [[*chain.from_iterable(once.values())]] * len(self.ranks)

    def _parts(self, batch_refs: Batches) -> list[tuple[ActorHandle, Batches]]:
        # Ranks of one data-parallel group (tensor, pipeline, context parallel) get the same part of
        # the batch.
        return [(rank, [batch_refs[self.layout.data_rank(i)]]) for i, rank in enumerate(self.ranks)]

    def update_weights(
        self,
        engine_urls: Sequence[str],
        version: str,
        same_host: bool,
        slots: Mapping[str, range],
        model: ModelTag = "actor",
        check_equal: bool = False,
    ) -> UpdateReport:
        """Send the weights, or a copy of them, to the engines.

        Returns:
            One report. Several ranks may send at the same time; the times are those of the slowest.
        """
        reports = self.ask_all(
            f"to send weights {version}",
            TrainActor.update_weights,
            engine_urls,
            version,
            same_host,
            slots,
            # A repeated update has the same version. The random part keeps it from reading store
            # keys of the first attempt.
            f"weights-{version}-{secrets.token_hex(8)}",
            model,
            check_equal,
        )
        sent = [report for report in reports if report is not None]
        slowest = {
            name: max(getattr(report, name) for report in sent)
            for name in ("seconds", "pause_seconds", "audit_seconds")
        }
        return dataclasses.replace(sent[0], **slowest)

    def check_probe(self, engine_urls: Sequence[str]) -> float:
        """Largest log-prob difference between trainer and engines on a fixed sequence; rank 0 asks
        the engines.
        """
        asked = [self.ranks[0].check_probe.remote(engine_urls)]
        return float(self._call(asked, "to compare log-probs with the engines")[0])

    def save(self, directory: Path) -> None:
        self.ask_all("to save", TrainActor.save, directory / self.role)

    def repeat_save(self) -> None:
        """Let all ranks write again what they copied in :meth:`save` (``--async-save``)."""
        self.ask_all("to repeat a save", TrainActor.repeat_save)

    def is_saving(self) -> bool:
        """Whether a rank is still writing what :meth:`save` began (``--async-save``)."""
        return any(self.ask_all("to report whether it is saving", TrainActor.is_saving))

    def finish_save(self) -> list[FileEntry]:
        """The files of all ranks, with paths relative to the snapshot, for its manifest."""
        of_ranks = self.ask_all("to save", TrainActor.finish_save)
        for rank, entries in enumerate(of_ranks):
            for entry in entries:
                entry["path"] = f"{self.role}/{entry['path']}"
                entry["rank"] = rank
        return [*chain.from_iterable(of_ranks)]

    def save_hf(self, directory: Path) -> None:
        self.ask_all("to write --save-hf", TrainActor.save_hf, directory)

    def copy_weights(self, source: ModelTag, target: ModelTag) -> None:
        self.ask_all("to copy weights", TrainActor.copy_weights, source, target)

    def sleep(self, keep_weights: bool = False) -> None:
        """Release accelerator memory, with ``keep_weights`` all but the weights. Does nothing if
        already asleep.
        """
        if self.resident != "nothing":
            self.ask_all("to sleep", TrainActor.sleep, keep_weights)
            self.resident = "weights" if keep_weights else "nothing"

    def wake(self) -> None:
        """Take all accelerator memory again. Does nothing if already awake."""
        if self.resident != "everything":
            self.ask_all("to wake", TrainActor.wake)
            self.resident = "everything"

    def memory(self) -> dict[str, float]:
        """GiB in use, the maximum over all ranks; see
        :func:`slime.observability.profiler.memory_in_use`.
        """
        each = self.ask_all("to report its memory", TrainActor.memory)
        return {name: max(used[name] for used in each) for name in each[0]}

    def pop_spans(self) -> list[Span]:
        """What each rank has done since the last call."""
        each = self.ask_all("to report its timed phases", TrainActor.pop_spans)
        return [*chain.from_iterable(each)]

    def measure_memory(self, share: float) -> list[Measurement]:
        """The measurement of each rank that has a GPU."""
        each = self._call(
            self.start(TrainActor.measure_memory, share), "to measure its memory", starting=True
        )
        return [one for one in each if one is not None]

    def set_token_budgets(self, budgets: Mapping[str, int]) -> None:
        self.ask_all("to take the token budget", TrainActor.set_token_budgets, budgets)

    def close(self) -> None:
        """Release what would outlive the processes. The wait is short, so a rank that hangs does
        not delay the end.
        """
        door().get(self.start(TrainActor.close), timeout=CLOSE_DEADLINE_SECONDS)

    def end(self) -> None:
        """Kill all ranks, also frozen ones, and wait until their processes have ended and their
        memory is free.

        Raises:
            NotEnded: A process still runs.
            ActorError: The node of a rank does not answer.
        """
        for rank in self.ranks:
            door().kill(rank)
        door().end_processes(self._processes, END_SECONDS)

    def start_on_parts(
        self,
        method: Callable[Concatenate[TrainActor, Batches, P], T],
        batch_refs: Batches,
        *arguments: P.args,
        **keywords: P.kwargs,
    ) -> list[Ref[T]]:
        """Start a call on all ranks, each with its part of a batch."""
        return [
            getattr(rank, method.__name__).remote(part, *arguments, **keywords)
            for rank, part in self._parts(batch_refs)
        ]

    def start(
        self,
        method: Callable[Concatenate[TrainActor, P], T],
        *arguments: P.args,
        **keywords: P.kwargs,
    ) -> list[Ref[T]]:
        """Start a call on all ranks."""
        return [
            getattr(rank, method.__name__).remote(*arguments, **keywords) for rank in self.ranks
        ]

    def ask_all(
        self,
        what: str,
        method: Callable[Concatenate[TrainActor, P], T],
        *arguments: P.args,
        **keywords: P.kwargs,
    ) -> list[T]:
        """Call all ranks and wait for their results."""
        return self._call(self.start(method, *arguments, **keywords), what)

    def _call(self, refs: Sequence[Ref[T]], what: str, starting: bool = False) -> list[T]:
        args = self.args
        deadline, flag = args.phase_timeout, "--phase-timeout"
        if starting:
            deadline, flag = args.start_timeout, "--start-timeout"
        return self.waiter.get(
            refs, f"the {self.role} {what}", deadline, actors=self._named, flag=flag
        )
