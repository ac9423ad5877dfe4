"""The agent of agent.py on LangGraph: a graph of an answer and a hint, which ends with the right
number.

    python graph_agent.py "What is 6 times 7?" 42    # at whatever endpoint OPENAI_BASE_URL and OPENAI_API_KEY name

Needs ``pip install langgraph langchain-openai``. As a function for ``--agent-function-path
graph_agent.py:run`` in the environment of slime, or as a command in an environment of its own:
``--agent-command "agents-env/bin/python graph_agent.py"``.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from typing import Any

from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, MessagesState, StateGraph

ATTEMPTS = 3


def graph(model: ChatOpenAI, answer: int) -> Any:
    """The compiled graph: answer, and as long as the number is wrong and an attempt is left, a hint
    and an answer.
    """

    def numbers(state: MessagesState) -> list[int]:
        return [
            int(number) for number in re.findall(r"\d{1,9}", str(state["messages"][-1].content))
        ]

    async def reply(state: MessagesState) -> dict[str, Any]:
        return {"messages": [await model.ainvoke(state["messages"])]}

    def hint(state: MessagesState) -> dict[str, Any]:
        found = numbers(state)
        said = (
            f"{found[-1]} is too {'small' if found[-1] < answer else 'large'}."
            if found
            else "That is no number."
        )
        return {"messages": [("user", f"{said} Try again.")]}

    def ends(state: MessagesState) -> str:
        attempts = sum(message.type == "ai" for message in state["messages"])
        return END if numbers(state)[-1:] == [answer] or attempts == ATTEMPTS else "hint"

    builder = StateGraph(MessagesState)
    builder.add_node("reply", reply)
    builder.add_node("hint", hint)
    builder.add_edge(START, "reply")
    builder.add_conditional_edges("reply", ends, ["hint", END])
    builder.add_edge("hint", "reply")
    return builder.compile()


async def solve(model: ChatOpenAI, question: str, answer: int) -> float:
    """1 for the right number, half of it for each hint that it took, 0 without it."""
    start = [("system", "Answer briefly."), ("user", question)]
    state = await graph(model, answer).ainvoke({"messages": start})
    attempts = sum(message.type == "ai" for message in state["messages"])
    right = re.findall(r"\d{1,9}", str(state["messages"][-1].content))[-1:] == [str(answer)]
    return 0.5 ** (attempts - 1) * right


async def run(task: Any) -> float:
    """What slime calls, with the task's row and its endpoint."""
    model = ChatOpenAI(
        model=task.model, base_url=task.openai_base_url, api_key=task.api_key, max_tokens=16
    )
    return await solve(model, task.prompt[-1]["content"], int(task.label))


async def main() -> None:
    if "SLIME_TASK" in os.environ:
        task = json.loads(os.environ["SLIME_TASK"])
        question, answer = task["prompt"][-1]["content"], int(task["label"])
    else:
        question, answer = sys.argv[1], int(sys.argv[2])
    model = ChatOpenAI(model=os.environ.get("SLIME_MODEL", "gpt-4o-mini"), max_tokens=16)
    print(json.dumps({"reward": await solve(model, question, answer)}))


if __name__ == "__main__":
    asyncio.run(main())
