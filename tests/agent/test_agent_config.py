"""The flags of agents, and what a program may return."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from slime.agent.program import Task, reward_of
from slime.config.args import Args
from slime.config.defaults import resolve_defaults


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ({"agent_function_path": "mine:run"}, None),
        ({"agent_command": "node agent.js"}, None),
        ({"agent_command": "a", "custom_generate_function_path": "mine:generate"}, None),
        ({"custom_generate_function_path": "slime.agent.rollout.generate"}, "--agent-function-path or --agent-command"),
        ({"agent_command": "a", "agent_function_path": "b:c"}, "both name the agent program"),
        ({"agent_command": "a", "agent_timeout": 0.0}, "--agent-timeout 0.0: must be above 0"),
    ],
)
def test_flags(flags: dict[str, Any], problem: str | None) -> None:
    args = Args(**flags)
    problems = [text for text in resolve_defaults(args) if "agent" in text]
    assert [problem in text for text in problems] == [True] * (problem is not None)  # type: ignore[operator]
    own = flags.get("custom_generate_function_path")
    assert args.custom_generate_function_path == (own or "slime.agent.rollout.generate")


@pytest.mark.parametrize(
    ("value", "reward"), [(1, 1.0), (True, 1.0), (np.float32(0.5), 0.5), (None, None), ({"a": 1}, {"a": 1})]
)
def test_rewards(value: Any, reward: Any) -> None:
    assert reward_of(value, "f") == reward


def test_what_is_no_reward_is_an_error() -> None:
    with pytest.raises(TypeError, match=r"agent program mine\.py returned str"):
        reward_of("1.0", "mine.py")


def test_both_client_libraries_find_the_endpoint_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    from anthropic import Anthropic
    from openai import OpenAI

    task = Task("q", "a", {}, "http://127.0.0.1:1/s/x/v1", "http://127.0.0.1:1/s/x", "x")
    for name, value in task.environment().items():
        monkeypatch.setenv(name, value)
    assert str(OpenAI().base_url).rstrip("/") == task.openai_base_url and OpenAI().api_key == "x"
    assert str(Anthropic().base_url).rstrip("/") == task.anthropic_base_url and Anthropic().api_key == "x"
