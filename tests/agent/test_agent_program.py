"""Agent programs by themselves: how they end, and that no end is more than theirs."""

from __future__ import annotations

import asyncio
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from slime.agent.program import Task, reward_of, run_program

TASK = Task(prompt="p", label="l", metadata={}, openai_base_url="http://x", anthropic_base_url="http://x", api_key="k")


async def leaves(task: Task) -> None:
    sys.exit(3)


async def stays(task: Task) -> float:
    await asyncio.sleep(0.01)
    return 1.0


async def run(program: str) -> Any:
    return await run_program(SimpleNamespace(agent_command=None, agent_function_path=f"{__name__}:{program}"), TASK)


async def test_an_exit_of_one_program_is_not_the_end_of_the_others() -> None:
    with pytest.raises(RuntimeError, match=r"ended by SystemExit\(3\)"):
        await asyncio.wait_for(run("leaves"), 30)
    assert await asyncio.wait_for(run("stays"), 30) == 1.0


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "1", [1.0]])
def test_what_is_no_reward(value: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="agent program f"):
        reward_of(value, "f")
