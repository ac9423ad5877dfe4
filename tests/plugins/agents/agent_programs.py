"""Agent programs for the tests, good and bad. As a command: ``python agent_programs.py NAME``."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from typing import Any

QUESTION = [{"role": "user", "content": "say a word"}]


async def two_turns(task: Any) -> float:
    from openai import AsyncOpenAI

    async with AsyncOpenAI(base_url=task.openai_base_url, api_key=task.api_key) as client:
        messages: list[Any] = list(QUESTION)
        for _ in range(2):
            answer = await client.chat.completions.create(
                model=task.model, messages=messages, max_tokens=8
            )
            messages += [answer.choices[0].message, {"role": "user", "content": "another"}]
    return 0.25


def plain(task: Any) -> dict[str, float]:
    from openai import OpenAI

    with OpenAI(base_url=task.openai_base_url, api_key=task.api_key) as client:
        client.responses.create(model=task.model, input="say a word", max_output_tokens=8)
    return {"score": 0.5}


async def blocking(task: Any) -> None:
    """A synchronous client in a coroutine; the reward is left to --rm-type."""
    from anthropic import Anthropic

    with Anthropic(base_url=task.anthropic_base_url, api_key=task.api_key) as client:
        for word in ("one", "two"):
            client.messages.create(
                model=task.model, messages=[{"role": "user", "content": word}], max_tokens=8
            )


async def hangs_on_odd(task: Any) -> float:
    await two_turns(task)
    if int(task.label) % 2:
        await asyncio.sleep(3600)
    return float(int(task.label) % 3)


async def raises(task: Any) -> float:
    await two_turns(task)
    raise KeyError("my own mistake")


async def silent(task: Any) -> float:
    return 1.0


async def endless(task: Any) -> float:
    """Goes on whatever happens."""
    while True:
        try:
            await two_turns(task)
        except Exception:
            await asyncio.sleep(0.01)


async def too_much(task: Any) -> float:
    from openai import AsyncOpenAI

    async with AsyncOpenAI(base_url=task.openai_base_url, api_key=task.api_key) as client:
        messages: list[Any] = list(QUESTION)
        while True:
            answer = await client.chat.completions.create(model=task.model, messages=messages)
            messages += [
                answer.choices[0].message,
                {"role": "user", "content": "a long story " * 20},
            ]


def main(name: str) -> None:
    if name == "hangs":
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
        time.sleep(3600)
    if name == "fails":
        sys.exit("out of ideas")
    from openai import OpenAI

    with OpenAI() as client:  # all from the environment
        client.chat.completions.create(
            model=os.environ["SLIME_MODEL"], messages=QUESTION, max_tokens=8
        )  # type: ignore[arg-type]
    task = json.loads(os.environ["SLIME_TASK"])
    print("x" * 200_000)
    print(json.dumps({"reward": float(task["label"]) / 2}))


if __name__ == "__main__":
    main(sys.argv[1])
