"""Programs on agent frameworks that call tools: ``python framework_programs.py NAME``. slime is not
imported here.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys

MODEL = os.environ["SLIME_MODEL"]


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


async def sdk_tools(stream: bool = False) -> str:
    """A triage agent of the OpenAI Agents SDK that hands over to an agent with a tool, over Chat
    Completions.
    """
    from agents import Agent, Runner, function_tool, set_default_openai_api, set_tracing_disabled

    set_tracing_disabled(True)
    set_default_openai_api("chat_completions")
    clerk = Agent(name="Clerk", instructions="Add.", model=MODEL, tools=[function_tool(add)])
    triage = Agent(name="Triage", instructions="Hand over.", model=MODEL, handoffs=[clerk])
    if not stream:
        return str((await Runner.run(triage, "1 and 2?")).final_output)
    result = Runner.run_streamed(triage, "1 and 2?")
    async for _ in result.stream_events():
        pass
    return str(result.final_output)


async def sdk_responses() -> str:
    """The SDK's default API, Responses, streamed, with a sub-agent as a tool."""
    from agents import Agent, Runner, function_tool, set_tracing_disabled

    set_tracing_disabled(True)
    clerk = Agent(name="Clerk", instructions="Add.", model=MODEL, tools=[function_tool(add)])
    chief = Agent(
        name="Chief", instructions="Ask.", model=MODEL,
        tools=[clerk.as_tool("ask_clerk", "Asks the clerk.")],
    )  # fmt: skip
    result = Runner.run_streamed(chief, "1 and 2?")
    async for _ in result.stream_events():
        pass
    return str(result.final_output)


async def graph_tools() -> str:
    """LangGraph's prebuilt agent with a tool."""
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI
    from langgraph.prebuilt import create_react_agent

    agent = create_react_agent(ChatOpenAI(model=MODEL), [tool(add)], prompt="Add.")
    state = await agent.ainvoke({"messages": [("user", "1 and 2?")]})
    return str(state["messages"][-1].content)


async def main(name: str) -> None:
    programs = {
        "sdk_tools": sdk_tools, "sdk_stream": lambda: sdk_tools(stream=True), "sdk_responses": sdk_responses,
        "graph_tools": graph_tools,
    }  # fmt: skip
    said = await programs[name]()
    print(json.dumps({"reward": {"said": said}}))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
