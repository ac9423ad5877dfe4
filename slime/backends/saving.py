"""The files that a rank writes of a snapshot, with their digests; also during training
(``--async-save``).
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import torch
import torch.distributed as dist
from torch import Tensor

from slime.backends.bank import WeightBank
from slime.backends.collectives import gather_objects
from slime.backends.tensor_index import META
from slime.backends.tensor_shards import ShardMemory, TensorShard, write_shards
from slime.backends.trainable import TrainedAdapter, require_fit
from slime.checkpoint.files import DigestedFile, FileEntry, describe_files
from slime.checkpoint.snapshot import SnapshotError, damaged_part
from slime.config.args import Args
from slime.data.plain_values import save_value

Write = Callable[[], list[FileEntry]]
"""Writes this rank's files and returns them."""


class RngState(TypedDict):
    """The states of a rank's random-number generators."""

    cpu: Tensor
    cuda: NotRequired[Tensor]
    tracker: NotRequired[dict[str, Tensor]]
    """Megatron's own generators, by name."""


class BackgroundSave:
    """A save on a thread of its own, whose tensors are copied already. ``written`` is done when
    this rank's files are written. :meth:`finish` raises the errors of the writer, which
    :meth:`repeat` calls again."""

    def __init__(self, write: Write) -> None:
        self._write = write
        self.repeat()

    def repeat(self) -> None:
        pool = ThreadPoolExecutor(1, thread_name_prefix="save")
        self.written: Future[list[FileEntry]] = pool.submit(self._write)
        pool.shutdown(wait=False)

    def done(self) -> bool:
        return self.written.done()

    def finish(self, seconds: float) -> list[FileEntry]:
        """Wait for this rank's files and return them.

        Raises:
            TimeoutError: The files were not written in time.
        """
        try:
            return self.written.result(seconds)
        except TimeoutError as error:
            raise TimeoutError(
                f"a snapshot was not written within {seconds:g} s (--phase-timeout)"
            ) from error


def small_files_writer(
    path: Path, rank: int, rng: RngState, description: Mapping[str, object] | None
) -> Write:
    """Return a function that writes a rank's random state below ``path``, and the description of
    the folder, if given.

    Both are captured now, so it does not matter when the function is called.
    """
    # The description becomes text now: what it refers to may have changed when the file is written.
    text = None if description is None else json.dumps(description, indent=2) + "\n"

    def write() -> list[FileEntry]:
        with DigestedFile(path / f"rng_{rank}.pt") as file:
            save_value(rng, file)
        if text is None:
            return [file.entry(path)]
        (path / META).write_text(text)
        return [file.entry(path), *describe_files([path / META], path)]

    return write


@dataclass
class SavedState(ABC):
    """The part of the training state on a rank. All ranks must call every method together.

    With an adapter (LoRA), only it is saved, with the identity of its base.
    """

    args: Args
    role: str
    rank: int
    world_size: int
    bank: WeightBank
    adapter: TrainedAdapter | None

    def __post_init__(self) -> None:
        self.memory = ShardMemory()
        # Of all ranks, for the collectives of --async-save, which overlap those of training.
        asynchronous = self.args.async_save and dist.is_initialized()
        self.group = dist.new_group(backend="gloo") if asynchronous else None

    @abstractmethod
    def written(self, path: Path) -> dict[Path, list[TensorShard]]:
        """Return the shards that this rank writes, by folder in ``path``."""

    @abstractmethod
    def describe(self) -> dict[str, object]:
        """Return what the folder says about itself. This is a collective operation."""

    @abstractmethod
    def load(self, path: Path) -> None:
        """Load what :meth:`writer` wrote, with any number of ranks."""

    def take_memory(self) -> None:
        """Allocate the memory for the copies of asynchronous saves on a thread, during training.
        Only the first call does this."""
        if not self.memory.is_taken:
            self.memory.take(chain.from_iterable(self.written(Path()).values()))

    def folders(self, path: Path) -> list[Path]:
        """Return the folders that must exist before any rank writes."""
        return [path]

    def rng(self) -> RngState:
        """Return the states of the random-number generators in this process."""
        state: RngState = {"cpu": torch.get_rng_state()}
        if torch.cuda.is_initialized():
            state["cuda"] = torch.cuda.get_rng_state()
        return state

    def writer(self, path: Path) -> Write:
        """Return a function that writes the current state below ``path``. The caller must hide an
        incomplete folder.

        With ``--async-save`` everything is copied first, so that the function may be called during
        training.
        """
        for folder in self.folders(path) if self.rank == 0 else ():
            folder.mkdir(parents=True, exist_ok=True)
        if self.world_size > 1:
            dist.barrier()
        write = self.tensors_writer(path)
        description = self.describe()
        small = small_files_writer(
            path, self.rank, self.rng(), description if self.rank == 0 else None
        )
        # The collective operations come first: a rank that fails before them would leave the others
        # waiting.
        return lambda: [*write(), *small()]

    def tensors_writer(self, path: Path) -> Write:
        """Return a function that writes the tensors."""
        folders = self.written(path)
        group = None
        if self.args.async_save:
            # Training continues while these are written, so they are copies, and the collectives of
            # the writer use a separate group. In the default group they would be mixed with those
            # of the next step.
            copied = iter(self.memory.copied(chain.from_iterable(folders.values())))
            folders = {folder: list(islice(copied, len(x))) for folder, x in folders.items()}
            group = self.group
        return lambda: [
            entry
            for folder, shards in folders.items()
            for entry in write_shards(shards, folder, path, group)
        ]

    def require_fit(self, path: Path, meta: Mapping[str, Any]) -> None:
        """Refuse a snapshot of the other role, of another adapter or with a damaged file. This is a
        collective operation.

        Args:
            meta: What the folder says about itself.

        Raises:
            ValueError: It is of the other role or of another adapter.
            SnapshotError: A file has changed since it was written.
        """
        if meta["role"] != self.role:
            raise ValueError(
                f"{path} contains the state of the {meta['role']}, not of the {self.role}"
            )
        require_fit(self.adapter, path, meta.get("lora"))
        _require_undamaged(path, self.rank, self.world_size)

    def load_rng(self, path: Path) -> RngState | None:
        """Set torch's random-number generators as this rank's were, and return their states; None
        if there are none, or the flags leave them out.
        """
        file = path / f"rng_{self.rank}.pt"
        if self.args.no_load_rng or self.args.finetune or not file.is_file():
            return None
        state: RngState = torch.load(file, weights_only=True)
        torch.set_rng_state(state["cpu"])
        if "cuda" in state and torch.cuda.is_available():
            torch.cuda.set_rng_state(state["cuda"])
        return state


def _require_undamaged(folder: Path, rank: int, ranks: int) -> None:
    """Compare the digests of the files in a snapshot's ``folder``, which are divided among the
    ranks.

    This is a collective operation.

    Raises:
        SnapshotError: A rank found damage. The error is raised on all ranks.
    """
    found = gather_objects(damaged_part(folder, rank, ranks))
    if problems := [problem for problem in found if problem]:
        raise SnapshotError("\n".join(problems))
