"""The files that a rank writes of a snapshot, with their digests; also during training
(``--async-save``).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, NotRequired, Protocol, TypedDict

import torch
import torch.distributed as dist
from torch import Tensor

from slime.checkpoint.files import DigestedFile, FileEntry, describe_files
from slime.checkpoint.snapshot import SnapshotError, damaged_part
from slime.data.value_files import save_value
from slime.weights.torch_dist import META

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Write = Callable[[], list[FileEntry]]
"""Writes this rank's files and returns them."""


class RngState(TypedDict):
    """The states of a rank's random-number generators."""

    cpu: Tensor
    cuda: NotRequired[Tensor]
    tracker: NotRequired[dict[str, Tensor]]
    """Megatron's own generators, by name."""


class SavedState(Protocol):
    """The part of the training state on a rank. All ranks must call every method together."""

    def take_memory(self) -> None:
        """Allocate the memory for the copies of asynchronous saves on a thread, during training.
        Only the first call does this."""

    def writer(self, path: Path) -> Write:
        """Return a function that writes the current state below ``path``. The caller must hide an
        incomplete folder.

        With ``--async-save`` everything is copied first, so that the function may be called during
        training.
        """

    def load(self, path: Path) -> None:
        """Load what :meth:`writer` wrote, with any number of ranks."""


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


def new_save_group(asynchronous: bool) -> ProcessGroup | None:
    """Create a group of all ranks for the collectives of ``--async-save``, which overlap those of
    training.

    This is a collective operation. The result is None if saves are not ``asynchronous`` or without
    a process group.
    """
    return dist.new_group(backend="gloo") if asynchronous and dist.is_initialized() else None


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


def rng_state() -> RngState:
    """Return the states of torch's random-number generators in this process."""
    state: RngState = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_rng_state(state: RngState) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def require_undamaged(folder: Path, rank: int, ranks: int) -> None:
    """Compare the digests of the files in a snapshot's ``folder``, which are divided among the
    ranks.

    This is a collective operation.

    Raises:
        SnapshotError: A rank found damage. The error is raised on all ranks.
    """
    found: list[str | None] = [damaged_part(folder, rank, ranks)]
    if ranks > 1:
        mine = found[0]
        found = [None] * ranks
        dist.all_gather_object(found, mine)
    if problems := [problem for problem in found if problem]:
        raise SnapshotError("\n".join(problems))
