"""An agent that knows nothing of slime: it asks for a product, and says "too small" or "too large"
until it is right.

    python agent.py "What is 6 times 7?" 42          # at whatever endpoint OPENAI_BASE_URL and OPENAI_API_KEY name

slime trains it through the same client: ``--agent-function-path agent.py:run``, or
``--agent-command "python agent.py"``, which finds its task in the environment.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from typing import Any

from openai import AsyncOpenAI, BadRequestError

ATTEMPTS = 3


async def solve(client: AsyncOpenAI, model: str, question: str, answer: int) -> float:
    """1 for the right number, half of it for each hint that it took, 0 without it."""
    messages: list[Any] = [
        {"role": "system", "content": "Answer briefly."},
        {"role": "user", "content": question},
    ]
    for attempt in range(ATTEMPTS):
        try:
            reply = await client.chat.completions.create(
                model=model, messages=messages, max_tokens=16
            )
        except BadRequestError as error:
            if error.code == "context_length_exceeded":
                return 0.0
            raise
        text = reply.choices[0].message.content or ""
        numbers = [int(number) for number in re.findall(r"\d{1,9}", text)]
        if numbers and numbers[-1] == answer:
            return 0.5**attempt
        messages += [
            {"role": "assistant", "content": text},
            {"role": "user", "content": hint(numbers, answer)},
        ]
    return 0.0


def hint(numbers: list[int], answer: int) -> str:
    """What the agent says to a wrong answer."""
    if not numbers:
        return "That is no number. Answer with a number."
    return f"No, {numbers[-1]} is too {'small' if numbers[-1] < answer else 'large'}. Try again."


async def run(task: Any) -> float:
    """What slime calls, with the task's row and its endpoint."""
    async with AsyncOpenAI(base_url=task.openai_base_url, api_key=task.api_key) as client:
        return await solve(client, task.model, task.prompt[-1]["content"], int(task.label))


async def main() -> None:
    if "SLIME_TASK" in os.environ:
        task = json.loads(os.environ["SLIME_TASK"])
        question, answer = task["prompt"][-1]["content"], int(task["label"])
    else:
        question, answer = sys.argv[1], int(sys.argv[2])
    async with AsyncOpenAI() as client:  # reads OPENAI_BASE_URL and OPENAI_API_KEY
        reward = await solve(client, os.environ.get("SLIME_MODEL", "gpt-4o-mini"), question, answer)
    print(json.dumps({"reward": reward}))


if __name__ == "__main__":
    asyncio.run(main())
