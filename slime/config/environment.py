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

    environment: str | None = flag(None, metavar="NAME:WHAT?KEY=VALUE")
    """Environment that brings prompts, rewards and turns: reasoning_gym:DATASET, gymnasium:ENV_ID,
    verifiers:TASKSET, openenv:URL or file.py:Class, with options after a question mark"""
    environment_timeout: float = flag(60.0, above=0)
    """Deadline in seconds for the beginning and each step of an episode of --environment, and for each call of a
    tool of --mcp-server"""
    mcp_server: list[str] | None = None
    """MCP servers whose tools the model may call: a command in quotes, sandbox:FILE.py, or an http URL"""


def derive_environment(args: Args) -> None:
    """Select the data source and the generate function of ``--environment`` or ``--mcp-server``. What the user chose
    stays, and the rules refuse it."""
    chosen: dict[str, object] = {"custom_generate_function_path": MCP_GENERATE} if args.mcp_server else {}
    if args.environment is not None:
        program = PROGRAMS.get(args.environment.partition(":")[0])
        chosen = {
            "data_source_path": ENVIRONMENT_SOURCE,
            "agent_function_path": program,
            "custom_generate_function_path": AGENT_GENERATE if program else ENVIRONMENT_GENERATE,
        }
    for name, value in chosen.items():
        if name not in args.explicit:
            setattr(args, name, value)
