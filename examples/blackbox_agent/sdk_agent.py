"""The agent of agent.py on the OpenAI Agents SDK: two solvers at once, each gets a hint if it is
wrong.

    python sdk_agent.py "What is 6 times 7?" 42      # at whatever endpoint OPENAI_BASE_URL and OPENAI_API_KEY name

Needs ``pip install openai-agents``. As a function for ``--agent-function-path sdk_agent.py:run`` in
the environment of slime, or as a command in an environment of its own: ``--agent-command
"agents-env/bin/python sdk_agent.py"``.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from typing import Any

from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, Runner, set_tracing_disabled
from openai import AsyncOpenAI

SOLVERS = 2
set_tracing_disabled(True)  # traces would be sent to OpenAI


async def solve(solver: Agent, question: str, answer: int) -> float:
    """1 for the right number, half of it after a hint, 0 without it."""
    result = await Runner.run(solver, question)
    numbers = [int(number) for number in re.findall(r"\d{1,9}", result.final_output)]
    if numbers and numbers[-1] == answer:
        return 1.0
    hint = f"No, {numbers[-1]} is wrong. Try again." if numbers else "Answer with a number."
    result = await Runner.run(solver, [*result.to_input_list(), {"role": "user", "content": hint}])
    return 0.5 * (re.findall(r"\d{1,9}", result.final_output)[-1:] == [str(answer)])


async def team(client: AsyncOpenAI, model: str, question: str, answer: int) -> float:
    """The mean reward of the solvers, which run at the same time."""
    solver = Agent(
        name="Solver",
        instructions="Answer briefly.",
        # With the Responses API, the SDK raises ModelBehaviorError if an answer is cut at
        # max_tokens.
        model=OpenAIChatCompletionsModel(model, client),
        model_settings=ModelSettings(max_tokens=16),
    )
    rewards = await asyncio.gather(*(solve(solver, question, answer) for _ in range(SOLVERS)))
    return sum(rewards) / len(rewards)


async def run(task: Any) -> float:
    """What slime calls, with the task's row and its endpoint."""
    async with AsyncOpenAI(base_url=task.openai_base_url, api_key=task.api_key) as client:
        return await team(client, task.model, task.prompt[-1]["content"], int(task.label))


async def main() -> None:
    if "SLIME_TASK" in os.environ:
        task = json.loads(os.environ["SLIME_TASK"])
        question, answer = task["prompt"][-1]["content"], int(task["label"])
    else:
        question, answer = sys.argv[1], int(sys.argv[2])
    async with AsyncOpenAI() as client:  # reads OPENAI_BASE_URL and OPENAI_API_KEY
        reward = await team(client, os.environ.get("SLIME_MODEL", "gpt-4o-mini"), question, answer)
    print(json.dumps({"reward": reward}))


if __name__ == "__main__":
    asyncio.run(main())
