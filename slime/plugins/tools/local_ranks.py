"""Run a function on each of several training ranks, which are processes of this machine, without
Ray.
"""

from __future__ import annotations

import importlib
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime.cli.command import CommandError
from slime.cluster.placement import thread_environment
from slime.config.hooks import SAFE_PATH
from slime.config.process import import_environment, module_command
from slime.engines.process import free_port

POLL_SECONDS = 0.05
LOG_LINES = 25
"""The number of last lines of the log of a rank that failed that the error message contains."""
TASK = "task.pkl"


class RankError(CommandError):
    """A rank ended with an error, or took too long. The message is that of slime's own error, or
    the end of its log.
    """


@dataclass(frozen=True)
class Place:
    """One rank, and where rank 0 listens for the rendezvous of the process group."""

    rank: int
    world_size: int
    port: int
    address: str = "127.0.0.1"


def run_ranks(
    function: str,
    world_size: int,
    argument: object,
    folder: Path,
    *,
    threads: int = 1,
    variables: Mapping[str, str] | None = None,
    seconds: float = 3600.0,
    modules: Sequence[str] = (),
) -> list[Any]:
    """Call ``function(place, argument)`` in ``world_size`` new processes and return the results by
    rank.

    They import nothing from the working directory, which may be a folder that somebody else has
    made.

    Args:
        function: ``package.module:name``, which the processes import.
        argument: Any value that can be pickled.
        folder: An empty folder for the logs ``rank<i>.log`` and for the results.
        threads: CPU threads of each process.
        variables: Further environment variables.
        seconds: The deadline for all ranks together.
        modules: Folders in which the processes look for modules after all others.

    Raises:
        RankError: A rank failed or the deadline has passed. All other ranks are ended.
    """
    folder.mkdir(parents=True, exist_ok=True)
    port = free_port("127.0.0.1")
    (folder / TASK).write_bytes(pickle.dumps((function, world_size, port, argument, list(modules))))
    environment = {
        **os.environ,
        **thread_environment(threads),
        **import_environment(here=False),
        **SAFE_PATH,
    }
    environment |= variables or {}
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(world_size):
            with open(folder / f"rank{rank}.log", "wb") as log:
                command = [
                    *module_command("slime.plugins.tools.local_ranks"),
                    str(folder),
                    str(rank),
                ]
                ranks.append(
                    subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
                )
        _wait(ranks, folder, seconds)
    finally:
        for process in ranks:
            if process.poll() is None:
                process.kill()
            process.wait()
    return [pickle.loads((folder / f"rank{rank}.pkl").read_bytes()) for rank in range(world_size)]


def _wait(ranks: list[subprocess.Popen[bytes]], folder: Path, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    codes = [process.poll() for process in ranks]
    # A rank that failed leaves the others waiting in a collective operation.
    while None in codes and not any(codes) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
        codes = [process.poll() for process in ranks]
    for rank, code in enumerate(codes):
        if code and (refusal := folder / f"rank{rank}.refusal").is_file():
            raise RankError(refusal.read_text(encoding="utf-8"))
        if code:
            raise RankError(
                f"rank {rank} of {len(ranks)} failed (exit code {code}):\n{_end(folder, rank)}"
            )
    if None in codes:
        slow = codes.index(None)
        raise RankError(
            f"rank {slow} of {len(ranks)} did not finish within {seconds:g} s:\n"
            f"{_end(folder, slow)}"
        )


def _end(folder: Path, rank: int) -> str:
    text = (folder / f"rank{rank}.log").read_text(encoding="utf-8", errors="replace")
    return "\n".join(text.strip().splitlines()[-LOG_LINES:])


def _main(folder: Path, rank: int) -> None:
    function, world_size, port, argument, modules = pickle.loads((folder / TASK).read_bytes())
    sys.path.extend(modules)
    module, _, name = function.partition(":")
    try:
        result = getattr(importlib.import_module(module), name)(
            Place(rank, world_size, port), argument
        )
    except Exception as error:
        # written for the user, who needs no traceback
        if type(error).__module__.partition(".")[0] == "slime":
            (folder / f"rank{rank}.refusal").write_text(str(error), encoding="utf-8")
        raise
    (folder / f"rank{rank}.pkl").write_bytes(pickle.dumps(result))
    if "torch.distributed" in sys.modules:
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    _main(Path(sys.argv[1]), int(sys.argv[2]))
