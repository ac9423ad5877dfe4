"""Processes of tests that start in a moment: they are forked from one that has imported what most
of them need.

That server is started with the first of these processes, with the environment of that moment, and
ends with the tests.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.context import ForkServerContext
from typing import Any

PRELOADED = [
    "torch",
    "torch.distributed.fsdp",
    "transformers",
    "slime.backends.fsdp.backend",
    "slime.backends.train_loop",
    "slime.plugins.embedded.app",
    "slime.plugins.embedded.loading",
    "frozen_imports",
]
"""The imports take five to ten CPU seconds, which each process that is spawned would take again."""


def context() -> ForkServerContext:
    """What :func:`multiprocessing.get_context` returns, for processes that are forked from that
    server.
    """
    made = multiprocessing.get_context("forkserver")
    made.set_forkserver_preload(PRELOADED)
    return made


def start_ranks(
    worker: Callable[..., None], args: tuple[Any, ...], count: int, join: bool = False
) -> Any:
    """Call ``worker(rank, *args)`` in ``count`` processes, as ``torch.multiprocessing.spawn``
    does.
    """
    import torch.multiprocessing as mp

    context()
    return mp.start_processes(worker, args=args, nprocs=count, join=join, start_method="forkserver")
