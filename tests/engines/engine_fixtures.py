"""Tiny models and running engines, for the tests of engines and of the embedded engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_parts import engine_settings, save_tiny_llama
from forked_engines import fork_engine

from slime.engines.launch import EngineSpec
from slime.engines.launch import start_engine as launch_engine
from slime.engines.process import EngineProcess

START_SECONDS = 500.0


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture(scope="session")
def other_tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same architecture with other weights: what an update brings."""
    return save_tiny_llama(tmp_path_factory.mktemp("other-tiny-llama"), seed=1)


@pytest.fixture(scope="session")
def start_engine(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Callable[..., EngineProcess]]:
    """``start_engine(model, **args)``: an engine that is up, the embedded one unless the arguments
    say otherwise; all are stopped by pid at the end. The embedded one is forked, but for tests
    whose subject is its process (``spawned=True``).
    """
    started: list[EngineProcess] = []
    logs = tmp_path_factory.mktemp("engine-logs")

    def start(
        model: Path, wait: bool = True, spawned: bool = False, **changes: Any
    ) -> EngineProcess:
        index = len(started)
        log = logs / f"{index}.log"
        settings = engine_settings(model, **changes)
        process: EngineProcess
        if spawned or settings.backend != "embedded":
            process = launch_engine(settings, EngineSpec(index, str(model)), log_path=log)
        else:
            process = fork_engine(settings, index, log)
        started.append(process)
        if wait:
            process.wait_ready(START_SECONDS)
        return process

    yield start
    for process in started:
        process.stop()
