"""Flags of environments, which bring prompts, rewards and turns with them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from slime.config.agent import AGENT_GENERATE
from slime.config.flag import flag

if TYPE_CHECKING:
    from slime.config.args import Args

ENVIRONMENT_SOURCE = "slime.plugins.agents.environments.source.EnvironmentSource"
ENVIRONMENT_GENERATE = "slime.plugins.agents.environments.rollout.generate"
MCP_GENERATE = "slime.plugins.agents.environments.mcp.generate"
PROGRAMS = {"verifiers": "slime.plugins.agents.environments.verifiers.run"}
"""Agent program of each environment that speaks with the model by itself, by the name of the environment."""


@dataclass
class EnvironmentConfig:
    _title = "environments"

    environment: str | None = flag(
        None,
        metavar="NAME:WHAT?KEY=VALUE",
        help="Environment that brings prompts, rewards and turns: reasoning_gym:DATASET, gymnasium:ENV_ID, "
        "verifiers:TASKSET, openenv:URL or file.py:Class, with options after a question mark",
    )
    environment_timeout: float = flag(
        60.0,
        above=0,
        help="Deadline in seconds for the beginning and each step of an episode of --environment, and for each "
        "call of a tool of --mcp-server",
    )
    mcp_server: list[str] | None = flag(
        None,
        help="MCP servers whose tools the model may call: a command in quotes, sandbox:FILE.py, or an http URL",
    )


_EXCLUDED = {
    "prompt_data": "it brings its own prompts",
    "data_source_path": "it is a data source of its own",
    "custom_generate_function_path": "it speaks with the model itself",
    "agent_function_path": "it speaks with the model itself",
    "agent_command": "it speaks with the model itself",
    "rm_type": "it scores its tasks itself; --custom-rm-path can score them instead",
}


def derive_environment(args: Args) -> list[str]:
    """Select the data source and the generate function of ``--environment``."""
    if args.mcp_server:
        return _derive_mcp(args)
    if args.environment is None:
        return []
    option = {name: f"--{name.replace('_', '-')}" for name in _EXCLUDED}
    problems = [
        f"--environment {args.environment} and {option[name]} exclude each other: {why}"
        for name, why in _EXCLUDED.items()
        if name in args.explicit and getattr(args, name) is not None
    ]
    if not problems:
        args.data_source_path = ENVIRONMENT_SOURCE
        args.agent_function_path = PROGRAMS.get(args.environment.partition(":")[0])
        args.custom_generate_function_path = AGENT_GENERATE if args.agent_function_path else ENVIRONMENT_GENERATE
    return problems


def _derive_mcp(args: Args) -> list[str]:
    """Select the generate function of ``--mcp-server``."""
    others = ("environment", "custom_generate_function_path", "agent_function_path", "agent_command")
    problems = [
        f"--mcp-server and --{name.replace('_', '-')} exclude each other: both speak with the model"
        for name in others
        if getattr(args, name) is not None
    ]
    if args.apply_chat_template:
        problems.append(
            "--mcp-server writes its tools into the chat template when a sample begins: leave out --apply-chat-template"
        )
    if not problems:
        args.custom_generate_function_path = MCP_GENERATE
    return problems
