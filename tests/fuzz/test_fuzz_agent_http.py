"""Random requests to the agent gateway, in all its dialects: an answer or a 4xx, and the session
goes on.
"""

from __future__ import annotations

import json
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from agent_parts import ScriptedEngine, arguments, make_tokenizer
from odd_values import numbers, value

from slime.data.sample import Sample
from slime.engines.http import close_session
from slime.plugins.agents.server import AgentServer
from slime.rollout.state import GenerateState

CHUNKS = 10
FIELDS: dict[str, tuple[str, ...]] = {
    "chat/completions": (
        *(
            "messages",
            "tools",
            "tool_choice",
            "stop",
            "stream",
            "stream_options",
            "n",
            "max_tokens",
            "logprobs",
        ),
        *(
            "max_completion_tokens",
            "response_format",
            "reasoning_effort",
            "temperature",
            "logit_bias",
            "functions",
        ),
        *(
            "chat_template_kwargs",
            "top_logprobs",
            "parallel_tool_calls",
            "thinking",
            "modalities",
            "model",
        ),
    ),
    "responses": (
        *(
            "input",
            "instructions",
            "tools",
            "tool_choice",
            "text",
            "reasoning",
            "stream",
            "max_output_tokens",
        ),
        *(
            "previous_response_id",
            "store",
            "include",
            "truncation",
            "conversation",
            "background",
            "model",
        ),
    ),
    "messages": (
        *(
            "messages",
            "system",
            "tools",
            "tool_choice",
            "stop_sequences",
            "stream",
            "thinking",
            "max_tokens",
        ),
        *("top_k", "metadata", "output_config", "container", "mcp_servers", "model"),
    ),
}
FIELDS["messages/count_tokens"] = FIELDS["messages"]
PARTS = (
    "type",
    "text",
    "role",
    "content",
    "tool_calls",
    "tool_call_id",
    "name",
    "input",
    "arguments",
    "function",
)
TYPES = (
    "text",
    "tool_use",
    "tool_result",
    "image",
    "image_url",
    "message",
    "function",
    "function_call",
    "reasoning",
)
ROLES = ("user", "assistant", "system", "tool", "developer")
SAID = (
    "hi",
    "",
    '<tool_call>{"name": "a", "arguments": {"x": 1}}</tool_call>',
    "<tool_call>{",
    "<think>a</think>b",
)


class Endless(list[Any]):
    """A script without an end."""

    def pop(self, _: Any = 0) -> str:
        return SAID[len(self) % len(SAID)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest_asyncio.fixture
async def gateway() -> AsyncIterator[AgentServer]:
    server = await AgentServer("127.0.0.1").start()
    yield server
    await server.stop()
    await close_session()


def message(random_: random.Random) -> Any:
    """A message or an item of a conversation, with the fields that they have, and odd values in
    some.
    """
    content: Any = random_.choice(
        ("hi", value(random_), [{"type": random_.choice(TYPES), "text": "x"}])
    )
    if isinstance(content, list) and random_.random() < 0.5:
        content.append({random_.choice(PARTS): value(random_), "type": random_.choice(TYPES)})
    made: dict[str, Any] = {"role": random_.choice(ROLES), "content": content}
    for _ in range(random_.choice((0, 0, 1, 2))):
        made[random_.choice(PARTS)] = value(random_)
    return random_.choice((made, made, made, value(random_)))


def good(path: str) -> dict[str, Any]:
    said: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
    said = {"input": "hi"} if path == "responses" else said
    return {"model": "m", **said, **({"max_tokens": 50} if path.startswith("messages") else {})}


def request(random_: random.Random) -> tuple[str, bytes]:
    path = random_.choice([*FIELDS])
    body: Any = good(path)
    for _ in range(random_.choice((0, 1, 1, 2))):
        body[random_.choice(FIELDS[path])] = value(random_)
    if random_.random() < 0.5:
        body["input" if path == "responses" else "messages"] = [
            message(random_) for _ in range(random_.randrange(4))
        ]
    if random_.random() < 0.2:
        body["tools"] = [{"type": "function", "name": "a", random_.choice(PARTS): value(random_)}]
    if random_.random() < 0.1:
        body = value(random_)
    content = json.dumps(body).encode()
    if random_.random() < 0.1:
        at = random_.randrange(len(content) + 1)
        content = random_.choice(
            (content[:at], content[:at] + b"\xff" + content[at:], b"{" * 5000, b"")
        )
    return path, content


@pytest.mark.parametrize("chunk", range(CHUNKS))
async def test_requests(gateway: AgentServer, checkpoint: Path, chunk: int) -> None:
    async with ScriptedEngine(make_tokenizer(), []) as engine, aiohttp.ClientSession() as client:
        engine.script = Endless()
        args = arguments(checkpoint, engine.url)
        args.rollout_max_response_len = 2000
        state = GenerateState(args)
        session = gateway.open(state, Sample(prompt="p"), state.sampling_params)
        headers = {"Content-Type": "application/json"}

        async def ask(path: str, content: bytes) -> tuple[int, bytes]:
            url = f"{gateway.url(session)}/v1/{path}"
            async with client.post(url, data=content, headers=headers) as answer:
                return answer.status, await answer.read()

        for case in numbers(chunk, CHUNKS):
            path, content = request(random.Random(f"agent {case}"))
            status, answer = await ask(path, content)
            assert status == 200 or 400 <= status < 500, (case, path, content[:500], status, answer)
            if status != 200 and status != 404:
                assert json.loads(answer)["error"]["message"], (case, answer)
            assert session.fault is None, (case, path, content[:500], session.fault)
        for path in FIELDS:
            status, answer = await ask(path, json.dumps(good(path)).encode())
            assert status == 200, (path, answer)
        gateway.close(session)
        assert not session.tasks
