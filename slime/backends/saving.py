"""What a rank writes of a snapshot: files with their digests, also while training goes on (``--async-save``)."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from slime.checkpoint.files import FileEntry, describe_files
from slime.checkpoint.snapshot import SnapshotError, damaged_part
from slime.weights.torch_dist import META


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


def in_background(write: Callable[[], list[FileEntry]]) -> BackgroundSave:
    """Call ``write`` on a thread of its own."""
    pool = ThreadPoolExecutor(1, thread_name_prefix="save")
    written = pool.submit(write)
    pool.shutdown(wait=False)
    return BackgroundSave(written)


def new_save_group(args: Any) -> Any:
    """The ranks as a group for the collectives of ``--async-save``, which overlap those of training; a collective.

    None without ``--async-save``, or without a process group.
    """
    return dist.new_group(backend="gloo") if args.async_save and dist.is_initialized() else None


def small_files_writer(
    path: Path, rank: int, rng: Mapping[str, Any], description: Mapping[str, Any] | None
) -> Callable[[], list[FileEntry]]:
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
