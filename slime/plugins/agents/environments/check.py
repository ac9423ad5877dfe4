"""The check of ``--environment`` and ``--mcp-server`` before any process starts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slime.config.hf_config import read_chat_template
from slime.plugins.agents.environments.base import EnvironmentProblem
from slime.plugins.agents.environments.registry import Spec, own_seed
from slime.plugins.agents.environments.source import task_sample

if TYPE_CHECKING:
    from slime.config.args import Args


def check_environment(args: Args) -> list[str]:
    """Create the environment, so that a missing package or a wrong option is reported before any process starts."""
    if args.mcp_server:
        return _check_mcp(args.mcp_server)
    if args.environment is None:
        return []
    try:
        whole = own_seed(args.environment, args.rollout_seed)
        if (spec := Spec.parse(whole)).name == "reasoning_gym":
            from slime.plugins.agents.environments.reasoning_gym import try_sizes

            try_sizes(spec.what, spec.options, args.environment_timeout)
        first = task_sample(whole, 0)
    except EnvironmentProblem as error:
        return [f"--environment {args.environment}: {error}"]
    template = read_chat_template(args.hf_checkpoint) if args.hf_checkpoint else None
    if template == "" and not isinstance(first.prompt, str):
        return [f"--hf-checkpoint {args.hf_checkpoint}: its tokenizer has no chat template, which --environment needs"]
    return []


def _check_mcp(servers: list[str]) -> list[str]:
    from slime.plugins.agents.environments.mcp import check_servers

    try:
        check_servers(servers)
    except EnvironmentProblem as error:
        return [f"--mcp-server: {error}"]
    return []
