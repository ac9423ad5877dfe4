"""Profile the time (``--use-pytorch-profiler``) and the memory (``--record-memory-history``) of a
training rank, and measure the memory of a process for the log of colocated runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from slime.observability.files import best_effort

TARGET_OF_PHASE = {
    **dict.fromkeys(
        ("log_probs", "ref_log_probs", "teacher_log_probs", "values"), "train_log_probs"
    ),
    **dict.fromkeys(("actor_train", "critic_train"), "train_actor"),
}
_KEPT_EVENTS = 1_000_000
GIB = 2**30


class Profiler:
    """The profiler of one training rank.

    Traces are written to ``<folder>/train-<name>-<target>-<rollout>.json.gz``, for Perfetto or
    chrome://tracing. Memory snapshots are written to ``<memory_folder>/memory-<name>.pickle``, for
    pytorch.org/memory_viz.

    Args:
        name: Role and rank, such as ``actor-0``.
        profiled: The ids of the rollouts that are profiled; an empty range profiles none.
        targets: The parts to profile (``--profile-target``).
        memory_until: Number of rollouts after which the memory snapshot is written; 0 records no
            memory.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        profiled: range,
        targets: Sequence[str],
        memory_until: int,
        memory_folder: Path,
    ) -> None:
        self.name = name
        self.folder = folder
        self.profiled = profiled
        self.targets = targets
        self.memory_until = memory_until
        self.memory_folder = memory_folder
        self.rollout_id = -1
        self.rollouts = 0
        self.profiling = False
        if memory_until:
            import torch

            torch.cuda.memory._record_memory_history(max_entries=_KEPT_EVENTS)

    @contextmanager
    def rollout(self, rollout_id: int) -> Iterator[None]:
        """Profile the block as the trainer's work on one rollout."""
        self.rollout_id = rollout_id
        with self._target("train_overall"):
            yield
        self.rollouts += 1
        if self.rollouts == self.memory_until:
            self._save_memory()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Profile the block as one phase of training, with the name as in ``perf/<name>_time``."""
        import torch

        with self._target(TARGET_OF_PHASE.get(name)):
            if self.profiling:
                with torch.profiler.record_function(name):
                    yield
            else:
                yield

    @contextmanager
    def _target(self, target: str | None) -> Iterator[None]:
        """Profile the block if ``--profile-target`` names it. Inside another target, it becomes
        part of that trace.
        """
        # A profile inside a profile is not possible: the inner block is a part of the outer trace.
        if self.rollout_id not in self.profiled or self.profiling or target not in self.targets:
            yield
            return
        import torch

        self.profiling = True
        try:
            with torch.profiler.profile(record_shapes=True) as profile:
                yield
        finally:
            self.profiling = False
        with best_effort("profiles of the trainer"):
            self.folder.mkdir(parents=True, exist_ok=True)
            profile.export_chrome_trace(
                str(self.folder / f"train-{self.name}-{target}-{self.rollout_id:06d}.json.gz")
            )

    def _save_memory(self) -> None:
        import torch

        with best_effort("the memory snapshot of the trainer"):
            self.memory_folder.mkdir(parents=True, exist_ok=True)
            torch.cuda.memory._dump_snapshot(str(self.memory_folder / f"memory-{self.name}.pickle"))
        torch.cuda.memory._record_memory_history(enabled=None)


def memory_in_use() -> dict[str, float]:
    """Return the memory use of this process and of its GPU in GiB.

    Returns:
        ``process``: resident CPU memory, including pinned memory. With CUDA also ``tensors`` (live
        tensors of this process), ``reserved`` (memory of its allocator) and ``device`` (memory in
        use by all processes together).
    """
    import psutil

    used = {"process": psutil.Process().memory_info().rss / GIB}
    import torch

    if torch.cuda.is_initialized():
        free, total = torch.cuda.mem_get_info()
        used["tensors"] = torch.cuda.memory_allocated() / GIB
        used["reserved"] = torch.cuda.memory_reserved() / GIB
        used["device"] = (total - free) / GIB
    return used
