"""Environments that speak with the model by themselves: an episode is an agent program, which
reaches the model at the endpoint of its session.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

import aiohttp

from slime.data.sample import Message
from slime.types import JsonValue

from . import (
    NUMBER,
    SPEC,
    Environment,
    Episode,
    StepFailed,
    StepLimits,
    environment,
)

if TYPE_CHECKING:
    from ..program import Reward
    from ..program import Task as Program

_FULL = ("context_length_exceeded", "max_turns_exceeded")
"""Codes of the endpoint's refusals after which a conversation has ended."""


class Played(Environment):
    """An environment whose episodes are agent programs.

    Attributes:
        tasks: What the numbers of its tasks stand for.
    """

    tasks: Sequence[Any]

    def __len__(self) -> int:
        return len(self.tasks)

    async def start(self, number: int, limits: StepLimits) -> Episode:
        raise StepFailed("error", "this environment plays its episodes as agent programs")

    @abstractmethod
    async def play(self, number: int, program: Program) -> Reward:
        """Run one episode of the task ``number``, and return its reward.

        Raises:
            Exception: There is no reward, and the sample is left out.
        """


async def run(program: Program) -> Reward:
    """Play the episode that the metadata of a row name: the agent program of these environments."""
    made = environment(program.metadata[SPEC])
    assert isinstance(made, Played)  # only tasks of such environments are sent to this program
    return await made.play(int(program.metadata[NUMBER]), program)


async def ask(
    http: aiohttp.ClientSession, url: str, key: str, body: dict[str, Any]
) -> dict[str, Any] | None:
    """Send a request to the endpoint of a session; return its answer, or None if the conversation
    has no room for one.

    Raises:
        RuntimeError: The endpoint refused it for another reason.
    """
    async with http.post(url, json=body, headers={"Authorization": f"Bearer {key}"}) as response:
        if response.status == 200:
            answer: dict[str, Any] = await response.json()
            return answer
        refusal = await response.text()
        if any(code in refusal for code in _FULL):
            return None
        raise RuntimeError(f"the endpoint answered {response.status}: {refusal[:1000]}")


async def converse(
    base_url: str,
    key: str,
    model: str,
    messages: Sequence[Message],
    tools: Sequence[dict[str, JsonValue]],
    call: Callable[[str, str], Awaitable[str]],
) -> None:
    """Let the model call tools until it answers without a call, or has no room left.

    Args:
        base_url, key, model: Of an endpoint with ``/chat/completions``.
        tools: Their schemas.
        call: Called with the name of a tool and its arguments as the model wrote them; returns what
            the model sees.
    """
    said: list[Any] = list(messages)
    some = {"tools": list(tools)} if tools else {}
    # The session's own deadline is the one that counts.
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout()) as http:
        while True:
            body = {"model": model, "messages": said, **some}
            answer = await ask(http, f"{base_url}/chat/completions", key, body)
            if answer is None:
                return
            message = answer["choices"][0]["message"]
            said.append(message)
            if not message.get("tool_calls"):
                return
            for one in message["tool_calls"]:
                content = await call(one["function"]["name"], one["function"]["arguments"])
                said.append({"role": "tool", "tool_call_id": one["id"], "content": content})
