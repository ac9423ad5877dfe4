"""Start ranks that have imported torch and megatron-core once: the imports are most of what a small test costs.

``run_ranks("module:function", n, *args)`` runs ``function(rank, ports, *args)`` in ``n`` processes forked from one
that has imported everything; ``ports.get(key)`` is a free port that all ranks agree on, found when it is first needed.
"""

from __future__ import annotations

import gc
import importlib
import os
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SECONDS = 800.0


def run_ranks(function: str, ranks: int, *args: Any, seconds: float = SECONDS) -> None:
    """Raises CalledProcessError with the ranks' output when one of them fails."""
    with tempfile.NamedTemporaryFile(suffix=".pkl") as file:
        pickle.dump(args, file)
        file.flush()
        paths = [str(HERE), str(HERE.parent), str(HERE.parents[2]), os.environ.get("PYTHONPATH", "")]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}
        # A whole run (tests/e2e/test_train_megatron.py) compiles what Megatron compiles; here each rank would do so.
        environment["TORCHDYNAMO_DISABLE"] = "1"
        command = [sys.executable, "-W", "ignore", str(HERE / "launch.py"), function, str(ranks), file.name]
        subprocess.run(command, env=environment, check=True, timeout=seconds)


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


def _main() -> None:
    import multiprocessing

    import cpu_shim

    cpu_shim.prepare_on_cpu()
    _import_everything()
    module, _, name = sys.argv[1].partition(":")
    function = getattr(importlib.import_module(module), name)
    args = pickle.loads(Path(sys.argv[3]).read_bytes())
    context = multiprocessing.get_context("fork")
    ports = Ports(context)
    processes = [context.Process(target=_rank, args=(function, rank, ports, *args)) for rank in range(int(sys.argv[2]))]
    for process in processes:
        process.start()
    for process in processes:
        process.join(SECONDS)
    alive = [process for process in processes if process.is_alive()]
    for process in alive:
        process.kill()
    sys.exit(1 if alive or any(process.exitcode for process in processes) else 0)


def _rank(function: Any, *args: Any) -> None:
    from slime.config.parent import kill_with_parent

    kill_with_parent()  # an interrupted test, or one that is out of time, kills the parent only
    function(*args)


def _import_everything() -> None:
    import torch

    torch.set_num_threads(1)  # no thread pool before the fork
    for name in ("slime.backends.megatron.backend", "slime.backends.train_loop", "fsdp_helpers", "transformers"):
        importlib.import_module(name)
    gc.freeze()  # a collection after each small model need not look at a million objects of the imports


if __name__ == "__main__":
    _main()
