"""Fixtures of the environments: the scripted engine of the examples' tests, and a tokenizer of
bytes.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

sys.path[:0] = [
    str(Path(__file__).parents[3] / "examples"),
    str(Path(__file__).parents[1]),
    str(Path(__file__).parent),
]

from agent_parts import ScriptedEngine, arguments, make_tokenizer  # noqa: E402
from scripted_engine import Script, byte_tokenizer  # noqa: E402

from slime.data.sample import Sample  # noqa: E402
from slime.plugins.agents.environments import own_seed  # noqa: E402
from slime.plugins.agents.environments.rollout import generate  # noqa: E402
from slime.plugins.agents.environments.source import task_sample  # noqa: E402


@pytest.fixture(scope="session")
def bytes_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return byte_tokenizer(tmp_path_factory.mktemp("bytes"))


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch, bytes_dir: Path) -> Callable[..., Any]:
    """``await play(spec, texts, number=0, **flags)``: one episode in which the model says these
    texts.
    """

    async def run(
        spec: str, says: list[str], number: int = 0, **flags: Any
    ) -> tuple[Sample, Script]:
        script = Script(monkeypatch, bytes_dir, environment=spec, **flags)
        script.says = [text if text.endswith("ABORT") else f"{text}<eos>" for text in says]
        sample = task_sample(own_seed(spec, 42), number)
        sample.index = sample.group_index = 0
        return await generate(script.args, sample, script.params), script

    return run


@pytest_asyncio.fixture
async def play_program(tmp_path: Path) -> AsyncIterator[Any]:
    """``await play_program(spec, texts, number=0, **flags)``: one episode of an environment that
    speaks with the model by itself, in which the model says these texts; and what it was asked.
    """
    from slime.engines.http import close_session
    from slime.plugins.agents.server import stop_agent_server
    from slime.rollout.state import GenerateState

    folder = tmp_path / "tokenizer"
    make_tokenizer().save_pretrained(folder)

    async def run(
        spec: str, says: list[Any], number: int = 0, **flags: Any
    ) -> tuple[Any, list[str]]:
        async with ScriptedEngine(make_tokenizer(), says) as engine:
            args = arguments(folder, engine.url, environment=spec, **flags)
            args.rollout_max_response_len = 20_000
            # In a thread: a server of the test may be in this one.
            sample = await asyncio.to_thread(task_sample, own_seed(spec, 42), number)
            sample.index = sample.group_index = 0
            state = GenerateState(args)
            made = await generate(args, sample, state.sampling_params)
            return made, [state.tokenizer.decode(body["input_ids"]) for body in engine.bodies]

    yield run
    await stop_agent_server()
    await close_session()
