"""Start an embedded engine: in a process of its own, or on threads of this process."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from slime.config.process import module_command
from slime.engines.keys import send_key
from slime.engines.plan import EngineSpec
from slime.engines.process import EngineProcess, free_port, without_proxy
from slime.engines.settings import EngineSettings

if TYPE_CHECKING:
    from slime.plugins.embedded.inline import EngineThread


def start(
    settings: EngineSettings,
    spec: EngineSpec,
    host: str,
    log_path: str | Path | None,
    gpu_ids: Sequence[int] | None,
    node: tuple[int, int, str | None],
) -> EngineProcess | EngineThread:
    """Start the engine of ``spec``; see :func:`slime.engines.launch.start_engine`."""
    if settings.inline is not None:
        from slime.plugins.embedded.inline import EngineThread

        return EngineThread(settings, spec.index, log_path, listens=settings.inline == "port")
    return start_embedded_engine(settings, spec.index, host, log_path=log_path)


def start_embedded_engine(
    settings: EngineSettings,
    index: int,
    host: str = "127.0.0.1",
    port: int | None = None,
    log_path: str | Path | None = None,
) -> EngineProcess:
    """Start embedded engine number ``index`` and return immediately; see :meth:`ServerProcess.wait_ready`.

    The engine ends when the calling process ends, even if the caller is killed.
    """
    port = port or free_port(host)
    command = [*module_command("slime.plugins.embedded.server"), "--parent-pid", str(os.getpid())]
    command += ["--model-path", settings.model, "--host", host, "--port", str(port)]
    options = {
        "--dtype": settings.dtype,
        "--device": settings.device,
        "--max-running-requests": settings.max_running_requests,
        "--max-total-tokens": settings.max_total_tokens,
        "--threads": settings.threads,
    }
    for name, value in options.items():
        if value is not None:
            command += [name, str(value)]
    if settings.deterministic:
        command.append("--deterministic")
    if settings.trust_remote_code:
        command.append("--trust-remote-code")
    env = {"OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false"}
    env |= without_proxy(settings.model, host) | settings.keys.environment()
    if settings.threads:
        env["OMP_NUM_THREADS"] = env["MKL_NUM_THREADS"] = str(settings.threads)
    url = f"http://{host}:{port}"
    send_key(url, settings.keys)
    return EngineProcess(f"embedded engine {index}", command, url, log_path, env)
