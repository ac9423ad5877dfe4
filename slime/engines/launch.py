"""Start one engine of a run, of the kind that ``--rollout-backend`` names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from slime.registry import find

if TYPE_CHECKING:
    from slime.engines.plan import EngineSpec
    from slime.engines.settings import EngineSettings


Node = tuple[int, int, str | None]
"""For a server on several nodes: the rank of this node, the number of nodes, and the rendezvous (host:port)."""


class RunningEngine(Protocol):
    """What a registered engine's ``start`` returns, at once; :class:`~slime.engines.process.EngineProcess` is one.

    Attributes:
        url: Where the engine answers SGLang's native HTTP requests.
        pid: The id of the process that ends with the engine.
        fate: Why the engine was ended by its own watch; empty if it was not.
        bootstrap_port: The port at which a prefill server hands over its KV cache; None for others.
    """

    url: str
    pid: int
    fate: str
    bootstrap_port: int | None

    def wait_ready(self, deadline: float) -> None:
        """Wait until it answers; raises :class:`~slime.engines.process.ServerFailed` if it does not in this time."""

    def alive(self) -> bool: ...

    def log_tail(self) -> str:
        """Return the end of the engine's log, for error messages."""

    def cpu_seconds(self) -> float: ...

    def kill(self) -> None: ...

    def stop(self) -> None: ...


def start_engine(
    settings: EngineSettings,
    spec: EngineSpec,
    host: str = "127.0.0.1",
    log_path: str | Path | None = None,
    gpu_ids: Sequence[int] | None = None,
    node: Node = (0, 1, None),
) -> RunningEngine:
    """Start the server of ``spec``, or the part of it that runs on one node.

    The function returns immediately; :meth:`RunningEngine.wait_ready` waits until the server is up.

    The server ends when the calling process ends, even if the caller is killed. For SGLang this is the task of a guard
    process (:mod:`slime.engines.guard`), so the ``pid`` of the result is that of the guard. SGLang's own child
    processes end with their parent.

    Args:
        gpu_ids: The GPUs that the server may see. With None, ``CUDA_VISIBLE_DEVICES`` is not changed.
    """
    if settings.fp8 is not None and spec.updates:
        settings, spec = _quantized(settings, spec)
    engine: RunningEngine = find("engine", settings.backend)(settings, spec, host, log_path, gpu_ids, node)
    return engine


def _quantized(settings: EngineSettings, spec: EngineSpec) -> tuple[EngineSettings, EngineSpec]:
    """Let a server load a quantized copy of its checkpoint, which is written on this node at the first start.

    The parameters of the server then have the layout of the quantized weights that updates send.
    """
    from slime.models.fp8 import fp8_folder

    assert settings.fp8 is not None
    folder = str(fp8_folder(spec.model_path, settings.fp8, settings.dtype))
    return replace(settings, model=folder), replace(spec, model_path=folder)
