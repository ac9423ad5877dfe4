"""Ranks of ``slime replay``, ``what-if``, ``gap`` and ``verify`` for tests whose subject is not a
rank's process: they are forked from the server of :mod:`quick_processes`, which has imported what
they need. Each spares five CPU seconds.
"""

from __future__ import annotations

import os
import subprocess
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pytest
from forked_engines import Child

from slime.plugins.tools import local_ranks


class ForkedRank(Child):
    """What of :class:`subprocess.Popen` :mod:`slime.plugins.tools.local_ranks` uses."""

    def __init__(
        self, command: list[str], env: dict[str, str], stdout: IO[bytes], stderr: int
    ) -> None:
        super().__init__(command, env, str(stdout.name), target=_run)


@contextmanager
def forked_ranks() -> Iterator[None]:
    """Ranks that this process starts are forked."""
    started = types.SimpleNamespace(Popen=ForkedRank, STDOUT=subprocess.STDOUT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local_ranks, "subprocess", started)
        yield


def _run(command: list[str], environment: dict[str, str], log: str) -> None:
    """In the forked process: what the command does."""
    import torch

    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    folder, rank = command[-2:]
    local_ranks._main(Path(folder), int(rank))
