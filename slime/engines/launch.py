"""Start one engine of a run: the embedded engine or SGLang, depending on ``--rollout-backend``."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from slime.config.process_environment import module_command
from slime.engines.keys import send_key
from slime.engines.process import EngineProcess, free_port, start_embedded_engine, without_proxy

if TYPE_CHECKING:
    from slime.engines.plan import EngineSpec
    from slime.engines.settings import EngineSettings
    from slime.plugins.embedded.inline import EngineThread


Node = tuple[int, int, str | None]
"""For a server on several nodes: the rank of this node, the number of nodes, and the rendezvous (host:port)."""


def start_engine(
    settings: EngineSettings,
    spec: EngineSpec,
    host: str = "127.0.0.1",
    log_path: str | Path | None = None,
    gpu_ids: Sequence[int] | None = None,
    node: Node = (0, 1, None),
) -> EngineProcess | EngineThread:
    """Start the server of ``spec``, or the part of it that runs on one node.

    The function returns immediately; :meth:`EngineProcess.wait_ready` waits until the server is up.

    The server ends when the calling process ends, even if the caller is killed. For SGLang this is the task of a guard
    process (:mod:`slime.engines.guard`), so the ``pid`` of the result is that of the guard. SGLang's own child
    processes end with their parent.

    Args:
        gpu_ids: The GPUs that the server may see. With None, ``CUDA_VISIBLE_DEVICES`` is not changed.
    """
    if settings.fp8 is not None and spec.updates:
        settings, spec = _quantized(settings, spec)
    if settings.backend != "sglang" and settings.inline is not None:
        from slime.plugins.embedded.inline import EngineThread

        return EngineThread(settings, spec.index, log_path, listens=settings.inline == "port")
    if settings.backend != "sglang":
        return start_embedded_engine(settings, spec.index, host, log_path=log_path)
    from slime.engines.sglang.options import ServerPlace, server_environment, server_words, takes_keys

    port = free_port(host)
    bootstrap = free_port(host) if spec.worker_type == "prefill" else None
    rank, num_nodes, rendezvous = node
    # SGLang's own choice can be taken by an outgoing connection before the ranks have loaded their modules and listen.
    meeting = free_port(host) if num_nodes == 1 else None
    place = ServerPlace(host, port, rank, num_nodes, rendezvous, bootstrap, meeting)
    command = [*module_command("slime.engines.guard"), "--parent", str(os.getpid()), "--"]
    command += [*module_command("slime.engines.sglang.server"), *server_words(settings, spec, place)]
    env = {**without_proxy(spec.model_path, host), **server_environment(settings, spec)}
    if takes_keys(settings, spec):
        env |= settings.keys.environment()
    if gpu_ids is not None:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpu_ids))
    part = f" node {rank}" if num_nodes > 1 else ""
    what = f"SGLang engine {spec.index}{part}" + (f" ({spec.model})" if spec.model != "default" else "")
    ports = [(host, number) for number in (bootstrap, meeting) if number is not None]
    url = f"http://{host}:{port}"
    send_key(url, settings.keys)
    engine = EngineProcess(what, command, url, log_path, env, ports)
    engine.bootstrap_port = bootstrap
    return engine


def _quantized(settings: EngineSettings, spec: EngineSpec) -> tuple[EngineSettings, EngineSpec]:
    """Let a server load a quantized copy of its checkpoint, which is written on this node at the first start.

    The parameters of the server then have the layout of the quantized weights that updates send.
    """
    from slime.models.fp8 import fp8_folder

    assert settings.fp8 is not None
    folder = str(fp8_folder(spec.model_path, settings.fp8, settings.dtype))
    return replace(settings, model=folder), replace(spec, model_path=folder)
