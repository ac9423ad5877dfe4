"""The tiny model behind the real embedded engine, and an endpoint on the test's event loop."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from agent_parts import arguments, save_model

from slime.engines.process import EngineProcess
from slime.plugins.agents.server import AgentServer, agent_server, stop_agent_server


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("tiny-agent-model"))


@pytest.fixture(scope="session")
def engine(tiny_model: Path, serve_embedded: Any) -> Iterator[EngineProcess]:
    args = arguments(tiny_model, embedded_max_running_requests=64, embedded_max_total_tokens=65536)
    with serve_embedded(args) as process:
        yield process


@pytest_asyncio.fixture
async def endpoint() -> AsyncIterator[AgentServer]:
    from slime.engines.http import close_session

    yield await agent_server("127.0.0.1")
    await stop_agent_server()
    await close_session()
