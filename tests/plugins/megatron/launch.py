"""Ranks of Megatron's tests, forked from one process that has imported torch and megatron-core.

``run_ranks("module:function", n, *args)`` runs ``function(rank, ports, *args)`` in ``n`` processes;
``ports.get(key)`` is a free port that all ranks agree on, found when it is first needed. The
process that they are forked from is started once: its imports are most of what a small test costs.
"""

from __future__ import annotations

import functools
import gc
import importlib
import json
import os
import pickle
import select
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SECONDS = 800.0


class RanksError(Exception):
    """A rank has failed, or the ranks did not end in time; what they printed is on the standard
    error.
    """


def run_ranks(function: str, ranks: int, *args: Any, seconds: float = SECONDS) -> None:
    """Raises RanksError when one of them fails."""
    server = _server()
    assert server.stdin is not None and server.stdout is not None
    with tempfile.NamedTemporaryFile(suffix=".pkl") as file:
        pickle.dump(args, file)
        file.flush()
        server.stdin.write(json.dumps([function, ranks, file.name]) + "\n")
        server.stdin.flush()
        answer = (
            server.stdout.readline()
            if select.select([server.stdout], [], [], seconds)[0]
            else "no answer"
        )
    if answer != "done\n":
        server.kill()
        _server.cache_clear()
        raise RanksError(
            f"{function} with {ranks} ranks: {answer.strip() or 'the process has ended'} within "
            f"{seconds} s"
        )


@functools.cache
def _server() -> subprocess.Popen[str]:
    tests = HERE.parents[1]
    paths = [str(HERE), str(tests), str(tests / "backends"), str(tests.parent)]
    paths.append(os.environ.get("PYTHONPATH", ""))
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "OMP_NUM_THREADS": "1",
    }
    # A whole run (tests/e2e/test_preference_megatron.py) compiles what Megatron compiles; here each
    # rank would do so.
    environment["TORCHDYNAMO_DISABLE"] = "1"
    command = [sys.executable, "-W", "ignore", str(HERE / "launch.py")]
    return subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


class Ports:
    """A free port for each key, the same on every rank; in shared memory."""

    def __init__(self, context: Any, keys: int = 256) -> None:
        self.found = context.Array("i", keys)

    def get(self, key: int) -> int:
        from slime.engines.process import free_port

        with self.found.get_lock():
            if self.found[key] == 0:
                self.found[key] = free_port("127.0.0.1")
            return int(self.found[key])


def _serve() -> None:
    """Answer each line of the standard input, until it ends."""
    import multiprocessing

    import cpu_shim

    from slime.config.process import kill_with_parent

    kill_with_parent()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what ranks print is no answer
    cpu_shim.prepare_on_cpu()
    _import_everything()
    context = multiprocessing.get_context("fork")
    for line in sys.stdin:
        function, ranks, arguments = json.loads(line)
        failed = _run(context, function, ranks, pickle.loads(Path(arguments).read_bytes()))
        print("a rank failed" if failed else "done", file=answers, flush=True)


def _run(context: Any, function: str, ranks: int, args: tuple[Any, ...]) -> bool:
    ports = Ports(context)
    processes = [
        context.Process(target=_rank, args=(function, rank, ports, *args)) for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(SECONDS)
    alive = [process for process in processes if process.is_alive()]
    for process in alive:
        process.kill()
    return bool(alive) or any(process.exitcode for process in processes)


def _rank(function: str, *args: Any) -> None:
    from slime.config.process import kill_with_parent

    kill_with_parent()  # an interrupted test, or one that is out of time, kills the parent only
    module, _, name = function.partition(":")
    getattr(importlib.import_module(module), name)(*args)


def _import_everything() -> None:
    import torch

    torch.set_num_threads(1)  # no thread pool before the fork
    for name in (
        "slime.plugins.megatron.backend",
        "slime.backends.train_loop",
        "fsdp_helpers",
        "transformers",
    ):
        importlib.import_module(name)
    # a collection after each small model need not look at a million objects of the imports
    gc.freeze()


if __name__ == "__main__":
    _serve()
