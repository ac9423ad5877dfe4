"""What a rank writes of a snapshot: files with their digests, also while training goes on (``--async-save``)."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, NotRequired, Protocol, TypedDict

import torch
import torch.distributed as dist
from torch import Tensor

from slime.checkpoint.files import FileEntry, describe_files
from slime.checkpoint.snapshot import SnapshotError, damaged_part
from slime.config.args import Args
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
    """What a rank has of the training state. Every method is called on all ranks together."""

    def take_memory(self) -> None:
        """Get the memory that the first asynchronous save copies into, on a thread, while training goes on; once."""

    def writer(self, path: Path) -> Write:
        """A function that writes the state as it is now below ``path``. A half-written folder is the caller's to hide.

        With ``--async-save`` everything is copied at once, so that the function may be called while training goes on.
        """

    def load(self, path: Path) -> None:
        """Read what :meth:`writer` wrote, whatever the number of ranks was."""


class BackgroundSave:
    """Tensors were copied; ``written`` is done when this rank's files are there. Errors of the writer are raised by
    :meth:`finish`."""

    def __init__(self, written: Future[list[FileEntry]]) -> None:
        self.written = written

    def done(self) -> bool:
        return self.written.done()

    def finish(self, seconds: float) -> list[FileEntry]:
        """Wait for this rank's files and return them.

        Raises:
            TimeoutError: they were not there in time.
        """
        try:
            return self.written.result(seconds)
        except TimeoutError as error:
            raise TimeoutError(f"a snapshot was not written within {seconds:g} s (--phase-timeout)") from error


def in_background(write: Write) -> BackgroundSave:
    """Call ``write`` on a thread of its own."""
    pool = ThreadPoolExecutor(1, thread_name_prefix="save")
    written = pool.submit(write)
    pool.shutdown(wait=False)
    return BackgroundSave(written)


def new_save_group(args: Args) -> ProcessGroup | None:
    """The ranks as a group for the collectives of ``--async-save``, which overlap those of training; a collective.

    None without ``--async-save``, or without a process group.
    """
    return dist.new_group(backend="gloo") if args.async_save and dist.is_initialized() else None


def small_files_writer(path: Path, rank: int, rng: RngState, description: Mapping[str, object] | None) -> Write:
    """A function that writes a rank's random state below ``path``, and what describes the folder where that is given.

    Both are written as they are now, whenever the function is called.
    """
    text = None if description is None else json.dumps(description, indent=2) + "\n"

    def write() -> list[FileEntry]:
        files = [path / f"rng_{rank}.pt"]
        torch.save(rng, files[0])
        if text is not None:
            files.append(path / META)
            files[1].write_text(text)
        return describe_files(files, path)

    return write


def rng_state() -> RngState:
    """The states of torch's generators in this process."""
    state: RngState = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_rng_state(state: RngState) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def require_undamaged(folder: Path, rank: int, ranks: int) -> None:
    """Each rank reads its share of the files of a snapshot's ``folder`` and compares their digests; a collective.

    Raises:
        SnapshotError: on all ranks, if one of them found damage.
    """
    found: list[str | None] = [damaged_part(folder, rank, ranks)]
    if ranks > 1:
        mine, found = found[0], [None] * ranks
        dist.all_gather_object(found, mine)
    if problems := [problem for problem in found if problem]:
        raise SnapshotError("\n".join(problems))
