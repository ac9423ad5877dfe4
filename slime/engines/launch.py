"""Start one engine of a run: the embedded one or SGLang, as ``--rollout-backend`` says."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from slime.engines.process import EngineProcess, free_port, start_embedded_engine, without_proxy

if TYPE_CHECKING:
    from slime.engines.plan import EngineSpec
    from slime.engines.settings import EngineSettings


Node = tuple[int, int, str | None]
"""Rank, number of nodes and rendezvous (host:port) of a server that spans nodes."""


def start_engine(
    settings: EngineSettings,
    spec: EngineSpec,
    host: str = "127.0.0.1",
    log_path: str | Path | None = None,
    gpu_ids: Sequence[int] | None = None,
    node: Node = (0, 1, None),
) -> EngineProcess:
    """Start the server of ``spec``, or one node's part of it; returns at once, see :meth:`EngineProcess.wait_ready`.

    The server ends when the calling process does, also when that is killed. SGLang's does through a guard that
    watches the caller, and whose ``pid`` is the server's here; SGLang's own processes die with the one that started
    them.

    Args:
        gpu_ids: the GPUs it may see; None leaves ``CUDA_VISIBLE_DEVICES`` as it is.
    """
    if settings.backend != "sglang":
        return start_embedded_engine(settings, spec.index, host, log_path=log_path)
    from slime.engines.sglang.options import ServerPlace, server_environment, server_words

    port = free_port(host)
    bootstrap = free_port(host) if spec.worker_type == "prefill" else None
    rank, num_nodes, rendezvous = node
    place = ServerPlace(host, port, rank, num_nodes, rendezvous, bootstrap)
    command = [sys.executable, "-m", "slime.engines.guard", "--parent", str(os.getpid()), "--"]
    command += [sys.executable, "-m", "slime.engines.sglang.server", *server_words(settings, spec, place)]
    env = {**without_proxy(spec.model_path, host), **server_environment(settings, spec)}
    env.setdefault("SGLANG_GRPC_PORT", str(free_port(host)))  # its default, port + 10000, may be past the last port
    if gpu_ids is not None:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpu_ids))
    part = f" node {rank}" if num_nodes > 1 else ""
    what = f"SGLang engine {spec.index}{part}" + (f" ({spec.model})" if spec.model != "default" else "")
    engine = EngineProcess(what, command, f"http://{host}:{port}", log_path, env)
    engine.bootstrap_port = bootstrap
    return engine
