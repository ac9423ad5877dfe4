"""Tiny models and running engines, for the tests of engines and of the embedded engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_parts import engine_settings, save_tiny_llama

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
    say otherwise; all are stopped by pid at the end."""
    started: list[EngineProcess] = []
    logs = tmp_path_factory.mktemp("engine-logs")

    def start(model: Path, wait: bool = True, **changes: Any) -> EngineProcess:
        index = len(started)
        settings = engine_settings(model, **changes)
        process = launch_engine(
            settings, EngineSpec(index, str(model)), log_path=logs / f"{index}.log"
        )
        started.append(process)
        if wait:
            process.wait_ready(START_SECONDS)
        return process

    yield start
    for process in started:
        process.stop()
