"""Start the server of one SGLang engine, or the part of it that runs on one node."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from slime.config.process import module_command
from slime.engines.keys import send_key
from slime.engines.plan import EngineSpec
from slime.engines.process import EngineProcess, free_port, without_proxy
from slime.engines.settings import EngineSettings
from slime.engines.sglang.options import ServerPlace, server_environment, server_words, takes_keys


def start(
    settings: EngineSettings,
    spec: EngineSpec,
    host: str,
    log_path: str | Path | None,
    gpu_ids: Sequence[int] | None,
    node: tuple[int, int, str | None],
) -> EngineProcess:
    """Start the server behind a guard process; see :func:`slime.engines.launch.start_engine`."""
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
