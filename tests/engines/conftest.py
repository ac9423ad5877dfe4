"""Tiny models and running engines for the engine tests.

``contract_engine`` is what the contract suite runs against: the embedded engine and, in an environment that has
it, real SGLang on the CPU (marked ``sglang``, see scripts/test_sglang.sh). What an engine cannot do is in its
handle's ``Capabilities``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_parts import KEYS, ContractEngine, engine_settings, save_tiny_llama

from slime.config.machine import installed
from slime.engines.handle import EngineHandle
from slime.engines.launch import start_engine as launch_engine
from slime.engines.plan import EngineSpec
from slime.engines.process import EngineProcess
from slime.utils.async_utils import run

ENGINE_KINDS: list[Any] = ["embedded"]
if installed("sglang"):
    ENGINE_KINDS.append(pytest.param("sglang", marks=pytest.mark.sglang))
START_SECONDS = 500.0


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture(scope="session")
def other_tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same architecture with other weights: what an update brings."""
    return save_tiny_llama(tmp_path_factory.mktemp("other-tiny-llama"), seed=1)


@pytest.fixture(scope="session")
def start_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., EngineProcess]]:
    """``start_engine(model, **args)``: an engine that is up, the embedded one unless the arguments say otherwise; all
    are stopped by pid at the end."""
    started: list[EngineProcess] = []
    logs = tmp_path_factory.mktemp("engine-logs")

    def start(model: Path, wait: bool = True, **changes: Any) -> EngineProcess:
        index = len(started)
        settings = engine_settings(model, **changes)
        process = launch_engine(settings, EngineSpec(index, str(model)), log_path=logs / f"{index}.log")
        started.append(process)
        if wait:
            process.wait_ready(START_SECONDS)
        return process

    yield start
    for process in started:
        process.stop()


@pytest.fixture(scope="session", params=ENGINE_KINDS)
def contract_engine(
    request: pytest.FixtureRequest,
    tiny_llama: Path,
    other_tiny_llama: Path,
    start_engine: Callable[..., EngineProcess],
) -> ContractEngine:
    kind = request.param
    of_sglang = {"sglang": {"device": "cpu", "max_total_tokens": 8192}} if kind == "sglang" else {}
    process = start_engine(tiny_llama, rollout_backend=kind, keys=KEYS, **of_sglang)
    surface = run(EngineHandle(process.url).connect())
    return ContractEngine(kind, process, tiny_llama, other_tiny_llama, surface.capabilities)


@pytest.fixture
def engine_url(request: pytest.FixtureRequest, contract_engine: ContractEngine) -> str:
    """URL of the engine under test; the test is skipped where the engine lacks a capability it is marked with."""
    for mark in request.node.iter_markers("capability"):
        lacking = [name for name in mark.args if not getattr(contract_engine.capabilities, name)]
        if lacking:
            pytest.skip(f"{contract_engine.kind} has no {', '.join(lacking)}")
    return contract_engine.url


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "capability(*names): needs these capabilities of the engine under contract")
