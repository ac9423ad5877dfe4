"""An agent that plays a guessing game with the model, and returns its reward. run.sh names it:
--agent-function-path reward.py:run

It talks to the model through the OpenAI API and knows nothing of slime: an agent that you already
have works the same way, with the openai package, LangGraph or any other client of this API. slime
records the tokens of every request and trains on the model's turns.
"""

from __future__ import annotations

import re
from typing import Any

import aiohttp

ATTEMPTS = 3


async def run(task: Any) -> float:
    """Work on one row of data.jsonl; the return value is the reward of the whole session.

    ``task.prompt``, ``task.label`` and ``task.metadata`` are the columns of the row. With the
    openai package, the client would be ``AsyncOpenAI(base_url=task.openai_base_url,
    api_key=task.api_key)``.
    """
    messages = list(task.prompt)
    async with aiohttp.ClientSession() as session:
        for attempt in range(ATTEMPTS):
            text = await ask(session, task, messages)
            numbers = re.findall(r"\d{1,9}", text)
            if numbers and numbers[-1] == str(task.label):
                return float(0.5**attempt)  # 1 for the first attempt, half of it for each hint
            messages += [
                {"role": "assistant", "content": text},
                {"role": "user", "content": hint(numbers, task.label)},
            ]
    return 0.0


async def ask(session: aiohttp.ClientSession, task: Any, messages: list[dict[str, str]]) -> str:
    """Send the conversation, and return what the model answers."""
    url = f"{task.openai_base_url}/chat/completions"
    headers = {"Authorization": f"Bearer {task.api_key}"}
    body = {"model": task.model, "messages": messages, "max_tokens": 16}
    async with session.post(url, json=body, headers=headers) as response:
        response.raise_for_status()
        answer = await response.json()
    return str(answer["choices"][0]["message"]["content"] or "")


def hint(numbers: list[str], label: str) -> str:
    """What the agent says to a wrong answer."""
    if not numbers:
        return "That is no number. Answer with a number."
    return (
        f"No, {numbers[-1]} is too {'small' if int(numbers[-1]) < int(label) else 'large'}. Try "
        "again."
    )
