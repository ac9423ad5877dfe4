"""Profile the time (``--use-pytorch-profiler``) and the memory (``--record-memory-history``) of a training rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from slime.observability.best_effort import best_effort

if TYPE_CHECKING:
    from slime.config.args import Args

TARGET_OF_PHASE = {
    **dict.fromkeys(("log_probs", "ref_log_probs", "teacher_log_probs", "values"), "train_log_probs"),
    **dict.fromkeys(("actor_train", "critic_train"), "train_actor"),
}
_KEPT_EVENTS = 1_000_000


class Profiler:
    """The profiler of one training rank. Without the flags it does nothing.

    Traces are written to ``<folder>/train-<role>-<rank>-<target>-<rollout>.json.gz``, for Perfetto or chrome://tracing.
    Memory snapshots are written to ``memory-<role>-<rank>.pickle``, for pytorch.org/memory_viz.
    """

    def __init__(self, args: Args, folder: Path, role: str, rank: int) -> None:
        self.args, self.folder, self.name = args, folder, f"{role}-{rank}"
        self.rollout_id = -1
        self.rollouts = 0
        self.profiling = False
        if args.record_memory_history:
            import torch

            torch.cuda.memory._record_memory_history(max_entries=_KEPT_EVENTS)

    @contextmanager
    def rollout(self, rollout_id: int) -> Iterator[None]:
        """Profile the block as the trainer's work on one rollout."""
        self.rollout_id = rollout_id
        with self._target("train_overall"):
            yield
        self.rollouts += 1
        if self.args.record_memory_history and self.rollouts == (self.args.memory_snapshot_num_steps or 1):
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
        """Profile the block if ``--profile-target`` names it. Inside another target, it becomes part of that trace."""
        args = self.args
        due = args.use_pytorch_profiler and args.profile_step_start <= self.rollout_id < args.profile_step_end
        if not due or self.profiling or target not in args.profile_target:
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
            profile.export_chrome_trace(str(self.folder / f"train-{self.name}-{target}-{self.rollout_id:06d}.json.gz"))

    def _save_memory(self) -> None:
        import torch

        folder = Path(self.args.memory_snapshot_dir or self.folder)
        with best_effort("the memory snapshot of the trainer"):
            folder.mkdir(parents=True, exist_ok=True)
            torch.cuda.memory._dump_snapshot(str(folder / f"memory-{self.name}.pickle"))
        torch.cuda.memory._record_memory_history(enabled=None)
