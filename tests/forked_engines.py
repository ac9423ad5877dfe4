"""Embedded engines for tests whose subject is not an engine's process: they are forked from the
server of :mod:`quick_processes`, which has imported what they need. Each spares six CPU seconds.
"""

from __future__ import annotations

import gc
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import pytest
from quick_processes import context

from slime.engines.launch import EngineSettings
from slime.engines.process import EngineProcess
from slime.plugins.embedded import server


def fork_engine(settings: EngineSettings, index: int, log_path: Path) -> EngineProcess:
    """What :func:`slime.plugins.embedded.server.start_embedded_engine` returns, with the same
    command line and environment.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server, "EngineProcess", ForkedEngine)
        return server.start_embedded_engine(settings, index, log_path=log_path)


class ForkedEngine(EngineProcess):
    def start(self, command: list[str], log: IO[bytes], environment: dict[str, str]) -> Any:
        return Child(command, environment, log.name)


class Child:
    """What of :class:`subprocess.Popen` an engine's process uses."""

    def __init__(
        self,
        command: list[str],
        environment: dict[str, str],
        log: str,
        target: Callable[[list[str], dict[str, str], str], None] | None = None,
    ) -> None:
        self.process = context().Process(target=target or _serve, args=(command, environment, log))
        self.process.daemon = True
        self.process.start()
        assert self.process.pid is not None
        self.pid = self.process.pid

    @property
    def returncode(self) -> int | None:
        return self.process.exitcode

    def poll(self) -> int | None:
        return self.process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self.process.join(timeout)
        code = self.process.exitcode
        if code is None:
            raise subprocess.TimeoutExpired("the engine", timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _serve(command: list[str], environment: dict[str, str], log: str) -> None:
    """In the forked process: what the command does."""
    from slime.config.process import end_with_parent
    from slime.plugins.embedded.server import main

    end_with_parent(os.getppid())  # the fork server, which ends with the tests
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ.clear()
    os.environ.update(environment)
    gc.freeze()
    main(command[command.index("--model-path") :])
